"""Looks at something now and then, off the way of requests. On the event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from model_handlers.system.threads import advised
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

R = TypeVar("R")

_log = logging.getLogger("mme.cache")


class Maintenance:
    """One look at a time, each at the earliest time that was asked for."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        look: Callable[[], Awaitable[None]],  # looks once
        # seconds until the next look, asked after each, failed ones too; None for none until `look_in`
        rests: Callable[[], float | None],
        initializer: Callable[[], None] = lambda: None,  # called on its thread first
    ) -> None:
        self.looking: asyncio.Task[None] | None = None
        self.closed = False
        self._name = name
        self._loop = loop
        self._look_once = look
        self._rests = rests
        self._thread = ThreadPool(name, initializer, most=1, keeps_one=True)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    @property
    def waits(self) -> bool:
        """Whether a next look is due."""
        return self._timer is not None

    def look_in(self, seconds: float) -> None:
        """Look then, if not earlier."""
        due = self._loop.time() + seconds
        if self.closed or (self._timer is not None and self._due <= due):
            return
        self._stop()
        self._due, self._timer = due, self._loop.call_at(due, self.look)

    def look(self) -> None:
        """Look now, unless a look is under way."""
        self._stop()
        if self.looking is None and not self.closed:
            self.looking = self._loop.create_task(self._look(), name=self._name)

    async def aside(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function on the thread."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        self.closed = True
        self._stop()
        if self.looking is not None:
            await asyncio.wait([self.looking])
        self._thread.shutdown(wait=True)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _look(self) -> None:
        try:
            await self._look_once()
        except OSError as error:  # for want of files or processes: the next look may find some
            _log.warning("%s: a look failed: %s", self._name, advised(error))
        except Exception:  # noqa: BLE001 - it is not awaited, and the next look is as good
            _log.exception("%s: a look failed", self._name)
        finally:
            self.looking = None
        seconds = self._rests()
        if seconds is not None:
            self.look_in(seconds)
