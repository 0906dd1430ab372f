"""How target models are loaded, once they are prepared: on their devices, warmed up, and measured.

Loading runs on load threads; a `Target` lives on the event loop: what one archive or one repository folder turned into,
all its served versions.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from model_handlers.base import CPU, Footprint, Handler, LoadedModel, Placement, offering, total
from model_handlers.config.model_config import Guess
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import ExecutorLoop, at_home
from model_handlers.system import devices, memory
from model_handlers.system.devices import uuid_of
from model_handlers.system.threads import NEVER, within
from model_handlers.worker.limits import LoadQuota, ReservationExceededError, allowed, allowing
from serve.loading.prepare import PreparedTarget, Preparer, in_order, still_there
from serve.model.ensemble import EnsembleModel, ServedSteps, checked_config, step_models
from serve.model.ensemble_plan import blaming, not_available
from serve.model.model import DispatchQueue, Model
from serve.model.warmup import Warmup, ensemble_labels, initial_states, read_labels
from serve.options import DEFAULT_LATENCIES
from serve.statistics import new_stats
from serve.threads import ThreadPool, UnderWay

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.system.threads import CancelToken, ThreadBudget
    from serve.cache.entry import JointLease
    from serve.loading.measuring import Others, Scales
    from serve.loading.verify import BatchVerdicts, Proofs
    from serve.model.batch_proof import BatchProof
    from serve.model.rate_limiter import LimitedInstances, ResourcePool
    from serve.model.replies import RetryRequest
    from serve.model.response_cache import ResponseCache
    from serve.model.warmup import Labels
    from serve.model_calls import ModelCalls
    from serve.options import Latencies
    from serve.sources.repository import ModelDirectory
    from serve.sources.source import Source
    from serve.statistics import ModelStats
    from serve.weights.forms import TargetForms


AnyModel = Model | EnsembleModel


class TargetObserver(Protocol):
    """Is told what a target takes, itself or as a member of one."""

    def changed(self) -> None:
        """It takes something else. On the event loop."""

    def closed(self) -> None:
        """All of it was given back. On any thread."""


class Target:
    """The loaded versions of one target model: started on the event loop, closed on a thread, when no lease is left."""

    def __init__(
        self,
        name: str,
        versions: dict[int, AnyModel],
        members: dict[str, Target] | None = None,
        *,
        content: object = None,
        steps: tuple[str, ...] = (),
        forms: TargetForms | None = None,
        footprint: Footprint | None = None,
        labels: Labels | None = None,
        started: Callable[[Target], None] | None = None,
        left: Callable[[], None] = memory.trim,
    ) -> None:
        self.name = name
        self.labels = labels or {}  # output → the names of its classes, where there are any
        self.versions = versions
        self.members = members or {}  # the other models of its archive, by the names that it calls them by
        self.content = content  # see `PreparedTarget`
        self.steps = steps  # names of the served models that it consists of, which are no members
        self.joint: JointLease | None = None  # on it and on all of them
        self.latest = versions[max(versions)]
        self.forms = forms  # what it was loaded from; None where that is the models' files
        self.at_load = footprint or Footprint()
        self._footprint = self.at_load
        self.observer: TargetObserver | None = None
        # what the executions of it and its members took beyond that of the serving process and of GPUs
        self.grown = Footprint()
        self.closed = False  # whether all of that was given back
        self._started = started
        self._left = left

    def __repr__(self) -> str:
        return f"<Target {self.name}: versions {sorted(self.versions)}>"

    @property
    def footprint(self) -> Footprint:
        """What it takes, without members; of one in processes of its own, growth included."""
        return self._footprint

    @footprint.setter
    def footprint(self, footprint: Footprint) -> None:
        self._footprint = footprint
        if self.observer is not None:
            self.observer.changed()

    def version(self, number: int | None) -> AnyModel:
        """One version, the latest if none is named; UNKNOWN_VERSION if it is not there."""
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
        if self._started is not None:
            self._started(self)

    @property
    def apart(self) -> bool:
        """Whether it lives in processes of its own, without its members."""
        return any(model.executors.apart for model in self.versions.values())

    def is_memory_only(self) -> bool:
        """Whether it and its members hold memory and nothing else, which goes with the process."""
        return all(model.executors.memory_only for model in self.models())

    @property
    def executes_here(self) -> bool:
        """Whether it, or a member, executes in the serving process."""
        return any(not part.apart for part in self.parts())

    def known(self) -> Footprint:
        """What it takes with its members without `grown`: of the host, in the serving process alone."""
        return total(
            [Footprint(0 if part.apart else part.footprint.host, part.footprint.devices) for part in self.parts()]
        )

    def growth(self) -> Footprint:
        """What it takes with its members beyond what they took when they were loaded."""
        own = sum(max(part.footprint.host - part.at_load.host, 0) for part in self.parts() if part.apart)
        return self.grown + Footprint(own)

    def memory(self) -> Footprint:
        """What its processes take now, without its members."""
        return sum((model.executors.footprint() for model in self.versions.values()), Footprint())

    def is_down(self) -> bool:
        return any(model.is_down() for model in self.models())

    def refuse_waiting(self) -> None:
        for model in self.models():
            model.refuse_waiting()

    def unwire(self) -> None:
        """The model of a step has left memory."""
        self.joint = None
        for model in self.versions.values():
            if isinstance(model, EnsembleModel):
                model.unwire()

    def parts(self) -> Iterator[Target]:
        yield self
        for member in self.members.values():
            yield from member.parts()

    def models(self) -> Iterator[AnyModel]:
        for part in self.parts():
            yield from part.versions.values()

    def takes(self) -> Footprint:
        return sum((part.footprint for part in self.parts()), self.grown)

    def close(self) -> None:
        with contextlib.ExitStack() as versions:  # each is closed, though another raises
            versions.callback(self._left)
            for model in self.models():
                versions.callback(model.close)
        self.closed = True
        if self.observer is not None:
            self.observer.closed()


@dataclass(eq=False, repr=False)
class ModelLoader:
    """Loads what a `Preparer` has prepared; for most arguments see `Model`. On load threads.

    `stats` are counters by name and version that outlive a model's stay in memory. `outside` tells by a target's name
    what its models may ask of the server, `resident` which model of a name is in memory. `started` is told on the event
    loop of every target that begins to serve, `left` on any thread of every one that was closed. Frameworks may have
    `threads` in this process, None for any number.
    """

    loop: asyncio.AbstractEventLoop
    stats: dict[tuple[str, int], ModelStats]
    preparer: Preparer = field(default_factory=Preparer)
    _: KW_ONLY
    proofs: Proofs | None = None
    verdicts: BatchVerdicts | None = None
    inline_ns: int = 0
    outside: Callable[[str, CancelToken], ModelCalls] | None = None
    retry: RetryRequest | None = None
    responses: ResponseCache | None = None
    latencies: Latencies = DEFAULT_LATENCIES
    limits: ResourcePool | None = None
    home: ExecutorLoop | None = None
    started: InitVar[Callable[[Target], None] | None] = None
    under_way: UnderWay = field(default_factory=UnderWay)
    larger: Callable[[], None] | None = None
    threads: ThreadBudget | None = None
    left: InitVar[Callable[[], None]] = memory.trim
    resident: Callable[[str], Target | None] = lambda _: None

    def __post_init__(self, started: Callable[[Target], None] | None, left: Callable[[], None]) -> None:
        self._dispatches = DispatchQueue(self.loop)
        self.home = self.home or ExecutorLoop(self.loop, ThreadPool("instance", idle_seconds=0))
        self._target = functools.partial(Target, started=started, left=left)

    @property
    def scales(self) -> Scales:
        return self.preparer.scales

    def prepare(self, name: str, source: Source, token: CancelToken) -> PreparedTarget:
        return self.preparer.prepare(name, source, token)

    def equip(self, prepared: PreparedTarget, token: CancelToken) -> PreparedTarget:
        return self.preparer.equip(prepared, token)

    def try_files(self, prepared: PreparedTarget, token: CancelToken) -> None:
        for each in (*prepared.members, prepared):
            if self.proofs is None or not each.needs_proof:
                continue
            with _blaming(each, prepared):
                for version in each.directory.versions:
                    token.check()
                    with _of_version(version):
                        self.proofs.provide(*_to_prove(each, version))

    def load(
        self,
        prepared: PreparedTarget,
        token: CancelToken = NEVER,
        more: Callable[[int, Callable[[], None]], int] | None = None,
    ) -> tuple[Target, Footprint]:
        """Load every selected version on its devices, members first, warm it up, measure, and remember.

        For `more`, which has bytes of the host reserved while the load goes on, see `LoadQuota`.
        """
        members: dict[str, Target] = {}
        allowance = LoadQuota(more, token.check) if more is not None and prepared.has_processes else None
        try:
            with (
                self.under_way.of(prepared.target),
                still_there(prepared.target, prepared.folders()),
                allowing(allowance),
                within(self.threads),
            ):
                for member in in_order(prepared):
                    with _blaming(member, prepared):
                        members[member.directory.path.name] = self._load(member, members, {}, token)
                target = self._load(prepared, members, members, token)
        except BaseException:
            for loaded in members.values():
                loaded.close()
            raise
        return target, target.takes()

    def _load(
        self, prepared: PreparedTarget, parts: dict[str, Target], members: dict[str, Target], token: CancelToken
    ) -> Target:
        name, forms, config = prepared.directory.name, prepared.forms, prepared.directory.config
        labels: Labels = read_labels(config, prepared.directory.path)
        if prepared.handler is None:
            versions = self._ensembles(prepared.directory, _members(prepared.directory, parts))
            labels = ensemble_labels(config, labels, {part: target.labels for part, target in parts.items()})
            return self._target(name, versions, members, labels=labels)
        models, taken = self._load_allowed(prepared, token)
        # What a process was forked from counts apart, the next time too.
        known = taken if prepared.placement is Placement.PROCESS else taken.whole()
        self.preparer.footprints.measured(prepared.identity, prepared.handler.backend, prepared.on_disk, known)
        forms = forms if forms is not None and forms.known else None
        return self._target(
            name, models, members, content=prepared.content, forms=forms, footprint=taken, labels=labels
        )

    def _load_allowed(self, prepared: PreparedTarget, token: CancelToken) -> tuple[dict[int, AnyModel], Footprint]:
        """Of what the whole load may take: one that is stopped for it is known to take that the next time."""
        allowance = allowed()
        if allowance is None:
            return self._load_measured(prepared, token)
        before = allowance.settled
        try:
            models, taken = self._load_measured(prepared, token)
        except ReservationExceededError as error:
            least = Footprint(error.need - before, prepared.estimate.devices)
            self.preparer.footprints.takes_at_least(prepared.identity, least)
            raise
        if prepared.placement is Placement.INLINE:
            allowance.settle(taken.host)
        return models, taken

    def _load_measured(self, prepared: PreparedTarget, token: CancelToken) -> tuple[dict[int, AnyModel], Footprint]:
        """All versions, and what they take; none of them where that can't be told."""
        models: dict[int, AnyModel] = {}

        def load() -> None:
            models.update(self._load_versions(prepared, token))

        try:
            with self.preparer.scales.apart() as others:
                if prepared.placement is Placement.PROCESS:
                    load()
                    all_of_it = sum((model.executors.footprint() for model in models.values()), Footprint())
                    taken = replace(all_of_it, devices=all_of_it.beyond(others.take).devices)
                    here = Footprint(0, taken.devices)
                else:
                    taken = here = self._weighed(prepared, load, others)
        except BaseException:
            _close_all(models)
            raise
        self.preparer.scales.note(here)
        return models, taken

    def _weighed(self, prepared: PreparedTarget, load: Callable[[], None], others: Others) -> Footprint:
        """What a load into this process takes; see `alone`. A model in a process of its own tells that itself."""
        size = prepared.directory.size() if prepared.forms is None else 0  # its files may be replaced meanwhile
        _, taken = self.preparer.scales.measured(load)
        taken -= others.take
        if prepared.forms is not None:
            return prepared.forms.weighed(taken)
        # A heap page that an unloaded model left behind may be used again without being seen, and what leaves a GPU
        # meanwhile hides what comes: never less than the file, where it is held.
        least = devices.size_on(prepared.directory.config.instance_group, prepared.lanes, size)
        numbers = {device.index for _, device in prepared.lanes if device.kind == "gpu"}
        return taken.most(least).on(numbers)  # on other GPUs, other processes took some meanwhile

    def assemble(self, prepared: PreparedTarget, steps: Mapping[str, Target]) -> Target:
        """An ensemble of models that are served, and are loaded: by the names that they are served under."""
        directory = prepared.directory
        served = ServedSteps(directory.steps, directory.config, self.resident)
        versions = self._ensembles(directory, [steps[name] for name in directory.steps], served)
        parts = {
            step.model_name: steps[name].labels
            for step, name in zip(directory.config.ensemble, directory.steps, strict=True)
        }
        labels = ensemble_labels(directory.config, prepared.labels or {}, parts)
        return self._target(directory.name, versions, content=prepared.content, steps=directory.steps, labels=labels)

    def _ensembles(
        self, directory: ModelDirectory, targets: Sequence[Target], served: ServedSteps | None = None
    ) -> dict[int, AnyModel]:
        # Versions of an ensemble differ in nothing but their numbers.
        steps = step_models(directory.config, targets)
        config = checked_config(directory.config, steps)
        return {
            version: EnsembleModel(
                directory.name,
                version,
                config,
                steps,
                self._stats_of(directory, version),
                self.loop,
                self.responses,
                served,
            )
            for version in directory.versions
        }

    def _load_versions(self, prepared: PreparedTarget, token: CancelToken) -> dict[int, AnyModel]:
        loaded: dict[int, AnyModel] = {}
        try:
            for version in prepared.directory.versions:
                token.check()
                with _of_version(version):
                    loaded[version] = self._load_version(prepared, version, token)
        except BaseException:
            _close_all(loaded)
            raise
        return loaded

    def _stats_of(self, directory: ModelDirectory, version: int) -> ModelStats:
        return self.stats.setdefault((directory.name, version), new_stats(self.latencies))

    def _load_version(self, prepared: PreparedTarget, version: int, token: CancelToken) -> Model:
        directory = prepared.directory
        config = directory.config
        handlers: list[LoadedModel] = []
        lanes: list[tuple[str, LoadedModel]] = []
        shared: dict[Device, LoadedModel] = {}
        here = prepared.placement is Placement.INLINE
        # what may run on the event loop is no author's code, and asks nothing
        asks = self.outside if not (here and prepared.traits.inline) else None
        outside = asks(prepared.target, token) if asks is not None else None
        try:
            for lane, device in prepared.lanes:
                handler = shared.get(device)
                if handler is None:
                    if self.proofs is not None and prepared.needs_proof:  # it was tried, and waited for its turn since
                        self.proofs.check(*_to_prove(prepared, version))
                    with offering(outside), at_home(self.home):
                        handler = prepared.start(version, config, device, lane)
                    handlers.append(handler)
                    config = handler.config
                if here:  # a process executes one batch at a time
                    shared[device] = handler
                lanes.append((lane, handler))
            if config.model_warmup:
                warmup = Warmup(config, directory.path)
                for lane, handler in lanes:
                    warmup.run(handler, lane, token.check)
            if outside is not None:
                outside.loaded()
            stats = self._stats_of(directory, version)
            stats.gpu_uuid = uuid_of([device for _, device in prepared.lanes])
            return Model(
                directory.name,
                version,
                lanes,
                stats,
                self.loop,
                self.inline_ns,
                self.retry,
                self.responses,
                initial_states(config, directory.path),
                self._limited(prepared, config),
                self._dispatches,
                self.home,
                self._proof_of(prepared, version, config),
                turns=len({device for _, device in prepared.lanes}) > 1,
                larger=self.larger,
            )
        except BaseException:
            for handler in handlers:
                handler.close()
            raise

    def _limited(self, prepared: PreparedTarget, config: ModelConfig) -> LimitedInstances | None:
        groups = config.instance_group
        if self.limits is None or not any(group.resources for group in groups):
            return None
        return self.limits.instances(prepared.directory.name, groups, prepared.lanes)

    def _proof_of(self, prepared: PreparedTarget, version: int, config: ModelConfig) -> BatchProof | None:
        if config.guess is Guess.NONE or prepared.handler is None or self.verdicts is None:
            return None
        return self.verdicts.proof(prepared.handler, config, prepared.directory.model_file(version))


def _members(directory: ModelDirectory, members: Mapping[str, Target]) -> list[Target]:
    """For each step of an archive's ensemble its model in the archive."""
    names = [step.model_name for step in directory.config.ensemble]
    missing = dict.fromkeys(name for name in names if name not in members)
    if missing:
        there = f"; there are {', '.join(members)}: a step names a model's directory" if members else ""
        raise not_available(directory.name, missing, there)
    return [members[name] for name in names]


@contextlib.contextmanager
def _of_version(version: int) -> Iterator[None]:
    try:
        yield
    except MmeError as error:
        error.version = version
        raise


def _close_all(models: dict[int, AnyModel]) -> None:
    for model in models.values():
        model.close()


def _blaming(member: PreparedTarget, whole: PreparedTarget) -> AbstractContextManager[None]:
    is_step = bool(whole.directory.config.ensemble)
    return blaming(whole.directory.name, member.directory.path.name) if is_step else contextlib.nullcontext()


def _to_prove(prepared: PreparedTarget, version: int) -> tuple[type[Handler], ModelConfig, Path]:
    assert prepared.handler is not None  # noqa: S101 - it is delicate
    config = prepared.directory.config
    return prepared.handler, config, prepared.file(version, config, CPU)  # there is no other file for GPUs
