"""What models take of this process and of GPUs: by their loads, and by what they execute later.

A load is measured by itself: two at once could not be told apart. A model whose code has another one loaded ends its
turn: what that one takes is known by then, and left out. Of executions see `Meter`. What models have left in the heap
is handed back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

from model_handlers.base import Footprint
from model_handlers.system import devices, memory
from model_handlers.system.threads import NEVER, threads, usual_priority
from serve.threads import FairSemaphore, Maintenance, Slices

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping

    from model_handlers.system.threads import CancelToken
    from serve.cache.model_cache import ModelCache
    from serve.loading.loader import Target
    from serve.threads import ThreadPool, Turn


R = TypeVar("R")
_TRIM_SECONDS = 1.0


class Scales:
    """One a process: whatever loads into it has its turn first. Frameworks, which models share, take `common` bytes.

    A load has its turn before it is given a thread; frameworks, which are imported while models are prepared, and
    weights, which change over while models serve, have theirs on their threads.
    """

    def __init__(self) -> None:
        self.common = 0
        self.turns = FairSemaphore(1)
        self._under_way: list[Others] = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[Others]:
        """What other loads turn out to take meanwhile."""
        others = Others()
        self._under_way.append(others)
        try:
            yield others
        finally:
            self._under_way.remove(others)

    def note(self, taken: Footprint) -> None:
        """So much of this process and of the GPUs is not of those whose loads are under way."""
        for others in self._under_way:
            others.take += taken

    def weigh(self, load: Callable[[], R], token: CancelToken = NEVER) -> tuple[R, Footprint]:
        """`measured`, in a turn of its own. Raises CANCELLED while it waited for its turn."""
        turn = self.turns.ask()
        try:
            token.wait(lambda seconds: _has_come(turn, seconds) or None)
            return self.measured(load)
        finally:
            turn.end()

    def measured(self, load: Callable[[], R]) -> tuple[R, Footprint]:
        """Call `load`, which has its turn; return what it does, and the bytes that it took: see `taken`."""
        others = threads()
        before = _trimmed()
        loaded = load()
        _restore_priority(others)
        return loaded, _trimmed() - before


def _has_come(turn: Turn, seconds: float) -> bool:
    return turn.came in futures.wait([turn.came], seconds).done


class Others:
    """What others `take` that were loaded during a load. Compared by identity."""

    def __init__(self) -> None:
        self.take = Footprint()


def taken() -> Footprint:
    """The bytes that this process takes of the host, and all processes of the GPUs."""
    return Footprint(memory.private_memory(), devices.device_memory_used())


def _trimmed() -> Footprint:
    memory.trim()  # of what loading took for a while
    return taken()


def _restore_priority(before: set[int]) -> None:
    # Threads that a framework started for the model inherited the loader's low priority, at which they shall not
    # execute. They are not Python's; what Python started meanwhile are other loaders.
    begun = threads() - before
    for thread in begun and begun - {thread.native_id for thread in threading.enumerate()}:
        usual_priority(thread)


class HeapTrim:
    """Trims the heap at most once a second, for all that left since: it takes milliseconds and malloc's locks."""

    def __init__(
        self, threads: ThreadPool, trim: Callable[[], None] = memory.trim, seconds: float = _TRIM_SECONDS
    ) -> None:
        self._threads = threads
        self._trim = trim
        self._seconds = seconds
        self._lock = threading.Lock()
        self._due = 0.0  # when the next may be
        self._asked = False
        self._ended = threading.Event()

    def left(self) -> None:
        """A model was closed. Its pages are given back when this returns, or soon with those of others."""
        with self._lock:
            now = time.monotonic()
            if self._asked:
                return
            self._asked = waits = now < self._due
            if not waits:
                self._due = now + self._seconds
        if waits:
            self._threads.run(self._later)
        else:
            self._trim()

    def close(self) -> None:
        self._ended.set()

    def _later(self) -> None:
        if self._ended.wait(max(self._due - time.monotonic(), 0)):
            return
        with self._lock:
            self._asked = False
            self._due = time.monotonic() + self._seconds
        self._trim()


