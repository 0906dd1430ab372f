"""Who is in memory: leases, single-flight loads, reserve → commit or abort, and eviction.

Theory of operation. All state here is touched on the event loop only, so nothing is locked; whatever takes time
(fetching, loading, closing) runs on the loader's threads while the loop goes on. The cache decides on the loop and
acts off it:

    acquire ── resident ────────────────────────────────► leased
       │ not resident: one load per name, everybody who asks meanwhile waits for that one
       ▼
    prepare (thread) ─► reserve ─► load (thread) ─► commit: the measured footprint replaces the estimate
                          │  ▲                └──► abort:  the bytes are given back, everybody gets the error
                          ▼  │ tried again whenever a lease ends, an unload finishes or a reservation is returned
                        evict the least recently used unleased models, if that makes enough room; else wait

A *lease* keeps a model in memory while a request uses it: a leased model is never a victim. Bytes are counted in three
places that never overlap: residents (also while they are being closed), reservations of loads under way, and nothing
else; `check_integrity` proves it.

In platform-managed mode (`evicts=False`) the platform chooses victims: what does not fit is out of memory at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError, out_of_memory
from serve import eviction
from serve.lifecycle import Event, State, step
from serve.request import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from serve.stats import TargetStats

_log = logging.getLogger("mme.cache")
_now = time.perf_counter_ns


class Resident(Protocol):
    """What is kept in memory: started on the loop, closed on a thread."""

    def start(self) -> None:
        """Begin to execute; called on the event loop when the model is committed."""

    def refuse_waiting(self) -> None:
        """Tell every queued request that the model goes; called on the event loop."""

    def close(self) -> None:
        """Give the memory back; called on a thread, when no lease is left."""


T = TypeVar("T", bound=Resident)
T_co = TypeVar("T_co", bound=Resident, covariant=True)


class Prepared(Protocol):
    """An artifact on disk, ready to be loaded.

    Attributes:
        identity: names the bytes: a footprint measured once is the estimate for the same bytes next time.
        estimate: for bytes never seen before.
        download_ns: what fetching took, 0 when it was on disk.
    """

    @property
    def identity(self) -> str: ...  # noqa: D102 - see the class
    @property
    def estimate(self) -> Footprint: ...  # noqa: D102
    @property
    def download_ns(self) -> int: ...  # noqa: D102


P = TypeVar("P", bound=Prepared)


class Loader(Protocol[P, T_co]):
    """Turns a name into something resident. Both methods run on a load thread."""

    def prepare(self, name: str, source: Any, cancelled: Callable[[], bool]) -> P:
        """Fetch and open the model's artifact; no memory to speak of is taken."""

    def load(self, prepared: P) -> tuple[T_co, Footprint]:
        """Load it; return what was loaded and what it takes, measured."""


class Entry(Generic[T]):
    """A model the cache knows, in memory or not. An entry is the lease that requests hold.

    Attributes:
        name, source: which model, and where it comes from.
        state, reason: where it stands, and why it is UNAVAILABLE.
        resident: what was loaded; None unless READY or UNLOADING.
        footprint: bytes it takes; zero unless `resident`.
        leases: requests that use it now.
        last_used: `time.monotonic()` of its last use.
        stats: what the cache did for it.
        abandoned: whether it is being unloaded for good.
        evicted: whether it left memory for another, and comes back with its next request.
    """

    __slots__ = (
        "_cache",
        "_drained",
        "abandoned",
        "closing",
        "evicted",
        "footprint",
        "last_used",
        "leases",
        "name",
        "reason",
        "resident",
        "source",
        "state",
        "stats",
        "task",
        "waiters",
    )

    def __init__(self, cache: ModelCache[Any, T], name: str, source: Any, stats: TargetStats) -> None:
        self._cache = cache
        self._drained: asyncio.Future[None] | None = None
        self.name = name
        self.source = source
        self.state = State.UNAVAILABLE
        self.reason = ""
        self.resident: T | None = None
        self.footprint = Footprint()
        self.leases = 0
        self.last_used = 0.0
        self.stats = stats
        self.abandoned = False
        self.evicted = False
        self.task: asyncio.Task[LoadReport] | None = None
        self.waiters: list[asyncio.Future[LoadReport]] = []
        self.closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        megabytes = (self.footprint.host + self.footprint.device) / 1e6
        return f"<Entry {self.name}: {self.state.value}, {megabytes:.1f} MB, {self.leases} leases>"

    def leased(self) -> T:
        """What the holder of a lease may use."""
        if self.resident is None:
            raise MmeError(Kind.INTERNAL, f"model '{self.name}' is used without a lease")
        return self.resident

    def release(self) -> None:
        """End one lease."""
        self.leases -= 1
        self.last_used = time.monotonic()
        if self.leases == 0:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._cache.lease_ended()

    def drained(self) -> asyncio.Future[None]:
        """Done when no lease is left."""
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
            if self.leases == 0:
                self._drained.set_result(None)
        return self._drained


