"""The byte budget of unpacked archives: what lies there, who uses it, and who has to go for more.

Archives that nobody uses leave least recently used first; the time of a directory is its last use, so that it outlives
the process. One that is in memory or being loaded never leaves: its user holds it, here and, by a lock that ends with
the process, against other servers that share the directory. Thread-safe; load threads call, one at a time decides.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from model_handlers.disk import disk_errors
from model_handlers.errors import out_of_memory
from serve.sources.byte_locks import ByteLocks
from serve.sources.copy_sums import CopySums
from serve.sources.disk import directory_size, staging_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from model_handlers.errors import MmeError

_log = logging.getLogger("mme.disk")
_NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}")
_PACKING = 64 << 10  # bytes that packing may add to files that can't be compressed
_DEFAULT_SHARE = 0.8  # of what is free at the start, and of what lies there already


@dataclass(slots=True)
class Unpacking:
    """An archive on its way to the disk.

    Attributes:
        name: of the archive, for errors and the log.
        claimed: bytes that it has claimed so far.
    """

    name: str
    claimed: int = 0


@dataclass(slots=True)
class Hold:
    """The use of one directory, until `release`."""

    room: DiskRoom
    path: Path
    _held: bool = field(default=True)

    def release(self) -> None:
        """It is not used any more: this was its last use."""
        if self._held:
            self._held = False
            self.room._release(self.path)  # noqa: SLF001 - its own


class Derived(Protocol):
    """What lies on the same disk and was made of what archives hold, as the weights of models.

    Attributes:
        taken: bytes, as far as is known.
    """

    taken: int

    def shrink(self) -> None:
        """Remove what nobody needs any more, since the archives that it was made of are gone."""


class DiskRoom:
    """Room for unpacked archives in one directory, whose names are those that `Artifacts` gives.

    Attributes:
        budget: bytes for all of them.
        evictions: how many left for others.
        derived: what counts as well; None for nothing.
        sums: of the files of all of them.

    Args:
        directory: theirs; it exists.
        budget: None for 80 % of what is free there now and of what they take already.
        let_go: called on a load thread that needs room for an archive, by its name: puts one model out of memory, if
            any may go, so that its archive may leave; returns whether it did.
    """

    def __init__(
        self,
        directory: Path,
        budget: int | None = None,
        let_go: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
    ) -> None:
        self._directory = directory
        self._let_go = let_go
        self._guard = threading.RLock()
        self._locks = ByteLocks(directory / ".locks")
        self._users: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._claimed = 0
        self.evictions = 0
        self.derived = derived
        self.sums = CopySums(directory)
        self._look()
        free = shutil.disk_usage(directory).free
        self.budget = int((free + self.used) * _DEFAULT_SHARE) if budget is None else budget

    def __repr__(self) -> str:
        return f"<DiskRoom {self.used / 1e6:.1f} MB of {self.budget / 1e6:.1f} MB taken by {len(self._sizes)} archives>"

    @property
    def used(self) -> int:
        """Bytes of everything unpacked, of everything claimed, and of what was derived."""
        return self.archives + self._claimed + (self.derived.taken if self.derived is not None else 0)

    @property
    def archives(self) -> int:
        """Bytes of everything unpacked."""
        return sum(self._sizes.copy().values())

    def hold(self, path: Path) -> Hold | None:
        """Use a directory that lies there; None if it does not, or somebody is removing it."""
        with self._guard:
            if not self._users[path.name] and not self._locks.share(_byte(path)):
                return None
            self._users[path.name] += 1
            if path.is_dir():
                self.touch(path)
                return Hold(self, path)
            self._release(path)
            return None

    def _release(self, path: Path) -> None:
        with self._guard:
            self._users[path.name] -= 1
            if not self._users[path.name]:
                del self._users[path.name]
                self._locks.unlock(_byte(path))
            self.touch(path)

    def close(self) -> None:
        """Nobody here uses anything any more."""
        self._locks.close()

    def touch(self, path: Path, seconds: float | None = None) -> None:
        """Note that a directory was used now, or at that time of the wall clock, if it is there and the disk allows."""
        with suppress(OSError):  # it is no more than a hint whom to remove first
            os.utime(path, None if seconds is None else (seconds, seconds))

    @contextmanager
    def unpacking(self, name: str, packed: int) -> Iterator[Unpacking]:
        """While an archive of `packed` bytes is unpacked: what it claims is given back, its directory counts by itself.

        Raises:
            MmeError: OUT_OF_MEMORY when already its packed bytes are too many.
        """
        if packed > self.budget + _PACKING:
            raise self._too_large(name)
        with self._guard:
            self._look()  # other servers may share the directory
        unpacking = Unpacking(name)
        try:
            yield unpacking
        finally:
            with self._guard:
                self._claimed -= unpacking.claimed

    def claim(self, unpacking: Unpacking, size: int) -> None:
        """Make room for so many more bytes of an archive, evicting others. Called before they are written.

        Raises:
            MmeError: OUT_OF_MEMORY when they do not fit whoever leaves, or models in use leave no room.
        """
        unpacking.claimed += size
        with self._guard:
            self._claimed += size
        if unpacking.claimed > self.budget:
            raise self._too_large(unpacking.name)
        while self.used > self.budget:
            if self._shrink():
                continue
            if self._evict_one(unpacking.name) is None and not self._let_go(unpacking.name):
                raise out_of_memory(
                    f"'{unpacking.name}' finds no room on disk: models in memory, and those on their way to the disk, "
                    f"hold {_shown(self.used - size)} of {_shown(self.budget)}; raise MME_DISK_BUDGET, or unload a "
                    "model first"
                )

    def has(self, size: int) -> bool:
        """Whether so many bytes are left, for what can do without: nobody leaves for it."""
        return self.used + size <= self.budget

    def _shrink(self) -> bool:
        """Whether anything comes back of what was derived from archives that are gone."""
        if self.derived is None:
            return False
        before = self.derived.taken
        self.derived.shrink()
        return self.derived.taken < before

    def _too_large(self, name: str) -> MmeError:
        return out_of_memory(
            f"'{name}' takes more than the whole disk budget of {_shown(self.budget)}: raise "
            "MME_DISK_BUDGET, or give the cache directory a larger disk"
        )

    def published(self, path: Path, size: int) -> None:
        """A directory is complete and in its place."""
        self.sums.appeared(path)
        with self._guard:
            self._sizes[path.name] = size

    def make_way(self, name: str, size: int) -> bool:
        """The disk is full, whatever the budget says: remove so many bytes for an archive. Whether any came back."""
        freed: list[int] = []
        while sum(freed) < size:
            evicted = self._evict_one(name)
            self._shrink()
            if evicted is None and (freed or not self._let_go(name)):
                break
            freed += [] if evicted is None else [evicted]
        return bool(freed)

    def remove(self, path: Path, staging: Path) -> bool:
        """Move a directory that nobody uses into staging; whether that was so.

        A crash in between leaves staging, never half a model under its name.
        """
        with self._guard:
            if self._users[path.name] or not self._locks.exclude(_byte(path)):
                return False
            try:
                path.rename(staging / path.name)
                self._sizes.pop(path.name, None)
                self.sums.forget(path.name)
            except FileNotFoundError:
                self._sizes.pop(path.name, None)
                return False
            finally:
                self._locks.unlock(_byte(path))
        return True

    def _evict_one(self, beneficiary: str) -> int | None:
        """Remove the least recently used archive that may go; its bytes, None if there is none."""
        with staging_directory(self._directory) as staging, disk_errors(f"{self._directory} cannot be cleared"):
            for _, path in sorted(self._used_at()):
                size = self._sizes.get(path.name, 0)
                if self.remove(path, staging):
                    self.evictions += 1
                    _log.info(
                        "removed %s from disk for '%s', least recently used, %.1f MB",
                        path.name,
                        beneficiary,
                        size / 1e6,
                        extra={"beneficiary": beneficiary, "bytes": size},
                    )
                    return size
        return None

    def _used_at(self) -> Iterator[tuple[int, Path]]:
        """Every directory that lies there, with its last use."""
        for path in self._directory.iterdir():
            if _NAME.fullmatch(path.name):
                try:
                    yield path.stat().st_mtime_ns, path
                except FileNotFoundError:
                    continue

    def _look(self) -> None:
        """See what lies there; what lay there before has the size that it had."""
        found = {path.name: path for _, path in self._used_at()}
        self._sizes = {name: self._sizes.get(name) or directory_size(path) for name, path in found.items()}


def _byte(path: Path) -> int:
    """The byte of the lock file that stands for a directory."""
    return int(path.name.replace("-", "")[-15:], 16)


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
