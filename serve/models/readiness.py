"""Whether a model in memory says that it is ready, where its code has a say in that. On the event loop.

All of its instances are asked at the same time, and all have to say so. Who asks while an instance still thinks about
it waits for that answer, so that a model which hangs is asked once, however often it is probed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_handlers.base import Handler

_log = logging.getLogger("mme.model")
_SECONDS = 5.0  # as in Triton


class Readiness:
    """Of one version of a model.

    Args:
        name: the model's.
        handlers: of its instances; those that tell are asked.
        loop: the event loop.
    """

    def __init__(self, name: str, handlers: Iterable[Handler], loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._handlers = [handler for handler in handlers if handler.tells_ready]
        self._loop = loop
        self._asked: dict[Handler, asyncio.Future[bool]] = {}

    async def told(self) -> bool:
        """Whether all instances say so within five seconds; True where none has a say."""
        if not self._handlers:
            return True
        answers, late = await asyncio.wait(map(self._answer, self._handlers), timeout=_SECONDS)
        if late:
            what = f"model '{self._name}': is_ready has not answered within {_SECONDS:.0f} s"
            _log.warning(what, extra={"target_model": self._name})
        return not late and all(answer.result() for answer in answers)

    def _answer(self, handler: Handler) -> asyncio.Future[bool]:
        answer = self._asked.get(handler)
        if answer is None:
            answer = self._loop.create_future()
            handler.ask_ready(functools.partial(self._told, answer))
            self._asked[handler] = answer
            answer.add_done_callback(lambda _: self._asked.pop(handler))
        return answer

    def _told(self, answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - see Handler.ask_ready
        """On any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_resolve, answer, ready)


def _resolve(answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - as above
    if not answer.done():
        answer.set_result(ready)
