"""What is asked of disks wherever files are written: folders of our own, lasting names, errors that say what to do.

Synchronous; runs on load threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory
from model_handlers.system.threads import advised

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

# What is another when a file is: device, inode, size, time of the last change in nanoseconds.
FileIdentity = tuple[int, ...]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


def own_directory(directory: Path) -> None:
    """Make a directory that only we can read, or take over our own.

    In a folder where every user may write, as /tmp, another could have made it first and put models there.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared = directory.parent.stat().st_mode & stat.S_IWOTH
    if shared and directory.stat().st_uid != os.geteuid():
        raise invalid_argument(f"{directory} belongs to another user: set MME_CACHE_DIR to a directory of your own")


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory survive a crash, as fsync of a file does for its bytes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_disk_of(directory: Path) -> None:
    """Make everything on that disk survive a crash: for folders of so many files that each by itself takes too long."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)


def identity_of(status: os.stat_result) -> FileIdentity:
    """What to remember a file by; links to it and permissions may change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def state_of(status: os.stat_result) -> FileIdentity:
    """The same, and another after everything that is done to the file: a write shows whatever times were set."""
    return *identity_of(status), status.st_ctime_ns


def directory_size(path: Path) -> int:
    """Bytes of the regular files below."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place at the end, readable for all, or goes."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        draft.chmod(0o644)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """The one place where what the disk says becomes an error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise out_of_memory(
                f"{what}: the disk is full; free some of it or give the directory a larger one"
            ) from error
        if error.errno in _NO_FILES:  # which says nothing of the disk
            raise MmeError(Kind.UNAVAILABLE, f"{what}: {advised(error)}") from error
        raise MmeError(Kind.INTERNAL, f"{what}: {error}; check the directory and its permissions") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of `disk_errors` says that the disk is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DISK_FULL
