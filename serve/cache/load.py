"""One load: fetch, equip, reserve, load, measure; whatever goes wrong, all is given back. On the event loop only.

It waits for memory with no turn in hand and nothing of its own in memory, so that no two loads wait for each other; one
that has another model loaded lends its turn meanwhile and keeps its reservation. The deadline does not run during waits
for a turn or memory. A thread inside a framework can't be stopped: it stays as an *orphan*, its requests answered and
its turns free, and only its reservation and files stay taken until it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import CancelToken
from model_handlers.worker.load_watch import ReservationExceededError
from serve.request import LoadReport
from serve.threads import Progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from serve.cache.entry import Entry
    from serve.cache.eviction import Rules
    from serve.cache.residents import Residents
    from serve.cache.room import Room
    from serve.loading.loader import ModelLoader, Target
    from serve.loading.prepare import PreparedTarget

    GiveWay = Callable[[Entry], None]
    # has the models of an ensemble's steps loaded, and returns them: by name, of which some may have left again
    Bring = Callable[[str, tuple[str, ...]], Coroutine[Any, Any, Mapping[str, Target]]]
    Loaded = tuple[Target, Footprint]
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


class Turns:
    """A semaphore in the order of asking, whose turns can be lent and whose waits can be refused."""

    def __init__(self, count: int) -> None:
        self._free = count  # below 0 while more are had than there are, see `lent`
        self._waiting: dict[object, asyncio.Future[None]] = {}  # by name, the first of them first
        self._having: set[object] = set()
        self._lent: Counter[object] = Counter()  # for how many others, by name

    def __repr__(self) -> str:
        return f"<Turns: {self._free} free, {len(self._waiting)} waiting>"

    @contextlib.asynccontextmanager
    async def acquire(self, name: object) -> AsyncIterator[None]:
        """Have a turn, once there is one, under a name that has or waits for no other; or raise what `refuse` says."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait(name)
        self._having.add(name)
        try:
            yield
        finally:
            self._having.discard(name)
            self._pass_on()

    @contextlib.contextmanager
    def lent(self, name: object) -> Iterator[bool]:
        """If `name` has a turn, which this tells, it waits for others: meanwhile there is one more, for all of them."""
        if name not in self._having:
            yield False
            return
        self._lent[name] += 1
        if self._lent[name] == 1:
            self._pass_on()
        try:
            yield True
        finally:
            self._lent[name] -= 1
            if not self._lent[name]:
                del self._lent[name]
                self._free -= 1  # the next that ends is the one that was lent

    def refuse(self, name: object, error: Exception) -> None:
        """End the wait under that name, if there is one, with an error."""
        turn = self._waiting.get(name)
        if turn is not None and not turn.done():
            turn.set_exception(error)

    async def _wait(self, name: object) -> None:
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # it came in the very moment the wait was cancelled
            raise
        finally:
            del self._waiting[name]

    def _pass_on(self) -> None:
        if self._free < 0:
            self._free += 1
            return
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


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


