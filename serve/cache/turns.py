"""So many at a time, in the order of asking; whoever waits for a turn may be told to go. On the event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Turns:
    """Turns at something that takes long.

    Args:
        count: how many at a time.
    """

    def __init__(self, count: int) -> None:
        self._free = count  # below 0 while more are had than there are, see `lent`
        self._waiting: dict[object, asyncio.Future[None]] = {}  # by who asked, the first of them first
        self._having: set[object] = set()
        self._lent: Counter[object] = Counter()  # for how many others, by who has it

    def __repr__(self) -> str:
        return f"<Turns: {self._free} free, {len(self._waiting)} waiting>"

    @asynccontextmanager
    async def taken(self, name: object) -> AsyncIterator[None]:
        """Have a turn, once there is one. `name` says for whom, who has or waits for no other.

        Raises:
            MmeError: what `refuse` said meanwhile.
        """
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait(name)
        self._having.add(name)
        try:
            yield
        finally:
            self._having.discard(name)
            self._pass_on()

    @contextmanager
    def lent(self, name: object) -> Iterator[bool]:
        """If `name` has a turn, which this tells, it waits for others: meanwhile there is one more, for all of them."""
        if name not in self._having:
            yield False
            return
        self._lent[name] += 1
        if self._lent[name] == 1:
            self._pass_on()
        try:
            yield True
        finally:
            self._lent[name] -= 1
            if not self._lent[name]:
                del self._lent[name]
                self._free -= 1  # the next that ends is the one that was lent

    def refuse(self, name: object, error: Exception) -> None:
        """Whoever waits under this name, if anybody does, is not to wait any longer."""
        turn = self._waiting.get(name)
        if turn is not None and not turn.done():
            turn.set_exception(error)

    async def _wait(self, name: object) -> None:
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # it came in the very moment the wait was cancelled
            raise
        finally:
            del self._waiting[name]

    def _pass_on(self) -> None:
        if self._free < 0:
            self._free += 1
            return
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
