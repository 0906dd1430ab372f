"""A target model whose files are found and understood, before anything of it is loaded. Made on load threads."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.base import CPU, Footprint, Handler, Placement
from model_handlers.errors import Kind, MmeError
from model_handlers.system import devices
from model_handlers.worker.start import start_isolated
from serve.model.ensemble_plan import check_circle
from serve.model.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from serve.loading.environments import Brought
    from serve.sources.disk_room import Hold
    from serve.sources.gathering import Gathering
    from serve.sources.repository import ModelDirectory
    from serve.weights.forms import TargetForms

_OF_FILES = {Kind.INVALID_MODEL, Kind.UNSUPPORTED, Kind.INTERNAL}


@dataclass(frozen=True, slots=True)
class PreparedTarget:
    """A model's files, found and understood, and where each of its lanes is to run. See `serve.cache.load.Prepared`.

    Attributes:
        target: the name of the target model, which a member only begins with.
        content: see there.
        brought: the environments of its versions.
        forms: that it is loaded from; None where that is the model's files.
        members: the other models of the archive.
        hold: keeps the files on disk, where they were downloaded.
    """

    target: str

    directory: ModelDirectory
    handler: type[Handler] | None  # None for an ensemble
    lanes: list[tuple[str, Device]]
    placement: Placement
    brought: Brought
    identity: str
    on_disk: Footprint
    estimate: Footprint
    pinned: bool
    forms: TargetForms | None = None
    download_ns: int = 0
    members: tuple[PreparedTarget, ...] = ()
    hold: Hold | Gathering | None = None
    content: object = None

    @property
    def equipped(self) -> bool:
        """Whether every environment is there that the target's models bring."""
        return self.brought.complete and all(member.equipped for member in self.members)

    @property
    def alone(self) -> bool:
        """Whether any of its models is measured by what the process or the GPUs take more."""
        inside = self.handler is not None and self.placement is Placement.INLINE
        on_gpu = any(device != CPU for _, device in self.lanes)
        return inside or on_gpu or any(member.alone for member in self.members)

    @property
    def is_delicate(self) -> bool:
        """Whether its own files are loaded into this process only with a proof: see `serve/loading/proofs.py`."""
        return self.handler is not None and self.handler.tried_first and self.placement is Placement.INLINE

    @property
    def tried_first(self) -> bool:
        """Whether there have to be such proofs of any of the target's models."""
        return self.is_delicate or any(member.tried_first for member in self.members)

    def folders(self) -> Iterator[Path]:
        """Where the files of its models lie."""
        yield self.directory.path
        yield from self.directory.versions.values()
        for member in self.members:
            yield from member.folders()

    def release(self) -> None:
        """The files may go."""
        if self.hold is not None:
            self.hold.release()

    def start(self, version: int, config: ModelConfig, device: Device, lane: str) -> Handler:
        """Load one instance where it is to execute, from its form if it has one; warm up what names no samples."""
        handler = self.forms.start(version) if self.forms is not None else None
        if handler is None:
            handler = self._start(version, config, device, lane)
            if not config.model_warmup:
                warm_up(handler)
        return handler

    def _start(self, version: int, config: ModelConfig, device: Device, lane: str) -> Handler:
        assert self.handler is not None  # noqa: S101 - ensembles have no instances
        model_file = self.file(version, config, device)
        if self.placement is Placement.PROCESS:
            environment = self.brought.there.get(self.directory.model_file(version))
            return start_isolated(self.handler, config, model_file, device, lane, environment)
        return self.handler.load(config, model_file, device, lane)

    def file(self, version: int, config: ModelConfig, device: Device) -> Path:
        """The model file of a version for a device."""
        if config.cc_model_filenames:
            return devices.file_for(device, config, self.directory.versions[version])
        return self.directory.model_file(version)


@contextmanager
def still_there(name: str, folders: Iterable[Path]) -> Iterator[None]:
    """What goes wrong in there with the files of a model is no fault of theirs if somebody removed them meanwhile.

    Raises:
        MmeError: UNAVAILABLE where that is so.
    """
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
    """The members of a target, ensembles behind those that they consist of.

    Raises:
        MmeError: INVALID_MODEL when ensembles consist of one another.
    """
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
