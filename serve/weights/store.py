"""Forms of models' weights on disk, in one directory that any number of servers may share. On load threads.

    files/<checksum>-<length>-<n>     blobs: large tensors, each once
    files/<key>                       the graph of a written form, which names blobs beside it
    files/<key>-<refinement>          the graph that was made of it, for this processor and this framework
    forms/<name of the graph>         JSON: its checksum, which blobs a form has, and how its trial went
    refs/<digest of a path>           JSON: which files a form was made from, as they were

A blob is named after the CRC-32 and the length of its bytes, and a number: of blobs whose first two are the same, the
first whose bytes are the same is taken, else one more is made. That is as sure as a cryptographic hash, because every
byte is compared, and two to ten times as quick; a load waits for it.

A reference says which form a model's file leads to, by device, inode, size and time of change, so that a reload reads
no weights. What is said of files in `forms/` and `refs/` is written after they are safe on the disk, so that whatever
is found there is whole. A file is compared with its checksum when a process looks for it first, and when its status has
changed; one that is damaged is removed, and made again.

A form is removed when no reference leads to it whose files are still what they were, a file when no form has it; what
is new stays for a while, since it is about to be kept. So forms go with the archives that they were made from, and what
a crash leaves goes too. Pages of a removed file live until no process maps it.

Thread-safe without locks: everything appears by one link or rename, and what disappears meanwhile costs a plain load.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from isal import isal_zlib

from model_handlers.errors import Kind, MmeError
from model_handlers.mapped import SourceFile, Span, Trial
from model_handlers.system.disk import (
    directory_size,
    identity_of,
    own_directory,
    remove_staging,
    staging_directory,
    sync,
    text_digest,
)
from serve.sources.disk_budget import crc_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_handlers.mapped import MappedHandler
    from model_handlers.system.disk import FileIdentity


_READABLE = 0o400  # a blob is not written to


class Draft:
    """A form that is being written: see `model_handlers.mapped.Draft`."""

    def __init__(self, folder: Path, files: Path) -> None:
        self.folder = folder  # the directory for what is needed meanwhile
        self.blobs: dict[str, int] = {}  # what the form shares: name → bytes
        self.sources: dict[Path, SourceFile] = {}  # what was opened to be read
        self.added = 0  # bytes of blobs that were not there before
        self._files = files

    def __repr__(self) -> str:
        return f"<Draft of {len(self.blobs)} blobs, {sum(self.blobs.values()) / 1e6:.1f} MB>"

    def source(self, path: Path) -> SourceFile:
        if path not in self.sources:
            self.sources[path] = SourceFile(path)
        return self.sources[path]

    def put(self, span: Span) -> str:
        stem = f"{_checksum(span):08x}-{span.length:x}"
        number = 0
        while True:
            name = f"{stem}-{number}"
            path = self._files / name
            try:
                if _holds(path, span):
                    os.utime(path)  # a sweep leaves it now
                    break
                number += 1
            except FileNotFoundError:  # there is none, or it was swept this moment
                if self._add(name, span):
                    break
        self.blobs[name] = span.length
        return name

    def is_true(self) -> bool:
        """Whether no source was written to while it was read."""
        return all(source.is_unchanged() for source in self.sources.values())

    def close(self) -> None:
        for source in self.sources.values():
            source.close()

    def _add(self, name: str, span: Span) -> bool:
        """Write a new blob; False when another of that name was quicker."""
        path = self.folder / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _READABLE)
        try:
            for piece in span.pieces():
                _write(fd, piece)
        finally:
            os.close(fd)
        if not appear(path, self._files / name):
            return False
        self.added += span.length
        return True


def checksum_of(blob: str) -> int:
    return int(blob.partition("-")[0], 16)


def appear(made: Path, name: Path) -> bool:
    """Give a finished file its name; False when there is one of that name. Either way it is not where it was made.

    ONNX Runtime refuses weights that have several hard links, so this one is gone before it looks.
    """
    try:
        os.link(made, name)
    except FileExistsError:
        return False
    finally:
        made.unlink()
    return True


def _holds(path: Path, span: Span) -> bool:
    blob = SourceFile(path)
    try:
        return span.equals(Span(blob, 0, blob.size))  # a crash of the machine may have cut it
    finally:
        blob.close()


def _checksum(span: Span) -> int:
    checksum = 0
    for piece in span.pieces():
        checksum = isal_zlib.crc32(piece, checksum)
    return checksum


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


_log = logging.getLogger("mme.weights")
_NEW_SECONDS = 600.0  # for which what nothing leads to stays
_HURRIED_SECONDS = 5.0  # the same, where the disk is short of room
_SPARE_DISK = 2  # times the model's size that the disk must have left
_KERNEL_LIMIT = Path("/proc/sys/vm/max_map_count")
# What reading something can raise that is not there, not there any more, or was not written by us.
_NONE_OF_OURS = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Form:
    """A form on disk: its graph at `path`, beside its blobs, by name and bytes.

    The key is that of the written form; only a refined form that was tried has a trial.
    """

    path: Path
    key: str
    blobs: dict[str, int]
    trial: Trial | None = None

    @property
    def blob_bytes(self) -> int:
        return sum(self.blobs.values())

    def is_there(self) -> bool:
        return self.path.exists() and all(
            (self.path.parent / name).stat().st_size == size for name, size in self.blobs.items()
        )


@dataclass(frozen=True, slots=True)
class Reference:
    """What is known of a model's file: the files that it was read from, itself first, and what they were.

    The key is that of the written form, "" for a model that can't be mapped.
    """

    sources: dict[str, FileIdentity]
    key: str

    def is_current(self) -> bool:
        try:
            return all(identity_of(Path(path).stat()) == identity for path, identity in self.sources.items())
        except OSError:
            return False


class WeightStore:
    """All forms of one directory."""

    def __init__(self, directory: Path, has_room: Callable[[int], bool] | None = None) -> None:
        self.directory = directory
        self.taken = 0  # bytes of all files, as counted with the last sweep and written by us since
        self._has_room = has_room
        self.handlers: WeakSet[MappedHandler] = WeakSet()  # those of this process that were loaded from a form
        self._files, self._forms, self._refs = (directory / name for name in ("files", "forms", "refs"))
        self._whole: dict[str, FileIdentity] = {}  # file → what it was when it was what its checksum says
        self._is_open = False
        self._complained = False
        self._lock = threading.Lock()  # of taking the directory over
        self.open(make=False)

    def __repr__(self) -> str:
        return f"<WeightStore {self.directory}>"

    def open(self, *, make: bool = True) -> bool:
        """Take the directory over, once, and again where it was removed; what a crashed run left half written goes.

        Returns whether it can be used.
        """
        with self._lock:
            self._is_open = self._is_open and self._refs.is_dir()
            if not self._is_open and (make or self.directory.exists()):
                try:
                    for folder in (self.directory.parent, self.directory, self._files, self._forms, self._refs):
                        own_directory(folder)
                    remove_staging(self.directory)
                    self.taken = directory_size(self._files)
                    self._is_open = True
                except (OSError, MmeError) as error:
                    self.complain(f"{error}")
            return self._is_open

    def complain(self, reason: str) -> None:
        """Warn, once, that weights can't be mapped as they should."""
        if not self._complained:
            self._complained = True
            _log.warning("weights are not mapped, models are loaded plainly: %s: %s", self.directory, reason)

    def has_room(self, size: int) -> bool:
        """Whether a form of a model of that size may be written."""
        free = shutil.disk_usage(self.directory).free
        if free < _SPARE_DISK * size:
            self.complain(f"{free / 1e6:.0f} MB are left on the disk")
            return False
        if self._has_room is not None and not self._has_room(size):
            self.complain("archives take all of the disk budget but for less than a model's weights: MME_DISK_BUDGET")
            return False
        return True

    def can_map(self, files: int) -> bool:
        """Whether so many more files may be mapped: the kernel lets a process have only so many mappings."""
        return sum(handler.mappings for handler in self.handlers) + files <= _mapping_limit()

    # -- looking up ----------------------------------------------------------------------------------------------

    def reference(self, model_file: Path) -> Reference | None:
        """What is known of a file; None when that is nothing, or when the file is another one by now."""
        reference = _read_reference(self._ref(model_file)) if self.open(make=False) else None
        return reference if reference is not None and reference.is_current() else None

    def form(self, key: str, refinement: str) -> Form | None:
        """The form of that key, refined if it is."""
        for name in (_refined(key, refinement), key):
            with contextlib.suppress(*_NONE_OF_OURS):
                fields = json.loads((self._forms / name).read_text())
                form = Form(self._files / name, key, dict(fields["blobs"]), _trial(fields["trial"]))
                if form.is_there() and self._is_whole(form, fields["checksum"]):
                    return form
        return None

    def _is_whole(self, form: Form, checksum: int) -> bool:
        """Whether the files of a form are what was written. A damaged one is removed."""
        whole = True
        for name, expected in {form.path.name: checksum, **{blob: checksum_of(blob) for blob in form.blobs}}.items():
            file = self._files / name
            identity = identity_of(file.stat())
            if self._whole.get(name) == identity:
                continue
            if crc_of(file) == expected:
                self._whole[name] = identity
            else:
                _log.warning("%s is damaged on disk, and is made again", file)
                file.unlink(missing_ok=True)
                whole = False
        return whole

    # -- writing -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def draft(self) -> Iterator[Draft]:
        """A form to be written. Blobs that come to nothing are swept."""
        with staging_directory(self.directory) as folder:
            draft = Draft(folder, self._files)
            try:
                yield draft
            finally:
                draft.close()

    def add_written(self, draft: Draft, graph: bytes) -> Form:
        """A form of a draft's blobs and a graph, to be loaded at once; it is swept unless it is kept."""
        key = hashlib.sha256(graph).hexdigest()[:32]
        for name in draft.blobs:  # written, or compared, just now
            self._whole[name] = identity_of((self._files / name).stat())
        return Form(self._add_graph(draft, graph, key), key, draft.blobs)

    def add_refined(self, draft: Draft, graph: bytes, key: str, refinement: str) -> Form:
        """The same for what became of the written form of that key, to be tried."""
        return Form(self._add_graph(draft, graph, _refined(key, refinement)), key, draft.blobs)

    def keep(self, form: Form) -> None:
        """Have a form on the disk to stay, and let it be found. Takes as long as the disk does.

        Raises:
            OSError: also where the form is gone.
        """
        for name in (form.path.name, *form.blobs):
            sync(self._files / name)
        sync(self._files)
        checksum = crc_of(form.path)
        fields = {
            "checksum": checksum,
            "blobs": form.blobs,
            "trial": None if form.trial is None else asdict(form.trial),
        }
        self._write_json(self._forms / form.path.name, fields)

    def drop_written(self, key: str) -> None:
        """The written form of that key is not needed any more: there is a refined one."""
        (self._forms / key).unlink(missing_ok=True)

    def refer(self, model_file: Path, reference: Reference) -> None:
        self._write_json(self._ref(model_file), {"sources": reference.sources, "key": reference.key})

    # -- removing ------------------------------------------------------------------------------------------------

    def sweep(self, new_seconds: float = _NEW_SECONDS) -> None:
        """Remove what nothing leads to, but for what is newer than that."""
        if not self.open(make=False):
            return
        new = time.time() - new_seconds
        keys = set()
        for path in list(self._refs.iterdir()):
            reference = _read_reference(path)
            if reference is None or not reference.is_current():
                path.unlink(missing_ok=True)
            else:
                keys.add(reference.key)
        needed = set()
        for path in list(self._forms.iterdir()):
            if path.name.partition("-")[0] in keys or _is_newer(path, new):
                needed |= {path.name, *_blobs(path)}
            else:
                path.unlink(missing_ok=True)
        for path in list(self._files.iterdir()):
            if path.name not in needed and not _is_newer(path, new):
                path.unlink(missing_ok=True)
        for name in self._whole.keys() - needed:
            self._whole.pop(name, None)
        self.taken = directory_size(self._files)

    def shrink(self) -> None:
        """Remove what nothing leads to, now that the disk is short of room: see `DiskBudget`."""
        self.sweep(_HURRIED_SECONDS)

    def _add_graph(self, draft: Draft, graph: bytes, name: str) -> Path:
        made, path = draft.folder / name, self._files / name
        made.write_bytes(graph)
        self.taken += draft.added
        if appear(made, path):
            self.taken += len(graph)
        else:
            os.utime(path)
        return path

    def _write_json(self, path: Path, fields: dict[str, Any]) -> None:
        with staging_directory(self.directory) as staging:
            made = staging / path.name
            made.write_text(json.dumps(fields))
            sync(made)
            made.rename(path)
        sync(path.parent)

    def _ref(self, model_file: Path) -> Path:
        return self._refs / text_digest(str(model_file), 32)


def reference_to(draft: Draft, key: str) -> Reference:
    """What to remember of a draft's files; UNAVAILABLE when one of them was written to meanwhile."""
    if not draft.is_true():
        raise MmeError(Kind.UNAVAILABLE, "the model's file was written to while it was read")
    return Reference({str(path): source.identity for path, source in draft.sources.items()}, key)


def _read_reference(path: Path) -> Reference | None:
    try:
        fields = json.loads(path.read_text())
        return Reference({source: tuple(identity) for source, identity in fields["sources"].items()}, fields["key"])
    except _NONE_OF_OURS:
        return None


def _blobs(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text())["blobs"])
    except _NONE_OF_OURS:
        return []


def _trial(fields: dict[str, Any] | None) -> Trial | None:
    if fields is None:
        return None
    return Trial(**{**fields, "mapped_when_packed": tuple(fields["mapped_when_packed"])})


def _is_newer(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime > than
    except FileNotFoundError:
        return True


@functools.cache
def _mapping_limit() -> int:
    return int(_KERNEL_LIMIT.read_text()) // 2  # heaps and stacks of threads are mappings too


def _refined(key: str, refinement: str) -> str:
    return f"{key}-{text_digest(refinement, 12)}"
