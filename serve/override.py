"""Models that are loaded with another configuration than their own, or with files of the client's, for that one load.

An `Override` is a request; what becomes of it is a source like any other (`source.Overridden`). Files lie in a folder
of their own under the cache directory, and nowhere near those that they stand for; it is removed when nobody refers to
it any more, and by the next server if this one had no time to. Folders are made on load threads.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.disk import disk_errors
from model_handlers.errors import invalid_argument
from serve.life import goes_on, life_of
from serve.source import InRepository, Overridden, origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.outside import Override
    from serve.source import Source

FILE = "file:"
_SHOWN = 200  # characters of a client's path in a message


def inner_path(key: str) -> str:
    """The path inside a model's directory that a file parameter names, normalised.

    Raises:
        MmeError: INVALID_ARGUMENT when it leads out of it, or names no file.
    """
    path = posixpath.normpath(key.removeprefix(FILE))
    if path in {".", ".."} or path.startswith(("/", "../")) or key.endswith("/") or "\0" in path:
        raise invalid_argument(
            f"Invalid file parameter '{key[:_SHOWN]}' with normalized path '{path[:_SHOWN]}' must stay within model "
            "directory."
        )
    return path


def check_override(override: Override) -> dict[str, bytes]:
    """The files of an override by their paths.

    Raises:
        MmeError: INVALID_ARGUMENT when it is none that can be loaded.
    """
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


def digest_of(config: str) -> str:
    """What an overridden configuration adds to the name of a model's content; nothing if there is none."""
    return f"+{hashlib.sha256(config.encode()).hexdigest()[:16]}" if config else ""


class OverrideFolder:
    """A folder that is there as long as this object is.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._removal = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<OverrideFolder {self.path}>"


class Overrides:
    """Makes sources of overrides.

    Args:
        directory: where the folders of files lie; those that processes left there which ended are removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for left in directory.glob("*~*"):
            if not goes_on(left.name.partition("~")[0]):
                shutil.rmtree(left, ignore_errors=True)

    def source(self, name: str, base: Source | None, override: Override) -> Overridden:
        """Where model `name` comes from under an override.

        Args:
            name: the model's.
            base: where it comes from otherwise; None for a model that is nowhere else, which must bring all files.
            override: what it is to be loaded with.

        Raises:
            MmeError: INVALID_ARGUMENT for an override that makes no sense; OUT_OF_MEMORY for a full disk.
        """
        files = check_override(override)
        if not files:
            if base is None:
                raise ValueError(f"model '{name}' has no files")
            return Overridden(origin(base), override.config)
        with disk_errors(f"the files that model '{name}' is to be loaded with can't be written"):
            folder = self._folder(files)
        there = InRepository(folder.path) if base is None else origin(base)
        return Overridden(there, override.config, folder)

    def _folder(self, files: Mapping[str, bytes]) -> OverrideFolder:
        self._directory.mkdir(parents=True, exist_ok=True)
        folder = OverrideFolder(Path(tempfile.mkdtemp(prefix=f"{life_of(os.getpid())}~", dir=self._directory)))
        for path, content in files.items():
            file = folder.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return folder
