"""Models that are loaded with another configuration than their own, or with files of the client's, for that one load.

Files lie in a folder of their own under the cache directory, removed with the last reference to it; all of them may
take as much of the disk as archives may. A folder outlives a worker that dies, since the journal names it: the next
worker of the same master restores it, and removes the others; what a whole server leaves is removed by its master, or
by the next server. A folder is called `<life of the master>~<life of the worker that made it>~…`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import shutil
import tempfile
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_argument, out_of_memory
from model_handlers.system.disk import directory_size, disk_errors, file_digest
from serve.sources.source import InRepository, Overridden, origin
from serve.state_file import goes_on, life_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.model_calls import Override
    from serve.sources.source import Source

FOLDER = "overrides"  # in the cache directory
FILE = "file:"
_DEFAULT_SHARE = 0.8  # of what is free, where no budget is set
_SHOWN = 200  # characters of a client's path in a message
_MOST_NAME = 255  # bytes, of file systems
_MOST_PATH = 1024  # bytes, as S3's for a key


def inner_path(key: str) -> str:
    """The path inside a model's directory that a file parameter names, normalised."""
    path = posixpath.normpath(key.removeprefix(FILE))
    if path in {".", ".."} or path.startswith(("/", "../")) or key.endswith("/") or "\0" in path:
        raise invalid_argument(
            f"Invalid file parameter '{key[:_SHOWN]}' with normalized path '{path[:_SHOWN]}' must stay within model "
            "directory."
        )
    if len(path.encode()) > _MOST_PATH or any(len(name.encode()) > _MOST_NAME for name in path.split("/")):
        raise invalid_argument(
            f"Invalid file path '{path[:_SHOWN]}…': a name in it has at most {_MOST_NAME} bytes, and all of it "
            f"{_MOST_PATH}"
        )
    return path


def check_override(override: Override) -> dict[str, bytes]:
    """The files of an override by their paths."""
    for key in override.files:
        if not key.startswith(FILE):
            raise invalid_argument(f"Unrecognized load parameter '{key[:_SHOWN]}' with type 'BYTES'")
    if override.files and not override.config:
        raise invalid_argument("Load parameter 'config' must be specified for model file override")
    files = {inner_path(key): content for key, content in override.files.items()}
    for path in files:
        inside = [other for other in files if other.startswith(f"{path}/")]
        if inside:
            raise invalid_argument(f"file parameters name '{path}' as a file, and as the folder of '{inside[0]}'")
    return files


class OverrideFolder:
    """A folder that is there as long as this object is; then its `size` is appended to `left`."""

    def __init__(self, path: Path, size: int, left: deque[int]) -> None:
        self.path = path
        self._removal = weakref.finalize(self, _remove, path, size, left)

    def __repr__(self) -> str:
        return f"<OverrideFolder {self.path}>"

    @functools.cached_property
    def contents(self) -> str:
        """The same for the same bytes under the same names, wherever they were written to."""
        digest = hashlib.sha256()
        with disk_errors(f"files in {self.path} cannot be read"):
            for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
                digest.update(f"{file.relative_to(self.path)}\0{file_digest(file).hex()}\0".encode())
        return digest.hexdigest()

    def leave(self) -> None:
        self._removal.detach()


def _remove(path: Path, size: int, left: deque[int]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    left.append(size)


class Overrides:
    """Makes sources of overrides, whose folders lie in `directory`.

    `life` is that of the process that starts workers, whose next one restores what this one made; all files may take
    `budget` bytes together, or a share of what is free.
    """

    def __init__(self, directory: Path, life: str = "", budget: int | None = None) -> None:
        self._directory = directory
        self._own = life_of(os.getpid())
        self._life = life or self._own
        self._budget = budget
        self._folders: weakref.WeakSet[OverrideFolder] = weakref.WeakSet()
        self._lock = threading.Lock()  # of all folders, and of what they may take together
        self._taken = 0
        self._left: deque[int] = deque()  # what is not taken any more; on whatever thread a folder goes
        for left in directory.glob("*~*"):
            if not goes_on(left.name.partition("~")[0]):
                shutil.rmtree(left, ignore_errors=True)

    def source(self, name: str, base: Source | None, override: Override) -> Overridden:
        """Where model `name` comes from under an override, which must bring all files where `base` is None."""
        files = check_override(override)
        if not files:
            if base is None:
                raise ValueError(f"model '{name}' has no files")
            return Overridden(origin(base), override.config)
        with disk_errors(f"the files that model '{name}' is to be loaded with can't be written"), self._lock:
            folder = self._folder(name, files)
        there = InRepository(folder.path) if base is None else origin(base)
        return Overridden(there, override.config, folder)

    def restored(self, name: str, base: Source | None, config: str, folder: str) -> Overridden:
        """What `source` made in the worker before, by its configuration and the name of its folder ("" for none)."""
        if not folder:
            if base is None:
                raise ValueError(f"model '{name}' has no files")
            return Overridden(origin(base), config)
        path = self._directory / folder
        if not path.is_dir():
            sentence = f"model '{name}' was loaded with files of a client's that are gone: load it with them again"
            raise MmeError(Kind.UNAVAILABLE, sentence)
        with self._lock:
            there = self._made(path, directory_size(path))
        return Overridden(InRepository(path) if base is None else origin(base), config, there)

    def sweep(self) -> None:
        kept = {folder.path for folder in self._folders}
        for left in self._directory.glob(f"{self._life}~*"):
            if left not in kept and not goes_on(left.name.split("~")[1]):
                shutil.rmtree(left, ignore_errors=True)

    def _check_room(self, name: str, size: int) -> None:
        while self._left:
            self._taken -= self._left.popleft()
        taken, budget = self._taken, self._budget
        if budget is None:
            budget = int((shutil.disk_usage(self._directory).free + taken) * _DEFAULT_SHARE)
        if taken + size > budget:
            raise out_of_memory(
                f"the files that model '{name}' is to be loaded with find no room on disk: those of other models hold "
                f"{taken} of {budget} bytes; unload one of those, or raise MME_DISK_BUDGET"
            )

    def _folder(self, name: str, files: Mapping[str, bytes]) -> OverrideFolder:
        self._directory.mkdir(parents=True, exist_ok=True)
        size = sum(map(len, files.values()))
        self._check_room(name, size)
        prefix = f"{self._life}~{self._own}~"
        folder = self._made(Path(tempfile.mkdtemp(prefix=prefix, dir=self._directory)), size)
        for path, content in files.items():
            file = folder.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return folder

    def _made(self, path: Path, size: int) -> OverrideFolder:
        folder = OverrideFolder(path, size, self._left)
        self._folders.add(folder)
        self._taken += size
        return folder


def forget_overrides(cache_directory: Path, life: str) -> None:
    """Remove all that the workers of a server made: it ends, and no other worker comes."""
    for left in (cache_directory / FOLDER).glob(f"{life}~*"):
        shutil.rmtree(left, ignore_errors=True)
