"""The way from any thread to the event loop that owns the engine, and back with an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from container.control.targets import shown
from container.http1.limits import Limits
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from container.inference.http import InferRoutes

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("mme.http")
_MOST_UNSENT = Limits().stream_buffer


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
    """An exchange whose server is a thread that waits, as WSGI servers do. See `exchange.Exchange`."""

    def __init__(self, method: str, target: bytes, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.headers: Mapping[str, str] = headers
        self.body = body
        self.on_disconnect: Callable[[], None] | None = None
        self._answer: Future[tuple[int, bytes, bytes | Parts]] = Future()
        self._parts: Parts | None = None  # while a streamed answer is under way

    # for the loop

    def hold(self, _size: int) -> bool:
        """Count nothing: its server has bounds of its own."""
        return True

    def respond(self, status: int, headers: bytes, body: Any) -> None:
        """Take the answer."""
        self._take(status, headers, b"".join(body))

    def begin(self, status: int, headers: bytes) -> None:
        """Take the beginning of an answer."""
        parts = Parts(asyncio.get_running_loop(), self._leave)
        self._take(status, headers, parts)
        self._parts = parts

    def write(self, data: bytes | memoryview) -> None:
        """Take a part, and no more from a client that reads too slowly: it is cut off, as our own server does it."""
        parts = self._under_way()
        unsent = parts.unsent
        if unsent <= _MOST_UNSENT:
            parts.put(data)
            return
        _log.warning(
            "%s %r is cut off: its client has left %d bytes of the answer unread", self.method, self.target, unsent
        )
        parts.drop(self._cut_off())
        asyncio.get_running_loop().call_soon(self._leave)

    def end(self) -> None:
        """Take no more."""
        self._under_way().finish(None)
        self._parts = None

    def cut(self) -> None:
        """Have the iteration raise: the WSGI server then closes the connection, whose client knows."""
        self._under_way().finish(self._cut_off())
        self._parts = None

    @property
    def answered(self) -> bool:
        """Whether there is an answer, or the beginning of one."""
        return self._answer.done()

    @property
    def unsent(self) -> int:
        """Bytes of parts that the thread has not sent yet."""
        return 0 if self._parts is None else self._parts.unsent

    def _take(self, status: int, headers: bytes, body: bytes | Parts) -> None:
        if self.answered:
            raise RuntimeError(f"{self.method} {self.target!r} has been answered before: answer exactly once")
        self._answer.set_result((status, headers, body))

    def _cut_off(self) -> MmeError:
        sentence = f"the answer to {self.method} {shown(self.target)} can't be finished and was cut"
        return MmeError(Kind.EXECUTION_FAILED, sentence)

    def _under_way(self) -> Parts:
        if self._parts is None:
            raise RuntimeError(f"{self.method} {self.target!r} has no answer under way: begin, write, then end or cut")
        return self._parts

    def _leave(self) -> None:
        """The thread wants no more parts, because its client has left."""
        if self._parts is not None and self.on_disconnect is not None:
            leaves, self.on_disconnect = self.on_disconnect, None
            leaves()

    # for the thread

    def wait(self) -> tuple[int, bytes, bytes | Parts]:
        """Status, header lines and body, once they are there; of a streamed answer once it has begun."""
        return self._answer.result()


class Parts:
    """The body of a streamed answer, part by part as they come. The loop puts them in; a thread iterates, then closes.

    Args:
        loop: where the answer is made.
        leave: called there when the thread closes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
        self._loop = loop
        self._leave = leave
        self._queue: SimpleQueue[bytes | memoryview | MmeError | None] = SimpleQueue()
        self._closed = False
        self._dropped = False
        # Each is written by one side alone, so no lock is needed.
        self._put = 0  # bytes, by the loop
        self._sent = 0  # bytes, by the thread: who asks for a part has sent the one before
        self._sending = 0

    # for the loop

    def put(self, data: bytes | memoryview) -> None:
        """One part; an empty one is none."""
        size = memoryview(data).nbytes
        if size and not self._closed and not self._dropped:
            self._put += size
            self._queue.put(data)

    def finish(self, error: MmeError | None) -> None:
        """No more parts; with an error, because they are not all."""
        self._queue.put(error)

    def drop(self, error: MmeError) -> None:
        """Have the thread raise next, and forget what it has not sent."""
        self._dropped = True
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        self.finish(error)

    @property
    def unsent(self) -> int:
        """Bytes that were put in and not sent; 0 after `close` and `drop`."""
        return 0 if self._closed or self._dropped else self._put - self._sent

    # for the thread

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._sent += self._sending
        self._sending = 0
        part = None if self._closed else self._queue.get()
        if part is None:
            self._closed = True
            raise StopIteration
        if isinstance(part, MmeError):
            self._closed = True
            raise part
        self._sending = memoryview(part).nbytes
        return bytes(part)

    def close(self) -> None:
        """Want no more, whether or not all have come."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._leave)


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
