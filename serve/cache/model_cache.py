"""Which models are in memory: leases, single-flight loads, reserve → commit or abort, and eviction.

All state here is touched on the event loop only, so nothing is locked; whatever takes time runs on the loader's
threads. A leased model is never a victim. A request that waited for a load has its lease before the model can be
evicted again, so two models that fit only one at a time take turns. In platform-managed mode (`evicts=False`) the
platform chooses victims: what does not fit is out of memory at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from model_handlers.errors import ElsewhereError, Kind, MmeError, out_of_memory
from serve.cache import eviction
from serve.cache.entry import Entry, Event, Failure, Ready, Residency, State
from serve.cache.load import Load, Loading, no_steps, retry_pause
from serve.cache.residents import Residents
from serve.cache.room import Room, megabytes
from serve.request import LoadReport
from serve.statistics import CacheEvent, CacheEvents, EventType

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from model_handlers.base import Footprint
    from serve.cache.load import Bring
    from serve.loading.loader import ModelLoader

_log = logging.getLogger("mme.cache")
_now = time.perf_counter_ns
_PASSING = {Kind.UNAVAILABLE, Kind.CANCELLED, Kind.UNKNOWN_MODEL}
_BROKEN = {Kind.INVALID_MODEL, Kind.EXECUTION_FAILED, Kind.INTERNAL}


# acquire ── resident ────────────────────────────────► leased
#    │ not resident: one load per name, all requests that come meanwhile wait for that one
#    ▼
# prepare (thread) ─► reserve ─► load (thread) ─► commit: the measured footprint replaces the estimate
# equip   (thread)    (room.py)   (load.py)    └─► abort:  the bytes are given back, all of them get the error
#
# A model that is *reloaded* serves while the next is loaded beside it. When that is ready it takes the name, in one
# step of the loop, and the one before is *retiring*: it is leased no more, and closes after the last lease. A reload
# that fails leaves everything as it was. Only where memory has no room for both, the old one goes first, and requests
# wait for the new one as for any load.
class ModelCache:
    """Models in memory, within a budget of bytes for all together."""

    def __init__(
        self,
        loader: ModelLoader,
        budget: Footprint,
        pool: Executor,  # threads for the loader; `closers` for closing, the same if None
        *,
        closers: Executor | None = None,
        turns: int = 2,  # equipments at a time, and loads at a time
        rules: eviction.Rules = eviction.DEFAULT_RULES,
        # whether models make room for others (self-managed), or a full cache is an error (platform)
        evicts: bool = True,
        load_patience: float = 350.0,  # seconds that fetching and loading may take
        memory_patience: float = 60.0,  # seconds that a load waits for leased models to become free before it gives up
        drain_patience: float = 25.0,  # seconds that an unload waits for requests under way
        bring: Bring = no_steps,
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.events = CacheEvents()
        self._rules = rules
        self.residents = Residents(self.entries, rules, budget)
        self.room = Room(
            budget, self.residents, self._evict, policy=rules.policy, evicts=evicts, patience=memory_patience
        )
        self.ready = Ready()
        self.loading = Loading(
            loader,
            self.room,
            self.residents,
            rules,
            pool=pool,
            closers=closers or pool,
            turns=turns,
            patience=load_patience,
            give_way=self._give_way,
            relieve=self.relieve,
            bring=bring,
        )
        self._evicts = evicts
        self._closed = False
        self._drain_patience = drain_patience

    def __repr__(self) -> str:
        return f"<ModelCache {len(self.ready.models)} ready of {len(self.entries)} known, {self.room!r}>"

    def keep(self, entry: Entry, *, pinned: bool) -> None:
        """Have a model in memory stay there for good, or leave as any other; what asks for itself to stay does."""
        residency = entry.residency
        if residency is None:
            return
        pinned = pinned or self._rules.pins_name(entry.name) or residency.prepared.pinned
        if residency.pinned is not pinned:
            self.residents.pin(residency, pinned=pinned)
            self.room.settle()

    async def acquire(self, entry: Entry) -> tuple[Residency, LoadReport]:
        """Lease a model, loading it first if need be; what the load cost. The caller must release the lease.

        All callers that come while it loads wait for the same load, and get the same error.
        """
        residency = self.ready.models.get(entry.name)
        if residency is not None and residency.entry is entry:
            residency.stats.hits += 1
            residency.leases += 1
            return residency, LoadReport()
        entry.stats.misses += 1
        waiter: asyncio.Future[tuple[Residency, LoadReport]] = asyncio.get_running_loop().create_future()
        self._start_load(entry, entry.source).waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result()[0].release()  # the lease came in the very moment the caller left
            raise
        finally:
            del waiter  # whose error knows this frame

    async def reload(self, entry: Entry, source: Any, *, force: bool = False) -> LoadReport:
        """Load a model from a source, also if it is in memory, and do not lease it; it serves until it is replaced.

        The load goes on if its caller is cancelled.
        A load from that source that is under way will do; one from another is waited for. One in memory that was loaded
        from the same content stays, but for `force`; so does one whose successor can't be loaded, if there was room for
        both.
        """
        while entry.load is not None and entry.load.source != source:
            await asyncio.wait([entry.load.task])
            entry = self.entries.setdefault(entry.name, entry)
        return await asyncio.shield(self._start_load(entry, source, force=force).task)

    def _start_load(self, entry: Entry, source: Any, *, force: bool = False) -> Load:
        if self._closed:
            raise MmeError(Kind.UNAVAILABLE, f"model '{entry.name}' can't be loaded: this server is shutting down")
        load = entry.load
        if load is None:
            entry.tell(Event.LOAD)
            if entry.state is not State.RELOADING:
                entry.source, entry.reason, entry.failure = source, "", None
            load = entry.load = Load(entry, source, self._load, force=force)
            load.task.add_done_callback(functools.partial(self._load_ended, load))
        return load

    def _load_ended(self, load: Load, task: asyncio.Task[LoadReport]) -> None:
        if load.entry.load is load:  # it was cancelled before it began, so that nothing of it ever ran
            self._failed(load, _as_ours(load, asyncio.CancelledError()))
        _observe(task)

    async def unload(self, entry: Entry) -> None:
        """Take a model out of memory after the requests that use it; return when its memory was given back.

        A load under way is abandoned, and requests that wait for it are told.
        """
        entry.tell(Event.UNLOAD)
        load, residency, retiring = entry.load, entry.residency, list(entry.retiring)
        if residency is not None and not residency.leaving:
            self._start_closing(residency, "unloaded")
        if load is not None:
            load.cancel(f"model '{entry.name}' was unloaded while it was loading; load it again")
            await asyncio.wait([load.task])
        await asyncio.gather(*(self._refuse_in_time(each) for each in retiring))
        leaving = retiring if residency is None else [residency, *retiring]
        for closing in [entry.removal, *(each.closing for each in leaving)]:
            if closing is not None:
                await asyncio.shield(closing)

    async def relieve(self, name: str, need: Footprint | None, reason: str) -> tuple[str, ...]:
        """Evict others that hold about so much memory, for a model that is short of what no budget here counts.

        Where it is short of no memory, `need` is None: one goes, whatever it holds. Their names, when they are gone.
        """
        victims = self.room.relieve(name, need, reason)
        closings = [closing for name in victims if (closing := self.entries[name].closing) is not None]
        if closings:
            await asyncio.wait(closings)
        return victims

    def forget(self, entry: Entry) -> None:
        if self.entries.get(entry.name) is entry and not entry.busy:
            del self.entries[entry.name]

    def cut_short(self) -> None:
        """Load nothing from now on, and tell requests that wait for a load that this server is shutting down."""
        self._closed = True
        for entry in self.entries.values():
            if entry.load is not None:
                entry.load.cancel(_cut_short(entry))
                entry.load.task.cancel()

    async def close(self, *, ends: bool = False) -> None:
        """Unload everything; from now on nothing is loaded.

        Where the process `ends`, models that no request uses and that hold memory alone stay until then.
        """
        self.cut_short()
        leaving = [entry for entry in self.entries.values() if not (ends and entry.goes_with_process)]
        await asyncio.gather(*(self.unload(entry) for entry in leaving))
        left = [each for each in self.residents.own if each.leaving]
        await asyncio.gather(*(self._refuse_in_time(each) for each in left))
        await asyncio.gather(*(each.closing for each in left if each.closing is not None))
        orphans = [entry.orphan for entry in self.entries.values() if entry.orphan is not None]
        if orphans:
            await asyncio.wait(orphans)

    # -- one load ------------------------------------------------------------------------------------------------

    async def _load(self, load: Load) -> LoadReport | MmeError:
        """Return what came of it: see `load.Run`."""
        try:
            if load.entry.closing is not None:
                await asyncio.wait([load.entry.closing])  # however that ends
            loaded = await self.loading.run(load)
        except BaseException as error:
            is_told = load.cancelled is not None or not isinstance(error, asyncio.CancelledError)
            failure = _as_ours(load, error).bare()  # the frames hold what was made
            self._failed(load, failure)
            if not is_told:
                raise
        else:
            if loaded is None:
                return self._stays(load.entry)
            self._loaded(load, *loaded)
            return loaded[1]
        return failure

    def _stays(self, entry: Entry) -> LoadReport:
        """Nothing changed since the one was loaded whose place the load was to take: that one goes on."""
        entry.tell(Event.KEEP)
        entry.load, entry.failure = None, None
        _log.info("it stays as it is, nothing changed since it was loaded", extra={"target_model": entry.name})
        self.room.settle()
        return LoadReport()

    def _loaded(self, load: Load, residency: Residency, report: LoadReport) -> None:
        """All that wait have a lease before the model can be evicted again."""
        entry, before = load.entry, load.entry.residency
        entry.tell(Event.COMMIT)
        if before is not None:
            self._retire(before, hurries=False)
        entry.load, entry.residency, entry.source = None, residency, load.source
        entry.reason, entry.failure, entry.failures = "", None, 0
        entry.last_used = residency.loaded_at = time.monotonic()
        self.ready.put(residency)
        self.residents.arrived(residency)
        for waiter in load.waiters:
            if not waiter.done():
                residency.leases += 1
                waiter.set_result((residency, report))
        self._report(residency, report)
        self.room.settle()

    def _give_way(self, load: Load) -> None:
        """There is no room for both: what serves leaves first, and from here on the name means what is being loaded."""
        entry, before = load.entry, load.entry.residency
        if before is not None and entry.state is State.RELOADING:
            entry.tell(Event.GIVE_WAY)
            entry.residency, entry.source, entry.failure = None, load.source, None
            self._retire(before, hurries=True)

    def _retire(self, residency: Residency, *, hurries: bool) -> None:
        residency.entry.retiring.add(residency)
        self._start_closing(residency, "loaded anew", hurries=hurries)

    def remeasured(self, entry: Entry, footprint: Footprint) -> None:
        if entry.residency is not None:
            self.residents.remeasured(entry.residency, footprint)
            self.room.settle()

    def _failed(self, load: Load, error: MmeError) -> None:
        entry = load.entry
        entry.load, entry.failure = None, self._failure(load, error)
        if entry.state is not State.RELOADING:
            entry.reason = error.message
        if not entry.unloaded:
            entry.tell(Event.FAIL)
        elif entry.residency is None:
            entry.tell(Event.CLOSE)
        entry.stats.load_failures += 1
        self.events.tell(CacheEvent(EventType.FAILED, entry.name, why=error.message, kind=error.kind))
        level = logging.ERROR if error.kind in _BROKEN else logging.WARNING
        if error.kind is Kind.UNKNOWN_MODEL and load.waiters:  # its client's mistake, which is told
            level = logging.DEBUG
        _log.log(level, "load failed: %s", error.message, extra={"target_model": entry.name})
        error.logged = True
        for waiter in load.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.room.settle()

    def _failure(self, load: Load, error: MmeError) -> Failure:
        """What is remembered of it. After what may be otherwise the next time, through others' doing, is no pause."""
        entry, pause = load.entry, 0.0
        passes = error.kind in _PASSING or isinstance(error, ElsewhereError)
        if not passes and (self._evicts or error.kind is not Kind.OUT_OF_MEMORY):
            entry.failures += 1
            pause = retry_pause(entry.failures, time.monotonic() - load.began)
        return Failure(error.message, error.version, error.kind, time.monotonic() + pause if pause else 0.0)

    def _report(self, residency: Residency, report: LoadReport) -> None:
        name, stats, footprint = residency.name, residency.stats, residency.footprint
        stats.loads += 1
        stats.load.add(report.load)
        if report.download:
            stats.download.add(report.download)
        self.events.tell(CacheEvent(EventType.LOADED, name, report.load, report.download, footprint))
        _log.info(
            "loaded in %.0f ms (download %.0f ms), %s",
            report.load / 1e6,
            report.download / 1e6,
            megabytes(footprint),
            extra={"target_model": name, "evicted": list(report.evicted)},
        )

    # -- leaving -------------------------------------------------------------------------------------------------

    def _evict(self, plan: eviction.Plan, beneficiary: str, reason: str) -> None:
        self.residents.age = max(self.residents.age, plan.age)
        for name in plan.victims:
            entry = self.entries[name]
            entry.tell(Event.EVICT)
            entry.stats.evictions[reason] += 1
            entry.stats.evicted += entry.footprint
            self.events.tell(CacheEvent(EventType.EVICTED, name, footprint=entry.footprint, why=beneficiary))
            _log.info(
                "evicted for '%s' (%s), %s, %s",
                beneficiary,
                reason,
                self._rules.policy.reason,
                megabytes(entry.footprint),
                extra={
                    "target_model": name,
                    "beneficiary": beneficiary,
                    "reason": reason,
                    "host_bytes": entry.footprint.host,
                    "device_bytes": entry.footprint.device,
                    "gpu_bytes": list(entry.footprint.devices),
                },
            )
            if entry.residency is not None:
                self._start_closing(entry.residency, f"evicted for '{beneficiary}'")

    def _start_closing(self, residency: Residency, reason: str, *, hurries: bool = True) -> None:
        """From here on it is leased no more. Without hurry it waits for all requests that it has, however long."""
        self.residents.leaves(residency)
        self.ready.remove(residency)
        residency.closing = asyncio.get_running_loop().create_task(
            self._close(residency, reason, hurries=hurries), name=f"close {residency.name}"
        )

    async def _refuse_in_time(self, residency: Residency) -> None:
        """Tell requests that are still queued after a while that the model goes."""
        done, _ = await asyncio.wait([residency.drained()], timeout=self._drain_patience)
        if not done:
            residency.target.refuse_waiting()

    async def _close(self, residency: Residency, reason: str, *, hurries: bool) -> None:
        began = _now()
        entry = residency.entry
        if hurries:
            await self._refuse_in_time(residency)
        await residency.drained()
        await self.loading.close(entry.name, residency.target)
        footprint = residency.footprint
        self.residents.left(residency)
        residency.prepared.release()
        entry.retiring.discard(residency)
        if entry.residency is residency:
            self._closed_last(entry, reason)
        took = _now() - began
        entry.stats.unload.add(took)
        self.events.tell(CacheEvent(EventType.UNLOADED, entry.name, took, footprint=footprint, why=reason))
        self.room.settle()

    def _closed_last(self, entry: Entry, reason: str) -> None:
        entry.residency = None
        if entry.load is None:  # else it waits for this, and tells itself how that ends
            entry.reason, entry.failure = reason, None
            if entry.state is State.EVICTING or entry.state is State.UNLOADING:
                entry.tell(Event.CLOSE)
        if not entry.registered:
            entry.measured = None


def _as_ours(load: Load, error: BaseException) -> MmeError:
    if load.cancelled is not None:
        return load.refusal()
    if isinstance(error, MmeError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return MmeError(Kind.UNAVAILABLE, _cut_short(load.entry))
    if isinstance(error, MemoryError):
        return out_of_memory(f"model '{load.name}' ran out of memory while it was loaded: {error}")
    _log.error("load failed in a way we do not know", exc_info=error, extra={"target_model": load.name})
    return MmeError(Kind.INTERNAL, f"model '{load.name}' failed to load: {type(error).__name__}: {error}")


def _cut_short(entry: Entry) -> str:
    return f"the load of model '{entry.name}' was cut short: this server is shutting down"


def _observe(task: asyncio.Task[LoadReport]) -> None:
    """A load whose waiters all left must not warn about its error."""
    if not task.cancelled():
        task.exception()
