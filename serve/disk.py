"""What the disk tier does to directories: stage them, make them durable, measure them, and name what went wrong.

A staging directory is one that nobody may take for finished. Its owner holds a lock on it that dies with the process,
so that the next run can tell what a crash left from what a live process still writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

_STAGING_PREFIX = ".staging-"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def own_directory(directory: Path) -> None:
    """Make a directory that only we can read, or take over our own.

    In a folder where everybody may write, as /tmp, somebody else could have made it first and put their models there.

    Raises:
        MmeError: INVALID_ARGUMENT when that happened.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared = directory.parent.stat().st_mode & stat.S_IWOTH
    if shared and directory.stat().st_uid != os.geteuid():
        raise invalid_argument(f"{directory} belongs to another user: set MME_CACHE_DIR to a directory of your own")


def remove_staging(directory: Path) -> None:
    """Remove what runs that ended in the middle left in `directory`; what a live process unpacks stays."""
    for path in directory.glob(f"{_STAGING_PREFIX}*"):
        with suppress(OSError):  # somebody else removes it too, or still writes
            fd = _locked(path)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


@contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """A new directory that is gone afterwards, unless it was renamed."""
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent))
    fd = -1
    try:
        fd = _locked(staging)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if fd >= 0:
            os.close(fd)


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock by which a live staging directory differs from a left one."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory survive a crash, as fsync of a file does for its bytes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        raise MmeError(Kind.INTERNAL, f"{what}: {error}; check the directory and its permissions") from error


def directory_size(path: Path) -> int:
    """Bytes of the regular files below."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
