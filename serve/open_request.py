"""A request of a model that answers of its own accord: any number of responses, on any thread, in its own time.

The model's side of it is a `Responder`; each response is posted to the event loop, where the model's counters and the
client are.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.base import ModelResponse
    from model_handlers.errors import MmeError
    from serve.request import InferenceRequest

    Post = Callable[["OpenRequest", ModelResponse | MmeError | None, bool], None]


class OpenRequest:
    """One request from the start of its execution on. See `model_handlers.base.Responder`.

    Attributes:
        request: the request.
        began_ns: `time.perf_counter_ns()` of the start.

    Args:
        post: takes each response and whether it is the last; called on any thread.
    """

    __slots__ = ("_post", "_tell", "began_ns", "request")

    def __init__(self, request: InferenceRequest, post: Post) -> None:
        self.request = request
        self.began_ns = time.perf_counter_ns()
        self._post = post
        self._tell: list[Callable[[], None]] = []

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """One response, or the news that it was the last."""
        self._post(self, response, final)

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
