"""Freed pages of the heap are handed back to the system when models have left. On any thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from model_handlers.system import heap

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve.threads import ThreadPool

_SECONDS = 1.0


class HeapTrim:
    """Trims the heap at most once a second, for all models that left since: it takes milliseconds and malloc's locks.

    Args:
        threads: where the trim waits for its time that is for several of them.
        trim: does it.
        seconds: between two.
    """

    def __init__(self, threads: ThreadPool, trim: Callable[[], None] = heap.trim, seconds: float = _SECONDS) -> None:
        self._threads = threads
        self._trim = trim
        self._seconds = seconds
        self._lock = threading.Lock()
        self._due = 0.0  # when the next may be
        self._asked = False
        self._ended = threading.Event()

    def left(self) -> None:
        """A model was closed. Its pages are given back when this returns, or soon with those of others."""
        with self._lock:
            now = time.monotonic()
            if self._asked:
                return
            self._asked = waits = now < self._due
            if not waits:
                self._due = now + self._seconds
        if waits:
            self._threads.run(self._later)
        else:
            self._trim()

    def close(self) -> None:
        """Trim no more: what is freed goes with the process."""
        self._ended.set()

    def _later(self) -> None:
        if self._ended.wait(max(self._due - time.monotonic(), 0)):
            return
        with self._lock:
            self._asked = False
            self._due = time.monotonic() + self._seconds
        self._trim()
