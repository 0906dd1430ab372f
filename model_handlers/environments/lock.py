"""One at a time, among the threads of this process and among processes: a lock that dies with its holder.

The lock is the kernel's, on a file of its name, which is there only while somebody holds the lock or waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_POLL_SECONDS = 0.05


@contextlib.contextmanager
def locked(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock whose file is `path`. What `check`, called while it waits, raises ends the wait."""
    while True:
        with _opened(path) as fd:
            while not _taken(fd):
                check()
                time.sleep(_POLL_SECONDS)
            if _is(fd, path):
                try:
                    yield
                finally:
                    path.unlink()  # while it is held: who waits for this file finds it gone, and begins anew
                return


@contextlib.contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock if nobody else does; whether it is held."""
    with _opened(path) as fd:
        held = _taken(fd) and _is(fd, path)
        try:
            yield held
        finally:
            if held:
                path.unlink()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(fd: int, path: Path) -> bool:
    """Whether the file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
