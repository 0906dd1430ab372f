"""What happens to one request, in its order, though a thread works out some of it. On the event loop.

An answer that takes long to write would keep everybody else waiting: a thread writes it, and what happens to its
request meanwhile (a further response, an error, the end) has to wait for that one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, TypeVar

from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_log = logging.getLogger("mme.request")
_WRITERS = ThreadPool("write", idle_seconds=0)


class InTurn:
    """The events of one request."""

    def __init__(self) -> None:
        self._behind: list[Callable[[], None]] | None = None  # while a thread works

    def waits(self, event: Callable[[], None]) -> bool:
        """Whether it is not this event's turn yet; when it may be, the event is called, and asks again."""
        if self._behind is None:
            return False
        self._behind.append(event)
        return True

    def work_out(self, work: Callable[[], T], done: Callable[[asyncio.Future[T]], None]) -> None:
        """Have a thread do the work, and hand its result or error to `done`. Only while nothing else is worked out."""
        self._behind = []
        asyncio.wrap_future(_WRITERS.submit(work)).add_done_callback(functools.partial(self._go_on, done))

    def _go_on(self, done: Callable[[asyncio.Future[T]], None], worked_out: asyncio.Future[T]) -> None:
        events: list[Callable[[], None]] = [functools.partial(done, worked_out), *(self._behind or ())]
        self._behind = None
        for event in events:
            try:  # each asks again: one before it may have something worked out as well
                event()
            except Exception:  # noqa: BLE001 - what comes behind it must come: the end of the answer is among that
                _log.exception("an answer could not be handed over")
