"""The engine: load, unload, infer. Composition, no policy. On one event loop.

It ties together where models come from (`origins`), what comes into memory and leaves it by name (`load_api`), what is
there (`cache`), what is known of it (`registry`, `index`) and what executes (`model`). Callers of other threads come
through the container's `on_loop`.

*Registered* and *resident* are two things: a registered model that was evicted answers its next request after a reload;
it is never unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.base import Footprint, total
from model_handlers.environment_cache import Environments
from model_handlers.errors import Kind, MmeError
from model_handlers.executor import ExecutorLoop
from model_handlers.system.threads import ThreadBudget, lower_priority
from model_handlers.worker.fork_client import stop_fork_servers
from serve.cache import footprints
from serve.cache.footprints import Footprints
from serve.cache.model_cache import ModelCache
from serve.index import ModelIndex
from serve.load_api import LoadApi, WaitGraph
from serve.loading import verify
from serve.loading.loader import ModelLoader
from serve.loading.measuring import HeapTrim, Meter
from serve.loading.prepare import Preparer
from serve.loading.upkeep import Upkeep
from serve.loading.verify import BatchVerdicts, Proofs
from serve.model.rate_limiter import ResourcePool
from serve.model.replies import OomRetry
from serve.model.response_cache import ResponseCache
from serve.model_calls import ModelCalls
from serve.registry import Registry
from serve.request import LoadReport
from serve.sources.catalog import ModelCatalog
from serve.sources.scripts import fetched
from serve.sources.source import InRepository, S3Model, origin
from serve.sources.store import ARCHIVE_SUFFIX
from serve.state_file import Journal, LazyFile, StateFile
from serve.statistics import CacheEvent, CacheTimes, EventType
from serve.threads import LOAD_PATIENCE_SECONDS, STARTER, ThreadPool, on_daemon
from serve.weights.forms import target_forms
from serve.weights.store import WeightStore
from serve.weights.tiering import Tiering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.model_calls import Override
    from serve.cache.entry import JointLease, Residency
    from serve.cache.eviction import Rules
    from serve.loading.loader import AnyModel, Target
    from serve.options import EngineOptions
    from serve.request import InferenceRequest
    from serve.sources.scripts import Scripts
    from serve.statistics import ModelStats

_SPARE = 16  # threads that stand in for those in which a framework hangs while it closes a model
_LAST_UNLOADS = 256  # at a time, when all go
_LET_GO_SECONDS = 30.0  # for an unused model to be closed
_FOOTPRINT_SECONDS = 2.0  # from a measurement to the file


def _nothing() -> int:
    return 0


class Pools:
    """The threads of an engine. Loads and unloads have their own: none queues behind what it would make room for."""

    def __init__(self, options: EngineOptions) -> None:
        self.loads = ThreadPool("load", lower_priority, idle_seconds=0, patience=LOAD_PATIENCE_SECONDS)
        self.unloads = ThreadPool("unload", lower_priority, most=options.load_threads + _SPARE, keeps_one=True)
        # Of one thread: what a stuck load would keep from being written.
        self.writes = ThreadPool("state", most=1, keeps_one=True)
        self.instances = ThreadPool("instance", keeps_one=True)
        self.heap = HeapTrim(self.instances)

    async def close_unused(self, *, ends: bool) -> None:
        """End those that write nothing; where the process `ends`, instances' threads go with it."""
        await on_daemon("end loads", self.loads.shutdown)  # which takes a moment where some were cut short
        self.unloads.shutdown()
        self.heap.close()
        self.instances.shutdown(wait=not ends)  # one may execute for ever whose requests were told of a time limit


