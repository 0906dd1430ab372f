"""What is done before a target is loaded: it is fetched and understood, and equipped with what it needs around it.

On load threads; takes no memory worth counting. The rules here need the handler, or names that several packages know;
`model_handlers.config.validate` has all others. A load stops at the first that is broken, `check` tells every one.
"""

from __future__ import annotations

import difflib
import time
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from model_handlers.base import (
    CPU,
    PLACEMENT,
    Footprint,
    Handler,
    LoadedModel,
    Placement,
    Traits,
    placement_of,
    settled,
)
from model_handlers.config.model_config import OURS, InstanceGroup, warn_once
from model_handlers.config.pbtxt import refusal
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.mapped import MappedHandler
from model_handlers.registry import find_backend, handler_for
from model_handlers.system import devices
from model_handlers.system.disk import text_digest
from model_handlers.worker.limits import EXECUTION_TIMEOUT, LOAD_TIMEOUT, Deadlines
from model_handlers.worker.start import start_isolated
from serve.cache.footprints import Footprints
from serve.loading.measuring import Scales
from serve.model.ensemble_plan import check_circle
from serve.model.warmup import read_labels, warm_up
from serve.options import LEAST_SHARED_WEIGHTS, WEIGHTS, Weights, weights_of
from serve.sources.catalog import print_of
from serve.sources.layout import ENTRY
from serve.sources.repository import ModelDirectory, open_model, open_target
from serve.sources.scripts import Scripts
from serve.sources.source import Archived, InRepository, Overridden, S3Model, Source, Unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from model_handlers.base import Device, Runtime
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environment import Wanted
    from model_handlers.environment_cache import Brought, Environments
    from model_handlers.system.threads import CancelToken
    from serve.model.warmup import Labels
    from serve.sources.disk_budget import Hold
    from serve.sources.override import OverrideFolder
    from serve.weights.forms import TargetForms

    Check = tuple[str, Callable[[], object]]
    # finds how a model's weights lie in the common store on disk, once for all that hold them; None: in its own files
    Forms = Callable[[ModelDirectory, type[MappedHandler], Traits], TargetForms | None]

PIN = "MME_PIN"  # the parameter by which a model's configuration asks never to be evicted
_ALIKE = 0.75  # what they begin with is alike already
PARAMETERS = (ENTRY, PIN, WEIGHTS, PLACEMENT, LOAD_TIMEOUT, EXECUTION_TIMEOUT)


def asked_checks(config: ModelConfig, backend: str, traits: Traits | None) -> Iterator[Check]:
    """Every rule: the field that it is about, and a function that raises where it is broken. None: an ensemble."""
    yield f"parameters['{PIN}']", partial(is_pinned, config)
    if traits is None:
        return
    if WEIGHTS in config.parameters:
        yield f"parameters['{WEIGHTS}']", partial(weights_of, config, Weights.AUTO)
    yield f"parameters['{PLACEMENT}']", partial(placement_of, config, traits.placement)
    if LOAD_TIMEOUT in config.parameters or EXECUTION_TIMEOUT in config.parameters:
        yield "parameters", partial(Deadlines.of, config)
    if traits.sees_requests and (config.batch_input or config.batch_output):
        field = "batch_input" if config.batch_input else "batch_output"
        reason = f"models of backend '{backend}' get each request as it came"
        yield field, partial(_refuse, field, reason, config.name)
    if config.op_libraries and not traits.custom_ops:
        field = "model_operations.op_library_filename"
        reason = f"backend '{backend}' loads no libraries of operations"
        yield field, partial(_refuse, field, reason, config.name)


