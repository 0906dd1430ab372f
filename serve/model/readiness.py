"""Whether a model in memory is ready: no instance is down, and its code says so if it has a say. On the loop.

All instances are asked at the same time. While one still thinks about it, further questions wait for the same answer,
so that a model which hangs is asked once, however often it is probed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from model_handlers.base import LoadedModel
    from serve.model.executor import Executors

_log = logging.getLogger("mme.model")
_SECONDS = 5.0  # as in Triton


class Readiness:
    """Of one version of a model, whose handlers may change."""

    def __init__(self, name: str, executors: Executors, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._executors = executors
        self._loop = loop
        self._asked: dict[LoadedModel, asyncio.Future[bool]] = {}

    def is_down(self) -> bool:
        return self._executors.is_down()

    async def told(self) -> bool:
        """Whether none is down, and all that have a say say so within five seconds."""
        if self.is_down():
            return False
        asked = [self._answer(handler) for handler in self._executors.handlers if handler.tells_ready]
        if not asked:
            return True
        answers, late = await asyncio.wait(asked, timeout=_SECONDS)
        if late:
            what = f"model '{self._name}': is_ready has not answered within {_SECONDS:.0f} s"
            _log.warning(what, extra={"target_model": self._name})
        return not late and all(answer.result() for answer in answers)

    def _answer(self, handler: LoadedModel) -> asyncio.Future[bool]:
        answer = self._asked.get(handler)
        if answer is None:
            answer = self._loop.create_future()
            handler.ask_ready(functools.partial(self._told, answer))
            self._asked[handler] = answer
            answer.add_done_callback(lambda _: self._asked.pop(handler))
        return answer

    def _told(self, answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - see LoadedModel.ask_ready
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_resolve, answer, ready)


class JointReadiness:
    """Of one version of an ensemble: that of the models of its steps, as far as those are in memory."""

    def __init__(self, steps: Callable[[], Iterable[Readiness | JointReadiness]]) -> None:
        self._steps = steps

    def is_down(self) -> bool:
        return any(step.is_down() for step in self._steps())

    async def told(self) -> bool:
        each = dict.fromkeys(self._steps())  # a model may have several
        return all(await asyncio.gather(*(step.told() for step in each)))


def _resolve(answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - as above
    if not answer.done():
        answer.set_result(ready)
