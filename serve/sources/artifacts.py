"""The disk tier: archives of a store, unpacked once per etag and found again by later runs.

A directory's name is made of the archive's place and its etag, so that a directory that is there is complete, and needs
no index that could disagree with it. The store is asked each time for the current etag; when it can't be reached, what
is on disk has to do. A broken archive is remembered for a while instead of being downloaded for every request. Runs on
load threads, which wait for each other only when they want the same archive.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from cachetools import LRUCache, TTLCache

from model_handlers.errors import DamagedError, Kind, MmeError
from model_handlers.system.disk import (
    directory_size,
    disk_errors,
    is_disk_full,
    own_directory,
    remove_staging,
    text_digest,
)
from model_handlers.system.threads import NEVER
from serve.sources.archive import extract
from serve.sources.disk_budget import DiskBudget
from serve.sources.store import ARCHIVE_SUFFIX, ReplacedError, UnreachableError, validate_name, wrong_name
from serve.threads import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from model_handlers.system.threads import CancelToken
    from serve.sources.archive import ExtractLimits
    from serve.sources.disk_budget import Derived, DiskClaim, Hold
    from serve.sources.store import Store, StoredObject


_SECONDS = 60.0  # after something could not be asked, before it is asked again for what is on disk
_WHOLE = ""  # the scope of the whole store, which is no name
_MOST = 10_000  # names
_log = logging.getLogger("mme.artifacts")
_REPLACEMENTS = 2  # of an archive while it is downloaded, that a fetch bears with
_BROKEN = 1024  # archives remembered as good for nothing
_BROKEN_SECONDS = 60.0


class Outages:
    """The outages of one store. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._until: LRUCache[str, float] = LRUCache(_MOST)
        # Until when the store asks for it, and why.
        self._left_alone: LRUCache[str, tuple[float, str]] = LRUCache(_MOST)

    def __repr__(self) -> str:
        return f"<Outages of {len(self._until)}>"

    def goes_on(self, name: str) -> bool:
        """Whether a name need not be asked for: another thread asks now, or asked a moment ago."""
        now = self._clock()
        with self._guard:
            for scope in (_WHOLE, name):
                until = self._until.get(scope)
                if until is not None and now < until:
                    return True
            for scope in (_WHOLE, name):
                if scope in self._until:  # others need not wait until this one knows
                    self._until[scope] = now + _SECONDS
        return False

    def check_pause(self, name: str) -> None:
        """Raise an `UnreachableError` as long as the store asks to be left alone for a name."""
        with self._guard:
            until, why = self._left_alone.get(name, (0.0, ""))
        left = until - self._clock()
        if left > 0:
            raise UnreachableError(f"{why}; it is asked again in {left:.0f} s", whole=False)

    def begins(self, name: str, error: UnreachableError) -> bool:
        scope, now = _WHOLE if error.whole else name, self._clock()
        with self._guard:
            is_new = scope not in self._until
            self._until[scope] = now + max(_SECONDS, error.asked_pause)
            if error.asked_pause:
                self._left_alone[name] = now + error.asked_pause, error.message
        return is_new

    def is_over(self, name: str) -> bool:
        with self._guard:
            self._left_alone.pop(name, None)
            return [self._until.pop(scope, None) for scope in (_WHOLE, name)] != [None, None]


@dataclass(frozen=True, slots=True)
class Artifact:
    """An unpacked archive: whether this fetch downloaded it, in how many seconds; its hold keeps it on disk."""

    name: str
    path: Path
    downloaded: bool
    seconds: float
    hold: Hold

    @property
    def identity(self) -> str:
        """A name for its content, which stands for the etag."""
        return self.path.name.rpartition("-")[2]


