"""A target model in memory: what one archive or one repository folder turned into, all its served versions.

`ModelLoader` runs on load threads: it fetches, opens and loads, and measures what that took. Measuring means that one
model at a time is loaded into this process: two at once could not be told apart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model_handlers import devices
from model_handlers.base import CPU, Footprint, Handler, Placement
from model_handlers.config import InstanceGroup, ModelConfig
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.isolation.parameters import placement_of
from model_handlers.isolation.start import start_isolated
from model_handlers.registry import find_backend, handler_for
from model_handlers.tensor import BYTES
from serve.ensemble import EnsembleModel
from serve.environments import Brought, look, make
from serve.footprints import Footprints
from serve.model import Model
from serve.repository import ModelDirectory, open_model, open_target
from serve.scheduling.ensemble_check import check_members
from serve.scripts import Scripts
from serve.source import Archived, InRepository, Source
from serve.stats import ModelStats

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from model_handlers.base import Device
    from model_handlers.environments.cache import Environments
    from model_handlers.outside import Outside
    from serve.rescue import RescueRequest

AnyModel = Model | EnsembleModel

_log = logging.getLogger("mme.load")
PIN = "MME_PIN"  # the parameter by which a model's configuration asks never to be evicted
_THREADS = Path("/proc/self/task")


class Target:
    """The loaded versions of one target model.

    Attributes:
        name: the name it is served under.
        versions: version number → model.
        members: the other models of its archive, by the names that it calls them by.
    """

    def __init__(self, name: str, versions: dict[int, AnyModel], members: dict[str, Target] | None = None) -> None:
        self.name = name
        self.versions = versions
        self.members = members or {}
        self.latest = versions[max(versions)]

    def __repr__(self) -> str:
        return f"<Target {self.name}: versions {sorted(self.versions)}>"

    def version(self, number: int | None) -> AnyModel:
        """One version, the latest if none is named.

        Raises:
            MmeError: UNKNOWN_VERSION.
        """
        if number is None:
            return self.latest
        model = self.versions.get(number)
        if model is None:
            raise MmeError(
                Kind.UNKNOWN_VERSION,
                f"Request for unknown model: '{self.name}' version {number} is not found; "
                f"served versions are {', '.join(map(str, sorted(self.versions)))}",
            )
        return model

    def start(self) -> None:
        """Start every version's lanes."""
        for model in self.models():
            model.start()

    def refuse_waiting(self) -> None:
        """Tell everybody who waits for any version."""
        for model in self.models():
            model.refuse_waiting()

    def models(self) -> Iterator[AnyModel]:
        """Every version of it and of its members."""
        yield from self.versions.values()
        for member in self.members.values():
            yield from member.models()

    def close(self) -> None:
        """Give all memory back to the system."""
        with contextlib.ExitStack() as versions:  # each is closed, though another raises
            versions.callback(devices.trim_host_memory)
            for model in self.models():
                versions.callback(model.close)


