"""Threads for work that may never come back.

A pool has so many threads, and a framework that hangs in one of them takes it for good. Loads are few and long, so
each has a thread of its own; how many run at once is decided by whoever asks.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class ThreadPerTask(Executor):
    """An executor that starts a thread for each piece of work.

    Args:
        name: what threads are called, with a number behind it.
        initializer: called on each thread first.
    """

    def __init__(self, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        self._names = (f"{name}_{number}" for number in itertools.count())
        self._initializer = initializer
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start it."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                self._initializer()
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - as executors do
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        with self._lock:
            if self._closed:
                raise RuntimeError("no work is taken on after the shutdown")
            thread = threading.Thread(target=run, name=next(self._names))
            self._threads.add(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the interface
        """Take nothing on any more; wait for what is under way."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for thread in threads if wait else ():
            thread.join()
