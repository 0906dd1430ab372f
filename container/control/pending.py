"""Views that wait for the engine without keeping a thread.

A view that has to wait is a generator: it yields a coroutine, and goes on with the result. What comes before that and
what follows run on threads, each within a request of Flask's; in between our own server has the event loop alone. A
thread of any other server waits.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from flask import Response, request

if TYPE_CHECKING:
    from container.control.on_loop import OnLoop
    from container.control.views import View

SLOT = "mme.pending"  # in the WSGI environment of our own server: what goes on, None at the beginning
Steps = Generator[Coroutine[Any, Any, Any], Any, Response]


class Pending:
    """An answer that is not there yet.

    Args:
        steps: what makes it.

    Attributes:
        work: what it waits for, None while a thread has it.
    """

    def __init__(self, steps: Steps) -> None:
        self.work: Coroutine[Any, Any, Any] | None = None
        self._steps = steps
        self._result: Any = None
        self._error: BaseException | None = None

    async def wait(self) -> None:
        """Wait for what it waits for; on the loop."""
        work, self.work = self.work, None
        assert work is not None  # noqa: S101 - it waits
        try:
            self._result = await work
        except asyncio.CancelledError:
            self._error = CancelledError()  # an error like any, to its thread
        except Exception as error:  # noqa: BLE001 - the view's to tell
            self._error = error

    def go_on(self) -> Response | None:
        """Return the answer, or None where it has to wait; raises what the view does."""
        result, error = self._result, self._error
        self._result = self._error = None
        try:
            self.work = self._steps.throw(error) if error is not None else self._steps.send(result)
        except StopIteration as end:
            response: Response = end.value
            return response
        return None


def waiting(on_loop: OnLoop, view: Callable[..., Steps]) -> View:
    """Return the view that does what a generator does, and waits for what it yields."""

    @functools.wraps(view)
    def answer(**names: str) -> Response:
        ours = SLOT in request.environ
        pending = request.environ.get(SLOT) or Pending(view(**names))
        while (response := pending.go_on()) is None:
            if ours:
                request.environ[SLOT] = pending
                return Response()  # which is no answer, see `container.control.wsgi`
            on_loop.run(pending.wait())
        return response

    return answer
