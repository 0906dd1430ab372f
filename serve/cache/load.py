"""One load: fetch, equip, reserve, load, measure; whatever goes wrong, all is given back. On the event loop only.

It waits for memory with no turn in hand and nothing of its own in memory, so that no two loads wait for each other; one
that has another model loaded ends its turns first, and keeps its reservation. The deadline does not run during waits
for a turn or memory. A thread inside a framework can't be stopped: it stays as an *orphan*, its requests answered and
its turns free, and only its reservation and files stay taken until it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.worker.limits import ReservationExceededError
from serve.cache.entry import Residency, State
from serve.request import LoadReport
from serve.threads import FairSemaphore, Progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from model_handlers.system.threads import CancelToken
    from serve.cache.entry import Entry
    from serve.cache.eviction import Rules
    from serve.cache.residents import Residents
    from serve.cache.room import Room
    from serve.loading.loader import ModelLoader, Target
    from serve.loading.prepare import PreparedTarget
    from serve.threads import Turn

    # has the models of an ensemble's steps loaded, and returns them: by name, of which some may have left again
    Bring = Callable[[str, tuple[str, ...]], Coroutine[Any, Any, Mapping[str, Target]]]
    Loaded = tuple[Target, Footprint]
    Run = Callable[["Load"], Coroutine[Any, Any, LoadReport | MmeError]]  # loads it; a failure is returned
    Relieve = Callable[[str, Footprint, str], Coroutine[Any, Any, tuple[str, ...]]]

_log = logging.getLogger("mme.cache")
_now = time.perf_counter_ns
_HEADROOM = 16 << 20  # bytes at least, of memory that is free, for a load that asks for more
_HEADROOM_PART = 8  # of what it takes
_FETCHES = 8  # at a time
_STALL_SECONDS = 10.0  # without a byte, after which a fetch keeps no other one waiting
_LOOK_SECONDS = 1.0
_MOST_STALLED = 56  # fetches that go on without a turn
_WATCH_SECONDS = 0.02  # between two looks at a load that others leave for
_ATTEMPTS = 3  # at a load whose model turns out larger than was reserved for it
_MOST_PAUSE = 30.0  # seconds; the model may have been mended
_MOST_DOUBLINGS = 5


def retry_pause(failures: int, seconds: float) -> float:
    """Seconds until a request may have a model loaded again of which so many loads failed, one after the other.

    Each request would have the store asked, a process started and a line logged. One failure may be an accident; a
    model that fails late, after `seconds`, is not to hold a load thread all the time.
    """
    if failures < 2:
        return 0.0
    doubled: float = 2.0 ** min(failures - 2, _MOST_DOUBLINGS)
    return min(max(doubled, seconds), _MOST_PAUSE)


async def no_steps(_name: str, _steps: tuple[str, ...]) -> Mapping[str, Target]:
    """Of a cache without ensembles."""
    return {}


class Load:
    """One load under way, of a name that is not in memory or is to be loaded again."""

    def __init__(self, entry: Entry, source: Any, run: Run, *, force: bool = False) -> None:
        self.entry = entry
        self.name = entry.name
        self.source = source
        self.force = force  # whether it takes the place of one that was loaded from the very same content
        self.began = time.monotonic()
        self.waiters: list[asyncio.Future[tuple[Residency, LoadReport]]] = []  # requests that get a lease at its end
        self.cancelled: str | None = None  # why it is not wanted any more
        self.evicted: list[str] = []
        self.token = Progress(f"model '{self.name}'")
        self._waits = False
        self.task = asyncio.get_running_loop().create_task(_raising(run, [self]), name=f"load {self.name}")

    def __repr__(self) -> str:
        return f"<Load of {self.name}: {self.cancelled or f'{len(self.waiters)} requests wait'}>"

    def cancel(self, why: str) -> None:
        """End its wait, if it waits for a turn, memory or other loads; else it ends at its next step."""
        self.cancelled = self.cancelled or why
        self.token.cancel()
        if self._waits:
            self.task.cancel()

    def check(self) -> None:
        if self.cancelled is not None:
            raise self.refusal()

    def refusal(self) -> MmeError:
        """What requests are told that wait for it once it is cancelled."""
        return MmeError(Kind.UNAVAILABLE, self.cancelled or "")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While it waits with nothing under way on a thread."""
        self.check()
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextlib.asynccontextmanager
    async def turn(self, turns: FairSemaphore) -> AsyncIterator[Turn]:
        async with contextlib.AsyncExitStack() as stack:
            with self.waiting():
                turn = await stack.enter_async_context(turns.taken())
            self.token.turns.add(turn)
            try:
                yield turn
            finally:
                self.token.turns.discard(turn)

    def changes_nothing(self, prepared: PreparedTarget) -> bool:
        """Whether what serves was loaded from just that, and is not to be replaced all the same."""
        serving = self.entry.residency
        if self.force or serving is None or self.entry.state is not State.RELOADING:
            return False
        return serving.prepared.content == prepared.content and not serving.target.is_down()


