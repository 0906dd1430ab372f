"""Which models are in memory: leases, single-flight loads, reserve → commit or abort, and eviction.

All state here is touched on the event loop only, so nothing is locked; whatever takes time runs on the loader's
threads. A leased model is never a victim. A request that waited for a load has its lease before the model can be
evicted again, so two models that fit only one at a time take turns. In platform-managed mode (`evicts=False`) the
platform chooses victims: what does not fit is out of memory at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from model_handlers.errors import ElsewhereError, Kind, MmeError, out_of_memory
from serve.cache import eviction
from serve.cache.entry import Entry, Event, Failure, JointLease, State, transition
from serve.cache.events import CacheEvent, CacheEvents, EventType
from serve.cache.load import Loading, no_steps, retry_pause, unloaded
from serve.cache.residents import Residents
from serve.cache.room import Room, megabytes
from serve.request import LoadReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager

    from serve.cache.load import Bring
    from serve.loading.loader import ModelLoader, Target
    from serve.statistics import TargetStats

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
# A model that is *reloaded* has a successor: an entry of its own, loaded beside the one that serves. When it is ready
# it takes the name, in one step of the loop, and the other is *retiring*: it is leased no more, and closes after the
# last lease. A successor that fails leaves everything as it was. Only where memory has no room for both, the old one
# goes first, and requests wait for the new one as for any load.
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
        self._retiring: dict[str, set[Entry]] = {}  # by their names, which mean others
        self.residents = Residents(self.entries, rules, budget)
        self.room = Room(
            budget,
            self.residents,
            self._evict,
            policy=rules.policy,
            evicts=evicts,
            patience=memory_patience,
        )
        self._ready: dict[str, Entry] = {}  # the READY ones, for one look-up a request
        self._reading = 0  # which grows with each change of those
        self._loading = Loading(
            loader,
            self.room,
            self.residents,
            rules,
            pool=pool,
            closers=closers or pool,
            turns=turns,
            patience=load_patience,
            give_way=self._take_place,
            relieve=self.relieve,
            bring=bring,
        )
        self._evicts = evicts
        self._closed = False
        self._drain_patience = drain_patience

    def __repr__(self) -> str:
        return f"<ModelCache {len(self._ready)} ready of {len(self.entries)} known, {self.room!r}>"

    @property
    def resident_count(self) -> int:
        return len(self._ready)

    def add(self, name: str, source: Any, stats: TargetStats) -> Entry:
        entry = self.entries[name] = Entry(name, source, stats, self._lease_ended)
        return entry

    def all_entries(self) -> Iterator[Entry]:
        """Every entry that may be in memory: those that names mean, and those whose names mean others by now."""
        yield from self.entries.values()
        yield from self.retiring()

    def retiring(self) -> Iterator[Entry]:
        """Those that names do not mean any more, and that requests still use."""
        return itertools.chain.from_iterable(self._retiring.values())

    def _lease_ended(self, entry: Entry) -> None:
        if self.room.is_waited_for:
            self.room.lease_ended(self.residents.evictable(entry))

    def lease(self, name: str) -> Entry | JointLease | None:
        """The model if it is in memory, leased; else None. The one look-up of a request for a resident model.

        An ensemble is there if the models of all its steps are; they are leased with it, or none is.
        """
        entry = self._ready.get(name)
        if entry is None:
            return None
        if entry.resident is not None and entry.resident.steps:
            return self._lease_joint(name, entry.resident)
        entry.leases += 1
        entry.stats.hits += 1
        return entry

    def _lease_joint(self, name: str, whole: Target) -> JointLease | None:
        joint = whole.joint
        if joint is None or joint.reading != self._reading:
            held: dict[str, Entry] = {}
            if any(self._away((name,), held)):
                return None
            joint = whole.joint = JointLease(held, self._reading)
        return joint.take()

    def away(self, name: str) -> list[str]:
        """Of a model and all that it consists of, as far as that is known, what is not in memory to take requests."""
        return list(dict.fromkeys(self._away((name,), {})))

    def wanting(self, name: str) -> AbstractContextManager[None]:
        """While what is `away` of a model is loaded, others leave for it rather than the rest of that model."""
        held: dict[str, Entry] = {}
        away = list(self._away((name,), held))
        return self.residents.wanting([*held, *away])

    def _away(self, names: Iterable[str], held: dict[str, Entry]) -> Iterator[str]:
        for name in names:
            entry = self._ready.get(name)
            if entry is None:
                yield name
            elif name not in held:
                held[name] = entry
                yield from self._away(entry.steps, held)

    async def need(self, entry: Entry, *, exact: bool) -> tuple[Footprint, tuple[str, ...]]:
        """What a model takes by itself, and the served models that it consists of.

        If that need not be `exact`, one that was evicted is what it was.
        """
        if entry.resident is not None:
            own = self.residents.own.get(entry, Footprint())
            return replace(own, shared=self.residents.shared.files(entry)), entry.resident.steps
        if entry.measured is not None and entry.measured != Footprint() and not exact:
            return entry.measured, ()
        return await self._loading.estimate(entry)

    def check_together(self, whole: str, needs: Mapping[str, Footprint]) -> None:
        """Refuse models that can never be in memory at the same time: OUT_OF_MEMORY."""
        self.room.check_together(whole, sum(needs.values(), Footprint()).whole(), needs)

    def resident(self, name: str) -> Target | None:
        """What requests for that name are answered by, if it is in memory."""
        entry = self._ready.get(name)
        return None if entry is None else entry.resident

    def keep(self, entry: Entry, *, pinned: bool) -> None:
        """Have a model in memory stay there for good, or leave as any other; what asks for itself to stay does."""
        pinned = pinned or self._rules.pins_name(entry.name) or (entry.prepared is not None and entry.prepared.pinned)
        if entry.pinned is not pinned:
            self.residents.pin(entry, pinned=pinned)
            self.room.settle()

    def serves(self, name: str, resident: Target) -> bool:
        """Whether this is what requests for that name are answered by, and is to stay."""
        entry = self._ready.get(name)
        return entry is not None and entry.resident is resident

    async def acquire(self, entry: Entry) -> LoadReport:
        """Lease a model, loading it first if need be; what the load cost. The caller must release the lease.

        All callers that come while it loads wait for the same load, and get the same error.
        """
        if entry.state is State.READY:
            entry.stats.hits += 1
            entry.leases += 1
            return LoadReport()
        entry.stats.misses += 1
        self._start_load(entry)
        waiter: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                entry.release()  # the lease came in the very moment the caller left
            raise
        finally:
            del waiter  # whose error knows this frame

    async def load(self, entry: Entry) -> LoadReport:
        """Bring a model into memory without leasing it. The load goes on though its caller be cancelled."""
        return await asyncio.shield(self._start_load(entry))

    async def reload(self, entry: Entry, source: Any, *, force: bool = False) -> LoadReport:
        """Load a model from a source, also if it is in memory; it serves until it is replaced. See `load`.

        A load from that source that is under way will do; one from another is waited for. One in memory that was loaded
        from the same content stays, but for `force`; so does one whose successor can't be loaded, if there was room for
        both.
        """
        while (loading := entry.successor or entry).task is not None and loading.source != source:
            await asyncio.wait([loading.task])
            entry = self.entries.setdefault(entry.name, entry)
        if loading.task is None:
            if entry.state is State.READY:
                loading = self._successor(entry, source, force=force)
            entry.source = source if loading is entry else entry.source
        return await self.load(loading)

    def _successor(self, entry: Entry, source: Any, *, force: bool) -> Entry:
        successor = Entry(entry.name, source, entry.stats, self._lease_ended)
        successor.force = force
        successor.predecessor, entry.successor = entry, successor
        successor.orphan = entry.orphan
        return successor

    def _start_load(self, entry: Entry) -> asyncio.Task[LoadReport]:
        if self._closed:
            raise MmeError(Kind.UNAVAILABLE, f"model '{entry.name}' can't be loaded: this server is shutting down")
        if entry.task is None:
            entry.abandoned = False
            entry.loading_since = time.monotonic()
            entry.task = asyncio.get_running_loop().create_task(self._load(entry), name=f"load {entry.name}")
            entry.task.add_done_callback(functools.partial(self._load_ended, entry))
        return entry.task

    def _load_ended(self, entry: Entry, task: asyncio.Task[LoadReport]) -> None:
        if entry.task is task:  # it was cancelled before it began, so that nothing of it ever ran
            self._failed(entry, _as_ours(entry, asyncio.CancelledError()))
        _observe(task)

    def lent_turn(self, name: str) -> AbstractContextManager[None]:
        """While a model that is being loaded, if it is, waits for another one to be loaded."""
        entry = self.entries.get(name)
        loading = None if entry is None else entry.successor or entry
        if loading is None or loading.task is None:
            return contextlib.nullcontext()
        return self._loading.lent_turn(loading)

    async def unload(self, entry: Entry) -> None:
        """Take a model out of memory after the requests that use it; return when its memory was given back.

        A load under way is abandoned, and requests that wait for it are told.
        """
        loading = entry.successor or entry
        entry.abandoned, entry.evicted, loading.abandoned = True, False, True
        if loading.task is not None:
            self.room.refuse(entry.name, unloaded(loading))
            self._loading.refuse(entry.name, unloaded(loading))
            await asyncio.wait([loading.task])
        retiring = list(self._retiring.get(entry.name, ()))
        for one in {entry, loading}:
            if one.state is State.READY:
                self._start_closing(one, "unloaded")
        await asyncio.gather(*(self._refuse_in_time(one) for one in retiring))
        for closing in [one.closing for one in {entry, loading, *retiring} if one.closing is not None]:
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
            loading = entry.successor or entry
            loading.cut_short = True
            if loading.task is not None:
                loading.task.cancel()

    async def close(self, *, ends: bool = False) -> None:
        """Unload everything; from now on nothing is loaded.

        Where the process `ends`, models that no request uses and that hold memory alone stay until then.
        """
        self.cut_short()
        leaving = [entry for entry in self.entries.values() if not (ends and entry.goes_with_process)]
        await asyncio.gather(*(self.unload(entry) for entry in leaving))
        await asyncio.gather(*(self._refuse_in_time(entry) for entry in self.retiring()))
        await asyncio.gather(*(entry.closing for entry in self.retiring() if entry.closing is not None))
        orphans = [entry.orphan for entry in self.entries.values() if entry.orphan is not None]
        if orphans:
            await asyncio.wait(orphans)

    # -- one load ------------------------------------------------------------------------------------------------

    async def _load(self, entry: Entry) -> LoadReport:
        try:
            if entry.closing is not None:
                await asyncio.wait([entry.closing])  # however that ends
            entry.state, entry.reason, entry.failure = transition(entry.state, Event.LOAD), "", None
            report = await self._loading.run(entry)
        except BaseException as error:
            is_told = entry.cut_short or not isinstance(error, asyncio.CancelledError)
            failure = _as_ours(entry, error).bare()  # the frames hold what was made
            self._failed(entry, failure)
            if not is_told:
                raise
        else:
            if report is None:
                return self._stays(entry)
            self._loaded(entry, report)
            return report
        try:
            raise failure
        finally:
            del failure  # which knows this frame now, and those of all that wait for it

    def _stays(self, entry: Entry) -> LoadReport:
        """Nothing changed since the one was loaded whose place this entry was to take: that one goes on."""
        before = entry.predecessor
        assert before is not None  # noqa: S101 - see `Entry.is_same_content`
        before.successor, before.failure = None, None
        entry.task, entry.predecessor = None, None
        _log.info("it stays as it is, nothing changed since it was loaded", extra={"target_model": entry.name})
        self.room.settle()
        return LoadReport()

    def _loaded(self, entry: Entry, report: LoadReport) -> None:
        """All that wait have a lease before the model can be evicted again."""
        self._take_place(entry)
        entry.task = None
        entry.evicted, entry.failures = False, 0
        entry.state = transition(entry.state, Event.LOADED)
        entry.loaded_at = entry.last_used = time.monotonic()
        self._ready[entry.name] = entry
        self._reading += 1
        self.residents.arrived(entry)
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                entry.leases += 1
                waiter.set_result(report)
        self._report(entry, report)
        self.room.settle()

    def _take_place(self, entry: Entry) -> None:
        """From here on the name means this entry; the one that it meant closes, if it is in memory."""
        before = entry.predecessor
        if before is None:
            return
        entry.predecessor, before.successor = None, None
        entry.evicted = True  # registered all the time
        self.entries[entry.name] = entry
        if before.state is State.READY:
            self._start_closing(before, "loaded anew", hurries=entry.resident is None)
        if before.closing is not None:
            self._retiring.setdefault(before.name, set()).add(before)

    def remeasured(self, entry: Entry, footprint: Footprint) -> None:
        self.residents.remeasured(entry, footprint)
        self.room.settle()

    def _failed(self, entry: Entry, error: MmeError) -> None:
        entry.task = None
        failure = self._failure(entry, error)
        if entry.predecessor is not None:
            entry.predecessor.successor, entry.predecessor.orphan = None, entry.orphan
            entry.predecessor.failure = failure
        if entry.state is State.LOADING:  # else it was cancelled before it began
            entry.state, entry.reason, entry.failure = transition(entry.state, Event.FAILED), failure.message, failure
        entry.stats.load_failures += 1
        self.events.tell(CacheEvent(EventType.FAILED, entry.name, why=failure.message, kind=error.kind))
        level = logging.ERROR if error.kind in _BROKEN else logging.WARNING
        if error.kind is Kind.UNKNOWN_MODEL and entry.waiters:  # its client's mistake, which is told
            level = logging.DEBUG
        _log.log(level, "load failed: %s", failure.message, extra={"target_model": entry.name})
        error.logged = True
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.room.settle()

    def _failure(self, entry: Entry, error: MmeError) -> Failure:
        """What is remembered of it. After what may be otherwise the next time, through others' doing, is no pause."""
        pause = 0.0
        passes = error.kind in _PASSING or isinstance(error, ElsewhereError)
        if not passes and (self._evicts or error.kind is not Kind.OUT_OF_MEMORY):
            entry.failures += 1
            pause = retry_pause(entry.failures, time.monotonic() - entry.loading_since)
        return Failure(error.message, error.version, error.kind, time.monotonic() + pause if pause else 0.0)

    def _report(self, entry: Entry, report: LoadReport) -> None:
        entry.stats.loads += 1
        entry.stats.load.add(report.load)
        if report.download:
            entry.stats.download.add(report.download)
        self.events.tell(CacheEvent(EventType.LOADED, entry.name, report.load, report.download, entry.footprint))
        _log.info(
            "loaded in %.0f ms (download %.0f ms), %s",
            report.load / 1e6,
            report.download / 1e6,
            megabytes(entry.footprint),
            extra={"target_model": entry.name, "evicted": list(report.evicted)},
        )

    # -- leaving -------------------------------------------------------------------------------------------------

    def _evict(self, plan: eviction.Plan, beneficiary: str, reason: str) -> None:
        self.residents.advance(plan.age)
        for name in plan.victims:
            entry = self.entries[name]
            entry.evicted = True
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
            self._start_closing(entry, f"evicted for '{beneficiary}'")

    def _start_closing(self, entry: Entry, reason: str, *, hurries: bool = True) -> None:
        """From here on it is leased no more. Without hurry it waits for all requests that it has, however long."""
        self.residents.leaves(entry)
        if self._ready.get(entry.name) is entry:
            del self._ready[entry.name]
            self._reading += 1
        entry.closing = asyncio.get_running_loop().create_task(
            self._close(entry, reason, hurries=hurries), name=f"close {entry.name}"
        )

    async def _refuse_in_time(self, entry: Entry) -> None:
        """Tell requests that are still queued after a while that the model goes."""
        done, _ = await asyncio.wait([entry.drained()], timeout=self._drain_patience)
        if not done and entry.resident is not None:
            entry.resident.refuse_waiting()

    async def _close(self, entry: Entry, reason: str, *, hurries: bool) -> None:
        began = _now()
        resident = entry.resident
        if resident is None:
            return
        if hurries:
            await self._refuse_in_time(entry)
        await entry.drained()
        await self._loading.close(entry, resident)
        footprint = entry.footprint
        self.residents.left(entry)
        entry.reset(reason)
        if entry in (retiring := self._retiring.get(entry.name, set())):
            retiring.remove(entry)
            if not retiring:
                del self._retiring[entry.name]
        took = _now() - began
        entry.stats.unload.add(took)
        self.events.tell(CacheEvent(EventType.UNLOADED, entry.name, took, footprint=footprint, why=reason))
        self.room.settle()


def _as_ours(entry: Entry, error: BaseException) -> MmeError:
    if entry.abandoned:
        return unloaded(entry)
    if isinstance(error, MmeError):
        return error
    if isinstance(error, asyncio.CancelledError):
        entry.cut_short = True
        return unloaded(entry)
    if isinstance(error, MemoryError):
        return out_of_memory(f"model '{entry.name}' ran out of memory while it was loaded: {error}")
    _log.error("load failed in a way we do not know", exc_info=error, extra={"target_model": entry.name})
    return MmeError(Kind.INTERNAL, f"model '{entry.name}' failed to load: {type(error).__name__}: {error}")


def _observe(task: asyncio.Task[LoadReport]) -> None:
    """A load whose waiters all left must not warn about its error."""
    if not task.cancelled():
        task.exception()
