"""A request of a model that answers of its own accord: any number of responses, on any thread, in its own time.

The model's side of it is a `Responder`; each response is posted to the event loop, where the model's counters and the
client are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from serve.request import MOST_STEPS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from model_handlers.errors import MmeError
    from model_handlers.requests import ModelResponse
    from serve.request import Called, InferenceRequest

    Post = Callable[["OpenRequest", ModelResponse | MmeError | None, bool], None]

_AT_ONCE = 256  # responses in one turn of the loop


class OpenRequest:
    """One request from the start of its execution on. See `model_handlers.requests.Responder`.

    Attributes:
        request: the request.
        began_ns: `time.perf_counter_ns()` of the start; responded_ns: of the last response, or of the start.
        calls: those that its model made of other ones while it was open, of which the first are remembered.

    Args:
        post: takes each response and whether it is the last; called on any thread.
    """

    def __init__(self, request: InferenceRequest, post: Post) -> None:
        self.request = request
        self.began_ns = self.responded_ns = time.perf_counter_ns()
        self.calls: list[Called] | None = None
        self._post = post
        self._tell: list[Callable[[], None]] = []

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """One response, or the news that it was the last."""
        self._post(self, response, final)

    def called(self, call: Called) -> None:
        """Its model has called another one, on its behalf or on that of another of its batch. On the event loop."""
        if self.calls is None:
            self.calls = []
        if len(self.calls) < MOST_STEPS:
            self.calls.append(call)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self.request.cancelled

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when it leaves; at once if it has."""
        with _cancelling:
            self._tell.append(tell)
            self.request.on_cancel = self._cancelled
        if self.request.cancelled:
            self._cancelled()

    def _cancelled(self) -> None:
        with _cancelling:
            tell, self._tell = self._tell, []
        for each in tell:
            each()


_cancelling = threading.Lock()  # one for all: held for a moment, and rarely


class Posts:
    """Responses on their way from the threads of models to the event loop.

    Args:
        loop: the event loop.
        take: takes each there, in the order in which they were posted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Post) -> None:
        self._loop = loop
        self._take = take
        self._posted: deque[tuple[OpenRequest, ModelResponse | MmeError | None, bool]] = deque()
        self._told = False
        self._home = 0  # the thread of the loop, once it is known

    def post(self, opened: OpenRequest, response: ModelResponse | MmeError | None, final: bool) -> None:  # noqa: FBT001 - see Post
        """Take one. On any thread: one wake-up of the loop for all that is posted until it wakes.

        The loop itself posts no more in a turn than it can take in the next one.
        """
        self._posted.append((opened, response, final))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                if threading.get_ident() == self._home:
                    self._loop.call_soon(self._take_own)
                else:
                    self._loop.call_soon_threadsafe(self._take_some)

    def take_all(self) -> None:
        """Hand over what was posted before this call. On the loop."""
        self._hand_over(len(self._posted))

    def _take_own(self) -> None:
        self._told = False
        self.take_all()

    def _take_some(self) -> None:
        """A model that posts without end must not keep the loop from all others."""
        self._told = False
        self._home = threading.get_ident()
        self._hand_over(min(len(self._posted), _AT_ONCE))
        if self._posted and not self._told:
            self._told = True
            self._loop.call_soon(self._take_some)

    def _hand_over(self, count: int) -> None:
        while count and self._posted:
            self._take(*self._posted.popleft())
            count -= 1