class Engine:
    """All models of one server process. Made and used on one event loop."""

    def __init__(
        self, options: EngineOptions, loop: asyncio.AbstractEventLoop, on_the_way: Callable[[], int] = _nothing
    ) -> None:
        self.options = options
        self.stats: dict[tuple[str, int], ModelStats] = {}  # (name, version) → counters of requests
        self.on_the_way = on_the_way  # bytes of requests and responses in this process
        self._loop = loop
        self._store = WeightStore(options.cache_directory / "weights", self._disk_has_room)
        scripts, waits = fetched(options.scripts, options.cache_directory), WaitGraph()
        self.origins = ModelCatalog(options, scripts, self._store, self._let_go)
        self.pools = Pools(options)
        self.home = ExecutorLoop(loop, self.pools.instances, self.pools.loads.works)
        file = StateFile(options.cache_directory / "footprints.json", footprints.FORM)
        self._known = known = Footprints(file.read(), options.budget)
        self._footprints = LazyFile(file, known, self.pools.writes, delay=_FOOTPRINT_SECONDS)
        self.responses = ResponseCache(options.response_cache_bytes)  # those that are kept for requests that come again
        loader = self._loader(known, scripts, waits)
        # the models in memory; registry: which names mean what; origins: where models come from
        self.cache = self._cache(loader)
        self._tiering = Tiering(self._store, self.cache, loader.scales, loader.threads, loop, lower_priority)
        self._upkeep = Upkeep(self.cache, loop, lower_priority, self._has_grown)
        self._meter = Meter(
            self.cache,
            loop,
            lambda: loader.scales.common + on_the_way() + int(self.responses.currsize),
            self._has_grown,
        )
        self.registry = Registry(
            self.cache,
            self.origins,
            limited=options.control.limits,
            left_out=options.left_out,
            journal=Journal(options.cache_directory, options.life, self.cache.entries, self.pools.writes),
        )
        self._load_api = LoadApi(
            options,
            self.cache,
            self.registry,
            self.origins,
            loads=self.pools.loads,
            unloads=self.pools.unloads,
            waits=waits,
        )
        # look-ups by name, and the repository index
        self.index = ModelIndex(self.cache.entries, self.stats, self.registry, self.origins)
        self.times = CacheTimes()
        self.cache.events.listen(self.times.hear)
        self.cache.events.listen(self._note)
        STARTER.hold(self)

    def _loader(self, known: Footprints, scripts: Callable[[], Scripts], waits: WaitGraph) -> ModelLoader:
        options = self.options
        preparer = Preparer(
            known,
            require_gpu=options.require_gpu,
            scripts=scripts,
            environments=Environments(options.cache_directory / "environments"),
            forms=functools.partial(target_forms, self._store, options.weights),
            host=options.budget.host,
        )
        verdicts = StateFile(options.cache_directory / "batching.json", verify.BATCHING_FORM)
        return ModelLoader(
            self._loop,
            self.stats,
            preparer,
            proofs=Proofs(StateFile(options.cache_directory / "proofs.json", verify.PROOFS_FORM)),
            verdicts=BatchVerdicts(verdicts, self.pools.writes, options.batch_guess),
            inline_ns=options.inline_ns,
            outside=functools.partial(ModelCalls, self, self._loop, waits),
            retry=OomRetry(self._relieve) if options.evicts else None,
            responses=self.responses,
            latencies=options.latencies,
            limits=ResourcePool(self._loop, options.resources),
            home=self.home,
            started=self._begins_to_serve,
            under_way=options.under_way,
            larger=lambda: self._meter.larger(),  # noqa: PLW0108 - which is made with the cache, later
            threads=ThreadBudget(options.framework_threads) if options.framework_threads else None,
            left=self.pools.heap.left,
            resident=lambda name: self.cache.ready.target(name),  # noqa: PLW0108 - as above
        )

    def _cache(self, loader: ModelLoader) -> ModelCache:
        options = self.options
        return ModelCache(
            loader,
            options.budget,
            self.pools.loads,
            closers=self.pools.unloads,
            turns=options.load_threads,
            rules=_with_suffixes(options.eviction) if options.store else options.eviction,
            evicts=options.evicts,
            load_patience=options.load_patience,
            drain_patience=options.drain_patience,
            bring=lambda name, steps: self._load_api.steps.bring(name, steps),  # noqa: PLW0108 - made later
        )

    def __repr__(self) -> str:
        return f"<Engine {self.cache!r}>"

    def grown(self) -> Footprint:
        """Bytes that executions took beyond what models took when they were loaded, charged to a model or not."""
        return total((each.target.growth() for each in self.cache.residents.own), self.cache.room.grown)

    def _disk_has_room(self, size: int) -> bool:
        return self.origins.room is None or self.origins.room.has(size)

    def _begins_to_serve(self, target: Target) -> None:
        if any(part.forms is not None for part in target.parts()):
            self._tiering.watch(target)
        if any(part.apart for part in target.parts()):
            self._upkeep.watch(target)
        if target.executes_here or target.takes().devices:
            self._meter.watch(target)

    def _has_grown(self, target: Target) -> None:
        residency = self.cache.entries[target.name].residency
        assert residency is not None  # noqa: S101 - it serves
        prepared = residency.prepared
        parts = {member.directory.path.name: member for member in prepared.members}
        for each, part in [(prepared, target), *((parts[name], part) for name, part in target.members.items())]:
            grown = target.grown if part is target else Footprint()
            self._known.grew(each.identity, part.at_load, part.footprint + grown)
        self._footprints.changed()

    # -- inference -----------------------------------------------------------------------------------------------

    def submit(self, name: str, version: int | None, request: InferenceRequest, *, at_once: bool = False) -> bool:
        """Accept a request for a model in memory; False if the model is not there, and nothing happened.

        Once accepted, the request is resolved exactly once, on the loop; later, if it is not to be executed `at_once`.

        Raises:
            MmeError: the request was not accepted.
        """
        lease = self.cache.ready.lease(name)
        if lease is None:
            return False
        self._submit_leased(lease, version, request, at_once)
        return True

    def submit_now(self, name: str, version: int | None, make: Callable[[ModelConfig], InferenceRequest]) -> bool:
        """As `submit_made`, for a model in memory; False if the model is not there, and nothing happened.

        Raises:
            MmeError: as `submit_made`, and whatever else `make` raises.
        """
        lease = self.cache.ready.lease(name)
        if lease is None:
            return False
        try:
            target = lease.target
            model = target.latest if version is None else target.version(version)
            try:
                request = make(model.config)
            except BaseException:
                lease.uncount()  # what can't be read asks for nothing, or comes again
                raise
            request.lease, request.asked = lease, model
            if target.steps:
                request.steps = lease.held
            model.submit(request)
        except BaseException:
            lease.release()
            raise
        return True

    def submit_to_member(self, target: str, member: str, version: int | None, request: InferenceRequest) -> bool:
        """Accept a request for a model of an archive, made by another one of it; False if there is no such model."""
        entry = self.cache.entries.get(target)
        residency = None if entry is None else entry.residency
        if residency is None or member not in residency.target.members:
            return False
        residency.share()
        try:
            request.lease = residency
            residency.target.members[member].version(version).submit(request)
        except BaseException:
            request.lease = None
            residency.release()
            raise
        return True

    async def submit_cold(self, name: str, version: int | None, request: InferenceRequest) -> LoadReport:
        """Accept a request for any model, loading the model first; see `submit`."""
        return await self.submit_made(name, version, lambda _config: request)

    async def submit_made(
        self, name: str, version: int | None, make: Callable[[ModelConfig], InferenceRequest]
    ) -> LoadReport:
        """As `submit_cold`, for a request that is made once the model's configuration is known.

        Raises:
            MmeError: as `submit_cold`, and what `make` raises; CANCELLED where the client left before that.
        """
        lease, report = self.cache.ready.lease(name), LoadReport()
        if lease is None:
            lease, report = await self._load_api.acquire(name, version)
        try:
            request = _made(lease.target.version(version), make)
        except BaseException:
            lease.release()
            raise
        self._submit_leased(lease, version, request)
        return report

    def _submit_leased(
        self,
        lease: Residency | JointLease,
        version: int | None,
        request: InferenceRequest,
        at_once: bool = False,  # noqa: FBT001, FBT002 - on each request's way
    ) -> None:
        try:
            request.lease = lease
            target = lease.target
            if target.steps:
                request.steps = lease.held
            request.asked = model = target.latest if version is None else target.version(version)
            model.submit(request, at_once)
        except BaseException:
            if request.lease is not None:  # else it was answered
                request.lease = None
                lease.release()
            raise

    def wholes_of(self, name: str) -> list[str]:
        """The ensembles in memory that consist of a model, themselves or by others of them."""
        return self.registry.dependents.all_wholes_of(name)

    def end_sequence(self, name: str, correlation_id: int | str) -> None:
        """End a sequence of a model, whether that is in memory or not."""
        entry = self.cache.entries.get(name)
        if entry is not None and entry.resident is not None:
            for model in entry.resident.models():
                model.end_sequence(correlation_id)

    # -- the registered models -----------------------------------------------------------------------------------

    async def load(self, name: str, url: str = "", alias: str = "") -> None:
        """Register a model and load it: see `LoadApi.load`."""
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

    @contextlib.asynccontextmanager
    async def leased(self, name: str, version: int | None = None) -> AsyncIterator[AnyModel]:
        """The model, in memory for as long as the context lasts; it is loaded if need be."""
        lease, _ = await self._load_api.acquire(name, version)
        try:
            yield lease.target.version(version)
        finally:
            lease.release()

    async def close(self, *, ends: bool = False) -> None:
        """Unload everything and end the threads; where the process ends, only what would outlive it."""
        try:
            await self._close(ends=ends)
        finally:
            STARTER.let_go(self)

    async def _close(self, *, ends: bool) -> None:
        self.registry.leave_overrides()
        await asyncio.gather(self._tiering.close(), self._upkeep.close(), self._meter.close())
        unloads = self.pools.unloads
        unloads.most = max(unloads.most, _LAST_UNLOADS)  # models' code has its say at the end, side by side
        await self.cache.close(ends=ends)
        await self.pools.close_unused(ends=ends)
        if self.origins.room is not None:
            self.origins.room.close()
        await self._footprints.flush()
        await self._footprints.close()
        await self.registry.close()
        self.pools.writes.shutdown()

    def _note(self, event: CacheEvent) -> None:
        if event.type is not EventType.LOADED:
            return
        self._footprints.changed()
        target = self.cache.ready.target(event.name)
        assert target is not None  # noqa: S101 - it was just loaded
        self.registry.versions[event.name] = sorted(target.versions)
        namespace = self._namespace_of(event.name) if self.options.namespaces else ""
        for model in target.models():
            model.stats.tags, model.stats.namespace = model.config.metric_tags, namespace
            model.stats.load_ns = event.ns
        config, registry = target.latest.config, self.registry
        (registry.body_takers.add if config.takes_raw_body else registry.body_takers.discard)(event.name)

    def _namespace_of(self, name: str) -> str:
        source = origin(self.cache.entries[name].source)
        return source.repository if isinstance(source, InRepository | S3Model) else ""

    # -- room for others ------------------------------------------------------------------------------------------

    async def _relieve(self, lease: Residency) -> tuple[str, ...]:
        return await self.cache.relieve(lease.name, lease.footprint, "execution")

    def _let_go(self, archive: str) -> bool:
        relief = asyncio.run_coroutine_threadsafe(self.cache.relieve(archive, None, "disk"), self._loop)
        try:
            return bool(relief.result(_LET_GO_SECONDS))
        except (TimeoutError, CancelledError):  # the server ends
            relief.cancel()
            return False


def end_shared() -> None:
    """End the threads and fork servers that all engines of a process share, once none is left. Waits for them."""
    if STARTER.end():
        stop_fork_servers()


def _made(model: AnyModel, make: Callable[[ModelConfig], InferenceRequest]) -> InferenceRequest:
    try:
        request = make(model.config)
    except MmeError as error:
        if error.kind is Kind.CANCELLED:
            model.stats.failed(error.kind, 0)
        raise
    if request.cancelled:  # a queue might hold it for long, behind sequences
        model.stats.failed(Kind.CANCELLED, 0)
        raise MmeError(Kind.CANCELLED, f"the client of model '{model.name}' left")
    return request


def _with_suffixes(rules: Rules) -> Rules:
    """As names of a store's archives, pins may leave out the suffix."""
    pins = dict.fromkeys(name for pin in rules.pins for name in (pin, pin + ARCHIVE_SUFFIX))
    return replace(rules, pins=tuple(pins))
