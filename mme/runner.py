"""The event loop that an engine lives on: a thread of its own, or the caller's."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from model_handlers.errors import Kind, MmeError, known
from serve.engine import Engine
from serve.threads import STARTER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from serve.options import EngineOptions
    from serve.request import InferenceRequest

T = TypeVar("T")

_CLOSED = "the server is closed"
_ONE_TASK_NS = 500_000  # that requests of one task execute before the loop looks at its sockets


class Runner:
    """An engine and its event loop, called from any thread.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Run on that loop, or without one on a thread of its own."""
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # its loop is closed
        self._identity = threading.get_ident()
        self._gate = threading.Lock()  # no call comes between the last look at `_closed` and the end of the loop
        self._closed = False
        self._end: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last_asker = 0  # the thread, or on the loop the task, that asked last, and
        self._last_until = 0  # when the task's time is over
        if loop is None:
            loop = uvloop.new_event_loop()
            # A daemon: at the end of an interpreter that closed no server, atexit does.
            self._thread = threading.Thread(target=self._run, args=(loop,), name="mme", daemon=True)
            self._thread.start()
            self._identity = self._thread.ident or 0
        self.loop = loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.get_loop().run_forever()
        finally:
            self._over.set()

    def open(self, options: EngineOptions) -> None:
        """Make the engine. On the loop."""
        self._engine = Engine(options, self.loop)

    @property
    def engine(self) -> Engine:
        """The engine, which lives on the loop."""
        if self._engine is None:
            raise MmeError(Kind.UNAVAILABLE, _CLOSED)
        return self._engine

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine returns, from any other thread."""
        self._check_thread()
        running = self.send(make)
        try:
            return running.result()
        finally:
            running.cancel()  # an interrupt

    def send(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Have the loop run a coroutine; what it returns."""
        with self._gate:
            self._check_open()
            return asyncio.run_coroutine_threadsafe(self._unless_closed(make), self.loop)

    async def _unless_closed(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine returns in a task of its own, which does not outlive the engine."""
        self._check_open()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it is a coroutine
        self._tasks.add(task)
        try:
            return await make()
        except MmeError as error:
            raise own(error) from None
        except asyncio.CancelledError:
            self._check_open()
            raise
        finally:
            self._tasks.discard(task)

    def submit(
        self, name: str, version: int | None, request: InferenceRequest, *, waits: bool = False, task: bool = False
    ) -> None:
        """Have a request answered; `waits` says that its caller blocks until then, `task` that it is a task's.

        A request of the thread that asked last, and waits, or of the task that did, has no company to wait for: it is
        executed at once. But the loop has its turn between those of one task.
        """
        if self._is_here():
            if waits:
                self._check_thread()
            self._check_open()
            self._begin(name, version, request, task and self._is_task_alone())
            return
        asker = threading.get_ident()
        with self._gate:
            self._check_open()
            at_once, self._last_asker = waits and asker == self._last_asker, asker
            self.loop.call_soon_threadsafe(self._begin, name, version, request, at_once)

    def cancel(self, request: InferenceRequest) -> None:
        """Cancel a request, from any thread, and in the middle of anything: streams that nothing reads end that way."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(request.cancel)

    def _is_task_alone(self) -> bool:
        asker, now = id(asyncio.current_task(self.loop)), time.perf_counter_ns()
        if asker == self._last_asker and now < self._last_until:
            return True
        self._last_asker, self._last_until = asker, now + _ONE_TASK_NS
        return False

    def _begin(self, name: str, version: int | None, request: InferenceRequest, at_once: bool) -> None:  # noqa: FBT001 - each request's way
        try:
            self._check_open()
            name = self.engine.registry.canonical(name)
            if not self.engine.submit(name, version, request, at_once=at_once):
                # which the loop keeps until it begins, and `_tasks` from then on
                self.loop.create_task(self._begin_cold(name, version, request))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            request.resolve(known(error))

    async def _begin_cold(self, name: str, version: int | None, request: InferenceRequest) -> None:
        try:
            await self._unless_closed(lambda: self.engine.submit_cold(name, version, request))
        except Exception as error:  # noqa: BLE001 - as above
            request.resolve(known(error))

    async def shut(self) -> None:
        """Refuse further calls, let those under way end, and close the engine, once however often it is called."""
        await asyncio.shield(self._ended())

    def stop(self) -> None:
        """As `shut`, and end the thread. From any other thread."""
        self._check_thread()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._ended)
            self._over.wait()  # `join` takes the thread for ended where an interrupt cuts it short
            self._thread.join()
        elif self.loop.is_running():
            asyncio.run_coroutine_threadsafe(self.shut(), self.loop).result()

    def _ended(self) -> asyncio.Task[None]:
        if self._end is None:
            with self._gate:
                self._closed = True
            self._end = self.loop.create_task(self._shut())
        return self._end

    async def _shut(self) -> None:
        try:
            if self._engine is not None:
                await self._engine.close()
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
        finally:
            if self._thread is not None:
                self.loop.stop()

    @property
    def is_open(self) -> bool:
        """Whether it takes calls."""
        return not (self._closed or self.loop.is_closed())

    def _check_open(self) -> None:
        if not self.is_open:
            raise MmeError(Kind.UNAVAILABLE, _CLOSED)

    def _is_here(self) -> bool:
        """Whether this is the thread of the loop."""
        check_not_forked()
        return threading.get_ident() == self._identity

    def _check_thread(self) -> None:
        if self._is_here() and not self.loop.is_closed():
            what = "this call would wait for the event loop that it is made on: await the form that ends in _async"
            raise RuntimeError(what)


def check_not_forked() -> None:
    """Refuse a process that was forked from one with a server, whose threads are not here: it can have none."""
    if STARTER.is_copy:
        raise MmeError(Kind.UNAVAILABLE, "the server is in the process that this one was forked from: `spawn` this one")


def own(error: MmeError) -> MmeError:
    """The error as one of the caller's own, whose name for a budget is the argument's: all of a batch share it."""
    message = re.sub(r"\bMME_((?:GPU_)?MEMORY_BUDGET)\b", lambda found: found[1].lower(), error.message)
    other = MmeError(error.kind, message, error.said)
    other.version, other.parts = error.version, error.parts
    return other
