"""The byte budget of unpacked archives: what lies there, whether it is whole, what is used, what has to go for more.

Unused archives leave least recently used first; the time of a directory is its last use, so that the order outlives
the process. One that is in memory or being loaded never leaves: it is held, here and, by a lock that ends with the
process, against other servers that share the directory. What lies there is known from one look at the start and from
what is published and removed here; it is looked at again once a minute, and at each need while another server shares
the directory. Thread-safe; load threads call, one at a time decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import struct
import threading
import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from isal import isal_zlib

from model_handlers.errors import out_of_memory
from model_handlers.system.disk import (
    directory_size,
    disk_errors,
    own_directory,
    replacing,
    staging_directory,
    state_of,
)
from model_handlers.system.threads import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from model_handlers.errors import MmeError
    from model_handlers.system.threads import CancelToken


_FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, and a pid that must be 0
_LOCK_FILES = 61  # the kernel compares every lock with all others of its file
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have none, where nothing can be shared
Sums = dict[str, tuple[int, int]]  # path below the copy → bytes and CRC-32
_BLOCK_SIZE = 1 << 20
_NEW_SECONDS = 3600.0  # for which checksums without a copy stay: another server may be about to have it appear
_log = logging.getLogger("mme.disk")
_NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}")
_PACKING = 64 << 10  # bytes that packing may add to files that can't be compressed
_KEY = 24  # characters of a name that all copies of one archive have in common
_LOOK_SECONDS = 60.0
_IN_USE = 1 << 60  # the byte of the lock file that every server holds which uses the directory
_DEFAULT_SHARE = 0.8  # of what is free at the start, and of what lies there already


class ByteLocks:
    """Locks that several processes share, each of them one byte of one of a few files in a folder.

    They belong to the open files (OFD locks of Linux) and end with them, however their process ends; two open files
    exclude each other even within one process. Never waited for. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_file():  # as older versions had it
            folder.unlink(missing_ok=True)
        own_directory(folder)
        self._folder = folder
        self._fds: dict[int, int] = {}
        self.close = weakref.finalize(self, _close_all, self._fds)  # gives every lock back; once

    def share(self, byte: int) -> bool:
        """Lock a byte together with others; False if it is locked alone. A lock held already becomes shared."""
        return self._set(fcntl.F_RDLCK, byte)

    def exclude(self, byte: int) -> bool:
        """Lock a byte alone; False if another file has it."""
        return self._set(fcntl.F_WRLCK, byte)

    def unlock(self, byte: int) -> None:
        self._set(fcntl.F_UNLCK, byte)

    def others_have(self, byte: int) -> bool:
        """Whether another open file has locked a byte."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            found = fcntl.fcntl(self._fd(byte), fcntl.F_OFD_GETLK, asked)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd(byte), fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def _fd(self, byte: int) -> int:
        number = byte % _LOCK_FILES
        fd = self._fds.get(number)
        if fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = self._fds[number] = os.open(self._folder / f"{number:02}", flags, 0o600)
        return fd


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


class CopySums:
    """Checksums of unpacked copies, as JSON in `.sums/<name of the copy>`: path → bytes and CRC-32.

    They are kept before the copy appears. A copy is read and compared when this process first looks at it, 20 to 70 ms
    for 90 MB, and again when the status of any of its files has changed. A CRC finds what disks and crashes do.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = directory / ".sums"
        self._whole: dict[str, int] = {}  # copy → what its files looked like when they were what was written
        self._sweep()

    def __repr__(self) -> str:
        return f"<CopySums of {self._directory}, {len(self._whole)} seen>"

    def note(self, name: str, sums: Sums) -> None:
        own_directory(self._folder)
        with replacing(self._folder / name) as file:
            file.write(json.dumps({"files": sums}).encode())

    def appeared(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # it left for another already
            self._whole[path.name] = _look_of(path)

    def forget(self, name: str) -> None:
        self._whole.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)

    def knows(self, path: Path) -> bool:
        return path.name in self._whole or (self._folder / path.name).exists()

    def damage(self, path: Path, token: CancelToken) -> str:
        """What is wrong with a copy, "" for nothing. The caller holds the copy."""
        with disk_errors(f"{path} cannot be read"):
            look = _look_of(path)
            if self._whole.get(path.name) == look:
                return ""
            sums = self._noted(path.name)
            if sums is None:
                return "it has no checksums, as an older version left it"
            for name, expected in sums.items():
                if wrong := _wrong(path / name, expected, token):
                    return f"{name} {wrong}"
        self._whole[path.name] = look
        return ""

    def _noted(self, name: str) -> Sums | None:
        try:
            noted = json.loads((self._folder / name).read_bytes())["files"]
            return {file: (int(size), int(crc)) for file, (size, crc) in noted.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def _sweep(self) -> None:
        """Remove what was noted of copies that are gone."""
        new = time.time() - _NEW_SECONDS
        with suppress(FileNotFoundError):
            for noted in list(self._folder.iterdir()):
                with suppress(FileNotFoundError):
                    if not (self._directory / noted.name).is_dir() and noted.stat().st_mtime < new:
                        noted.unlink()


def _wrong(file: Path, expected: tuple[int, int], token: CancelToken) -> str:
    """What a file is instead of what was written, "" for the same."""
    size, crc = expected
    try:
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes of {size}"
        return "" if crc_of(file, token) == crc else "has other bytes than were written"
    except (FileNotFoundError, NotADirectoryError):
        return "is not there"


def crc_of(file: Path, token: CancelToken = NEVER) -> int:
    crc, block = 0, memoryview(bytearray(min(_BLOCK_SIZE, max(file.stat().st_size, 1))))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            crc = isal_zlib.crc32(block[:size], crc)
            token.check()
    return crc


def _look_of(path: Path) -> int:
    looks = []
    for base, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
            status = os.stat(os.path.join(base, file), follow_symlinks=False)  # noqa: PTH116, PTH118
            looks.append((base, file, *state_of(status)))
    return hash(tuple(looks))


@dataclass(slots=True)
class Hold:
    """The use of one directory, until `release`."""

    room: DiskBudget
    path: Path
    _held: bool = field(default=True)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.room._release(self.path)  # noqa: SLF001 - its own


@dataclass(slots=True)
class DiskClaim:
    """An archive on its way to a directory, the bytes that it has claimed so far, and its use of that."""

    name: str
    path: Path
    token: CancelToken
    claimed: int = 0
    hold: Hold | None = None


class Derived(Protocol):
    """What lies on the same disk and was made of what archives hold: `taken` bytes, as far as is known."""

    taken: int

    def shrink(self) -> None:
        """Remove what was made of archives that are gone."""


class DiskBudget:
    """Room for unpacked archives in one directory, whose names are those that `Artifacts` gives.

    Attributes:
        budget: bytes for all of them.
        archives: bytes of everything unpacked.
        evictions: how many left for others.

    Args:
        directory: theirs; it exists.
        budget: None for 80 % of what is free there now and of what they take already.
        evict: called on a load thread that needs room for an archive, by its name: evicts one model from memory, so
            that its archive may leave; returns whether it did.
        derived: what counts as well; None for nothing.
        clock: seconds.
    """

    def __init__(
        self,
        directory: Path,
        budget: int | None = None,
        evict: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._evict = evict
        self._guard = threading.RLock()
        self._locks = ByteLocks(directory / ".locks")
        self._users: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._copies: dict[str, set[str]] = {}  # their names, by what those of one archive have in common
        self._idle: dict[str, None] = {}  # not used here, the one used longest ago first
        self._in_order = True
        self._looked_at = 0.0
        self.archives = self._claimed = 0
        self.evictions = 0
        self.derived = derived
        self.sums = CopySums(directory)
        self._locks.share(_IN_USE)
        self._look()
        free = shutil.disk_usage(directory).free
        self._is_share = budget is None  # of what was free
        self.budget = int((free + self.used) * _DEFAULT_SHARE) if budget is None else budget

    def __repr__(self) -> str:
        return (
            f"<DiskBudget {self.used / 1e6:.1f} MB of {self.budget / 1e6:.1f} MB taken by {len(self._sizes)} archives>"
        )

    @property
    def used(self) -> int:
        return self.archives + self._claimed + (self.derived.taken if self.derived is not None else 0)

    def copies(self, key: str) -> list[Path]:
        """The directories whose names begin with a key, the one used last at the end."""
        with self._guard:
            self._look_again()
            paths = [self._directory / name for name in self._copies.get(key, ())]
        found = []
        for path in paths:
            with suppress(FileNotFoundError):  # it leaves for another
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def hold(self, path: Path) -> Hold | None:
        """Use a directory that lies there; None if it does not, or is being removed."""
        with self._guard:
            if not self._use(path):
                return None
            if path.is_dir():
                if path.name not in self._sizes:  # another server's work
                    self._appeared(path.name, directory_size(path))
                self.touch(path)
                return Hold(self, path)
            self._left(path.name)
            self._release(path)
            return None

    def _use(self, path: Path) -> bool:
        """Count a use, during which no server removes it; False while one does."""
        with self._guard:
            if not self._users[path.name] and not self._locks.share(_byte(path)):
                return False
            self._users[path.name] += 1
            self._idle.pop(path.name, None)
            return True

    def _release(self, path: Path) -> None:
        with self._guard:
            self._users[path.name] -= 1
            if not self._users[path.name]:
                del self._users[path.name]
                self._locks.unlock(_byte(path))
                if path.name in self._sizes:
                    self._idle[path.name] = None
            self.touch(path)

    def close(self) -> None:
        self._locks.close()

    def touch(self, path: Path, seconds: float | None = None) -> None:
        """Note the last use of a directory, now or at that time of the wall clock, if the disk allows."""
        if seconds is not None:
            self._in_order = False
        with suppress(OSError):  # it is no more than a hint what to remove first
            os.utime(path, None if seconds is None else (seconds, seconds))

    @contextmanager
    def unpacking(self, name: str, packed: int, path: Path, token: CancelToken) -> Iterator[DiskClaim]:
        if packed > self.budget + _PACKING:
            raise self._too_large(name)
        with self._guard:
            self._look_again()
        unpacking = DiskClaim(name, path, token)
        try:
            yield unpacking
        finally:
            with self._guard:
                self._claimed -= unpacking.claimed
            if unpacking.hold is not None:
                unpacking.hold.release()

    def claim(self, unpacking: DiskClaim, size: int) -> None:
        """Make room for so many more bytes of an archive, evicting others. Called before they are written."""
        unpacking.claimed += size
        with self._guard:
            self._claimed += size
        if unpacking.claimed > self.budget:
            raise self._too_large(unpacking.name)
        while self.used > self.budget:
            if self._shrink():
                continue
            if self._evict_one(unpacking.name) is None and not self._evict(unpacking.name):
                raise out_of_memory(
                    f"'{unpacking.name}' finds no room on disk: models in memory, and those on their way to the disk, "
                    f"hold {_shown(self.used - size)} of {_shown(self.budget)}; raise MME_DISK_BUDGET, or unload a "
                    "model first"
                )

    def has(self, size: int) -> bool:
        """Whether so many bytes are left; nothing is evicted for it."""
        return self.used + size <= self.budget

    def _shrink(self) -> bool:
        if self.derived is None:
            return False
        before = self.derived.taken
        self.derived.shrink()
        return self.derived.taken < before

    def _too_large(self, name: str) -> MmeError:
        if self._is_share:
            return out_of_memory(
                f"'{name}' takes more than the whole disk budget of {_shown(self.budget)}, {_DEFAULT_SHARE:.0%} of "
                f"what was free on the disk of {self._directory}: free some of it and restart, or give the directory "
                "a larger one"
            )
        return out_of_memory(
            f"'{name}' takes more than the whole disk budget of {_shown(self.budget)}: raise "
            "MME_DISK_BUDGET, or give the cache directory a larger disk"
        )

    def appears(self, unpacking: DiskClaim, sums: Sums) -> None:
        """Note the checksums of a directory that is about to appear.

        Until it is unpacked no server removes it: one that removes the directory of before forgets its checksums, which
        are by the same name.
        """

        def used(seconds: float) -> Hold | None:
            if self._use(unpacking.path):
                return Hold(self, unpacking.path)
            time.sleep(seconds)
            return None

        unpacking.hold = unpacking.token.wait(used)
        self.sums.note(unpacking.path.name, sums)

    def published(self, path: Path, size: int) -> None:
        self.sums.appeared(path)
        with self._guard:
            self._appeared(path.name, size)

    def evict_for(self, name: str, size: int) -> bool:
        """The disk is full, whatever the budget says: remove so many bytes. Whether any came back."""
        freed: list[int] = []
        while sum(freed) < size:
            evicted = self._evict_one(name)
            self._shrink()
            if evicted is None and (freed or not self._evict(name)):
                break
            freed += [] if evicted is None else [evicted]
        return bool(freed)

    def remove(self, path: Path) -> bool:
        """Remove a directory that is not used, out of staging: a crash in between leaves that, never half a model."""
        with ExitStack() as staging, self._guard:  # staging is emptied when others may have the guard
            if self._users[path.name] or not self._locks.exclude(_byte(path)):
                return False
            try:
                path.rename(staging.enter_context(staging_directory(self._directory)) / path.name)
                self._left(path.name)
                self.sums.forget(path.name)
            except FileNotFoundError:
                self._left(path.name)
                return False
            finally:
                self._locks.unlock(_byte(path))
        return True

    def _evict_one(self, beneficiary: str) -> int | None:
        tried = set[str]()  # not removed: other servers use them
        with disk_errors(f"{self._directory} cannot be cleared"):
            while (name := self._used_longest_ago(tried)) is not None:
                size = self._sizes.get(name, 0)
                if self.remove(self._directory / name):
                    self.evictions += 1
                    _log.info(
                        "removed %s from disk for '%s', least recently used, %.1f MB",
                        name,
                        beneficiary,
                        size / 1e6,
                        extra={"beneficiary": beneficiary, "bytes": size},
                    )
                    return size
                tried.add(name)
        return None

    def _used_longest_ago(self, but: set[str]) -> str | None:
        with self._guard:
            if not self._in_order:
                self._look()
            return next((name for name in self._idle if name not in but), None)

    def _used_at(self) -> Iterator[tuple[int, Path]]:
        for path in self._directory.iterdir():
            if _NAME.fullmatch(path.name):
                try:
                    yield path.stat().st_mtime_ns, path
                except FileNotFoundError:
                    continue

    def _look_again(self) -> None:
        if self._locks.others_have(_IN_USE) or self._clock() - self._looked_at > _LOOK_SECONDS:
            self._look()

    def _look(self) -> None:
        """See what lies there; what lay there before has the size that it had."""
        self._looked_at, self._in_order = self._clock(), True
        found = {path.name: path for _, path in sorted(self._used_at())}
        for name in self._sizes.keys() - found.keys():
            self._left(name)
        for name, path in found.items():
            self._appeared(name, self._sizes.get(name) or directory_size(path))
        self._idle = {name: None for name in found if name not in self._users}

    def _appeared(self, name: str, size: int) -> None:
        self.archives += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self._copies.setdefault(name[:_KEY], set()).add(name)
        if name not in self._users:
            self._idle[name] = None

    def _left(self, name: str) -> None:
        self._idle.pop(name, None)
        if name in self._sizes:
            self.archives -= self._sizes.pop(name)
            self._copies[name[:_KEY]].remove(name)
            if not self._copies[name[:_KEY]]:
                del self._copies[name[:_KEY]]


def _byte(path: Path) -> int:
    return int(path.name.replace("-", "")[-15:], 16)


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
