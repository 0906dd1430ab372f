"""What both sides of a worker decide by: how long to poll and to linger, how many requests to coalesce, restarts. PURE.

Times are nanoseconds or seconds of one monotonic clock, and arguments.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

_MOST_MISSES = 6  # in a row that count
_TURN_NS = 1_000_000  # of a thread that computes: Linux gives 1.4 ms and more
_CROWDED_SKIPS = (0, 7, 63, 1023)


class BusyPoll:
    """Whether a thread that waits for work stays awake for it (*busy polling*), or goes to sleep at once.

    Waking an idle processor takes 20 to 60 µs in a virtual machine, four times a request. So the thread looks again and
    again for a moment, yielding in between; each fruitless attempt halves the rate, down to one wait in sixty-four. A
    yielded processor that was kept for a whole turn means crowded cores: the thread sleeps the next 7 times, 63, 1,023.
    """

    longest: ClassVar[int] = 0  # nanoseconds to wait awake at most, in this process; 0 for never. The operator's

    def __init__(self) -> None:
        self._misses = 0
        self._skips = 0
        self._crowds = 0  # an index of _CROWDED_SKIPS

    def __repr__(self) -> str:
        return f"<BusyPoll: {self._misses} misses in a row>"

    def begin(self) -> int:
        """Return how many nanoseconds to wait awake this time; 0 to go to sleep at once."""
        if self._skips:
            self._skips -= 1
            return 0
        return self.longest

    def caught(self) -> None:
        self._misses = 0
        self._crowds = max(self._crowds - 1, 0)

    def missed(self) -> None:
        self._misses = min(self._misses + 1, _MOST_MISSES)
        self._skips = self._rarity()

    def lost(self, nanoseconds: int) -> bool:
        """Count a yield that took so long; return whether the cores are crowded, and sleeping is better."""
        if nanoseconds < _TURN_NS:
            return False
        self._crowds = min(self._crowds + 1, len(_CROWDED_SKIPS) - 1)
        self._skips = max(_CROWDED_SKIPS[self._crowds], self._rarity())
        return True

    def _rarity(self) -> int:
        return (1 << self._misses) - 1


_MOST = 32
_TOGETHER_NS = 1_000_000
_FAR_TOO_LONG_NS = 10_000_000  # it was no accident; and what a model is expected to take at first
_WEIGHT = 1 / 16  # of the newest execution
_ALONE_NS = 60_000_000_000  # after a death
_BYTES = 64 << 10  # of all inputs together, or all outputs: more is copied by another thread, and company saves little


class Pace:
    """How many unbatched requests cross to one worker in a message: about a millisecond of executions.

    An execution far longer counts in full. After a death each crosses alone for a while: those just before died with
    it.
    """

    def __init__(self) -> None:
        self._mean = float(_FAR_TOO_LONG_NS)
        self._bytes = 1
        self._alone_until = 0

    def __repr__(self) -> str:
        return f"<Pace: {self._mean / 1000:.0f} us, {self._bytes} bytes>"

    def together(self, now: int) -> int:
        """Return how many requests may cross together next."""
        most = min(_MOST, int(_TOGETHER_NS / max(self._mean, 1.0)), _BYTES // self._bytes)
        return 1 if most < 2 or now < self._alone_until else most

    def learn(self, took: int, requests: int, size: int) -> None:
        """Count `requests` executed in `took` ns all together; each had `size` bytes of inputs, or of outputs."""
        self._bytes = max(size, 1)
        if took > _FAR_TOO_LONG_NS:
            self._mean = float(took)
        else:
            self._mean += (took / requests - self._mean) * _WEIGHT

    def died(self, now: int) -> None:
        self._mean = float(_FAR_TOO_LONG_NS)
        self._alone_until = now + _ALONE_NS


LIMIT = 5
WINDOW = 60.0  # seconds
OVERRUN_WINDOW = 600.0  # seconds, of processes that were ended for the time they took
OUTGROWN_LIMIT, OUTGROWN_WINDOW = 3, 600.0  # of those that were ended for their memory
_FIRST_DELAY = 0.1  # seconds before the second restart


class RestartBudget:
    """The restarts of one instance: the first at once, each further one after twice the delay of the one before.

    After `limit` within `window` seconds there is none until the oldest is that long ago, for the sake of other models.
    Processes ended for time or memory have budgets of their own: a longer window, no delay.
    """

    def __init__(
        self,
        window: float = WINDOW,
        delay: float = _FIRST_DELAY,
        limit: int = LIMIT,
        why: str = "died too often",
    ) -> None:
        self.window = window
        self.limit = limit
        self.why = why  # what the process did when the budget is used up
        self._delay = delay
        self._restarts: deque[float] = deque(maxlen=limit)

    def __repr__(self) -> str:
        return f"<RestartBudget: restarts at {list(self._restarts)}>"

    def is_used_up(self, now: float) -> bool:
        """Return whether there is no restart for a while. On any thread."""
        return len(self._restarts) == self.limit and self._restarts[0] > now - self.window

    def next_at(self, now: float) -> float | None:
        """Return when the next restart may happen, `now` or later; None when the budget is used up."""
        if self.is_used_up(now):
            return None
        count = sum(restart > now - self.window for restart in self._restarts)
        return max(now, self._restarts[-1] + self._delay * 2 ** (count - 1)) if count else now

    def free_at(self) -> float:
        """Return when a used-up budget has room again."""
        return self._restarts[0] + self.window

    def restarted(self, now: float) -> None:
        self._restarts.append(now)


_LINGER_TURNS = 3  # of the loop; a client of this machine is back in one or two
_LINGER_NS = 300_000  # for all of them: other models may have much to do in each
_ENOUGH = 4  # requests: sending their batch takes less time than each of them would wait for answers to be written


class BatchLinger:
    """Whether waiting requests are sent at once when a batch is done, or joined by those of the clients it answers.

    Clients that wait for their answers come again as soon as they have them, and a batch costs far more than one more
    request in it (170 µs to 15 where this was measured). So a batch is answered first, and the loop looks at its
    sockets for a few turns before it sends the next one, until as many wait as were answered: about what a client waits
    longer, it waits less behind others. Where many wait already they go first, and the process has work while the
    answers are written.
    """

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._size = 0  # of the batch that was done last
        self.turns = 0  # of the loop, for which waiting requests may still be left alone
        self._is_done = False  # whether that batch was done, and nothing was asked since
        self._until = 0

    def __repr__(self) -> str:
        return f"<BatchLinger: {self.turns} turns left for {self._size} to come again>"

    def batch_done(self, size: int) -> None:
        """A batch is done; it is answered behind the next question whether those that wait are ready."""
        self._size, self.turns, self._until, self._is_done = size, _LINGER_TURNS, 0, True

    def ready(self, waiting: int, now: int) -> bool:
        """Whether so many waiting requests are sent now, or the loop looks at its sockets once more."""
        if self._is_done:
            self._is_done = False
            if self._joins and waiting < max(self._size, _ENOUGH):
                return False
            self.turns = 0
        if not self.turns:
            return True
        if not self._until:
            self._until = now + _LINGER_NS
        if not waiting:
            return True
        if waiting < self._size and now < self._until:
            self.turns -= 1
            return False
        self.turns = 0
        return True
