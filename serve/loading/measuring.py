"""What loading something into this process takes: of one load at a time, two at once could not be told apart.

But for a model whose code has another one loaded: what that takes is known by then, and left out. Runs on the threads
that load.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

from model_handlers.base import Footprint
from model_handlers.cancel_token import NEVER
from model_handlers.system import devices, heap
from model_handlers.system.priority import threads, usual_priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_handlers.cancel_token import CancelToken

R = TypeVar("R")


class Scales:
    """One a process: whatever loads into it takes turns here.

    Attributes:
        common: bytes of the host that frameworks take, which models share.
    """

    def __init__(self) -> None:
        self.common = 0
        self._lock = threading.Lock()
        self._under_way: list[Others] = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[Others]:
        """What others that are loaded meanwhile turn out to take."""
        others = Others()
        self._under_way.append(others)
        try:
            yield others
        finally:
            self._under_way.remove(others)

    def note(self, taken: Footprint) -> None:
        """Something takes that much of this process and of the GPUs: it is not of those whose loads are under way."""
        for others in self._under_way:
            others.take += taken

    def weigh(self, load: Callable[[], R], token: CancelToken = NEVER) -> tuple[R, Footprint]:
        """Call `load`; return what it does, and the bytes that it took: private ones on the host, anybody's on GPUs.

        Raises:
            MmeError: CANCELLED while it waited for its turn.
        """
        with self._turn(token):
            others = threads()
            before = _trimmed()
            loaded = load()
            _restore_priority(others)
            return loaded, _trimmed() - before

    @contextlib.contextmanager
    def _turn(self, token: CancelToken) -> Iterator[None]:
        def taken(seconds: float) -> threading.Lock | None:
            lock = self._lock  # another one, if who holds the first was overruled
            return lock if lock.acquire(timeout=seconds) else None

        lock = token.wait(taken)
        try:
            yield
        finally:
            lock.release()

    def overrule(self) -> None:
        """Whoever has its turn may never end it, or waits for another: others need not wait for it.

        What it takes meanwhile is counted as theirs.
        """
        self._lock = threading.Lock()


class Others:
    """What others take that were loaded during a load. Compared by identity.

    Attributes:
        take: that.
    """

    def __init__(self) -> None:
        self.take = Footprint()


def taken() -> Footprint:
    """Return the bytes that this process takes of the host, and all processes of the GPUs."""
    return Footprint(devices.private_memory(), devices.device_memory_used())


def _trimmed() -> Footprint:
    """See `taken`, without what loading took for a while."""
    heap.trim()
    return taken()


def _restore_priority(before: set[int]) -> None:
    """Threads that a framework started for the model inherited the loader's low priority; they do not execute at it.

    A framework's threads are not Python's; what Python started meanwhile are other loaders.
    """
    begun = threads() - before
    for thread in begun and begun - {thread.native_id for thread in threading.enumerate()}:
        usual_priority(thread)
