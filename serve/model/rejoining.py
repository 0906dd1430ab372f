"""Whether those who wait are sent at once when a batch is done, or are joined by those whom it answers.

Clients that wait for their answers come again as soon as they have them. A batch costs the loop and the model's process
far more than one more request in it (170 µs to 15 where this was measured), so of eight clients that come and go in
batches of three, two thirds of the work is for the batches. So a batch is answered first, and the loop looks at its
sockets for a few turns before it sends the next one, until as many wait as were answered: about what a client waits
longer, it waits less behind others. Where many wait already they go first, and the process has work while the answers
are written.

PURE.
"""

from __future__ import annotations

_TURNS = 3  # of the loop; a client of this machine is back in one or two
_LONGEST_NS = 300_000  # for all of them: other models may have much to do in each
_MANY = 4  # requests: sending their batch takes less time than each of them would wait for answers to be written


class Rejoining:
    """Decides for one model.

    Args:
        joins: whether its requests are joined into batches at all.

    Attributes:
        turns: of the loop, for which those who wait may still be left alone.
    """

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._size = 0  # of the batch that was answered last
        self.turns = 0
        self._until = 0

    def __repr__(self) -> str:
        return f"<Rejoining: {self.turns} turns left for {self._size} to come again>"

    def goes_first(self, waiting: int, size: int) -> bool:
        """Whether so many who wait are sent before a batch of that size is answered, which is done."""
        return not self._joins or waiting >= max(size, _MANY)

    def answered(self, size: int, now: int) -> None:
        """So many have been answered (ns)."""
        self._size, self.turns, self._until = size, _TURNS, now + _LONGEST_NS

    def waits(self, waiting: int, now: int) -> bool:
        """Whether those who wait now (ns) are left alone until the loop has looked at its sockets once more."""
        if not (self.turns and waiting):
            return False
        if waiting < self._size and now < self._until:
            self.turns -= 1
            return True
        self.turns = 0
        return False
