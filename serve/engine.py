"""The engine: load, unload, infer, index. Composition, no policy.

It ties together where models come from (`origins`), loads and unloads by name (`load_api`), which models are in memory
(`model_cache`) and what executes (`model`). Every method is called on the event loop; `on_loop` of the container brings
callers from other threads here.

*Registered* and *resident* are two things: a registered model that was evicted answers its next request after a
reload; it is never unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint, total
from model_handlers.environments.cache import Environments
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import takes_raw_body
from model_handlers.system.priority import lower_priority
from model_handlers.system.threads import ThreadBudget
from model_handlers.worker.channel import LISTENER
from serve.cache import footprints
from serve.cache.entry import State
from serve.cache.events import CacheEvent, CacheTimes, EventType
from serve.cache.footprints import Footprints
from serve.cache.model_cache import ModelCache
from serve.index import index_rows
from serve.load_api import LoadApi, WaitGraph
from serve.loading import verify
from serve.loading.loader import ModelLoader
from serve.loading.measuring import HeapTrim
from serve.loading.meter import Meter
from serve.loading.prepare import PreparedTarget
from serve.loading.upkeep import Upkeep
from serve.loading.verify import BatchVerdicts, Proofs
from serve.model.dispatch import LoopPoller
from serve.model.rate_limiter import ResourcePool
from serve.model.replies import OomRetry
from serve.model.response_cache import ResponseCache
from serve.model_calls import ModelCalls
from serve.registry import Registry
from serve.request import LoadReport
from serve.sources.catalog import Origins, unknown
from serve.sources.scripts import SharedScript
from serve.sources.source import InBucket, InRepository, Overridden, origin
from serve.sources.store import ARCHIVE_SUFFIX
from serve.state_file import Journal, LazyFile, StateFile
from serve.threads import LOAD_PATIENCE_SECONDS, ThreadPool, on_daemon
from serve.weights.store import WeightStore
from serve.weights.tiering import Tiering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.model_calls import Override
    from serve.cache.entry import Entry
    from serve.cache.eviction import Rules
    from serve.engine_options import EngineOptions
    from serve.loading.loader import AnyModel, Target
    from serve.model.warmup import Labels
    from serve.request import InferenceRequest
    from serve.sources.disk_budget import DiskRoom
    from serve.statistics import ModelStats

_SPARE = 16  # threads that stand in for those in which a framework hangs while it closes a model
_LAST_UNLOADS = 256  # at a time, when all go
_LET_GO_SECONDS = 30.0  # for a model that nobody uses to be closed
_FOOTPRINT_SECONDS = 2.0  # from a measurement to the file


def _nothing() -> int:
    """What is on the way where it is not told."""
    return 0


class Engine:
    """All models of one server process. Made and used on one event loop.

    Attributes:
        stats: (name, version) → counters of requests; target_stats: name → what the cache did for it.
        register: which names mean what.
        responses: those that are kept for requests that come again.
        body_takers, decoupled: see `Registry`.
        on_the_way: bytes of requests and responses in this process.
    """

    def __init__(
        self, options: EngineOptions, loop: asyncio.AbstractEventLoop, on_the_way: Callable[[], int] = _nothing
    ) -> None:
        """Make an engine without models.

        Args:
            options: how it is to behave.
            loop: the event loop that it lives on.
            on_the_way: bytes of requests and responses in this process.
        """
        self.options = options
        self.stats: dict[tuple[str, int], ModelStats] = {}
        self.on_the_way = on_the_way
        self._loop = loop
        self._store = WeightStore(options.cache_directory / "weights", self._disk_has_room)
        self._script = SharedScript(options.scripts, options.cache_directory)
        self._origins = Origins(options, self._script.scripts, self._store, self._let_go)
        self._loads = ThreadPool("load", lower_priority, idle_seconds=0, patience=LOAD_PATIENCE_SECONDS)
        self.poll = LoopPoller(loop, self._loads.works)
        # Threads of their own: an unload must not queue behind the downloads it would make room for.
        self._unloads = ThreadPool("unload", lower_priority, most=options.load_threads + _SPARE, keeps_one=True)
        # Of one thread: what a stuck load would keep from being written.
        self._writes = ThreadPool("state", most=1, keeps_one=True)
        self._instances = ThreadPool("instance", keeps_one=True)
        self._heap = HeapTrim(self._instances)
        file = StateFile(options.cache_directory / "footprints.json", footprints.FORM)
        self._known = known = Footprints(file.read(), options.budget)
        self._footprints = LazyFile(file, known, self._writes, delay=_FOOTPRINT_SECONDS)
        self.responses = ResponseCache(options.response_cache_bytes)
        loader = self._loader(known)
        self.cache = self._cache(loader)
        self._tiering = Tiering(self._store, self.cache, loader.scales, loader.threads, loop, lower_priority)
        self._upkeep = Upkeep(self.cache, loop, lower_priority, self._has_grown)
        self._meter = Meter(
            self.cache,
            loop,
            lambda: loader.scales.common + on_the_way() + int(self.responses.currsize),
            self._has_grown,
        )
        self.register = Registry(
            self.cache,
            self._origins,
            limited=options.control.limits,
            left_out=options.left_out,
            journal=Journal(options.cache_directory, options.life, self.cache.entries, self._writes),
        )
        self._load_api = LoadApi(
            options, self.cache, self.register, self._origins, loads=self._loads, unloads=self._unloads
        )
        self.target_stats = self.register.stats
        self.body_takers = self.register.body_takers
        self.decoupled = self.register.decoupled
        self.times = CacheTimes()
        self.cache.events.listen(self.times.hear)
        self.cache.events.listen(self._note)
        LISTENER.lend(loop)

    def _loader(self, known: Footprints) -> ModelLoader:
        options = self.options
        return ModelLoader(
            self._loop,
            self.stats,
            footprints=known,
            proofs=Proofs(StateFile(options.cache_directory / "proofs.json", verify.PROOFS_FORM)),
            verdicts=self._batch_verdicts(),
            inline_ns=options.inline_ns,
            require_gpu=options.require_gpu,
            outside=functools.partial(ModelCalls, self, self._loop, WaitGraph()),
            scripts=self._script.scripts,
            retry=OomRetry(self._relieve) if options.evicts else None,
            environments=Environments(options.cache_directory / "environments"),
            store=self._store,
            weights=options.weights,
            responses=self.responses,
            latencies=options.latencies,
            limits=ResourcePool(self._loop, options.resources),
            poll=self.poll,
            started=self._begins_to_serve,
            under_way=options.under_way,
            host=options.budget.host,
            larger=self._executes_more,
            threads=ThreadBudget(options.framework_threads) if options.framework_threads else None,
            instances=self._instances,
            left=self._heap.left,
        )

    def _batch_verdicts(self) -> BatchVerdicts:
        file = StateFile(self.options.cache_directory / "batching.json", verify.BATCHING_FORM)
        return BatchVerdicts(file, self._writes, self.options.batch_guess)

    def _cache(self, loader: ModelLoader) -> ModelCache[PreparedTarget, Target]:
        options = self.options
        return ModelCache(
            loader,
            options.budget,
            self._loads,
            closers=self._unloads,
            turns=options.load_threads,
            rules=_with_suffixes(options.eviction) if options.store else options.eviction,
            evicts=options.evicts,
            load_patience=options.load_patience,
            drain_patience=options.drain_patience,
        )

    def __repr__(self) -> str:
        return f"<Engine {self.cache!r}>"

    @property
    def disk_room(self) -> DiskRoom | None:
        """What downloaded models take of the disk; None where there are none."""
        return self._origins.room

    def grown(self) -> Footprint:
        """Bytes that executions took beyond what models took when they were loaded, charged to a model or not."""
        residents = (entry.resident for entry in self.cache.all_entries())
        return total((each.growth() for each in residents if each is not None), self.cache.room.grown)

    def _disk_has_room(self, size: int) -> bool:
        return self.disk_room is None or self.disk_room.has(size)

    def _begins_to_serve(self, target: Target) -> None:
        self._tiering.watch(target)
        self._upkeep.watch(target)
        self._meter.watch(target)

    def _executes_more(self) -> None:
        self._meter.larger()

    def _has_grown(self, target: Target) -> None:
        """Remember what a target in memory takes by now, over restarts."""
        prepared = self.cache.entries[target.name].prepared
        assert isinstance(prepared, PreparedTarget)  # noqa: S101 - it was loaded from that
        parts = {member.directory.path.name: member for member in prepared.members}
        for each, part in [(prepared, target), *((parts[name], part) for name, part in target.members.items())]:
            grown = target.grown if part is target else Footprint()
            self._known.grew(each.identity, part.at_load, part.footprint + grown)
        self._footprints.changed()

    # -- inference -----------------------------------------------------------------------------------------------

    def submit(self, name: str, version: int | None, request: InferenceRequest) -> bool:
        """Accept a request for a model in memory; False if the model is not there, and nothing happened.

        Once accepted, the request is resolved exactly once, later, on the loop.

        Raises:
            MmeError: the request was not accepted.
        """
        entry = self.cache.lease(name)
        if entry is None:
            return False
        self._submit_leased(entry, version, request)
        return True

    def submit_to_member(self, target: str, member: str, version: int | None, request: InferenceRequest) -> bool:
        """Accept a request for a model of an archive, of which somebody uses another; False if there is no such model.

        Raises:
            MmeError: the request was not accepted.
        """
        entry = self.cache.entries.get(target)
        if entry is None or entry.resident is None or member not in entry.resident.members:
            return False
        entry.share()
        try:
            request.lease = entry
            entry.leased().members[member].version(version).submit(request)
        except BaseException:
            request.lease = None
            entry.release()
            raise
        return True

    async def submit_cold(self, name: str, version: int | None, request: InferenceRequest) -> LoadReport:
        """Accept a request for any model, loading the model first; see `submit`.

        Raises:
            MmeError: UNKNOWN_MODEL, or why it can't be loaded, or why the request does not fit it.
        """
        return await self.submit_made(name, version, lambda _config: request)

    def lent_turn(self, target: str) -> AbstractContextManager[None]:
        """While the target, if it is being loaded, waits for another model to be loaded: see `Turns.lent`."""
        return self.cache.lent_turn(target)

    async def submit_made(
        self, name: str, version: int | None, make: Callable[[ModelConfig], InferenceRequest]
    ) -> LoadReport:
        """As `submit_cold`, for a request that is made once the model's configuration is known.

        Raises:
            MmeError: as `submit_cold`, and what `make` raises; CANCELLED where the client left before that.
        """
        entry, report = self.cache.lease(name), LoadReport()
        if entry is None:
            entry, report = await self._load_api.acquire(name, version)
        try:
            model = entry.leased().version(version)
            request = make(model.config)
            _check_client(model, request)
        except BaseException:
            entry.release()
            raise
        self._submit_leased(entry, version, request)
        return report

    def _submit_leased(self, entry: Entry[Target], version: int | None, request: InferenceRequest) -> None:
        try:
            request.lease = entry
            target = entry.leased()
            request.asked = model = target.latest if version is None else target.version(version)
            model.submit(request)
        except BaseException:
            request.lease = None
            entry.release()
            raise

    def end_sequence(self, name: str, correlation_id: int | str) -> None:
        """Nothing more comes of a sequence of a model, whether it is in memory or not."""
        entry = self.cache.entries.get(name)
        if entry is not None and entry.resident is not None:
            for model in entry.resident.models():
                model.end_sequence(correlation_id)

    # -- the registered models -----------------------------------------------------------------------------------

    def canonical(self, name: str) -> str:
        """The registered name that a client means: aliases resolved, a store's archives with or without suffix."""
        return self.register.canonical(name)

    def aliases(self) -> dict[str, str]:
        """Registered name → the other name that it was loaded with, where there is one."""
        return {name: alias for alias, name in self.register.aliases.items()}

    def check_control(self) -> None:
        """Refuse a client's load or unload where clients have no say.

        Raises:
            MmeError: UNAVAILABLE.
        """
        self.options.control.check()

    async def load(self, name: str, url: str = "", alias: str = "") -> None:
        """Registry a model and load it: see `LoadApi.load`."""
        try:
            await self._load_api.load(name, url, alias)
        finally:
            self._load_api.mark_explicit(name)

    async def reload(self, name: str, override: Override | None = None) -> None:
        """Load a model as it is now where it comes from: see `LoadApi.reload`."""
        try:
            await self._load_api.reload(name, override)
        finally:
            self._load_api.mark_explicit(name)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unregister a model: see `LoadApi.unload`."""
        await self._load_api.unload(name, dependents=dependents)

    def registered(self) -> list[tuple[str, str]]:
        """(name, url) of every registered model, by name: those in memory, and those that we put out of it."""
        return sorted((entry.name, entry.source.url) for entry in self.cache.entries.values() if entry.registered)

    def url(self, name: str) -> str:
        """Where a registered model came from.

        Raises:
            MmeError: UNKNOWN_MODEL.
        """
        entry = self.cache.entries.get(name)
        if entry is None or not entry.registered:
            raise unknown(name)
        url: str = entry.source.url
        return url

    @contextlib.asynccontextmanager
    async def leased(self, name: str, version: int | None = None) -> AsyncIterator[AnyModel]:
        """The model, in memory for as long as the context lasts; it is loaded if need be."""
        entry, _ = await self._load_api.acquire(name, version)
        try:
            yield entry.leased().version(version)
        finally:
            entry.release()

    def versions(self, name: str) -> list[int]:
        """The served versions of a model, [] if it is not in memory."""
        entry = self.cache.entries.get(name)
        return sorted(entry.resident.versions) if entry is not None and entry.resident is not None else []

    def class_names(self, name: str, version: str) -> tuple[bool, Labels]:
        """Of a model in memory: whether it batches, and what the classes of its outputs are called."""
        entry = self.cache.entries.get(name)
        if entry is None or entry.resident is None:  # it left in the very moment of its last answer
            return False, {}
        target = entry.resident  # which may have taken the place of the one that answered
        model = target.versions.get(int(version), target.latest)
        return model.config.max_batch_size > 0, target.labels

    def config(self, name: str, version: int | None = None) -> ModelConfig | None:
        """A model's configuration; None if it is not in memory, or the version is not."""
        entry = self.cache.entries.get(name)
        if entry is None or entry.resident is None:
            return None
        target = entry.resident
        model = target.latest if version is None else target.versions.get(version)
        return None if model is None else model.config

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a request would be answered: in memory, or put out of it by us and back with the next request."""
        entry = self.cache.entries.get(name)
        if entry is None or not entry.registered or entry.state is State.LOADING:
            return False
        return version is None or entry.resident is None or version in entry.resident.versions

    async def says_ready(self, name: str, version: int | None = None) -> bool:
        """The same, and if it is in memory and its code has a say in that, whether this says so: waits for it."""
        if not self.is_ready(name, version):
            return False
        resident = self.cache.entries[name].resident
        return resident is None or await resident.version(version).readiness.told()

    def resident_models(self) -> Iterator[tuple[str, AnyModel]]:
        """Every version of every model in memory."""
        for entry in self.cache.entries.values():
            if entry.resident is not None:
                for model in entry.resident.models():
                    yield model.name, model

    def is_overridden(self, name: str) -> bool:
        """Whether it is registered as a client loaded it, with another configuration or with other files."""
        entry = self.cache.entries.get(name)
        return entry is not None and entry.registered and isinstance(entry.source, Overridden)

    def is_resident(self, name: str) -> bool:
        """Whether the model is in memory to take requests: one that leaves takes none any more."""
        entry = self.cache.entries.get(name)
        return entry is not None and entry.state is State.READY

    def index(self, offered: Iterable[str] = ()) -> list[dict[str, Any]]:
        """The repository index: every model that the cache knows, and those of `offered` that it does not, by name."""
        entries, versions = self.cache.entries.values(), self.register.versions
        return index_rows(entries, offered, self.target_stats, versions, self._origins.refused)

    def find_all(self) -> list[str]:
        """Every name that store or repository offers. Blocks on disk or network: not for the loop."""
        return self._origins.find_all()

    def has_no_model(self) -> bool:
        """Whether there is a store or a repository, but no model in it. Blocks on disk or network: not for the loop."""
        return self._origins.is_bare()

    def scan(self) -> dict[str, str]:
        """Every name that the repositories offer, and what its files look like. Blocks on disk: not for the loop."""
        return self._origins.scan()

    def cut_short(self) -> None:
        """See `ModelCache.cut_short`."""
        self.cache.cut_short()

    async def close(self, *, ends: bool = False) -> None:
        """Unload everything and end the threads; where the process ends, what would outlive it alone."""
        try:
            await self._close(ends=ends)
        finally:
            LISTENER.take_back(self._loop)

    async def _close(self, *, ends: bool) -> None:
        self.register.leave_overrides()
        await asyncio.gather(self._tiering.close(), self._upkeep.close(), self._meter.close())
        self._unloads.most = max(self._unloads.most, _LAST_UNLOADS)  # models' code has its say at the end, side by side
        await self.cache.close(ends=ends)
        await on_daemon("end loads", self._loads.shutdown)  # which takes a moment where some were cut short
        self._unloads.shutdown()
        self._heap.close()
        self._instances.shutdown(wait=not ends)  # one may execute for ever whose requests were told of a time limit
        if self.disk_room is not None:
            self.disk_room.close()
        await self._footprints.flush()
        await self._footprints.close()
        await self.register.close()
        self._writes.shutdown()

    def _note(self, event: CacheEvent) -> None:
        if event.type is not EventType.LOADED:
            return
        self._footprints.changed()
        target = self.cache.entries[event.name].leased()
        self.register.versions[event.name] = sorted(target.versions)
        source = origin(self.cache.entries[event.name].source)
        namespace = ""
        if self.options.namespaces and isinstance(source, InRepository | InBucket):
            namespace = source.repository
        for model in target.models():
            model.stats.tags, model.stats.namespace = model.config.metric_tags, namespace
            model.stats.load_ns = event.ns
        config = target.latest.config
        (self.body_takers.add if takes_raw_body(config) else self.body_takers.discard)(event.name)
        (self.decoupled.add if config.decoupled else self.decoupled.discard)(event.name)

    # -- room for others ------------------------------------------------------------------------------------------

    async def _relieve(self, entry: Entry[Target]) -> tuple[str, ...]:
        """Room for a request that ran out of memory."""
        return await self.cache.relieve(entry.name, entry.footprint, "execution")

    def _let_go(self, archive: str) -> bool:
        """Put one model out of memory, so that its archive may leave the disk for another. On a load thread."""
        relief = asyncio.run_coroutine_threadsafe(self.cache.relieve(archive, None, "disk"), self._loop)
        try:
            return bool(relief.result(_LET_GO_SECONDS))
        except (TimeoutError, CancelledError):  # the server ends
            relief.cancel()
            return False


def _check_client(model: AnyModel, request: InferenceRequest) -> None:
    """Refuse a request whose client has left: a queue might hold it for long, behind sequences."""
    if request.cancelled:
        model.stats.failed(Kind.CANCELLED, 0)
        raise MmeError(Kind.CANCELLED, f"the client of model '{model.name}' left")


def _with_suffixes(rules: Rules) -> Rules:
    """As names of a store's archives, pins may leave out the suffix."""
    pins = dict.fromkeys(name for pin in rules.pins for name in (pin, pin + ARCHIVE_SUFFIX))
    return replace(rules, pins=tuple(pins))
