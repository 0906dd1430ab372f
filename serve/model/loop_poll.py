"""Keeps the event loop awake for a moment where its next piece of work is likely to come at once. See `BusyPoll`.

The loop turns without waiting as long as a callback asks for the next turn; it looks at its sockets in each. It also
takes Python's lock in each, so it does not do so while threads of ours are at work: those that execute batches, and
those that load models.

On the event loop only.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from model_handlers.worker.policies import BusyPoll

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_now = time.perf_counter_ns
_HOLD_NS = 5_000_000  # after a thread of ours was given work, or brought it back


class LoopPoll:
    """Keeps one loop awake.

    Args:
        loop: the event loop.
        threads_work: whether threads have work that takes long.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads_work: Callable[[], bool]) -> None:
        self._loop = loop
        self._threads_work = threads_work
        self._poll = BusyPoll()
        self._until = 0
        self._held_until = 0
        self._awake = False
        self._turned = False  # since something was last expected

    def __repr__(self) -> str:
        return f"<LoopPoll {'awake' if self._awake else 'asleep'}, {self._poll!r}>"

    def expect(self) -> None:
        """Something has just been sent to which an answer, or the next request, may come at once."""
        if not BusyPoll.longest:
            return
        now = _now()
        if self._awake:
            if self._turned:  # else this is one of several things in one turn
                self._turned = False
                self._poll.caught()
                self._until = now + BusyPoll.longest
        elif now >= self._held_until and (longest := self._poll.begin()) and not self._threads_work():
            self._awake, self._turned, self._until = True, False, now + longest
            self._loop.call_soon(self._turn)

    def hold(self) -> None:
        """A thread needs Python's lock: leave it alone for a while."""
        self._held_until = _now() + _HOLD_NS
        self._until = 0

    def _turn(self) -> None:
        now = _now()
        if now < self._until:
            self._turned = True
            os.sched_yield()
            if not self._poll.lost(_now() - now):
                self._loop.call_soon(self._turn)
                return
        elif self._until:
            self._poll.missed()
        self._awake = False
