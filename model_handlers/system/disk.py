"""What is asked of disks wherever files are written: folders of our own, lasting names, locks, staging, digests.

Runs on load threads. A lock is the kernel's: it dies with its holder, and keeps apart threads as well as processes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory
from model_handlers.system.threads import CancelToken, advised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO


# What is another when a file is: device, inode, size, time of the last change in nanoseconds.
FileIdentity = tuple[int, ...]
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


def own_directory(directory: Path) -> None:
    """Make a directory that only we can read, or take over our own: in /tmp another could have put models there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared = directory.parent.stat().st_mode & stat.S_IWOTH
    if shared and directory.stat().st_uid != os.geteuid():
        raise invalid_argument(f"{directory} belongs to another user: set MME_CACHE_DIR to a directory of your own")


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a directory, survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
    """Bytes of the files below a directory, but for what others remove meanwhile."""
    return sum(_size(os.path.join(base, file)) for base, _, files in os.walk(path) for file in files)  # noqa: PTH118


def _size(file: str) -> int:
    try:
        status = os.stat(file)  # noqa: PTH116 - a link counts as what it leads to
    except OSError:  # it was removed, or is a link that leads nowhere
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def etag_of(status: os.stat_result) -> str:
    """The same as a text that outlives a remount, which gives a disk another number."""
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def new_file(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


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
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DISK_FULL


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


@contextmanager
def locked(path: Path, token: CancelToken | None = None) -> Iterator[bool]:
    """Hold the lock of the file `path`, which is there as long as the lock is held or waited for.

    Without a token a lock that another holds is not waited for. Yields whether it is held.
    """

    def taken(seconds: float) -> int | None:
        if (fd := take(path, os.O_RDWR | os.O_CREAT)) is None:
            time.sleep(seconds)
        return fd

    fd = taken(0) if token is None else token.wait(taken)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            path.unlink(missing_ok=True)  # while it is held: what waits for it finds it gone, and opens the next
            os.close(fd)


_STAGING_PREFIX = ".staging-"
_LEFT: set[Path] = set()  # what could not be removed: that takes descriptors, of which there may be none
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def remove_staging(directory: Path) -> None:
    """Remove what runs that ended in the middle left; what a live process unpacks stays."""
    for path in directory.glob(f"{_STAGING_PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            fd = take(path, os.O_DIRECTORY)
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
    """Remove it, or leave that to the next staging: removing takes descriptors."""
    shutil.rmtree(staging, ignore_errors=True)
    (_LEFT.add if staging.exists() else _LEFT.discard)(staging)


def publish(staging: Path, directories: Iterable[Path], destination: Path) -> None:
    """Make a staging directory the destination.

    A rename is atomic for processes, not for power: without fsync of the files and of every directory, the name may
    survive a crash while the bytes do not. `directories` are all that were made, the deepest first.
    """
    for directory in directories:
        sync(directory)
    staging.chmod(0o755)
    try:
        staging.rename(destination)
    except OSError as error:
        if error.errno not in _EXISTS:
            raise
        raise MmeError(Kind.ALREADY_EXISTS, f"{destination} exists already: discard it first") from error
    sync(destination.parent)


def _staging(parent: Path) -> tuple[Path, int]:
    """A new directory and the lock on it. Before it is locked, another run that begins may take it for a left one."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent))
        try:
            fd = take(staging, os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError:
            staging.rmdir()
            raise
        if fd is not None:
            return staging, fd


DIGITS = 32  # of a digest, where it names a folder
_CHUNK = 1 << 20


def text_digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: Path, kind: str = "sha256") -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).digest()


class Digests:
    """SHA-256s of files, worked out once for as long as a file stays the same."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[FileIdentity, str]] = {}  # single operations of a dict need no lock

    def of(self, path: Path, token: CancelToken) -> str:
        with path.open("rb") as file:
            state = state_of(os.fstat(file.fileno()))
            known = self._known.get(path)
            if known is not None and known[0] == state:
                return known[1]
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                token.check()
                digest.update(chunk)
        self._known[path] = state, digest.hexdigest()
        return digest.hexdigest()
