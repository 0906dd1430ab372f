"""What the disk tier does to directories: stage them, publish them, measure them.

A staging directory is one that nobody may take for finished. Its owner holds a lock on it that dies with the process,
so that the next run can tell what a crash left from what a live process still writes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.system import file_lock
from model_handlers.system.disk import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STAGING_PREFIX = ".staging-"
_LEFT: set[Path] = set()  # what could not be removed: that takes descriptors, of which there may be none
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def remove_staging(directory: Path) -> None:
    """Remove what runs that ended in the middle left in `directory`; what a live process unpacks stays."""
    for path in directory.glob(f"{_STAGING_PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            fd = file_lock.take(path, os.O_DIRECTORY)
            if fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)


@contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """A new directory that is gone afterwards, unless it was renamed."""
    for left in list(_LEFT):
        _remove(left)
    staging, fd = _staging(parent)
    try:
        yield staging
    finally:
        _remove(staging)
        os.close(fd)


def _remove(staging: Path) -> None:
    """Remove it, or have the next one who stages anything do it."""
    shutil.rmtree(staging, ignore_errors=True)
    (_LEFT.add if staging.exists() else _LEFT.discard)(staging)


def publish(staging: Path, directories: Iterable[Path], destination: Path) -> None:
    """Make a staging directory the destination.

    A rename is atomic for processes, not for power: without fsync of the files and of every directory, the name may
    survive a crash while the bytes behind it do not, and the next run would take the empty files for the model.

    Args:
        staging: whose files are on the disk.
        directories: every one that was made in it, the deepest first, and itself.
        destination: must not exist, or be empty.

    Raises:
        MmeError: ALREADY_EXISTS when the destination is there.
    """
    for directory in directories:
        fsync_directory(directory)
    staging.chmod(0o755)
    try:
        staging.rename(destination)
    except OSError as error:
        if error.errno not in _EXISTS:
            raise
        raise MmeError(Kind.ALREADY_EXISTS, f"{destination} exists already: discard it first") from error
    fsync_directory(destination.parent)


def _staging(parent: Path) -> tuple[Path, int]:
    """A new directory and the lock on it. Before it is locked, another run that begins may take it for a left one."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent))
        try:
            fd = file_lock.take(staging, os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError:
            staging.rmdir()
            raise
        if fd is not None:
            return staging, fd


def directory_size(path: Path) -> int:
    """Bytes of the regular files below."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
