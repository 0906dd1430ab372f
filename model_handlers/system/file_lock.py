"""One at a time, among the threads of this process and among processes: a lock that dies with its holder.

The lock is the kernel's, on a file or a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_handlers.cancel_token import CancelToken

_CREATED = os.O_RDWR | os.O_CREAT


def take(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor that holds the lock of what lies at `path` until it is closed; None where another holds it."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):  # held, or removed by its holder after it was opened
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextlib.contextmanager
def locked(path: Path, token: CancelToken) -> Iterator[None]:
    """Hold the lock of the file `path`, which is there as long as the lock is held or waited for."""

    def taken(seconds: float) -> int | None:
        if (fd := take(path, _CREATED)) is None:
            time.sleep(seconds)
        return fd

    with _held(path, token.wait(taken)):
        yield


@contextlib.contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock of such a file if nothing else does; whether it is held."""
    fd = take(path, _CREATED)
    if fd is None:
        yield False
        return
    with _held(path, fd):
        yield True


@contextlib.contextmanager
def _held(path: Path, fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink()  # while it is held: what waits for this file finds it gone, and opens the next
        os.close(fd)
