"""So many at a time, in the order of asking; whoever waits for a turn may be told to go. On the event loop only."""

from __future__ import annotations

import asyncio
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
        try:
            yield
        finally:
            self._pass_on()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Somebody who has a turn waits for somebody else who needs one: meanwhile there is one more."""
        self._pass_on()
        try:
            yield
        finally:
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