class Growth:
    """The growth of one memory. PURE."""

    def __init__(self) -> None:
        self.counted = 0  # bytes
        self.charged: dict[Target, int] = {}  # model → how many of them
        self.pending = False  # whether the last look saw more than is counted
        self._seen = 0

    def __repr__(self) -> str:
        return f"<Growth of {self.counted} bytes, {len(self.charged)} models charged>"

    @property
    def uncharged(self) -> int:
        return self.counted - sum(self.charged.values())

    def look(self, beyond: int, inputs: Mapping[Target, int]) -> None:
        """A look saw so many bytes beyond what is known; `inputs` are those of recent executions, in bytes."""
        beyond = max(beyond, 0)
        self.counted, self._seen = min(beyond, self._seen), beyond
        self.pending = beyond > self.counted
        rest, whole = self.uncharged, sum(inputs.values())
        if rest > 0 and whole:
            for key, size in inputs.items():
                self.charged[key] = self.charged.get(key, 0) + rest * size // whole
        elif rest < 0:
            charged = self.counted - rest
            self.charged = {key: size * self.counted // charged for key, size in self.charged.items()}

    def keep(self, stays: Callable[[Target], bool]) -> None:
        """Charge those no more that left: what they did not give back is charged to none."""
        self.charged = {key: size for key, size in self.charged.items() if size and stays(key)}


_SECONDS = 10.0
_SOON_SECONDS = 1.0
_OWN = 32 << 20  # bytes that the server itself may grow by, with what it knows of clients and the heap's free pages
_NOTABLE = 1 << 20  # bytes that make a difference


class _Observed:
    """A target in memory of which the meter has to know what it executes."""

    def __init__(self, meter: Meter, target: Target) -> None:
        self.target = target
        self.models = list(target.models())
        # what its libraries share in this process is trimmed by
        here = [model.executors for model in self.models if not model.executors.apart]
        self.trims = {each.trim_runtime for executors in here for each in executors.handlers if each.trim_runtime}
        self.known = target.known()
        self.inputs = 0  # bytes of what it executed since the look before the last one
        self.idle = False  # whether it executed nothing since the last look
        self._meter = meter
        self._last = self._total = 0
        for part in target.parts():
            part.observer = self

    def changed(self) -> None:
        self._meter.changed(self)

    def closed(self) -> None:
        if self._meter.maintenance.closed:
            self.end()
        else:
            self._meter.closed.append(self)

    def executes(self) -> None:
        self._meter.executing[self] = None

    def advance(self) -> None:
        total = self._executed()
        last, self._last, self._total = self._last, total - self._total, total
        self.inputs = last + self._last
        self.idle = not self._last

    def rest(self) -> bool:
        """Whether it has executed nothing for two looks, and not since; the next execution is told then."""
        rests = not self.inputs and self._executed() == self._total
        if rests:
            for model in self.models:
                model.executors.executed.first = self.executes
        return rests

    def _executed(self) -> int:
        return sum([model.executors.executed.bytes for model in self.models])

    def end(self) -> None:
        for part in self.target.parts():
            part.observer = None
        for model in self.models:
            model.executors.executed.first = None


class Meter:
    """Measures now and then what executions take of the serving process and of GPUs; counts it, and has it given back.

    What executions take, in arenas, heaps and libraries, no framework tells; but the process as a whole can be
    measured. What it takes beyond all that is known is growth. Known are what the process took before there were
    models, what their frameworks took when they were imported, what models took when they were loaded, what loads
    under way have reserved, requests and responses on the way, and cached responses; of GPUs what was taken at the
    start, and what models took. One look may see a batch under way, so growth counts once two looks in a row have
    seen it; what a look does not see any more counts no longer. It is charged to the models that have executed, by
    the bytes of their inputs; the rest, of models that have left, is charged to none. Other models leave then, or
    loads are refused.

    The process is looked at every ten seconds while anything executes, and at most once a second after a batch with
    more input bytes than any before of its model. On the event loop; what takes time is done on a thread, of the
    usual priority: while it shrinks an arena or a heap, it has locks that executions want.
    """

    def __init__(
        self,
        cache: ModelCache,
        loop: asyncio.AbstractEventLoop,
        passing: Callable[[], int],
        counted: Callable[[Target], None],
    ) -> None:
        self._cache = cache
        self._loop = loop
        self.maintenance = Maintenance("meter", loop, self._look, self._next_delay)
        self._passing = passing
        self._counted = counted
        memory.trim()
        self._before = taken()
        self._host = Growth()
        self._gpus = [Growth() for _ in range(max(devices.gpu_uuids(), default=-1) + 1)]
        self._growths = [self._host, *self._gpus]
        self._charged: set[Target] = set()
        self._observed = 0
        self._targets_take = Footprint()  # what all that are observed are known to take
        self.executing: dict[_Observed, None] = {}  # since the look before the last one
        self.closed: deque[_Observed] = deque()  # since the last look
        self._owe: set[_Observed] = set()  # that have executed since they were last asked to give back
        self._looked_at = 0.0
        self._soon = False

    def __repr__(self) -> str:
        return f"<Meter of {self._observed} models, {self._host.counted} bytes grown>"

    def watch(self, target: Target) -> None:
        """Know what a target executes in this process or on GPUs, from now on."""
        if not self.maintenance.closed:
            observed = _Observed(self, target)
            self._observed += 1
            self._targets_take += observed.known
            self.executing[observed] = None
            self.maintenance.look_in(_SECONDS)

    def changed(self, observed: _Observed) -> None:
        """A target takes something else than it did."""
        before, observed.known = observed.known, observed.target.known()
        self._targets_take += observed.known - before

    def larger(self) -> None:
        """A model has executed more input bytes at a time than before: look soon, if it was not done just now."""
        self._soon = True
        if self.maintenance.waits:
            since = self._loop.time() - self._looked_at
            self.maintenance.look_in(max(_SOON_SECONDS - since, 0.0))

    async def close(self) -> None:
        """Look no more; what was counted counts no longer."""
        await self.maintenance.close()
        self._cache.room.grown = Footprint()

    def _next_delay(self) -> float | None:
        if not self._observed and not any(growth.counted for growth in self._growths):
            return None
        soon = self._soon or any(growth.pending for growth in self._growths)
        return _SOON_SECONDS if soon else _SECONDS

    async def _look(self) -> None:
        self._soon = False
        self._looked_at = self._loop.time()
        for each in self.executing:
            each.advance()
            if not each.idle:
                self._owe.add(each)
        closed = self._forget_closed()
        owe = self._owe | closed  # what those that have left share with others may have to be given back, too
        known, room = self._known(), self._cache.room
        counted = known + Footprint(self._host.counted)
        most = counted + (room.budget - room.used()).beyond(Footprint())
        look = functools.partial(_measured, owe, counted.host, most.host)
        found, gave_back = await self.maintenance.run_in_thread(look)
        if self.maintenance.closed:
            return
        self._owe -= gave_back
        beyond = found.beyond(known.most(self._known()))  # models may have come and gone meanwhile
        self._host.look(beyond.host, self._inputs(lambda target: target.executes_here))
        for number, growth in enumerate(self._gpus):
            size = beyond.devices[number] if number < len(beyond.devices) else 0
            growth.look(size, self._inputs(functools.partial(_is_on, number)))
        await self._charge()
        for each in [each for each in self.executing if each.rest()]:
            del self.executing[each]

    def _forget_closed(self) -> set[_Observed]:
        """Those that were closed since the last look, which count no longer."""
        closed = set()
        while self.closed:
            each = self.closed.popleft()
            closed.add(each)
            each.end()
            self._observed -= 1
            self._targets_take -= each.known
            self.executing.pop(each, None)
        closed &= self._owe
        self._owe -= closed
        return closed

    def _known(self) -> Footprint:
        """What the process and the GPUs are known to take, without growth."""
        known = self._before + self._cache.room.reserved + Footprint(_OWN + self._passing())
        return known + self._targets_take

    def _inputs(self, may_be_charged: Callable[[Target], bool]) -> dict[Target, int]:
        return {each.target: each.inputs for each in self.executing if each.inputs and may_be_charged(each.target)}

    async def _charge(self) -> None:
        """Have the cache count what was found, and others leave for it where the budget is passed."""
        room = self._cache.room
        for growth in self._growths:
            growth.keep(lambda target: not target.closed)
        found = {target for growth in self._growths for target in growth.charged}
        uncharged = Footprint(self._host.uncharged, tuple(growth.uncharged for growth in self._gpus))
        room.grown = uncharged.within(room.grown)  # what models are charged for below is not counted twice meanwhile
        slices = Slices()
        changed: list[tuple[Target, Footprint]] = []
        for target in found | self._charged:
            await slices.rest()
            grown = Footprint(
                self._host.charged.get(target, 0), tuple(growth.charged.get(target, 0) for growth in self._gpus)
            )
            if grown != target.grown:
                changed.append((target, grown))
        changed.sort(key=lambda change: not change[1].fits(change[0].grown))  # what is less first: no sum is too large
        for target, grown in changed:
            await slices.rest()
            if self._cache.ready.serves(target):
                target.grown = grown
                self._cache.remeasured(self._cache.entries[target.name], target.takes())
                self._counted(target)
        self._charged = found
        room.grown = uncharged
        if any(growth.counted for growth in self._growths):
            most = max(found, key=lambda target: target.grown.host + target.grown.device, default=None)
            room.regain(most.name if most is not None else "")


def _is_on(gpu: int, target: Target) -> bool:
    on = target.known().devices
    return gpu < len(on) and on[gpu] > 0


def _measured(owe: set[_Observed], counted: int, most: int) -> tuple[Footprint, set[_Observed]]:
    """What is taken, once what idle models need no more was given back, and the models that did so. On a thread.

    So many bytes of the host are known, or `counted`; where more than `most` are taken, models that are not idle give
    back what they could do without.
    """
    found = taken()
    if found.host <= counted - _NOTABLE:
        return found, set()
    resting = {each for each in owe if each.idle or each.target.closed or found.host > most}
    if found.host <= counted + _NOTABLE and not resting:
        return found, set()
    for each in resting:
        for model in each.models:
            if not model.executors.apart:
                model.executors.trim(idle=True)
    for trim in {trim for each in resting for trim in each.trims}:
        trim()
    memory.trim()
    return taken(), resting