async def _raising(run: Run, loads: list[Load]) -> LoadReport:
    """Raise the failure that a load returns, in a frame that does not have the load: its task has the failure."""
    outcome = await run(loads.pop())
    try:
        if isinstance(outcome, MmeError):
            raise outcome
        return outcome
    finally:
        del outcome  # it knows this frame now, and those of all that wait for it


class _DeviceFullError(MmeError):
    """A device had less memory than was reserved of it. Kind OUT_OF_MEMORY."""

    __slots__ = ()


@contextlib.contextmanager
def _of_devices(need: Footprint) -> Iterator[None]:
    """Want of memory in there is that of devices, if a model needs any of them and did not outgrow the host's."""
    try:
        yield
    except ReservationExceededError:
        raise
    except MmeError as error:
        if error.kind is not Kind.OUT_OF_MEMORY or not need.devices:
            raise
        raise _DeviceFullError(error.kind, error.message) from error


class Reservation:
    """Bytes of a room that are reserved for a load, until it ends: `apart` of them for files that others may map.

    That of an `orphaned` load, which was given up, ends when its thread comes back.
    """

    def __init__(self, room: Room, residents: Residents, own: Footprint, files: Mapping[str, int]) -> None:
        self.apart = sum(files.values())
        self.size = own + Footprint(self.apart)
        self.orphaned = False
        self._room = room
        self._residents = residents
        self._over = False
        self._files = dict(files)
        residents.reserved(self, files)

    def relieve(self, files: Iterable[str]) -> None:
        size = sum(self._files.pop(file) for file in files)
        self.apart -= size
        self.size -= Footprint(size)
        self._room.give_back(Footprint(size))

    def grow(self, more: Footprint) -> None:
        if self._over:
            self._room.give_back(more)
        else:
            self.size += more

    def loaded(self) -> None:
        self._residents.released(self, self._files)

    def end(self) -> None:
        """The bytes are free, or counted as a resident's from now on."""
        self.loaded()
        self._over = True
        self._room.give_back(self.size)


def _ignore(work: asyncio.Future[Any]) -> None:
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # which counts as seen


def _release(fetching: asyncio.Future[Any]) -> None:
    """A fetch that no load waited for came back."""
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().release()


