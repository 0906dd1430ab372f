"""What requests may take of the server: time, threads, memory, turns of the event loop; how many connections may be.

Bodies and messages count as they arrive, and what they are once inflated counts as well. What does not fit is refused,
and gives back what it held: requests that have arrived in part never wait for one another. Responses do not count, nor
does memory that clients share.

In a turn of the loop heads, frame headers and chunk sizes cost time; a byte of a body costs one part in `BODY` of that.
One integer counts them for all connections together, and the clock is read once for each `STEP` of them. A connection
that has spent its budget stops reading and waits; those that wait go on in later turns, in their order, before anything
else is read. All of it runs on the loop, but for `Inflating.take`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, ParamSpec, Protocol, Self, TypeVar

from model_handlers.errors import Kind, MmeError
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.inference.call import Call

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 256  # listings of a store, 64 over HTTP and 64 over gRPC, leave as many
THREADS = ThreadPool("offload", most=MOST_THREADS, idle_seconds=0)


async def by_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the function returns, or raises, called by a thread: what takes long, as large bodies do."""
    return await asyncio.wrap_future(THREADS.submit(work, *args, **kwargs))


_TICKS = 16  # in the limit
_SHORTEST, _LONGEST = 0.02, 1.0  # seconds of a tick


class RequestLimit:
    """How long each request may take, in seconds; the answer to one that takes longer is 504.

    Counts from when the whole request has come until it is answered, its decoding, the load of its model and its wait
    in a queue included; of a streamed answer, from the last response on. What executes goes on, and what waits is
    dropped as if its client had left. Times are noted to a tick of one timer, which looks at those only that are late,
    and rests while nothing is under way.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._tick_seconds = min(max(seconds / _TICKS, _SHORTEST), _LONGEST)
        self._loop = loop
        self._now = 0.0  # at the last tick
        # whose time runs, and when each came or had its last response, in that order; leave when they are over
        self.under_way: dict[Call, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RequestLimit of {self._seconds:g} s: {len(self.under_way)} under way>"

    def begin(self, request: Call) -> None:
        """A request has come."""
        if self._timer is None:
            self._now = self._loop.time()
            self._timer = self._loop.call_later(self._tick_seconds, self._tick)
        self.under_way[request] = self._now

    def renew(self, request: Call) -> None:
        """It had a response, and others may follow."""
        if self.under_way.pop(request, None) is not None:
            self.under_way[request] = self._now

    def _tick(self) -> None:
        self._timer = None
        self._now = self._loop.time()
        before = self._now - self._seconds - self._tick_seconds  # what was noted may be later than that by a tick
        while self.under_way:
            request, since = next(iter(self.under_way.items()))
            if since > before:
                self._timer = self._loop.call_later(self._tick_seconds, self._tick)
                return
            del self.under_way[request]
            request.expire(
                MmeError(
                    Kind.TIMED_OUT,
                    f"there was no answer within {self._seconds:g} s, the server's limit of a request "
                    "(MME_REQUEST_TIMEOUT); what executes goes on",
                )
            )


class RequestMemory:
    """The budget of all connections together, in bytes."""

    def __init__(self, limit: int) -> None:
        self.used = 0  # of requests as they arrived
        self._limit = limit
        self._most = limit  # less what threads inflate at the moment
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RequestMemory: {self.used} of {self._most} bytes>"

    def fits(self, size: int) -> bool:
        return self.used + size <= self._most

    def take(self, size: int) -> bool:
        """Count further bytes, if they fit."""
        self.used += size
        if self.used <= self._most:
            return True
        self.used -= size
        return False

    def free(self, size: int) -> None:
        self.used -= size

    @property
    def full(self) -> str:
        """What is answered to a request that does not fit."""
        return (
            f"the server holds as many bytes of requests as it may ({self._limit}): send this one again in a moment, "
            "or raise MME_REQUEST_MEMORY"
        )

    def lower(self, size: int) -> bool:
        """Take bytes by another thread, if they fit; below zero gives them back."""
        with self._lock:
            if size > 0 and self.used + size > self._most:
                return False
            self._most -= size
            return True


class Inflating:
    """What a thread inflates of one request. A context: in the end it counts no more, or is the request's own."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, size: int) -> None:
        """Count further bytes.

        Raises:
            MmeError: UNAVAILABLE when they do not fit.
        """
        if not self._memory.lower(size):
            raise out_of_request_memory(self._memory)
        self._taken += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.lower(-self._taken)


def out_of_request_memory(memory: RequestMemory) -> MmeError:
    """What is answered to a request that does not fit."""
    return MmeError(Kind.UNAVAILABLE, memory.full)