class Artifacts:
    """The unpacked archives of one store in one directory; `room` is what they take of the disk."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        limits: ExtractLimits | None = None,
        *,
        budget: int | None = None,
        evict: Callable[[str], bool] = lambda _: False,
        derived: Derived | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the directory over; what a crashed run left half unpacked is removed. Arguments as of `DiskBudget`."""
        self.store = store
        self.directory = directory
        self._limits = limits
        self._guard = threading.Lock()  # of the dictionary, held for no longer than a look-up
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # by name, while one is used
        self._fetched: dict[str, Path] = {}  # by name, what the last fetch found; guarded by that name's lock
        self._broken: TTLCache[str, tuple[Kind, str]] = TTLCache(_BROKEN, _BROKEN_SECONDS, clock)  # by directory name
        self._outages = Outages(clock)
        with disk_errors(f"{directory} cannot hold unpacked models"):
            own_directory(directory)
            remove_staging(directory)
            self.room = DiskBudget(directory, budget, evict, derived, clock)

    def __repr__(self) -> str:
        return f"<Artifacts of {self.store!r} in {self.directory}, {self.busy} busy>"

    @property
    def busy(self) -> int:
        return len(self._locks)

    def fetch(self, name: str, token: CancelToken = NEVER) -> Artifact:
        """The archive's current content on disk, downloaded unless that etag is there already.

        Threads that want the same name share one download. When the store can't be reached, it is what was used last.
        One that is replaced meanwhile is looked up again, a few times. Older etags stay while held or there is room.
        """
        validate_name(name)
        with self._locked(name, token):
            self._fetched.pop(name, None)
            for _ in range(_REPLACEMENTS):
                try:
                    return self._fetch(name, token)
                except ReplacedError as error:
                    _log.info("looking once more for what there is: %s", error, extra={"target_model": name})
            return self._fetch(name, token)

    def _fetch(self, name: str, token: CancelToken) -> Artifact:
        obj, path = self._find(name, token)
        self._refuse_broken(path)
        hold = self._held(name, path, can_download=obj is not None, token=token)
        if hold is not None:
            artifact = Artifact(name, path, downloaded=False, seconds=0.0, hold=hold)
        else:
            obj = obj or self._stat(name, token)
            artifact = self._download(obj, self._path(name, obj.etag), token)
        self._fetched[name] = artifact.path
        return artifact

    def _held(self, name: str, path: Path, *, can_download: bool, token: CancelToken) -> Hold | None:
        """Hold a copy that is there and whole; None for one that is to be downloaded."""
        hold = self.room.hold(path)
        if hold is None:
            return None
        is_known = self.room.sums.knows(path)
        try:
            damage = self.room.sums.damage(path, token) if is_known or can_download else ""
        except BaseException:
            hold.release()
            raise
        if not damage:
            return hold
        hold.release()
        with disk_errors(f"{path} cannot be removed"):
            if self.room.remove(path):
                _log.warning("what is on disk is not used, and downloaded again: %s", damage, extra=_of(name))
                return None
        if not is_known:  # an older version wrote it, and uses it
            return self.room.hold(path)
        raise MmeError(
            Kind.UNAVAILABLE,
            f"the copy of '{name}' on disk is damaged ({damage}) and still in use: unload the model, on every server "
            f"that shares {self.directory}, and load it again",
        )

    def discard(self, name: str) -> None:
        """Remove the unpacked copies of an archive that are not held."""
        problem = f"what was unpacked of '{name}' cannot be removed"
        with self._locked(name, NEVER), disk_errors(problem):
            self._fetched.pop(name, None)
            for path in self.copies(name):
                self.room.remove(path)

    def quarantine(self, name: str, error: MmeError) -> None:
        """What was fetched last under that name can't be loaded, for that reason: remove it, and remember why."""
        problem = f"what was unpacked of '{name}' cannot be removed"
        with self._locked(name, NEVER), disk_errors(problem):
            path = self._fetched.pop(name, None)
            if path is not None:
                self._remember_broken(path, error)
                self.room.remove(path)

    def used(self, name: str, seconds: float) -> None:
        for path in self.copies(name)[-1:]:
            with suppress(FileNotFoundError):  # it leaves for another
                if path.stat().st_mtime < seconds:
                    self.room.touch(path, seconds)

    def _find(self, name: str, token: CancelToken) -> tuple[StoredObject | None, Path]:
        """What the store has, and its directory; only what was used last, when the store can't be reached."""
        copies = self.copies(name)
        if copies and self._outages.goes_on(name):
            return None, copies[-1]
        if not copies:
            self._outages.check_pause(name)
        try:
            obj = self._stat(name, token, hurried=bool(copies))
        except UnreachableError as error:
            is_new = self._outages.begins(name, error)
            if not copies:
                raise
            if is_new:
                what = "models are" if error.whole else f"'{name}' is"
                _log.warning("%s served from disk, current or not, until the store can be asked: %s", what, error)
            return None, copies[-1]
        if self._outages.is_over(name):
            _log.info("the store %s can be asked again", self.store.uri, extra=_of(name))
        return obj, self._path(name, obj.etag)

    def _download(self, obj: StoredObject, path: Path, token: CancelToken) -> Artifact:
        """Unpack the archive: once more if it arrives damaged, or when others left the full disk."""
        start = time.perf_counter()
        arrived_damaged = False
        while True:
            with self.room.unpacking(obj.name, obj.size, path, token) as unpacking:
                error = self._unpack(obj, unpacking)
                hold = self.room.hold(path) if error is None else None
                if hold is not None:
                    seconds = time.perf_counter() - start
                    return Artifact(obj.name, path, downloaded=True, seconds=seconds, hold=hold)
            if isinstance(error, DamagedError) and not arrived_damaged:
                arrived_damaged = True
                _log.warning("it is downloaded once more: %s", error, extra=_of(obj.name))
            elif error is not None and not (is_disk_full(error) and self.room.evict_for(obj.name, unpacking.claimed)):
                if error.kind is Kind.INVALID_MODEL:
                    self._remember_broken(path, error)
                raise error

    def _unpack(self, obj: StoredObject, unpacking: DiskClaim) -> MmeError | None:
        try:
            size = self._bring(obj, unpacking)
        except MmeError as error:
            if error.kind is not Kind.ALREADY_EXISTS:
                return error
            size = directory_size(unpacking.path)  # another process was faster; same etag, same content
        self.room.published(unpacking.path, size)
        return None

    def _stat(self, name: str, token: CancelToken, *, hurried: bool = False) -> StoredObject:
        """A store may have an archive without the suffix, which names of archives need not have."""
        try:
            return self.store.stat(name, token, hurried=hurried)
        except MmeError as error:
            bare = name.removesuffix(ARCHIVE_SUFFIX)
            if error.kind is not Kind.UNKNOWN_MODEL or bare == name or wrong_name(bare):
                raise
            try:
                return self.store.stat(bare, token, hurried=hurried)
            except MmeError as of_bare:
                raise (error if of_bare.kind is Kind.UNKNOWN_MODEL else of_bare) from None

    def _bring(self, obj: StoredObject, unpacking: DiskClaim) -> int:
        return extract(
            watched(self.store.open(obj), unpacking.token),
            unpacking.path,
            name=obj.name,
            packed=obj.size,
            limits=self._limits,
            claim=functools.partial(self.room.claim, unpacking),
            note=functools.partial(self.room.appears, unpacking),
            token=unpacking.token,
        )

    def _remember_broken(self, path: Path, error: MmeError) -> None:
        with self._guard:
            self._broken[path.name] = error.kind, error.message  # whose traceback holds what was made for the load

    def _refuse_broken(self, path: Path) -> None:
        with self._guard:
            found = self._broken.get(path.name)
        if found is not None:
            kind, message = found
            raise MmeError(
                kind,
                f"{message.rstrip()} (so it was found within the last {_BROKEN_SECONDS:.0f} s; only another archive in "
                "its place is downloaded)",
            )

    def copies(self, name: str) -> list[Path]:
        """What is unpacked of an archive, the one used last at the end."""
        with disk_errors(f"{self.directory} cannot be read"):
            return self.room.copies(self._key(name))

    def _path(self, name: str, etag: str) -> Path:
        return self.directory / f"{self._key(name)}-{text_digest(etag, 16)}"

    def _key(self, name: str) -> str:
        return key_of(self.store.uri, name)

    @contextmanager
    def _locked(self, name: str, token: CancelToken) -> Iterator[None]:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        token.wait(lambda seconds: lock.acquire(timeout=seconds) or None)
        try:
            yield
        finally:
            lock.release()


def key_of(place: str, name: str) -> str:
    """What the directories of a name in a place begin with."""
    return text_digest(f"{place}\0{name}", 24)


def _of(name: str) -> dict[str, str]:
    return {"target_model": name}
