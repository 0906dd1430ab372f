"""Models that have requests to hand out, and that do so when what runs on the event loop now has ended.

A model that hands out batches may answer them at once, and an answer may be the request of another model, as in an
ensemble. That one's turn comes right behind, in the same turn of the loop: requests that are on their way through the
same steps stay together, as one batch, and the loop does not look at its sockets in between. On the event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_now = time.perf_counter_ns
_LONGEST_NS = 500_000  # then the loop looks at its sockets, however many models there are


class Dispatches:
    """Those of the models of one loop that wait for their turn, in the order in which they asked for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._asked = False

    def __repr__(self) -> str:
        return f"<Dispatches: {len(self._waiting)} waiting>"

    def ask(self, dispatch: Callable[[], None]) -> None:
        """Have it called soon."""
        self._waiting.append(dispatch)
        if not self._asked:
            self._asked = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        waiting, until = self._waiting, _now() + _LONGEST_NS
        try:
            while waiting:
                waiting.popleft()()
                if _now() > until:
                    break
        finally:  # though one has raised, which is the loop's to tell, the others have their turn
            self._asked = bool(waiting)
            if waiting:
                self._loop.call_soon(self._run)
