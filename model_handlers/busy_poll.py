"""Whether whoever waits for its next piece of work stays awake for it, or goes to sleep at once.

A processor that has nothing to do sleeps, and waking it takes 20 to 60 µs in a virtual machine: more than all the work
on a small request. A request to a model in a process of its own meets that four times. So whoever has just had work,
and gets its work in quick succession, looks for the next piece again and again for a moment (*busy polling*), and
gives the processor to anybody else who wants it in between.

It learns from what comes of it: after each time that brought nothing it stays away twice as often, so that a model with
few requests, or with long executions, pays for one attempt in sixty-four.

PURE but for one number, which is the operator's: the longest that anybody here waits awake.
"""

from __future__ import annotations

from typing import ClassVar

_MOST_MISSES = 6  # in a row that count


class BusyPoll:
    """Decides for one who waits, which has one thread.

    Attributes:
        longest: nanoseconds that one waits awake at most, in this process; 0 for never.
    """

    longest: ClassVar[int] = 0

    def __init__(self) -> None:
        self._misses = 0
        self._skips = 0

    def __repr__(self) -> str:
        return f"<BusyPoll: {self._misses} misses in a row>"

    def begin(self) -> int:
        """How many nanoseconds to wait awake this time; 0 to go to sleep at once."""
        if self._skips:
            self._skips -= 1
            return 0
        return self.longest

    def caught(self) -> None:
        """Something came meanwhile."""
        self._misses = 0

    def missed(self) -> None:
        """Nothing came."""
        self._misses = min(self._misses + 1, _MOST_MISSES)
        self._skips = (1 << self._misses) - 1