class _Claim:
    """A load that waits for room."""

    __slots__ = ("evicted", "granted", "name", "need")

    def __init__(self, name: str, need: Footprint, granted: asyncio.Future[None]) -> None:
        self.name = name
        self.need = need
        self.granted = granted
        self.evicted: list[str] = []


class ModelCache(Generic[P, T]):
    """Models in memory, within a budget.

    Args:
        loader: fetches and loads.
        budget: bytes for all models together.
        evicts: whether the least recently used make room (self-managed), or a full cache is an error (platform).
        pool: threads for the loader and for closing.
        memory_patience: seconds that a load waits for leased models to become free before it gives up.
        drain_patience: seconds that an unload waits for requests under way.
    """

    def __init__(
        self,
        loader: Loader[P, T],
        budget: Footprint,
        pool: Executor,
        *,
        evicts: bool = True,
        memory_patience: float = 60.0,
        drain_patience: float = 25.0,
    ) -> None:
        self.budget = budget
        self.entries: dict[str, Entry[T]] = {}
        self._ready: dict[str, Entry[T]] = {}  # the READY ones, for one look-up a request
        self._loader = loader
        self._pool = pool
        self._evicts = evicts
        self._memory_patience = memory_patience
        self._drain_patience = drain_patience
        self._reserved = Footprint()
        self._claims: list[_Claim] = []
        self._remembered: dict[str, Footprint] = {}

    def __repr__(self) -> str:
        used = self.used()
        return (
            f"<ModelCache {len(self._ready)} ready of {len(self.entries)} known, "
            f"{(used.host + used.device) / 1e6:.1f} of {(self.budget.host + self.budget.device) / 1e6:.1f} MB, "
            f"{len(self._claims)} waiting for room>"
        )

    @property
    def resident_count(self) -> int:
        """Models ready in memory."""
        return len(self._ready)

    def used(self) -> Footprint:
        """Bytes of everything in memory and of what is promised to loads under way."""
        return sum((entry.footprint for entry in self.entries.values()), self._reserved)

    def add(self, name: str, source: Any, stats: TargetStats) -> Entry[T]:
        """Make a model known, not loaded."""
        entry = self.entries[name] = Entry(self, name, source, stats)
        return entry

    def lease(self, name: str) -> Entry[T] | None:
        """The model if it is in memory, leased; else None. The one look-up of a request for a resident model."""
        entry = self._ready.get(name)
        if entry is not None:
            entry.leases += 1
            entry.stats.hits += 1
        return entry

    async def acquire(self, entry: Entry[T]) -> LoadReport:
        """Lease a model, loading it first if need be; whoever asks while it loads waits for the same load.

        Returns:
            what the load cost. The caller holds a lease on `entry` and must release it.

        Raises:
            MmeError: what went wrong; the same error for everybody who waits.
        """
        entry.stats.misses += 1
        if entry.state is State.READY:
            entry.leases += 1
            return LoadReport()
        waiter: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._start_load(entry)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                entry.release()  # the lease came in the very moment the caller left
            raise

    async def load(self, entry: Entry[T]) -> LoadReport:
        """Bring a model into memory without leasing it. The load goes on though its caller be cancelled."""
        return await asyncio.shield(self._start_load(entry))

    def _start_load(self, entry: Entry[T]) -> asyncio.Task[LoadReport]:
        if entry.task is None:
            entry.abandoned = False
            entry.task = asyncio.get_running_loop().create_task(self._load(entry), name=f"load {entry.name}")
            entry.task.add_done_callback(_observe)
        return entry.task

    async def unload(self, entry: Entry[T]) -> None:
        """Take a model out of memory after the requests that use it; return when its memory was given back.

        A load under way is abandoned, and whoever waits for it is told.
        """
        entry.abandoned = True
        if entry.task is not None:
            await asyncio.wait([entry.task])
        if entry.state is State.READY:
            self._start_closing(entry, "unloaded")
        if entry.closing is not None:
            await asyncio.shield(entry.closing)

    def forget(self, entry: Entry[T]) -> None:
        """Drop an entry that is not in memory."""
        if self.entries.get(entry.name) is entry and entry.state is State.UNAVAILABLE:
            del self.entries[entry.name]

    def lease_ended(self) -> None:
        """A model became free: loads that wait for room may evict it now, before its next request comes."""
        if self._claims:
            self._settle()

    def check_integrity(self) -> None:
        """Prove that the bookkeeping adds up.

        Raises:
            AssertionError: it does not.
        """
        for entry in self.entries.values():
            held = entry.state in {State.READY, State.UNLOADING}
            assert (entry.resident is not None) == held, entry  # noqa: S101
            assert held or entry.footprint == Footprint(), entry  # noqa: S101
            assert entry.leases >= 0, entry  # noqa: S101
            assert (self._ready.get(entry.name) is entry) == (entry.state is State.READY), entry  # noqa: S101
        assert self._reserved.host >= 0, self._reserved  # noqa: S101
        assert self._reserved.device >= 0, self._reserved  # noqa: S101

    async def close(self) -> None:
        """Unload everything."""
        await asyncio.gather(*(self.unload(entry) for entry in self.entries.values()))

    # -- one load ------------------------------------------------------------------------------------------------

    async def _load(self, entry: Entry[T]) -> LoadReport:
        if entry.closing is not None:
            await asyncio.shield(entry.closing)
        began = _now()
        entry.state, entry.reason = step(entry.state, Event.LOAD), ""
        evicted: list[str] = []
        try:
            prepared = await self._aside(self._loader.prepare, entry.name, entry.source, lambda: entry.abandoned)
            await self._load_prepared(entry, prepared, evicted)
        except BaseException as error:
            self._failed(entry, error)
            raise
        report = LoadReport(prepared.download_ns, _now() - began - prepared.download_ns, tuple(evicted))
        self._loaded(entry, report)
        return report

    async def _load_prepared(self, entry: Entry[T], prepared: P, evicted: list[str]) -> None:
        """Reserve, load, and correct the estimate; commit the rest or give everything back."""
        need = self._remembered.get(prepared.identity, prepared.estimate)
        evicted += await self._reserve(entry.name, need)
        reserved = need
        try:
            resident, footprint = await self._aside(self._loader.load, prepared)
            self._remembered[prepared.identity] = footprint
            try:
                more = footprint.beyond(need)
                evicted += await self._reserve(entry.name, more, footprint)
                reserved = need + more
                _must_go_on(entry)
            except BaseException:
                await self._aside(resident.close)
                raise
            entry.resident, entry.footprint = resident, footprint
        finally:
            self._reserved = self._reserved - reserved

    def _loaded(self, entry: Entry[T], report: LoadReport) -> None:
        """Everybody who waits has a lease before anybody else can evict the model again."""
        entry.task = None
        entry.evicted = False
        entry.state = step(entry.state, Event.LOADED)
        entry.last_used = time.monotonic()
        self._ready[entry.name] = entry
        if entry.resident is not None:
            entry.resident.start()
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                entry.leases += 1
                waiter.set_result(report)
        self._report(entry, report)
        self._settle()

    def _failed(self, entry: Entry[T], error: BaseException) -> None:
        entry.task = None
        entry.state, entry.reason = step(entry.state, Event.FAILED), str(error)
        entry.stats.load_failures += 1
        _log.warning("load failed: %s", error, extra={"target_model": entry.name})
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._settle()

    def _report(self, entry: Entry[T], report: LoadReport) -> None:
        entry.stats.loads += 1
        entry.stats.load.add(report.load)
        if report.download:
            entry.stats.download.add(report.download)
        _log.info(
            "loaded in %.0f ms (download %.0f ms), %.1f MB",
            report.load / 1e6,
            report.download / 1e6,
            (entry.footprint.host + entry.footprint.device) / 1e6,
            extra={"target_model": entry.name, "evicted": list(report.evicted)},
        )

    # -- room ----------------------------------------------------------------------------------------------------

    async def _reserve(self, name: str, need: Footprint, whole: Footprint | None = None) -> list[str]:
        """Have `need` bytes promised, evicting whom it takes; the names of those evicted.

        `whole` is all that the model takes, where `need` is what was missing in its estimate.
        """
        if need == Footprint():
            return []
        if not (whole or need).fits(self.budget):
            raise out_of_memory(self._too_big(name, whole or need))
        claim = _Claim(name, need, asyncio.get_running_loop().create_future())
        self._claims.append(claim)
        self._settle()
        try:
            async with asyncio.timeout(self._memory_patience):
                await claim.granted
        except TimeoutError:
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{name}' waited {self._memory_patience:.0f} s for {need.host + need.device} bytes of memory "
                "held by models in use; try again, or give the server a larger memory budget",
            ) from None
        finally:
            if claim in self._claims:
                self._claims.remove(claim)
        return claim.evicted

    def _settle(self) -> None:
        """Look at every claim again, first come first; grant, evict for it, or refuse."""
        for claim in list(self._claims):
            if not claim.granted.done():
                self._attempt(claim)
        self._claims = [claim for claim in self._claims if not claim.granted.done()]

    def _attempt(self, claim: _Claim) -> None:
        if claim.need.fits(self.budget - self.used()):
            self._reserved = self._reserved + claim.need
            claim.granted.set_result(None)
            return
        plan = eviction.plan(self._residents(), self._reserved, claim.need, self.budget)
        if not self._evicts and (plan.victims or not plan.fits):
            claim.granted.set_exception(out_of_memory(self._full(claim)))
        else:
            for name in plan.victims:
                claim.evicted.append(name)
                self._evict(self.entries[name], claim.name)

    def _residents(self) -> list[eviction.Resident]:
        return [
            eviction.Resident(
                entry.name, entry.footprint, entry.last_used, entry.leases > 0, entry.state is State.UNLOADING
            )
            for entry in self.entries.values()
            if entry.resident is not None
        ]

    def _too_big(self, name: str, need: Footprint) -> str:
        return (
            f"model '{name}' needs {_megabytes(need)}, more than the whole memory budget of "
            f"{_megabytes(self.budget)}: raise MME_MEMORY_BUDGET or serve it on a larger instance"
        )

    def _full(self, claim: _Claim) -> str:
        return (
            f"model '{claim.name}' needs {_megabytes(claim.need)}, but {_megabytes(self.used())} of "
            f"{_megabytes(self.budget)} are taken: unload a model first"
        )

    # -- leaving -------------------------------------------------------------------------------------------------

    def _evict(self, entry: Entry[T], beneficiary: str) -> None:
        entry.stats.evictions += 1
        entry.evicted = True
        _log.info(
            "evicted for '%s', least recently used, %s",
            beneficiary,
            _megabytes(entry.footprint),
            extra={"target_model": entry.name},
        )
        self._start_closing(entry, f"evicted for '{beneficiary}'")

    def _start_closing(self, entry: Entry[T], reason: str) -> None:
        """From here on nobody gets a lease."""
        entry.state = step(entry.state, Event.UNLOAD)
        del self._ready[entry.name]
        entry.closing = asyncio.get_running_loop().create_task(self._close(entry, reason), name=f"close {entry.name}")

    async def _close(self, entry: Entry[T], reason: str) -> None:
        began = _now()
        resident = entry.resident
        if resident is None:
            return
        done, _ = await asyncio.wait([entry.drained()], timeout=self._drain_patience)
        if not done:
            resident.refuse_waiting()
            await entry.drained()
        try:
            await self._aside(resident.close)
        finally:
            entry.closing = None
            entry.resident, entry.footprint = None, Footprint()
            entry.state, entry.reason = step(entry.state, Event.UNLOADED), reason
            entry.stats.unload.add(_now() - began)
            self._settle()

    async def _aside(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def _must_go_on(entry: Entry[Any]) -> None:
    if entry.abandoned:
        raise MmeError(Kind.CANCELLED, f"model '{entry.name}' was unloaded while it was loading")


def _observe(task: asyncio.Task[LoadReport]) -> None:
    """Somebody looked at the error: a load whose waiters all left must not warn about it."""
    if not task.cancelled():
        task.exception()


def _megabytes(footprint: Footprint) -> str:
    host = f"{footprint.host / 1e6:.1f} MB"
    return f"{host} and {footprint.device / 1e6:.1f} MB of device memory" if footprint.device else host