class Loading:
    """Loads models into a room, within `patience` seconds each; for `relieve` see `ModelCache`.

    `give_way` has the model begin to leave whose place the one it is given is to take.
    """

    def __init__(
        self,
        loader: ModelLoader,
        room: Room,
        residents: Residents,
        rules: Rules,
        *,
        pool: Executor,
        closers: Executor,
        turns: int,
        patience: float,
        give_way: GiveWay,
        relieve: Relieve,
        bring: Bring,
    ) -> None:
        self._loader = loader
        self._room = room
        self._residents = residents
        self._rules = rules
        self._pool = pool
        self._closers = closers
        self._fetch_turns = Turns(_FETCHES)  # they wait for the network, not for cores
        self._stalled = 0
        self._equip_turns = Turns(turns)
        self._load_turns = Turns(turns)
        self._trial_turns = asyncio.Semaphore(turns)
        self._alone = Turns(1)
        self._overruled: set[Entry] = set()  # whose measurement no load waits for, though it goes on
        self._patience = patience
        self._give_way = give_way
        self._relieve = relieve
        self._bring = bring
        self._awaiting: dict[str, asyncio.Task[Mapping[str, Target]]] = {}  # ensembles whose steps are being loaded

    async def run(self, entry: Entry) -> LoadReport | None:
        """Load a model; it is in its entry when this returns. None: it would change nothing, and was not loaded."""
        if entry.orphan is not None:
            if not entry.orphan.done():
                raise MmeError(
                    Kind.UNAVAILABLE, f"a load of model '{entry.name}' that was given up has not ended; try again later"
                )
            entry.orphan = None  # it was another load's
        evicted: list[str] = []
        async with self._fetch_turns.acquire(entry):
            began = _now()
            _check_wanted(entry)
            prepared = await self._in_time(entry, self._patience, self._fetch(entry))
            left = self._patience - (_now() - began) / 1e9
        try:
            steps = await self._steps(entry, prepared)
            if steps:
                prepared = replace(
                    prepared, content=(prepared.content, *[steps[name].content for name in prepared.steps])
                )
            if not entry.abandoned and entry.is_same_content(prepared):
                prepared.release()
                return None
            if steps:
                self._assemble(entry, prepared, steps)
            else:
                if not prepared.equipped:
                    prepared = await self._equip(entry, prepared)
                await self._load_attempts(entry, prepared, left, evicted)
        except BaseException:
            if entry.orphan is None:
                prepared.release()
            raise
        entry.prepared = prepared
        entry.download_ns = prepared.download_ns or entry.download_ns
        return LoadReport(prepared.download_ns, _now() - began - prepared.download_ns, tuple(evicted))

    @contextlib.contextmanager
    def lent_turn(self, entry: Entry) -> Iterator[None]:
        """While a load that has its turn waits for another one, which then may have one, too."""
        with self._load_turns.lent(entry), self._alone.lent(entry) as is_measured:
            if is_measured and entry not in self._overruled:
                self._overruled.add(entry)
                self._loader.overrule()
            yield

    def refuse(self, name: str, error: MmeError) -> None:
        """End the wait of model `name` for its turn to be equipped or for its steps, if it waits, with an error."""
        self._equip_turns.refuse(name, error)
        if name in self._awaiting:
            self._awaiting[name].cancel()

    async def estimate(self, entry: Entry) -> tuple[Footprint, tuple[str, ...]]:
        """What a model that was never in memory takes at least, and the served models that it consists of."""
        async with self._fetch_turns.acquire(object()):
            prepared = await self._in_time(
                entry, self._patience, self._fetch(entry, Progress(f"model '{entry.name}'", bool))
            )
        try:
            return prepared.least or prepared.estimate, prepared.steps
        finally:
            prepared.release()

    async def close(self, entry: Entry, resident: Target) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._closers, resident.close)
        except Exception:  # noqa: BLE001 - whatever a framework has against it, loads that wait for its room go on
            _log.exception("closing failed; it may still hold memory", extra={"target_model": entry.name})

    # -- an ensemble of served models ------------------------------------------------------------------------------

    async def _steps(self, entry: Entry, prepared: PreparedTarget) -> Mapping[str, Target]:
        """Have its steps loaded, with nothing in hand meanwhile; {} for any other model."""
        if not prepared.steps:
            return {}
        _check_wanted(entry)
        bringing = asyncio.get_running_loop().create_task(self._bring(entry.name, prepared.steps))
        self._awaiting[entry.name] = bringing
        try:
            return await bringing
        except asyncio.CancelledError:
            _check_wanted(entry)
            raise
        finally:
            bringing.cancel()
            del self._awaiting[entry.name]

    def _assemble(self, entry: Entry, prepared: PreparedTarget, steps: Mapping[str, Target]) -> None:
        """It takes no memory itself, so that it is there in this turn of the loop."""
        _check_wanted(entry)
        resident = self._loader.assemble(prepared, steps)
        resident.start()
        self._commit(entry, prepared, resident, Footprint())

    def _commit(self, entry: Entry, prepared: PreparedTarget, resident: Target, footprint: Footprint) -> None:
        entry.resident, entry.measured = resident, footprint
        entry.pinned = prepared.pinned or self._rules.pins_name(entry.name)
        self._residents.charge(entry, footprint)

    # -- before memory is taken ------------------------------------------------------------------------------------

    async def _fetch(self, entry: Entry, progress: Progress | None = None) -> PreparedTarget:
        prepare = functools.partial(self._loader.prepare, entry.name, entry.source)
        progress = progress or _token(entry)
        watch = asyncio.get_running_loop().create_task(self._lend_stalled(entry, progress))
        try:
            prepared: PreparedTarget = await self._on_thread(
                entry, lambda fetching: fetching.add_done_callback(_release), prepare, progress
            )
        finally:
            watch.cancel()
        return prepared

    async def _lend_stalled(self, entry: Entry, progress: Progress) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if progress.idle < _STALL_SECONDS or self._stalled >= _MOST_STALLED:
                continue
            self._stalled += 1
            try:
                with self._fetch_turns.lent(entry):
                    while progress.idle >= _STALL_SECONDS:  # noqa: ASYNC110 - told by a thread, looked at now and then
                        await asyncio.sleep(_LOOK_SECONDS)
            finally:
                self._stalled -= 1

    async def _equip(self, entry: Entry, prepared: PreparedTarget) -> PreparedTarget:
        """What the model brings has a deadline of its own, and is there for the next load if this one is given up."""
        equip = functools.partial(self._loader.equip, prepared)
        async with self._equip_turns.acquire(entry.name):
            _check_wanted(entry)
            equipped: PreparedTarget = await self._on_thread(entry, _ignore, equip)
        return equipped

    # -- within a reservation --------------------------------------------------------------------------------------

    async def _load_attempts(self, entry: Entry, prepared: PreparedTarget, left: float, evicted: list[str]) -> None:
        """Reserve, load, measure. A model that takes more than was reserved, and finds the rest taken, begins again."""
        need = prepared.estimate
        for _ in range(_ATTEMPTS):
            try:
                taken = await self._load_relieved(entry, prepared, need, left, evicted)
            except ReservationExceededError as error:
                if error.final:
                    raise
                taken = replace(need, host=min(error.taken, self._room.budget.host))
            if taken is None:
                return
            need = taken
        raise MmeError(
            Kind.UNAVAILABLE,
            f"model '{entry.name}' takes more memory each time it is loaded, and other models hold the rest; try again",
        )

    async def _load_relieved(
        self, entry: Entry, prepared: PreparedTarget, need: Footprint, left: float, evicted: list[str]
    ) -> Footprint | None:
        """Reserve and load; where a device has no room after all, once more when others have left it.

        Executions take memory that no budget counts.
        """
        try:
            return await self._load_reserved(entry, prepared, need, left, evicted)
        except _DeviceFullError as error:
            full = error.bare()  # what was loaded until then hangs on its frames
        victims = await self._relieve(entry.name, Footprint(0, need.devices), "load")
        if not victims:
            raise full
        evicted += victims
        return await self._load_reserved(entry, prepared, need, left, evicted)

    async def _load_reserved(
        self, entry: Entry, prepared: PreparedTarget, need: Footprint, left: float, evicted: list[str]
    ) -> Footprint | None:
        """Reserve, and load within that; commit, or give all back. What it takes, where too little was reserved."""
        own, files = Footprint(need.host, need.devices), self._residents.unpaid(need.shared)
        give_way = None if entry.predecessor is None else functools.partial(self._give_way, entry)
        evicted += await self._room.reserve(entry.name, own + Footprint(sum(files.values())), give_way)
        reservation = Reservation(self._room, self._residents, own, files)
        try:
            if prepared.tried_first:
                await self._try_files(entry, prepared, left)
            resident, footprint = await self._load(entry, prepared, reservation, left, evicted)
            try:
                _check_wanted(entry)
                reservation.loaded()
                whole = self._residents.counted(footprint)
                more = await self._room.extend(entry.name, reservation.size, whole)
                if more is not None:
                    reservation.grow(whole.beyond(reservation.size))
                    resident.start()
            except BaseException:
                await self.close(entry, resident)
                raise
            if more is None:
                await self.close(entry, resident)
                return footprint
            evicted += more
            self._commit(entry, prepared, resident, footprint)
            return None
        finally:
            if not reservation.orphaned:
                reservation.end()

    async def _load(
        self, entry: Entry, prepared: PreparedTarget, reservation: Reservation, left: float, evicted: list[str]
    ) -> Loaded:
        def given_up(loading: asyncio.Future[Loaded]) -> None:
            reservation.orphaned = True
            orphan = self._await_orphan(entry, prepared, loading, reservation)
            entry.orphan = asyncio.get_running_loop().create_task(orphan, name=f"orphan {entry.name}")
            self._loader.overrule()

        async with self._turn(entry, prepared):
            _check_wanted(entry)
            began = _now()
            load = functools.partial(self._loader.load, prepared, more=self._asking(entry, reservation, evicted))
            with _of_devices(reservation.size):
                loaded: Loaded = await self._in_time(entry, left, self._on_thread(entry, given_up, load))
            entry.reload_ns = _now() - began
        return loaded

    @contextlib.asynccontextmanager
    async def _turn(self, entry: Entry, prepared: PreparedTarget) -> AsyncIterator[None]:
        if not prepared.alone:
            async with self._load_turns.acquire(entry):
                yield
            return
        async with self._alone.acquire(entry), self._load_turns.acquire(entry):
            try:
                yield
            finally:
                self._overruled.discard(entry)

    async def _try_files(self, entry: Entry, prepared: PreparedTarget, left: float) -> None:
        """Within the reservation, since it takes the memory that is reserved, but in the way of no load."""
        trial = functools.partial(self._loader.try_files, prepared)
        async with self._trial_turns:
            _check_wanted(entry)
            await self._in_time(entry, left, self._on_thread(entry, _ignore, trial))

    def _asking(
        self, entry: Entry, reservation: Reservation, evicted: list[str]
    ) -> Callable[[int, Callable[[], None]], int]:
        """What a load asks on its thread for as many bytes of the host as it has to have: see `LoadQuota`."""
        loop = asyncio.get_running_loop()

        def more(host: int, look: Callable[[], None]) -> int:
            asked = asyncio.run_coroutine_threadsafe(self._grow(entry, reservation, host, evicted), loop)

            def answer(seconds: float) -> int | None:
                try:
                    return asked.result(min(seconds, _WATCH_SECONDS))
                except TimeoutError:
                    look()
                    return None

            try:
                return CancelToken(f"model '{entry.name}'", lambda: reservation.orphaned).wait(answer)
            except MmeError:
                asked.cancel()
                raise

        return more

    async def _grow(self, entry: Entry, reservation: Reservation, host: int, evicted: list[str]) -> int:
        """Reserve so many bytes for a load that goes on; where they are free, some more. How many that are."""
        whole = Footprint(host + reservation.apart)
        headroom = max(_HEADROOM, host // _HEADROOM_PART)
        ample = (whole + Footprint(headroom)).beyond(reservation.size)
        if self._room.spare(ample):
            reservation.grow(ample)
            return reservation.size.host - reservation.apart
        more = whole.beyond(reservation.size)
        try:
            victims = await self._room.extend(entry.name, reservation.size, whole)
        except MmeError as error:
            if error.kind is not Kind.OUT_OF_MEMORY:
                raise
            raise ReservationExceededError(error.message, host, final=True) from None
        if victims is None:
            sentence = f"model '{entry.name}' needs {whole.host / 1e6:.1f} MB, which are not free"
            raise ReservationExceededError(sentence, host, final=False)
        evicted += victims
        reservation.grow(more)
        return reservation.size.host - reservation.apart

    # -- on a thread -----------------------------------------------------------------------------------------------

    async def _in_time(self, entry: Entry, seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with asyncio.timeout(seconds) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{entry.name}' did not load within {self._patience:.0f} s: make it smaller, or raise "
                "MME_LOAD_TIMEOUT",
            ) from None

    async def _on_thread(
        self,
        entry: Entry,
        given_up: Callable[[asyncio.Future[Any]], None],
        function: Callable[[CancelToken], Any],
        progress: Progress | None = None,
    ) -> Any:
        """Have a load thread do it. Cancelled, this tells the thread, and hands what it still does to `given_up`."""
        progress = progress or _token(entry)
        work = asyncio.get_running_loop().run_in_executor(self._pool, function, progress)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            progress.cancel()
            given_up(work)
            raise
        finally:
            del work  # whose error knows this frame, and the thread's

    async def _await_orphan(
        self,
        entry: Entry,
        prepared: PreparedTarget,
        loading: asyncio.Future[Loaded],
        reservation: Reservation,
    ) -> None:
        """What a load that was given up took is given back when it ends."""
        _log.warning("a load was given up and has not ended", extra={"target_model": entry.name})
        try:
            resident, _ = await loading
            await self.close(entry, resident)
        except MmeError as error:
            _log.info("a load that was given up ended: %s", error, extra={"target_model": entry.name})
        except Exception:  # noqa: BLE001 - this task is not awaited, and what follows must be done
            _log.exception("a load that was given up ended", extra={"target_model": entry.name})
        finally:
            prepared.release()
            reservation.end()
            entry.orphan = None
            self._room.settle()


def _token(entry: Entry) -> Progress:
    return Progress(f"model '{entry.name}'", lambda: entry.abandoned)


def _check_wanted(entry: Entry) -> None:
    if entry.abandoned:
        raise unloaded(entry)


def unloaded(entry: Entry) -> MmeError:
    """What requests are told that wait for a model which is unloaded, or goes with the server."""
    if entry.cut_short:
        reason = f"the load of model '{entry.name}' was cut short: this server is shutting down"
    else:
        reason = f"model '{entry.name}' was unloaded while it was loading; load it again"
    return MmeError(Kind.UNAVAILABLE, reason)


def _ignore(work: asyncio.Future[Any]) -> None:
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # which counts as seen


def _release(fetching: asyncio.Future[Any]) -> None:
    """A fetch that no load waited for came back."""
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().release()