def unknown_parameters(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parameters that begin as ours do and are none of them, with a sentence; a model may read such of its own."""
    for name in sorted(config.parameters):
        if not name.startswith(OURS) or name in PARAMETERS:
            continue
        nearest = difflib.get_close_matches(name, PARAMETERS, 1, _ALIKE)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(PARAMETERS)}"
        yield name, f"parameter '{name}' means nothing to the server; {hint}"


def is_pinned(config: ModelConfig) -> bool:
    """Whether the model's own configuration wants it to stay in memory once it is there."""
    text = config.parameters.get(PIN, "false")
    try:
        return {"true": True, "false": False}[text.strip().lower()]
    except KeyError:
        raise invalid_model(
            f"model '{config.name}': parameter '{PIN}' must be 'true' or 'false', got '{text}'"
        ) from None


def _refuse(field: str, reason: str, model: str) -> None:
    raise refusal(field, reason, model)


_OF_FILES = {Kind.INVALID_MODEL, Kind.UNSUPPORTED, Kind.INTERNAL}


@dataclass(frozen=True, slots=True)
class PreparedTarget:
    """A model's files, found and understood, and where each of its lanes is to run."""

    target: str  # the name of the target model, also of a member
    directory: ModelDirectory
    handler: type[Handler] | None  # None for an ensemble
    lanes: list[tuple[str, Device]]
    placement: Placement
    identity: str
    on_disk: Footprint
    estimate: Footprint
    pinned: bool
    traits: Traits = field(default_factory=Traits)
    brought: Brought | None = None  # the environments of its versions, where they ask for any
    forms: TargetForms | None = None  # what it is loaded from; None where that is the model's files
    least: Footprint | None = None  # what it takes where that was measured, else bytes of its files
    labels: Labels | None = None  # of an ensemble of served models, its own
    download_ns: int = 0
    members: tuple[PreparedTarget, ...] = ()  # the other models of the archive
    hold: Hold | None = None  # keeps the files on disk, where they were downloaded
    content: object = None  # what it is loaded from, and as what: equal as long as none of that changes

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the served models that it consists of, one a step; () for anything but an ensemble of those."""
        return self.directory.steps

    @property
    def equipped(self) -> bool:
        """Whether every environment is there that the target's models bring."""
        complete = self.brought is None or self.brought.complete
        return complete and all(member.equipped for member in self.members)

    @property
    def needs_exclusive_load(self) -> bool:
        """Whether any of its models is measured by what the process or the GPUs take more."""
        inside = self.handler is not None and self.placement is Placement.INLINE
        on_gpu = any(device != CPU for _, device in self.lanes)
        return inside or on_gpu or any(member.needs_exclusive_load for member in self.members)

    @property
    def has_processes(self) -> bool:
        """Whether any of its models executes in processes of its own."""
        return self.placement is Placement.PROCESS or any(member.has_processes for member in self.members)

    @property
    def needs_proof(self) -> bool:
        """Whether its own files are loaded into this process only with a proof: see `serve/loading/verify.py`."""
        return self.traits.verify_first and self.placement is Placement.INLINE

    @property
    def tried_first(self) -> bool:
        """Whether there have to be such proofs of any of the target's models."""
        return self.needs_proof or any(member.tried_first for member in self.members)

    def folders(self) -> Iterator[Path]:
        yield self.directory.path
        yield from self.directory.versions.values()
        for member in self.members:
            yield from member.folders()

    def release(self) -> None:
        if self.hold is not None:
            self.hold.release()

    def start(self, version: int, config: ModelConfig, device: Device, lane: str) -> LoadedModel:
        """Load one instance where it is to execute, from its form if it has one; warm up what names no samples."""
        handler: LoadedModel | None = self.forms.start(version) if self.forms is not None else None
        if handler is None:
            handler = self._start(version, config, device, lane)
            if not config.model_warmup:
                warm_up(handler)
        return handler

    def _start(self, version: int, config: ModelConfig, device: Device, lane: str) -> LoadedModel:
        assert self.handler is not None  # noqa: S101 - ensembles have no instances
        model_file = self.file(version, config, device)
        if self.placement is Placement.PROCESS:
            there = {} if self.brought is None else self.brought.there
            environment = there.get(self.directory.model_file(version))
            return start_isolated(self.handler, config, model_file, device, lane, environment)
        return settled(self.handler.load(config, model_file, device, lane), self.traits, device)

    def file(self, version: int, config: ModelConfig, device: Device) -> Path:
        """The model file of a version for a device."""
        if config.cc_model_filenames:
            return devices.file_for(device, config, self.directory.versions[version])
        return self.directory.model_file(version)


@contextmanager
def still_there(name: str, folders: Iterable[Path]) -> Iterator[None]:
    """What goes wrong in there with the files of a model is UNAVAILABLE if they were removed meanwhile."""
    try:
        yield
    except (MmeError, OSError) as error:
        gone = next((folder for folder in folders if not folder.is_dir()), None)
        if gone is None or (isinstance(error, MmeError) and error.kind not in _OF_FILES):
            raise
        raise MmeError(
            Kind.UNAVAILABLE, f"model '{name}': {gone} was removed while it was loaded; put it back, and load it again"
        ) from error


def in_order(target: PreparedTarget) -> list[PreparedTarget]:
    """The members of a target, ensembles behind those that they consist of; INVALID_MODEL for a circle."""
    if not target.members and not _steps(target):
        return []
    steps = {model.directory.path.name: _steps(model) for model in (target, *target.members)}
    for name in steps:
        check_circle(name, steps)
    ordered: list[PreparedTarget] = []
    left = {member.directory.path.name: member for member in target.members}
    while left:
        ready = [name for name, member in left.items() if not any(step in left for step in _steps(member))]
        ordered += [left.pop(name) for name in ready]
    return ordered


def _steps(model: PreparedTarget) -> list[str]:
    return [step.model_name for step in model.directory.config.ensemble]


@dataclass(eq=False, repr=False)
class Preparer:
    """Fetches and opens, on load threads."""

    footprints: Footprints = field(default_factory=Footprints)
    _: KW_ONLY
    require_gpu: bool = False  # whether KIND_GPU without a GPU is an error
    scripts: Callable[[], Scripts] = Scripts
    environments: Environments | None = None  # None where no model brings any
    forms: Forms | None = None  # None for no forms at all
    host: int = 0  # bytes of the host that all models together may take; 0 for no bound

    def __post_init__(self) -> None:
        self.scales = Scales()
        self._shared: set[type[Handler]] = set()  # whose models share by now what they can

    def prepare(self, name: str, source: Source, token: CancelToken) -> PreparedTarget:
        """Fetch and understand what a name means; a client may have `sent` files in place of all that its `base` has.

        Models that lie beside the base are its ensembles' steps all the same.
        """
        override, sent = "", None
        if isinstance(source, Overridden):
            override, sent, base = source.config, source.folder, source.base
            beside = (base.path.parent, *base.others) if isinstance(base, InRepository) else ()
            source = base if sent is None else InRepository(sent.path, beside)
        if not isinstance(source, Archived | S3Model):
            with still_there(name, [source.path]):
                return self._found(name, source, override, sent, token)
        return self._fetched(name, source, override, token)

    def _found(
        self, name: str, source: Unpacked | InRepository, override: str, sent: OverrideFolder | None, token: CancelToken
    ) -> PreparedTarget:
        # First: what is written while the rest is read is a change.
        files = print_of(source.path) if sent is None else sent.contents
        directory = _opened(source, name, self.scripts(), override)
        prepared = self._prepared(directory, name, directory.fingerprint() + _digest_of(override), token)
        return replace(prepared, content=(files, override))

    def _fetched(self, name: str, source: Archived | S3Model, override: str, token: CancelToken) -> PreparedTarget:
        began = time.perf_counter_ns()
        if override and isinstance(source, S3Model):
            source.artifacts.want_whole(source.name)
        artifact = source.artifacts.fetch(source.name, token)
        download_ns = time.perf_counter_ns() - began if artifact.downloaded else 0
        try:
            opened = open_target if isinstance(source, Archived) else open_model
            path = artifact.path if isinstance(source, Archived) else artifact.path / source.name
            directory = opened(path, name, self.scripts(), override=override)
            prepared = self._prepared(directory, name, artifact.identity + _digest_of(override), token)
        except BaseException:
            artifact.hold.release()
            raise
        return replace(prepared, download_ns=download_ns, hold=artifact.hold, content=(artifact.identity, override))

    def _prepared(self, directory: ModelDirectory, name: str, content: str, token: CancelToken) -> PreparedTarget:
        prepared = self._understood(directory, name, content, token)
        members = tuple(self._understood(m, name, f"{content}/{m.path.name}", token) for m in directory.members)
        estimate = sum((member.estimate for member in members), prepared.estimate)
        return replace(prepared, members=members, estimate=estimate)

    def equip(self, prepared: PreparedTarget, token: CancelToken) -> PreparedTarget:
        brought, members = prepared.brought, tuple(self.equip(member, token) for member in prepared.members)
        if brought is not None and self.environments is not None:
            brought = self.environments.make(brought, prepared.directory.config, token)
        return replace(prepared, brought=brought, members=members)

    def _understood(self, directory: ModelDirectory, target: str, content: str, token: CancelToken) -> PreparedTarget:
        name = directory.name
        for _, sentence in unknown_parameters(directory.config):
            warn_once("mme.load", sentence, name)
        if directory.config.ensemble:
            none, pinned = Footprint(), is_pinned(directory.config)
            labels = read_labels(directory.config, directory.path) if directory.steps else None
            return PreparedTarget(
                target, directory, None, [], Placement.INLINE, content, none, none, pinned=pinned, labels=labels
            )
        backend = find_backend(directory.config.backend, directory.config.platform, name, directory.first)
        handler = handler_for(backend)
        traits = handler.traits(directory.config, directory.model_file(max(directory.versions)))
        for _, check in asked_checks(directory.config, backend.name, traits):
            check()
        placement = placement_of(directory.config, traits.placement)
        if placement is Placement.INLINE:
            self._share(handler, traits.runtime, token)
        directory, lanes = self._placed(directory, traits.runtime)
        size, mark, brought = directory.size(), "", None
        wanted = _environments_of(directory, handler) if traits.code is not None else None
        if wanted and self.environments is not None:
            brought = self.environments.look(wanted, directory.config, placement, token)
            size, mark = size - brought.size_in(directory.versions.values()), brought.mark
        on_disk = devices.size_on(directory.config.instance_group, lanes, size)
        where = f"{','.join(str(device) for _, device in lanes)}{_of_how_many(lanes)}"
        identity = f"{content} {placement.value} {where}{mark}"
        watched = placement is Placement.PROCESS
        estimate = self.footprints.expected(identity, handler.backend, on_disk, traits.estimate_factor, watched=watched)
        pinned = is_pinned(directory.config)
        forms = self._forms_of(directory, handler, traits, placement, lanes) if size >= LEAST_SHARED_WEIGHTS else None
        least = self.footprints.known(identity) or on_disk
        if forms is not None and forms.known:
            estimate = least = forms.expected(forms.tier)
        return PreparedTarget(
            target,
            directory,
            handler,
            lanes,
            placement,
            identity,
            on_disk,
            estimate,
            pinned,
            traits,
            brought,
            forms,
            least,
        )

    def _share(self, handler: type[Handler], runtime: Runtime, token: CancelToken) -> None:
        """Have in this process what the handler's models share there, as their framework, which is no model's own."""
        if handler in self._shared:
            runtime.provide()
            return
        _, taken = self.scales.weigh(runtime.provide, token)
        self.scales.common += taken.host
        if self.host:
            runtime.share(self.host)
        self._shared.add(handler)

    def _placed(self, directory: ModelDirectory, runtime: Runtime) -> tuple[ModelDirectory, list[tuple[str, Device]]]:
        name, gpu_capable = directory.name, runtime.gpu_capable()
        groups = directory.config.instance_group or (InstanceGroup(name),)
        lanes = devices.place(groups, name, gpu_capable=gpu_capable, require_gpu=self.require_gpu)
        groups = devices.settled(groups, name, gpu_capable=gpu_capable)
        return replace(directory, config=replace(directory.config, instance_group=groups)), lanes

    def _forms_of(
        self,
        directory: ModelDirectory,
        handler: type[Handler],
        traits: Traits,
        placement: Placement,
        lanes: list[tuple[str, Device]],
    ) -> TargetForms | None:
        here = placement is Placement.INLINE and all(device == CPU for _, device in lanes)
        here = here and not directory.config.cpu_accelerators and not directory.config.op_libraries
        if self.forms is None or not here or not issubclass(handler, MappedHandler):
            return None
        return self.forms(directory, handler, traits)


def asks(handler: type[Handler], config: ModelConfig, model_file: Path) -> Wanted | None:
    """The environment that a model asks for, for a process of its own; None where it is content with ours."""
    code = handler.traits(config, model_file).code
    return code.environment() if code is not None else None


def _environments_of(directory: ModelDirectory, handler: type[Handler]) -> dict[Path, Wanted]:
    files = [directory.model_file(version) for version in directory.versions]
    return {file: asked for file in files if (asked := asks(handler, directory.config, file)) is not None}


def _digest_of(config: str) -> str:
    """What an overridden configuration adds to the name of a model's content."""
    return f"+{text_digest(config, 16)}" if config else ""


def _of_how_many(lanes: list[tuple[str, Device]]) -> str:
    """How many GPUs there are, if a model is on any: its code may take memory of each."""
    return f" of {len(devices.gpu_uuids())}" if any(device.kind == "gpu" for _, device in lanes) else ""


def _opened(source: Unpacked | InRepository, name: str, scripts: Scripts, override: str) -> ModelDirectory:
    if isinstance(source, Unpacked):
        return open_target(source.path, name, scripts, override=override)
    # The folder is called otherwise where the name tells the repository too, and where it holds a client's files.
    strict = source.path.name == name
    return open_model(source.path, name, scripts, strict_name=strict, override=override, others=source.others)
