"""Threads for work that may never come back, pools that a full system does not stop, threads started for the loop.

A pool has so many threads, and a framework that hangs in one of them takes it for good. Loads are few and long, so
each has a thread of its own; how many run at once is decided by whoever asks.

`Thread.start` waits until the new thread runs, which takes milliseconds where the processors are busy: nothing for an
event loop. So it leaves that to a thread which does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar, cast

from model_handlers.errors import MmeError
from model_handlers.system_limits import no_room_for, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("mme.threads")
_AGAIN_SECONDS = 0.1  # until a thread is tried again for which the system had no room
LOAD_PATIENCE_SECONDS = 10.0  # that a load waits for its thread


def _nothing() -> None:
    """No work, and no preparation."""


class _Asked(NamedTuple):
    """A thread to be started, and who is told when there is no room for it by that time of the monotonic clock."""

    thread: threading.Thread
    refused: Callable[[MmeError], None]
    until: float


class ThreadStarter:
    """Starts threads for those who can't wait until they run. They get the priority of the first who asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._running = False

    def start(
        self,
        thread: threading.Thread,
        refused: Callable[[MmeError], None] = lambda _: None,
        patience: float = math.inf,
    ) -> None:
        """Have a thread started, soon.

        Args:
            thread: it.
            refused: told why, on another thread, once it was tried for so many seconds; it is not started any more.
            patience: those seconds.

        Raises:
            RuntimeError: the system has no room even for the one that starts threads; nothing was asked for then.
        """
        if not self._running:
            with self._lock:
                if not self._running:
                    threading.Thread(target=self._main, name="starter", daemon=True).start()
                    self._running = True
        self._asked.put(_Asked(thread, refused, time.monotonic() + patience))

    def _main(self) -> None:
        full = False
        while True:
            asked = self._asked.get()
            full = self._is_full_for(asked, full)
            del asked  # which knows what is to come of the work

    def _is_full_for(self, asked: _Asked, before: bool) -> bool:  # noqa: FBT001 - as it was for the one before
        """Whether the system has no room for a thread, which is tried again then or refused; else it is started."""
        try:
            start_thread(asked.thread)
        except MmeError as error:  # some of those that there are will end
            if not before:
                _log.warning("%s; it is tried again until there is room for it", error)
            if time.monotonic() > asked.until:
                asked.refused(error)
            else:
                time.sleep(_AGAIN_SECONDS)
                self._asked.put(asked)
            return True
        return False


STARTER = ThreadStarter()


async def on_daemon(name: str, function: Callable[[], R]) -> R:
    """What a function returns that asks somebody who may never answer, and changes nothing.

    Its thread keeps nobody from ending: neither the loop, nor the process.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[R] = loop.create_future()

    def tell(result: R | None, error: BaseException | None) -> None:
        if answer.done():  # who asked has left
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("R", result))

    def run() -> None:
        result: R | None = None
        problem: BaseException | None = None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, problem)

    STARTER.start(threading.Thread(target=run, name=name, daemon=True))
    return await answer


class SteadyPool(ThreadPoolExecutor):
    """A pool whose work waits for one of its threads where the system has no room for another.

    One is there from the beginning: what makes room could not be done for want of room else.

    Args:
        threads: so many at most.
        name: what they are called, with a number behind it.
        initializer: called on each first.

    Raises:
        MmeError: UNAVAILABLE, there is no room for the first one.
    """

    def __init__(self, threads: int, name: str, initializer: Callable[[], None] = _nothing) -> None:
        self._behind = 0  # pieces of work that had to do without a thread more
        super().__init__(threads, name, initializer)
        self.submit(_nothing)

    def _adjust_thread_count(self) -> None:
        while self._behind and self._idle_semaphore.acquire(blocking=False):  # one that only seems to be idle
            self._behind -= 1
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:  # the work is queued by now
            if not self._threads:
                raise no_room_for(f"{self._thread_name_prefix}_0") from error
            self._behind += 1


class ThreadPerTask(Executor):
    """An executor that starts a thread for each piece of work.

    Args:
        name: what threads are called, with a number behind it.
        initializer: called on each thread first.
        patience: seconds that work waits for a thread for which the system has no room; then that is its error.
    """

    def __init__(self, name: str, initializer: Callable[[], None] = _nothing, *, patience: float = math.inf) -> None:
        self._names = (f"{name}_{number}" for number in itertools.count())
        self._initializer = initializer
        self._patience = patience
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, threading.Event] = {}  # one that is not started can't be joined
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have it started."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        ended = threading.Event()

        def run(future: Future[R]) -> None:
            try:
                self._initializer()
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - as executors do
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                del future  # whose error knows this frame: they, and the arguments, would wait for the collector
                over(threading.current_thread())

        def over(thread: threading.Thread) -> None:
            with self._lock:
                del self._threads[thread]
            ended.set()

        def refused(error: MmeError) -> None:
            future.set_exception(error)
            over(thread)

        with self._lock:
            if self._closed:
                raise RuntimeError("no work is taken on after the shutdown")
            thread = threading.Thread(target=run, args=(future,), name=next(self._names))
            STARTER.start(thread, refused, self._patience)  # which ends no sooner than this lock is free
            self._threads[thread] = ended
        return future

    def works(self) -> bool:
        """Whether anything is under way."""
        return bool(self._threads)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the interface
        """Take nothing on any more; wait for what is under way."""
        with self._lock:
            self._closed = True
            threads = list(self._threads.items())
        for thread, ended in threads if wait else ():
            ended.wait()
            if thread.ident is not None:  # else it was never begun
                thread.join()
