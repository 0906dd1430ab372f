"""Whether whoever waits for its next piece of work stays awake for it, or goes to sleep at once.

A processor that has nothing to do sleeps, and waking it takes 20 to 60 µs in a virtual machine: more than all the work
on a small request. A request to a model in a process of its own meets that four times. So whoever has just had work,
and gets its work in quick succession, looks for the next piece again and again for a moment (*busy polling*), and
gives the processor to anybody else who wants it in between.

It learns from what comes of it: after each time that brought nothing it stays away twice as often, so that a model with
few requests, or with long executions, pays for one attempt in sixty-four. And where somebody else, who was given the
processor, keeps it for a whole turn, it does not sleep anyhow, and newer kernels count the turn against who gave it:
that one goes to sleep at once the next seven times, and a thousand times, if it happens again and again.

PURE but for one number, which is the operator's: the longest that anybody here waits awake.
"""

from __future__ import annotations

from typing import ClassVar

_MOST_MISSES = 6  # in a row that count
_TURN_NS = 1_000_000  # of one who computes: Linux gives 1.4 ms and more
_CROWDED_SKIPS = (0, 7, 63, 1023)


class BusyPoll:
    """Decides for one who waits, which has one thread.

    Attributes:
        longest: nanoseconds that one waits awake at most, in this process; 0 for never.
    """

    longest: ClassVar[int] = 0

    def __init__(self) -> None:
        self._misses = 0
        self._skips = 0
        self._crowds = 0  # an index of _CROWDED_SKIPS

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
        self._crowds = max(self._crowds - 1, 0)

    def missed(self) -> None:
        """Nothing came."""
        self._misses = min(self._misses + 1, _MOST_MISSES)
        self._skips = self._rarity()

    def lost(self, nanoseconds: int) -> bool:
        """The processor was given away for so long; whether that was a turn of somebody's, and one had better sleep."""
        if nanoseconds < _TURN_NS:
            return False
        self._crowds = min(self._crowds + 1, len(_CROWDED_SKIPS) - 1)
        self._skips = max(_CROWDED_SKIPS[self._crowds], self._rarity())
        return True

    def _rarity(self) -> int:
        """How many waits lie between two attempts, as often as nothing came of late."""
        return (1 << self._misses) - 1
