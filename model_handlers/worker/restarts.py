"""How often a process that died is started again.

PURE: `now` in, an answer out. The first restart comes at once, since most deaths are single ones; each further one
waits twice as long as the one before, and after LIMIT of them within a window there is none, until the oldest is that
long ago: a model that dies of every request would otherwise cost all others the processor time of its loads.

A process that was ended because a batch took too long has a budget of its own, whose window is longer: each such end
took as long as the limit of an execution. It waits for nothing before a restart. The same holds for one that
was ended for the memory that it took.
"""

from __future__ import annotations

from collections import deque

LIMIT = 5
WINDOW = 60.0  # seconds
OVERRUN_WINDOW = 600.0  # seconds, of processes that were ended for the time they took
OUTGROWN_LIMIT, OUTGROWN_WINDOW = 3, 600.0  # of those that were ended for their memory
_FIRST_DELAY = 0.1  # seconds before the second restart


class RestartBudget:
    """Remembers the last restarts of one instance.

    Attributes:
        window: seconds in which there are `limit` restarts at most.
        why: what the process did when it is used up.

    Args:
        delay: seconds before the second restart.
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
        self.why = why
        self._delay = delay
        self._restarts: deque[float] = deque(maxlen=limit)

    def __repr__(self) -> str:
        return f"<RestartBudget: restarts at {list(self._restarts)}>"

    def is_used_up(self, now: float) -> bool:
        """Whether there is no restart for a while. May be asked on any thread."""
        return len(self._restarts) == self.limit and self._restarts[0] > now - self.window

    def next_at(self, now: float) -> float | None:
        """When the next restart may happen, `now` or later in seconds; None when the budget is used up."""
        if self.is_used_up(now):
            return None
        count = sum(restart > now - self.window for restart in self._restarts)
        return max(now, self._restarts[-1] + self._delay * 2 ** (count - 1)) if count else now

    def free_at(self) -> float:
        """When a used-up budget has room again."""
        return self._restarts[0] + self.window

    def restarted(self, now: float) -> None:
        """A restart happens."""
        self._restarts.append(now)
