"""The event loop that an engine lives on: a thread of its own, or the caller's."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from model_handlers.errors import Kind, MmeError
from serve.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from serve.engine_options import EngineOptions
    from serve.request import InferenceRequest

T = TypeVar("T")


class Runner:
    """An engine and its event loop, called from any thread.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Run on that loop, or without one on a thread of its own."""
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._identity = threading.get_ident()
        self._gate = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        if loop is None:
            loop = uvloop.new_event_loop()
            # A daemon: at the end of an interpreter that closed no server, atexit does.
            self._thread = threading.Thread(target=self._run, args=(loop,), name="mme", daemon=True)
            self._thread.start()
            self._identity = self._thread.ident or 0
        self.loop = loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def open(self, options: EngineOptions) -> None:
        """Make the engine. On the loop."""
        self._engine = Engine(options, self.loop)

    @property
    def engine(self) -> Engine:
        """The engine, which lives on the loop."""
        if self._engine is None:
            raise _closed()
        return self._engine

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine returns, from any other thread."""
        self._check_thread()
        with self._gate:
            self._check_open()
            running = asyncio.run_coroutine_threadsafe(make(), self.loop)
        try:
            return running.result()
        except BaseException:  # an interrupt
            running.cancel()
            raise

    async def call_async(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine returns, on any loop."""
        if asyncio.get_running_loop() is self.loop:
            self._check_open()
            return await make()
        with self._gate:
            self._check_open()
            running = asyncio.run_coroutine_threadsafe(make(), self.loop)
        return await asyncio.wrap_future(running)

    def submit(self, name: str, version: int | None, request: InferenceRequest, *, waits: bool = True) -> None:
        """Have a request answered; `waits` says that its caller blocks until then."""
        if threading.get_ident() == self._identity:
            if waits:
                self._check_thread()
            self._check_open()
            self._begin(name, version, request)
            return
        with self._gate:
            self._check_open()
            self.loop.call_soon_threadsafe(self._begin, name, version, request)

    def cancel(self, request: InferenceRequest) -> None:
        """Cancel a request, from any thread."""
        with self._gate:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(request.cancel)

    def _begin(self, name: str, version: int | None, request: InferenceRequest) -> None:
        try:
            engine = self.engine
            known = engine.registry.canonical(name)
            if not engine.submit(known, version, request):
                task = self.loop.create_task(self._begin_cold(known, version, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            _fail(request, error)

    async def _begin_cold(self, name: str, version: int | None, request: InferenceRequest) -> None:
        try:
            await self.engine.submit_cold(name, version, request)
        except asyncio.CancelledError:
            _fail(request, _closed())
            raise
        except Exception as error:  # noqa: BLE001 - as above
            _fail(request, error)

    # -- the end -------------------------------------------------------------------------------------------------

    async def shut(self) -> None:
        """Refuse further calls, let those under way end, and close the engine. On the loop."""
        with self._gate:
            closed, self._closed = self._closed, True
        if not closed and self._engine is not None:
            await self._engine.close()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Shut the engine down, and end the thread. From any other thread."""
        self._check_thread()
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            asyncio.run_coroutine_threadsafe(self.shut(), self.loop).result()
        finally:
            with self._gate:
                self._closed = True
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _check_thread(self) -> None:
        if threading.get_ident() == self._identity:
            raise RuntimeError(
                "this call would wait for the event loop that it is made on: await the form that ends in _async"
            )


def _closed() -> MmeError:
    return MmeError(Kind.UNAVAILABLE, "the server is closed")


def _fail(request: InferenceRequest, error: Exception) -> None:
    known = error if isinstance(error, MmeError) else MmeError(Kind.INTERNAL, f"{type(error).__name__}: {error}")
    request.resolve(known)
