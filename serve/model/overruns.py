"""Batches that execute in the serving process for longer than their model may: they are answered, and go on.

Nothing can end a thread that is inside a framework, so only those that wait are told. The lane takes its next batch
when the execution has ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from serve.model.signature import Batch


class Overruns:
    """The executions of one model that are under way on threads.

    Args:
        seconds: that one may take.
        loop: the event loop.
        late: told of a batch that takes longer, once, on the loop.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop, late: Callable[[Batch], None]) -> None:
        self._seconds = seconds
        self._loop = loop
        self._late = late
        self._under_way: dict[int, tuple[Batch, float]] = {}  # by the lane's number; single operations need no lock
        self._told: list[Batch] = []  # late, and still under way
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Overruns after {self._seconds:g} s: {len(self._under_way)} under way>"

    def watch(self, lane: int, batch: Batch) -> None:
        """An idle lane begins with a batch. On the loop."""
        self.begun(lane, batch)
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def begun(self, lane: int, batch: Batch) -> None:
        """A lane goes on with a batch, or with none. On its thread."""
        if batch:
            self._under_way[lane] = batch, time.monotonic()
        else:
            self._under_way.pop(lane, None)

    def _look(self) -> None:
        """Tell of those whose time is over. One timer looks for all lanes, as long as any executes."""
        self._timer = None
        now = time.monotonic()
        next_look = now + self._seconds
        told, self._told = self._told, []
        for batch, began in list(self._under_way.values()):
            if began + self._seconds > now:
                next_look = min(next_look, began + self._seconds)
                continue
            self._told.append(batch)
            if not any(batch is each for each in told):
                self._late(batch)
        if self._under_way:
            self._timer = self._loop.call_later(next_look - now, self._look)

    def close(self) -> None:
        """Look no more. On the loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