STEP = 2048  # bytes of heads from one look at the clock to the next
HEADS = 64 * 1024  # that one connection may have handled in a turn
BODY = 64  # bytes of bodies that count as one byte of heads
SMALL = 8  # the same, of heads that come in a read of at most a `STEP`: a connection has one such read in a turn
EACH_SECONDS = 0.002  # in a turn, as long as few wait
LEAST_SECONDS = 0.0001  # however many wait
ALL_SECONDS = 0.0025  # twice in a turn: for connections that wait, and for those that have something new
_QUIET_SECONDS = 0.001  # behind a turn in which the next one's beginning is not looked for: it takes a call on the loop
_RESTED = 1  # turns without a look behind which a connection goes before those that had theirs


class Waiting(Protocol):
    """A connection that has something to handle."""

    def go_on(self) -> None:
        """Handle some of it, and wait again if there is more."""


class TurnBudget:
    """What one connection has spent."""

    def __init__(self) -> None:
        self.turn = -_RESTED  # in which it was last seen
        self.ends = 0.0  # its time in that turn
        self.heads = 0  # bytes, in that turn
        self.rested = True  # it had nothing to do in the turns before


class Turns:
    """The turns of one loop, as its connections share them.

    Args:
        call_soon: calls something in the loop's next turn.
        clock: of seconds.

    Attributes:
        left: bytes of heads until the next look at the clock. Connections subtract what they handle, and ask whether
            they have spent their budget once it is below zero; 0 is what is left where one had.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.left = STEP
        self._call_soon = call_soon
        self._clock = clock
        self._number = 0
        self._counted = False  # whether the end of this turn is waited for
        self._quiet_until = 0.0
        self._ends = 0.0
        self._share = EACH_SECONDS
        self._first: deque[tuple[Waiting, TurnBudget]] = deque()
        self._others: deque[tuple[Waiting, TurnBudget]] = deque()

    def __repr__(self) -> str:
        return f"<Turns: {self.waiting} connections wait>"

    @property
    def waiting(self) -> int:
        """Connections that wait for a later turn."""
        return len(self._first) + len(self._others)

    def spent(self, budget: TurnBudget) -> bool:
        """Whether a connection has to wait for a later turn: its own budget is spent, or that of all."""
        used, self.left = STEP - self.left, STEP
        now = self._clock()
        if not self._counted:
            if now < self._quiet_until:
                return False
            self._begin(now)
        if budget.turn != self._number:
            budget.rested = self._number - budget.turn > _RESTED
            self._renew(budget, now)
        budget.heads += used
        if budget.heads < HEADS and now < budget.ends and now < self._ends:
            return False
        self.left = 0  # what comes next in this turn is looked at as well: else each connection had a step more
        return True

    def wait(self, each: Waiting, budget: TurnBudget) -> None:
        """Have a connection go on in a later turn, since it has spent its budget of this one."""
        (self._first if budget.rested else self._others).append((each, budget))

    def _renew(self, budget: TurnBudget, now: float) -> None:
        budget.turn, budget.ends, budget.heads = self._number, now + self._share, 0

    def _begin(self, now: float) -> None:
        self._counted = True
        self._number += 1
        self._ends = now + ALL_SECONDS
        self._call_soon(self._turned)

    def _turned(self) -> None:
        """Let those that wait go on, each once at most, until the time for them is over."""
        now = self._clock()
        waiting = self.waiting
        if not waiting:
            self._counted = False
            self._quiet_until = now + _QUIET_SECONDS
            self._share = EACH_SECONDS
            return
        self._begin(now)
        self._share = max(min(EACH_SECONDS, ALL_SECONDS / waiting), LEAST_SECONDS)
        for _ in range(waiting):
            each, budget = (self._first or self._others).popleft()
            budget.rested = False
            if budget.turn != self._number:
                self._renew(budget, now)
            self.left = STEP  # at least so much each time
            each.go_on()
            now = self._clock()
            if now >= self._ends:
                break
        self._ends = now + ALL_SECONDS


class ConnectionCap:
    """How many connections there may be, over HTTP and gRPC together: files are left for models, downloads and S3.

    A connection beyond it is told so, and closed: at once where many are.
    """

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._crowd = limit + max(limit // 8, 16)

    def __repr__(self) -> str:
        return f"<ConnectionCap: {self.taken} of {self._limit}>"

    def enter(self) -> bool:
        """Count one; tells whether it may stay. Each leaves, too."""
        self.taken += 1
        return self.taken <= self._limit

    def leave(self) -> None:
        self.taken -= 1

    @property
    def is_crowded(self) -> bool:
        """Whether there are so many beyond the limit that no client is waited for."""
        return self.taken > self._crowd

    @property
    def full(self) -> str:
        """What a connection beyond the limit is told."""
        return (
            f"the server has as many connections as it may have ({self._limit}): ask again in a moment, keep fewer "
            "open, or raise MME_MAX_CONNECTIONS"
        )