@dataclass(frozen=True, slots=True)
class PreparedTarget:
    """A model's files, found and understood, and where each of its lanes is to run. See `model_cache.Prepared`.

    Attributes:
        target: the name of the target model, which a member only begins with.
        brought: the environments of its versions.
        members: the other models of the archive.
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
    download_ns: int
    pinned: bool
    members: tuple[PreparedTarget, ...] = ()

    @property
    def equipped(self) -> bool:
        """Whether every environment is there that the target's models bring."""
        return self.brought.complete and all(member.equipped for member in self.members)

    def start(self, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:
        """Load one instance where it is to execute."""
        assert self.handler is not None  # noqa: S101 - ensembles have no instances
        if self.placement is Placement.PROCESS:
            environment = self.brought.there.get(model_file)
            return start_isolated(self.handler, config, model_file, device, lane, environment)
        return self.handler.load(config, model_file, device, lane)


class ModelLoader:
    """Fetches, opens and loads. All methods run on load threads.

    Args:
        loop: the event loop that the models will serve.
        stats: (name, version) → counters that outlive a model's stay in memory.
        footprints: what models took before.
        inline_ns: see `Model`.
        require_gpu: whether KIND_GPU without a GPU is an error.
        outside: what a target's models may ask of the server, by its name.
        rescue: see `Model`.
        scripts: tells what is the same for all inference scripts.
        environments: where those that models bring are kept; without it models have none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stats: dict[tuple[str, int], ModelStats],
        *,
        footprints: Footprints | None = None,
        inline_ns: int = 0,
        require_gpu: bool = False,
        outside: Callable[[str], Outside] | None = None,
        rescue: RescueRequest | None = None,
        scripts: Callable[[], Scripts] = Scripts,
        environments: Environments | None = None,
    ) -> None:
        self._loop = loop
        self._stats = stats
        self._footprints = footprints or Footprints()
        self._inline_ns = inline_ns
        self._require_gpu = require_gpu
        self._outside = outside
        self._scripts = scripts
        self._rescue = rescue
        self._environments = environments
        self._measuring = threading.Lock()

    def prepare(self, name: str, source: Source, cancelled: Callable[[], bool]) -> PreparedTarget:
        """Fetch the archive, if it is one, and understand what is in it."""
        began = time.perf_counter_ns()
        download_ns = 0
        scripts = self._scripts()
        if isinstance(source, Archived):
            artifact = source.artifacts.fetch(source.name, cancelled)
            directory, content = open_target(artifact.path, name, scripts), artifact.etag
            if artifact.downloaded:
                download_ns = time.perf_counter_ns() - began
        else:
            opener = open_model if isinstance(source, InRepository) else open_target
            directory = opener(source.path, name, scripts)
            content = directory.fingerprint()
        prepared = self._understood(directory, name, content, download_ns, cancelled)
        members = tuple(self._understood(m, name, f"{content}/{m.path.name}", 0, cancelled) for m in directory.members)
        estimate = sum((member.estimate for member in members), prepared.estimate)
        return replace(prepared, members=members, estimate=estimate)

    def equip(self, prepared: PreparedTarget, cancelled: Callable[[], bool]) -> PreparedTarget:
        """Make the environments that its models bring and that are not there yet, which may take minutes."""
        environments = self._environments
        assert environments is not None  # noqa: S101 - else the model was refused
        return replace(
            prepared,
            brought=make(environments, prepared.brought, prepared.directory, cancelled),
            members=tuple(self.equip(member, cancelled) for member in prepared.members),
        )

    def _understood(
        self,
        directory: ModelDirectory,
        target: str,
        content: str,
        download_ns: int,
        cancelled: Callable[[], bool],
    ) -> PreparedTarget:
        """One model of a target, and how it is to be loaded."""
        name = directory.name
        if directory.config.ensemble:
            none = Footprint()
            return PreparedTarget(
                target, directory, None, [], Placement.INLINE, Brought(), content, none, none, download_ns, pinned=False
            )
        backend = find_backend(directory.config.backend, directory.config.platform, name)
        handler = handler_for(backend, name)
        groups = directory.config.instance_groups or (InstanceGroup(name),)
        lanes = devices.place(groups, name, gpu_capable=handler.gpu_capable(), require_gpu=self._require_gpu)
        placement = placement_of(directory.config, handler)
        brought = look(self._environments, directory, handler, placement, cancelled)
        size = directory.size() - brought.size_in(directory)
        on_gpus = len({device for _, device in lanes if device.kind == "gpu"})
        on_disk = Footprint(size if any(device == CPU for _, device in lanes) else 0, size * on_gpus)
        identity = f"{content} {placement.value} {','.join(str(device) for _, device in lanes)}"
        estimate = self._footprints.expected(identity, handler.backend, on_disk, handler.estimate_factor)
        pinned = _is_pinned(directory.config)
        return PreparedTarget(
            target, directory, handler, lanes, placement, brought, identity, on_disk, estimate, download_ns, pinned
        )

    def load(self, prepared: PreparedTarget) -> tuple[Target, Footprint]:
        """Load every selected version on its devices, members first, warm it up, measure, and remember."""
        members: dict[str, Target] = {}
        taken = Footprint()
        try:
            for member in in_order(prepared.members, prepared.directory.name):
                versions, footprint = self._load(member, members)
                members[member.directory.path.name] = Target(member.directory.name, versions)
                taken += footprint
            versions, footprint = self._load(prepared, members)
        except BaseException:
            for loaded in members.values():
                loaded.close()
            raise
        return Target(prepared.directory.name, versions, members), taken + footprint

    def _load(self, prepared: PreparedTarget, members: dict[str, Target]) -> tuple[dict[int, AnyModel], Footprint]:
        """One model of a target; ensembles consist of the `members` that are loaded already."""
        if prepared.handler is None:
            return self._ensembles(prepared, members), Footprint()
        models, taken = self._load_measured(prepared)
        self._footprints.measured(prepared.identity, prepared.handler.backend, prepared.on_disk, taken)
        return models, taken

    def _load_measured(self, prepared: PreparedTarget) -> tuple[dict[int, AnyModel], Footprint]:
        """A model in a process of its own tells what it takes, so any number of those may load side by side."""
        if prepared.placement is Placement.PROCESS:
            models = self._load_versions(prepared)
            return models, sum((model.memory() for model in models.values()), Footprint())
        with self._measuring:
            threads = _threads()
            before = _memory_taken()
            models = self._load_versions(prepared)
            _restore_priority(threads)
            taken = _memory_taken() - before
        # A heap page that an unloaded model left behind may be used again without being seen: never less than the file.
        return models, Footprint(max(taken.host, prepared.directory.size()), max(taken.device, 0))

    def _ensembles(self, prepared: PreparedTarget, members: dict[str, Target]) -> dict[int, AnyModel]:
        """Every selected version of an ensemble: they differ in nothing but their numbers."""
        directory = prepared.directory
        steps = []
        for step in directory.config.ensemble:
            if step.model not in members:
                raise invalid_model(
                    f"ensemble {directory.name} contains models that are not available or ambiguous: {step.model}"
                )
            steps.append(members[step.model].version(step.version))
        check_members(directory.config, [step.config for step in steps])
        config = replace(directory.config, decoupled=any(step.config.decoupled for step in steps))
        return {
            version: EnsembleModel(
                directory.name, version, config, steps, self._stats.setdefault((directory.name, version), ModelStats())
            )
            for version in directory.versions
        }

    def _load_versions(self, prepared: PreparedTarget) -> dict[int, AnyModel]:
        """All selected versions, or none."""
        loaded: dict[int, AnyModel] = {}
        try:
            for version in prepared.directory.versions:
                loaded[version] = self._load_version(prepared, version)
        except BaseException:
            for model in loaded.values():
                model.close()
            raise
        return loaded

    def _load_version(self, prepared: PreparedTarget, version: int) -> Model:
        directory = prepared.directory
        config = directory.config
        handlers: list[Handler] = []
        lanes: list[tuple[str, Handler]] = []
        shared: dict[Device, Handler] = {}
        try:
            for lane, device in prepared.lanes:
                handler = shared.get(device)
                if handler is None:
                    handler = prepared.start(config, directory.model_file(version), device, lane)
                    handler.outside = self._outside(prepared.target) if self._outside is not None else None
                    handlers.append(handler)
                    config = handler.config
                    _warm_up(handler)
                if prepared.placement is Placement.INLINE:  # a process executes one batch at a time
                    shared[device] = handler
                lanes.append((lane, handler))
            stats = self._stats.setdefault((directory.name, version), ModelStats())
            return Model(directory.name, version, lanes, stats, self._loop, self._inline_ns, self._rescue)
        except BaseException:
            for handler in handlers:
                handler.close()
            raise


def in_order(members: tuple[PreparedTarget, ...], target: str) -> list[PreparedTarget]:
    """The models of an archive, ensembles behind those that they consist of.

    Raises:
        MmeError: INVALID_MODEL when ensembles consist of one another.
    """
    ordered: list[PreparedTarget] = []
    left = {member.directory.path.name: member for member in members}
    while left:
        ready = [
            name
            for name, member in left.items()
            if not any(step.model in left for step in member.directory.config.ensemble)
        ]
        if not ready:
            raise invalid_model(f"circular dependency between ensembles of '{target}': {' -> '.join(left)}")
        ordered += [left.pop(name) for name in ready]
    return ordered


def _is_pinned(config: ModelConfig) -> bool:
    """Whether the model's own configuration wants it to stay in memory once it is there."""
    text = config.parameters.get(PIN, "false")
    try:
        return {"true": True, "false": False}[text.strip().lower()]
    except KeyError:
        raise invalid_model(
            f"model '{config.name}': parameter '{PIN}' must be 'true' or 'false', got '{text}'"
        ) from None


def _memory_taken() -> Footprint:
    """By this process on the host, by anybody on the GPUs."""
    devices.trim_host_memory()  # what loading took for a while is not the model's
    return Footprint(devices.private_memory(), devices.device_memory_used())


def _threads() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


def _restore_priority(before: set[int]) -> None:
    """Threads that a framework started for the model inherited the loader's low priority; they do not execute at it.

    A framework's threads are not Python's; what Python started meanwhile are other loaders.
    """
    begun = _threads() - before
    for thread in begun - {thread.native_id for thread in threading.enumerate()}:
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, 0)


def _warm_up(handler: Handler) -> None:
    """Execute once with zeros, so that the first request finds buffers allocated and the footprint counts them.

    A model may refuse zeros; that is no reason to refuse the model.
    """
    if not handler.inline:  # code of the model's author: it is not ours to call with made-up data
        return
    config = handler.config
    try:
        handler.execute(_zeros(config), [spec.name for spec in config.outputs])
    except MmeError as error:
        _log.debug("warm-up with zeros failed: %s", error, extra={"target_model": config.name})


def _zeros(config: ModelConfig) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """One element of every input, variable dimensions at 1."""
    zeros = {}
    for spec in config.inputs:
        dims = spec.dims if spec.reshape is None else spec.reshape
        shape = [max(dim, 1) for dim in dims]
        array = np.zeros([1, *shape] if config.max_batch_size > 0 else shape, dtype=spec.data_type.dtype)
        if spec.data_type is BYTES:
            array.fill(b"")
        zeros[spec.name] = array
    return zeros
