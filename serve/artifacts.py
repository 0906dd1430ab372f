"""The disk tier: archives of a store, unpacked once per etag and found again by later runs.

A directory's name is made of the archive's place and its etag, so that a directory that is there is complete and
current, and needs no index that could disagree with it. It refuses to know what is inside and who uses it: whoever
does says when an archive may go. Synchronous and thread-safe; runs on load threads, which wait for each other only
when they want the same archive.
"""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.disk import disk_errors, own_directory
from model_handlers.errors import Kind, MmeError
from serve.archive import extract
from serve.disk import directory_size, remove_staging, staging_directory
from serve.store import validate_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from serve.store import Store, StoredObject
    from serve.tar_member import ExtractLimits

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Artifact:
    """An unpacked archive.

    Attributes:
        name: in its store.
        path: the directory that holds its content.
        etag: of the archive that was unpacked.
        size: bytes of its files.
        downloaded: whether this fetch got it from the store.
        seconds: that download and unpacking took, 0 without.
    """

    name: str
    path: Path
    etag: str
    size: int
    downloaded: bool
    seconds: float


class _NameLock:
    """The lock of one name, and how many threads hold it or wait for it."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class Artifacts:
    """The unpacked archives of one store in one directory."""

    def __init__(self, store: Store, directory: Path, limits: ExtractLimits | None = None) -> None:
        """Take the directory over; what a crashed run left half unpacked goes.

        Raises:
            MmeError: INTERNAL or OUT_OF_MEMORY when the directory cannot be made, INVALID_ARGUMENT when another user
                could have filled it.
        """
        self.store = store
        self._directory = directory
        self._limits = limits
        self._guard = threading.Lock()  # of the dictionary, held for no longer than a look-up
        self._locks: dict[str, _NameLock] = {}
        with disk_errors(f"{directory} cannot hold unpacked models"):
            own_directory(directory)
            remove_staging(directory)

    def __repr__(self) -> str:
        return f"<Artifacts of {self.store!r} in {self._directory}>"

    def fetch(self, name: str, cancelled: Callable[[], bool] = lambda: False) -> Artifact:
        """The archive's current content on disk, downloaded unless that etag is there already.

        Threads that want the same name at once share one download. Older etags stay, since somebody may have their
        files mapped, until `discard`.

        Raises:
            MmeError: what the store, the archive or the disk have to say; CANCELLED.
        """
        validate_name(name)
        with self._locked(name, cancelled):
            obj = self.store.stat(name)
            path = self._path(name, obj.etag)
            if path.is_dir():
                return Artifact(name, path, obj.etag, directory_size(path), downloaded=False, seconds=0.0)
            return self._download(obj, path, cancelled)

    def discard(self, name: str, keep: str = "") -> None:
        """Remove the unpacked copies of an archive, but for that of the etag `keep`. Nobody may use them any more."""
        with self._locked(name, lambda: False):
            kept = self._path(name, keep)
            for path in self._directory.glob(f"{self._key(name)}-*"):
                if not keep or path != kept:
                    self._remove(path)

    def _download(self, obj: StoredObject, path: Path, cancelled: Callable[[], bool]) -> Artifact:
        start = time.perf_counter()
        stream = self.store.open(obj)
        try:
            size = extract(stream, path, name=obj.name, limits=self._limits, cancelled=cancelled).bytes
        except MmeError as error:
            if error.kind is not Kind.ALREADY_EXISTS:
                raise
            size = directory_size(path)  # another process was faster; same etag, same content
        return Artifact(obj.name, path, obj.etag, size, downloaded=True, seconds=time.perf_counter() - start)

    def _remove(self, path: Path) -> None:
        """Remove a directory so that a crash in between leaves staging, never half a model under its name."""
        with disk_errors(f"the unpacked model {path} cannot be removed"), staging_directory(self._directory) as staging:
            path.rename(staging / path.name)

    def _path(self, name: str, etag: str) -> Path:
        return self._directory / f"{self._key(name)}-{_digest(etag, 16)}"

    def _key(self, name: str) -> str:
        return _digest(f"{self.store.uri}\0{name}", 24)

    @contextmanager
    def _locked(self, name: str, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock of that name, which exists as long as somebody wants it."""
        with self._guard:
            entry = self._locks.setdefault(name, _NameLock())
            entry.users += 1
        try:
            while not entry.lock.acquire(timeout=_POLL_SECONDS):
                if cancelled():
                    raise MmeError(Kind.CANCELLED, f"the load of archive '{name}' was cancelled")
            try:
                yield
            finally:
                entry.lock.release()
        finally:
            with self._guard:
                entry.users -= 1
                if not entry.users:
                    del self._locks[name]


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
