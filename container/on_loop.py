"""The way from any thread to the event loop that owns the engine, and back with an answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from container.infer_routes import InferRoutes

P = ParamSpec("P")
T = TypeVar("T")


class OnLoop:
    """Runs functions and coroutines on the loop for threads that wait for their results."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that touches the engine's state."""

        async def on_loop() -> T:
            return function(*args, **kwargs)

        return self.run(on_loop())

    def dispatch(self, routes: InferRoutes, exchange: WaitingExchange) -> None:
        """Have a hot route answer; `exchange.wait()` has the answer.

        Raises:
            MmeError: UNSUPPORTED when the route does not know the method.
        """
        if not self.call(routes.dispatch, exchange):
            raise MmeError(Kind.UNSUPPORTED, f"{exchange.method} is not a method of this route")


class WaitingExchange:
    """An exchange whose server is a thread that waits, as WSGI servers do. See `container.exchange.Exchange`."""

    def __init__(self, method: str, target: bytes, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.headers: Mapping[str, str] = headers
        self.body = body
        self.on_disconnect: Callable[[], None] | None = None
        self._answer: Future[tuple[int, bytes, bytes]] = Future()

    def respond(self, status: int, headers: bytes, body: Any) -> None:
        """Take the answer, on the loop."""
        self._answer.set_result((status, headers, b"".join(body)))

    def wait(self) -> tuple[int, bytes, bytes]:
        """Status, header lines and body, once they are there."""
        return self._answer.result()


class LoopThread:
    """A loop on a thread of its own, for servers that bring none."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="engine loop", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
