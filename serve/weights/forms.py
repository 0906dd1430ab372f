"""The forms of one target model: found, written where there are none, and loaded. On load threads.

What can't be loaded from a form is loaded plainly, which `start` says by returning None: a model that is too small to
gain anything, a file that can't be taken apart, a disk that is full. A model that does not execute from a form, or
answers differently, is remembered and not tried again.
"""

from __future__ import annotations

import logging
import mmap
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.base import Footprint, settled
from model_handlers.errors import Kind, MmeError
from model_handlers.system.disk import directory_size
from serve.model.warmup import warm_up
from serve.options import LEAST_SHARED_WEIGHTS, Weights, weights_of
from serve.weights.store import Reference, reference_to

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from model_handlers.base import Handler, Traits
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.mapped import MappedHandler
    from serve.sources.repository import ModelDirectory
    from serve.weights.refining import Refiner
    from serve.weights.store import Form, WeightStore

_log = logging.getLogger("mme.weights")
_FAR_SLOWER = 3.0  # times; kernels that can't do with weights as they are: such a model is packed from the start
_WORTH_PACKING = 1.05  # times quicker, at least


class Tier(Enum):
    """How a loaded model holds its weights."""

    PLAIN = "plain"
    MAPPED = "mapped"
    PACKED = "packed"


def target_forms(
    store: WeightStore, usual: Weights, directory: ModelDirectory, handler: type[MappedHandler], traits: Traits
) -> TargetForms | None:
    """The forms of a model on the host's processors; None where it is to be loaded plainly."""
    weights = weights_of(directory.config, usual)
    if weights is Weights.PLAIN:
        return None
    files = {version: directory.model_file(version) for version in directory.versions}
    return TargetForms(store, handler, traits, weights, directory.config, files)


