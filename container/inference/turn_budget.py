"""What connections may do in one turn of the event loop, so that none keeps the loop from the others.

Heads, frame headers and chunk sizes cost time; a byte of a body costs one part in `BODY` of that. One integer counts
them for all connections together, and the clock is read once for each `STEP` of them. A connection that has spent
its budget stops reading and waits; those that wait go on in later turns, in their order, before anything else is read.

Runs on the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """What one connection has spent.

    Attributes:
        turn: the number of that in which it was last seen.
        ends: when its time in that turn is over.
        heads: bytes of heads, in that turn.
        rested: whether it had nothing to do in the turns before.
    """

    def __init__(self) -> None:
        self.turn = -_RESTED
        self.ends = 0.0
        self.heads = 0
        self.rested = True


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
