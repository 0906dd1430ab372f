"""What loading something into this process takes, and freed pages of the heap handed back when models have left.

Of one load at a time: two at once could not be told apart. A model whose code has another one loaded ends its turn:
what that one takes is known by then, and left out. On any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, TypeVar

from model_handlers.base import Footprint
from model_handlers.system import devices, memory
from model_handlers.system.priority import threads, usual_priority
from model_handlers.system.threads import NEVER
from serve.threads import FairSemaphore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_handlers.system.threads import CancelToken
    from serve.threads import ThreadPool, Turn


R = TypeVar("R")
_TRIM_SECONDS = 1.0


class Scales:
    """One a process: whatever loads into it has its turn first. Frameworks, which models share, take `common` bytes.

    A load has its turn before it is given a thread; frameworks, which are imported while models are prepared, and
    weights, which change over while models serve, have theirs on their threads.
    """

    def __init__(self) -> None:
        self.common = 0
        self.turns = FairSemaphore(1)
        self._under_way: list[Others] = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[Others]:
        """What other loads turn out to take meanwhile."""
        others = Others()
        self._under_way.append(others)
        try:
            yield others
        finally:
            self._under_way.remove(others)

    def note(self, taken: Footprint) -> None:
        """So much of this process and of the GPUs is not of those whose loads are under way."""
        for others in self._under_way:
            others.take += taken

    def weigh(self, load: Callable[[], R], token: CancelToken = NEVER) -> tuple[R, Footprint]:
        """`measured`, in a turn of its own.

        Raises:
            MmeError: CANCELLED while it waited for its turn.
        """
        turn = self.turns.ask()
        try:
            token.wait(lambda seconds: _has_come(turn, seconds) or None)
            return self.measured(load)
        finally:
            turn.end()

    def measured(self, load: Callable[[], R]) -> tuple[R, Footprint]:
        """Call `load`, which has its turn; return what it does, and the bytes that it took: see `taken`."""
        others = threads()
        before = _trimmed()
        loaded = load()
        _restore_priority(others)
        return loaded, _trimmed() - before


def _has_come(turn: Turn, seconds: float) -> bool:
    return turn.came in futures.wait([turn.came], seconds).done


class Others:
    """What others `take` that were loaded during a load. Compared by identity."""

    def __init__(self) -> None:
        self.take = Footprint()


def taken() -> Footprint:
    """The bytes that this process takes of the host, and all processes of the GPUs."""
    return Footprint(memory.private_memory(), devices.device_memory_used())


def _trimmed() -> Footprint:
    memory.trim()  # of what loading took for a while
    return taken()


def _restore_priority(before: set[int]) -> None:
    # Threads that a framework started for the model inherited the loader's low priority, at which they shall not
    # execute. They are not Python's; what Python started meanwhile are other loaders.
    begun = threads() - before
    for thread in begun and begun - {thread.native_id for thread in threading.enumerate()}:
        usual_priority(thread)


class HeapTrim:
    """Trims the heap at most once a second, for all that left since: it takes milliseconds and malloc's locks."""

    def __init__(
        self, threads: ThreadPool, trim: Callable[[], None] = memory.trim, seconds: float = _TRIM_SECONDS
    ) -> None:
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
        self._ended.set()

    def _later(self) -> None:
        if self._ended.wait(max(self._due - time.monotonic(), 0)):
            return
        with self._lock:
            self._asked = False
            self._due = time.monotonic() + self._seconds
        self._trim()