class TargetForms:
    """The forms of a target's versions, whose model files are `files`; `weights` is not PLAIN."""

    def __init__(
        self,
        store: WeightStore,
        handler: type[MappedHandler],
        traits: Traits,
        weights: Weights,
        config: ModelConfig,
        files: Mapping[int, Path],
    ) -> None:
        # what the loaded target does; PLAIN while any of its versions is not loaded from a form
        self.tier = Tier.PACKED if weights is Weights.PACKED else Tier.MAPPED
        self.weights = weights
        self._store = store
        self._handler = handler
        self._traits = traits
        self._config = config
        self._files = files
        self._refinement = handler.refinement(config)
        self._references = {version: store.reference(file) for version, file in files.items()}
        self._forms: dict[int, Form] = {}
        self._unkept: set[int] = set()  # versions of which something is known that the disk does not
        self._find()
        if weights is Weights.AUTO and self.far_slower:
            self.tier = Tier.PACKED

    def __repr__(self) -> str:
        return f"<TargetForms of {self._config.name}: {self.tier.value}, {len(self._forms)} of {len(self._files)}>"

    def _find(self) -> None:
        for version, reference in self._references.items():
            form = self._store.form(reference.key, self._refinement) if reference and reference.key else None
            if form is not None:
                self._forms[version] = form

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        return len(self._forms) == len(self._files)

    @property
    def refined(self) -> bool:
        return self.known and all(form.trial is not None for form in self._forms.values())

    @property
    def gain(self) -> float:
        """How many times quicker the target would be if it were packed, as far as is known."""
        return max((form.trial.gain for form in self._forms.values() if form.trial is not None), default=1.0)

    @property
    def worth_packing(self) -> bool:
        return self.refined and self.gain >= _WORTH_PACKING

    @property
    def far_slower(self) -> bool:
        """Whether the target should not be mapped at all, slow as it would be."""
        return self.gain > _FAR_SLOWER

    def expected(self, tier: Tier) -> Footprint:
        """What the target would take in that tier. Of written forms only what they map is known."""
        own = 0
        shared: dict[str, int] = {}
        for form in self._forms.values():
            if form.trial is not None:
                own += form.trial.packed_bytes if tier is Tier.PACKED else form.trial.mapped_bytes
            shared |= _mapped(form, tier)
        return Footprint(own, shared=shared)

    def weighed(self, taken: Footprint) -> Footprint:
        """What the loaded target takes, of what was measured.

        A heap page that an unloaded model left behind may be used again without being seen: never less than a process
        of its own took, and where there was none, than the part of the files that is not mapped.
        """
        expected = self.expected(self.tier)
        floor = expected.host
        if not self.refined:
            files = sum(_size(file) for file in self._files.values())
            floor = files - sum(form.blob_bytes for form in self._forms.values())
        return Footprint(max(taken.host, floor), shared=expected.shared)

    # -- loading -------------------------------------------------------------------------------------------------

    def start(self, version: int) -> Handler | None:
        """Load a version from its form, ready to serve; None when it has to be loaded plainly."""
        handler = self._started(version)
        if handler is None:
            self._forms.pop(version, None)
            self.tier = Tier.PLAIN
        return handler

    def _started(self, version: int) -> Handler | None:
        reference = self._references[version]
        if reference is not None and not reference.key:
            return None
        form = self._forms.get(version) or self._written(version)
        if form is None or not self._store.can_map(len(form.blobs)):
            return None
        self._forms[version] = form
        try:
            handler = self._load(version, self.tier)
        except MmeError as error:
            if error.kind is Kind.OUT_OF_MEMORY:
                raise
            _log.debug("not loaded from its form: %s", error, extra={"target_model": self._config.name})
            return None
        # A refined form has executed when it was tried, and its memory was measured then.
        if form.trial is not None or warm_up(handler):
            return handler
        handler.close()
        self._refuse(version)
        return None

    def _load(self, version: int, tier: Tier) -> Handler:
        form = self._forms[version]
        handler = self._handler.load_form(
            self._config, form.path, refined=form.trial is not None, packed=tier is Tier.PACKED
        )
        handler.mappings = len(_mapped(form, tier))
        self._store.handlers.add(handler)
        return settled(handler, self._traits)

    def turned(self, tier: Tier) -> dict[int, Handler]:
        """Every version once more, in another tier or from a form that is refined by now; all or none."""
        self._find()
        handlers: dict[int, Handler] = {}
        try:
            for version in self._files:
                handlers[version] = self._load(version, tier)
                warm_up(handlers[version])
        except BaseException:
            for handler in handlers.values():
                handler.close()
            raise
        return handlers

    # -- writing -------------------------------------------------------------------------------------------------

    def _written(self, version: int) -> Form | None:
        """A new form of a version, to be kept later; None when there can't be one."""
        file = self._files[version]
        size = _size(file)
        if size < LEAST_SHARED_WEIGHTS or not self._store.open() or not self._store.has_room(size):
            return None
        try:
            with self._store.draft() as draft:
                graph = self._handler.write_form(self._config, file, draft)
                if sum(draft.blobs.values()) < LEAST_SHARED_WEIGHTS:
                    return None
                form = self._store.add_written(draft, graph)
                self._references[version] = reference_to(draft, form.key)
                self._unkept.add(version)
                return form
        except MmeError as error:
            _log.debug("no form can be made: %s", error, extra={"target_model": self._config.name})
        except OSError as error:
            self._store.complain(f"{error}")
        return None

    def keep(self) -> None:
        """Have the disk keep what was written, and remember what it was made from. Takes as long as the disk does."""
        try:
            for version in sorted(self._unkept):
                reference = self._references[version]
                if reference is not None:
                    if reference.key:
                        self._store.keep(self._forms[version])
                    self._store.refer(self._files[version], reference)
        except OSError as error:
            self._store.complain(f"{error}")
        self._unkept.clear()

    def refine(self, refiner: Refiner) -> bool:
        """Have every form refined; False when one turns out to answer differently, which is remembered."""
        for version, form in self._forms.items():
            if form.trial is not None:
                continue
            if not self._store.has_room(form.blob_bytes):
                raise MmeError(Kind.UNAVAILABLE, f"no room on the disk to refine model '{self._config.name}'")
            if not refiner.refine(self._handler, self._config, form):
                self._refuse(version)
                return False
        self._find()
        return True

    def _refuse(self, version: int) -> None:
        reference = self._references[version]
        _log.info("its weights can't be mapped: it is loaded plainly", extra={"target_model": self._config.name})
        if reference is not None:
            self._references[version] = Reference(reference.sources, "")
            self._unkept.add(version)
            self.keep()


def _mapped(form: Form, tier: Tier) -> dict[str, int]:
    """The blobs that a loaded model maps, in whole pages."""
    names = form.trial.mapped_when_packed if tier is Tier.PACKED and form.trial is not None else form.blobs
    return {name: -(-form.blobs[name] // mmap.PAGESIZE) * mmap.PAGESIZE for name in names if name in form.blobs}


def _size(file: Path) -> int:
    """Bytes of a model's file, and of those beside it, where its weights may lie."""
    return directory_size(file if file.is_dir() else file.parent)