@dataclass(eq=False, repr=False)
class Loading:
    """Loads models into a room, within `patience` seconds each; for `relieve` see `ModelCache`.

    `give_way` has the model begin to leave whose place the load is to take.
    """

    loader: ModelLoader
    room: Room
    residents: Residents
    rules: Rules
    _: KW_ONLY
    pool: Executor
    closers: Executor
    turns: InitVar[int]
    patience: float
    give_way: Callable[[Load], None]
    relieve: Relieve
    bring: Bring

    def __post_init__(self, turns: int) -> None:
        self._transfers = FairSemaphore(_FETCHES)  # they wait for the network, not for cores
        self._stalled = 0  # transfers whose turn was ended
        self._beside = FairSemaphore(turns)  # environments made and files tried, in the way of no load
        self._loads = FairSemaphore(turns)

    async def run(self, load: Load) -> tuple[Residency, LoadReport] | None:
        """Bring a model into memory. None: it would change nothing, and was not loaded."""
        entry = load.entry
        if entry.orphan is not None:
            raise MmeError(
                Kind.UNAVAILABLE, f"a load of model '{load.name}' that was given up has not ended; try again later"
            )
        async with load.turn(self._transfers) as turn:
            began = _now()
            prepared = await self._in_time(load.name, self.patience, self._fetch(entry, load.source, load.token, turn))
            left = self.patience - (_now() - began) / 1e9
        try:
            steps: Mapping[str, Target] = {}
            if prepared.steps:
                with load.waiting():
                    steps = await self.bring(load.name, prepared.steps)
                content = (prepared.content, *[steps[name].content for name in prepared.steps])
                prepared = replace(prepared, content=content)
            load.check()
            if load.changes_nothing(prepared):
                prepared.release()
                return None
            if steps:  # it takes no memory itself, so that it is there in this turn of the loop
                target = self.loader.assemble(prepared, steps)
                target.start()
                residency = self._commit(load, prepared, target, Footprint(), entry.reload_ns)
            else:
                if not prepared.equipped:  # which has a deadline of its own, and is there for the next load in any case
                    async with load.turn(self._beside):
                        prepared = await self._on_thread(load.token, functools.partial(self.loader.equip, prepared))
                residency = await self._load(load, prepared, left)
        except BaseException:
            if entry.orphan is None:
                prepared.release()
            raise
        return residency, LoadReport(prepared.download_ns, _now() - began - prepared.download_ns, tuple(load.evicted))

    async def _load(self, load: Load, prepared: PreparedTarget, left: float) -> Residency:
        """Reserve, load, measure, commit; begin again, if the model takes more than was reserved and the rest is taken.

        Executions take memory that no budget counts: where a device has no room after all, others leave it, once.
        """
        need, full = prepared.estimate, None
        for _ in range(_ATTEMPTS):
            loaded: Residency | Footprint | None = None
            try:
                loaded = await self._attempt(load, prepared, need, left)
            except ReservationExceededError as error:
                if error.final:
                    raise
                loaded = replace(need, host=min(error.taken, self.room.budget.host))
            except _DeviceFullError as error:
                if full is not None:
                    raise
                full = error.bare()  # what was loaded until then hangs on its frames
            if isinstance(loaded, Residency):
                return loaded
            if loaded is None:
                victims = await self.relieve(load.name, Footprint(0, need.devices), "load")
                if not victims and full is not None:
                    raise full
                load.evicted += victims
            need = loaded or need
        raise MmeError(
            Kind.UNAVAILABLE,
            f"model '{load.name}' takes more memory each time it is loaded, and other models hold the rest; try again",
        )

    async def _attempt(
        self, load: Load, prepared: PreparedTarget, need: Footprint, left: float
    ) -> Residency | Footprint:
        """Load within a reservation; commit, or give all back. What it takes, where too little was reserved."""
        loader, residents, room = self.loader, self.residents, self.room
        own, files = Footprint(need.host, need.devices), residents.unpaid(need.shared)
        give_way = functools.partial(self.give_way, load) if load.entry.state is State.RELOADING else None
        with load.waiting():
            load.evicted += await room.reserve(load.name, own + Footprint(sum(files.values())), give_way)
        reservation = Reservation(room, residents, own, files)

        def given_up(loading: asyncio.Future[Loaded]) -> None:
            reservation.orphaned = True
            orphan = self._await_orphan(load.entry, prepared, loading, reservation)
            load.entry.orphan = asyncio.get_running_loop().create_task(orphan, name=f"orphan {load.name}")

        try:
            if prepared.tried_first:  # within the reservation, since it takes that memory
                trial = functools.partial(loader.try_files, prepared)
                async with load.turn(self._beside):
                    await self._in_time(load.name, left, self._on_thread(load.token, trial))
            async with contextlib.AsyncExitStack() as turns:
                for each in (loader.scales.turns, self._loads) if prepared.needs_exclusive_load else (self._loads,):
                    await turns.enter_async_context(load.turn(each))
                began = _now()
                read = functools.partial(loader.load, prepared, more=self._asking(load, reservation))
                with _of_devices(reservation.size):
                    loaded: Loaded = await self._in_time(load.name, left, self._on_thread(load.token, read, given_up))
                took = _now() - began
            target, taken = loaded
            try:
                load.check()
                reservation.loaded()
                whole = residents.counted(taken)
                with load.waiting():
                    more = await room.extend(load.name, reservation.size, whole)
                if more is not None:
                    reservation.grow(whole.beyond(reservation.size))
                    target.start()
            except BaseException:
                await self.close(load.name, target)
                raise
            if more is None:
                await self.close(load.name, target)
                return taken
            load.evicted += more
            return self._commit(load, prepared, target, taken, took)
        finally:
            if not reservation.orphaned:
                reservation.end()

    def _commit(self, load: Load, prepared: PreparedTarget, target: Target, taken: Footprint, took: int) -> Residency:
        entry = load.entry
        pinned = prepared.pinned or (bool(self.rules.pins) and self.rules.pins_name(load.name))
        waiting = sum(not each.done() for each in load.waiters)
        residency = Residency(entry, target, prepared, self._lease_ended, pinned=pinned, waiting=waiting)
        entry.measured, entry.reload_ns = taken, took
        entry.download_ns = prepared.download_ns or entry.download_ns
        self.residents.charge(residency, taken)
        return residency

    def _lease_ended(self, residency: Residency) -> None:
        residency.age = self.residents.age
        if self.room.claims:
            self.room.lease_ended(self.residents.evictable(residency))

    async def estimate(self, entry: Entry) -> tuple[Footprint, tuple[str, ...]]:
        """What a model that was never in memory takes at least, and the served models that it consists of."""
        token = Progress(f"model '{entry.name}'")
        async with self._transfers.taken() as turn:
            fetch = self._fetch(entry, entry.source, token, turn)
            prepared = await self._in_time(entry.name, self.patience, fetch)
        try:
            return prepared.least or prepared.estimate, prepared.steps
        finally:
            prepared.release()

    async def close(self, name: str, target: Target) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self.closers, target.close)
        except Exception:  # noqa: BLE001 - whatever a framework has against it, loads that wait for its room go on
            _log.exception("closing failed; it may still hold memory", extra={"target_model": name})

    # -- transfers -------------------------------------------------------------------------------------------------

    async def _fetch(self, entry: Entry, source: Any, token: Progress, turn: Turn) -> PreparedTarget:
        token.moved()
        watch = asyncio.get_running_loop().create_task(self._end_stalled(token, turn))
        try:
            prepare = functools.partial(self.loader.prepare, entry.name, source)
            prepared: PreparedTarget = await self._on_thread(
                token, prepare, lambda fetching: fetching.add_done_callback(_release)
            )
        finally:
            watch.cancel()
        return prepared

    async def _end_stalled(self, token: Progress, turn: Turn) -> None:
        while token.idle < _STALL_SECONDS or self._stalled >= _MOST_STALLED:  # noqa: ASYNC110 - told by a thread, looked at now and then
            await asyncio.sleep(_LOOK_SECONDS)
        turn.end()
        self._stalled += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._stalled -= 1

    # -- memory, while a load goes on --------------------------------------------------------------------------------

    def _asking(self, load: Load, reservation: Reservation) -> Callable[[int, Callable[[], None]], int]:
        """What a load asks on its thread for as many bytes of the host as it has to have: see `LoadQuota`."""
        loop = asyncio.get_running_loop()

        def more(host: int, look: Callable[[], None]) -> int:
            asked = asyncio.run_coroutine_threadsafe(self._grow(load, reservation, host), loop)

            def answer(seconds: float) -> int | None:
                try:
                    return asked.result(min(seconds, _WATCH_SECONDS))
                except TimeoutError:
                    look()
                    return None

            try:
                return load.token.wait(answer)
            except MmeError:
                asked.cancel()
                raise

        return more

    async def _grow(self, load: Load, reservation: Reservation, host: int) -> int:
        """Reserve so many bytes for a load that goes on; where they are free, some more. How many that are."""
        whole = Footprint(host + reservation.apart)
        headroom = max(_HEADROOM, host // _HEADROOM_PART)
        ample = (whole + Footprint(headroom)).beyond(reservation.size)
        if self.room.spare(ample):
            reservation.grow(ample)
            return reservation.size.host - reservation.apart
        more = whole.beyond(reservation.size)
        try:
            victims = await self.room.extend(load.name, reservation.size, whole)
        except MmeError as error:
            if error.kind is not Kind.OUT_OF_MEMORY:
                raise
            raise ReservationExceededError(error.message, host, final=True) from None
        if victims is None:
            sentence = f"model '{load.name}' needs {whole.host / 1e6:.1f} MB, which are not free"
            raise ReservationExceededError(sentence, host, final=False)
        load.evicted += victims
        reservation.grow(more)
        return reservation.size.host - reservation.apart

    # -- on a thread -----------------------------------------------------------------------------------------------

    async def _in_time(self, name: str, seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with asyncio.timeout(seconds) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{name}' did not load within {self.patience:.0f} s: make it smaller, or raise MME_LOAD_TIMEOUT",
            ) from None

    async def _on_thread(
        self,
        token: Progress,
        function: Callable[[CancelToken], Any],
        given_up: Callable[[asyncio.Future[Any]], None] = _ignore,
    ) -> Any:
        """Have a load thread do it. Cancelled, this tells the thread, and hands what it still does to `given_up`."""
        work = asyncio.get_running_loop().run_in_executor(self.pool, function, token)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            token.cancel()
            given_up(work)
            raise
        finally:
            del work  # whose error knows this frame, and the thread's

    async def _await_orphan(
        self, entry: Entry, prepared: PreparedTarget, loading: asyncio.Future[Loaded], reservation: Reservation
    ) -> None:
        """What a load that was given up took is given back when it ends."""
        _log.warning("a load was given up and has not ended", extra={"target_model": entry.name})
        try:
            target, _ = await loading
            await self.close(entry.name, target)
        except MmeError as error:
            _log.info("a load that was given up ended: %s", error, extra={"target_model": entry.name})
        except Exception:  # noqa: BLE001 - this task is not awaited, and what follows must be done
            _log.exception("a load that was given up ended", extra={"target_model": entry.name})
        finally:
            prepared.release()
            reservation.end()
            entry.orphan = None
            self.room.settle()
