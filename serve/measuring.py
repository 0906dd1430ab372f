"""What loading something into this process takes: of one load at a time, two at once could not be told apart.

Runs on the threads that load.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model_handlers import devices
from model_handlers.base import Footprint

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")
_THREADS = Path("/proc/self/task")


class Scales:
    """One a process: whatever loads into it takes turns here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def weigh(self, load: Callable[[], R]) -> tuple[R, Footprint]:
        """Call `load`; return what it does, and the bytes that it took: private ones on the host, anybody's on GPUs."""
        with self._lock:
            threads = _threads()
            before = _memory_taken()
            loaded = load()
            _restore_priority(threads)
            return loaded, _memory_taken() - before


def _memory_taken() -> Footprint:
    """By this process on the host, by anybody on the GPUs."""
    devices.trim_host_memory()  # what loading took for a while is not the model's
    return Footprint(devices.private_memory(), devices.device_memory_used())


def _threads() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()}


def _restore_priority(before: set[int]) -> None:
    """Threads that a framework started for the model inherited the loader's low priority; they do not execute at it.

    A framework's threads are not Python's; what Python started meanwhile are other loaders.
    """
    begun = _threads() - before
    for thread in begun - {thread.native_id for thread in threading.enumerate()}:
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, 0)
