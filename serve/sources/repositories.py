"""The models of one or several local repositories: which names there are, and which folder each of them means.

A name that two repositories have is refused, or, with namespaces, is the name of two models: `<repository>/<name>`
means one of them, the repository being called as its folder is. A name that only one has means that one either way.

`find` looks at two or three names and may be called on the event loop; `scan` reads directories, on a thread.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from model_handlers.config.bounds import MAX_CONFIG_SIZE
from model_handlers.errors import MmeError, invalid_argument, invalid_model
from model_handlers.system.disk import disk_errors
from serve.sources.layout import COMPILED, CONFIG_NAME, list_models, may_be_model
from serve.sources.source import InRepository, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from serve.sources.scripts import Scripts


class Repositories:
    """Names over folders.

    Attributes:
        refused: name → why it is none that can be served, as of the last look at all of them.

    Args:
        folders: one for each repository.
        scripts: what is the same for all inference scripts; may fetch something, on a thread.
        namespaces: whether two repositories may have models of one name.
    """

    def __init__(self, folders: tuple[Path, ...], scripts: Callable[[], Scripts], *, namespaces: bool = False) -> None:
        self.refused: dict[str, str] = {}
        self._folders = folders
        self._scripts = scripts
        self._namespaces = namespaces

    def __repr__(self) -> str:
        return f"<Repositories {', '.join(map(str, self._folders))}>"

    def canonical(self, name: str) -> str:
        """The shortest name of a model: without its repository, where only one has a model of that name."""
        space, slash, plain = name.partition("/")
        if not slash or not self._namespaces or not is_plain(plain):
            return name
        holders = self._holding(plain)
        return plain if [folder.name for folder in holders] == [space] else name

    def find(self, name: str) -> InRepository | None:
        """Where a model is, None if it is nowhere.

        Raises:
            MmeError: INVALID_MODEL for a name that two repositories have; INVALID_ARGUMENT where that is allowed, and
                the name does not say which is meant.
        """
        space, slash, plain = name.rpartition("/") if self._namespaces else ("", "", name)
        holders = self._holding(plain) if is_plain(plain) else []
        if slash:
            holders = [folder for folder in holders if folder.name == space] if len(holders) > 1 else []
        if not holders:
            return None
        if len(holders) > 1:
            raise self._ambiguous(name, holders)
        others = tuple(folder for folder in self._folders if folder != holders[0])
        return InRepository(holders[0] / plain, others)

    def has(self, name: str) -> bool:
        """Whether there is a model of that name, as `names` would tell: its folder may outlive it.

        Raises:
            MmeError: as `find`.
        """
        source = self.find(name)
        return source is not None and may_be_model(source.path, self._scripts())

    def names(self) -> list[str]:
        """Every name, in order; reads directories.

        Raises:
            MmeError: INVALID_ARGUMENT when a repository is not a directory.
        """
        owners: dict[str, list[Path]] = {}
        for folder in self._folders:
            for name in list_models(folder, self._scripts()):
                owners.setdefault(name, []).append(folder)
        found, refused = [], {}
        for name, folders in owners.items():
            holders = self._holding(name)  # one of them may be no model yet, which makes the name ambiguous as well
            if len(holders) > 1 and self._namespaces:
                found += [f"{folder.name}/{name}" for folder in folders]
                continue
            found.append(name)
            if len(holders) > 1:
                refused[name] = self._ambiguous(name, holders).message
        self.refused = refused
        return sorted(found)

    def scan(self) -> dict[str, str]:
        """Every name, and what its files look like now: another text when any of them was changed."""
        return {name: self._print(name) for name in self.names()}

    def _print(self, name: str) -> str:
        try:
            source = self.find(name)
            return "" if source is None else print_of(source.path)
        except MmeError as error:  # of this one alone: all others are served as they are
            return error.message

    def _holding(self, name: str) -> list[Path]:
        # Path.is_dir would raise for a name that is too long.
        return [folder for folder in self._folders if os.path.isdir(folder / name)]  # noqa: PTH112

    def _ambiguous(self, name: str, holders: list[Path]) -> MmeError:
        if self._namespaces:
            meant = " or ".join(f"'{folder.name}/{name}'" for folder in holders)
            return invalid_argument(
                f"There are {len(holders)} identifiers of model '{name}' in global map, model namespace must be "
                f"provided to resolve ambiguity. Ask for {meant}"
            )
        where = " and ".join(str(folder) for folder in holders)
        return invalid_model(
            f"model '{name}' is in {len(holders)} repositories, {where}: rename one, or give --model-namespacing"
        )


def print_of(path: Path) -> str:
    """What the files of a model look like: names, sizes and times, those of empty directories too.

    Its config.pbtxt is what it says: one that is written again with the same words is the same. What Python keeps of
    code that it has read is none of them.

    Raises:
        MmeError: INTERNAL when they can't be read.
    """
    digest = hashlib.sha256()
    walked = {_place(str(path))}
    with disk_errors(f"model directory {path} cannot be read"):
        # A version may be a link, which leads elsewhere from one moment to the next; and links may lead in a circle.
        for base, directories, files in os.walk(path, followlinks=True):
            digest.update(os.fsencode(f"{base}\0"))
            places = {name: _place(os.path.join(base, name)) for name in sorted(directories)}  # noqa: PTH118
            places.pop(COMPILED, None)
            directories[:] = [name for name, place in places.items() if place not in walked]
            walked.update(places.values())
            for name, place in places.items():
                digest.update(os.fsencode(f"{name}\0{place}\0"))
            for file in sorted(files):
                status = _says if base == str(path) and file == CONFIG_NAME else _status
                digest.update(os.fsencode(f"{file}\0{status(os.path.join(base, file))}\0"))  # noqa: PTH118
    return digest.hexdigest()[:32]


def _place(directory: str) -> tuple[int, int]:
    """The same for every way to a directory."""
    try:
        status = os.stat(directory)  # noqa: PTH116
    except OSError:  # as in `_status`
        return 0, 0
    return status.st_dev, status.st_ino


def _says(config: str) -> str:
    try:
        with open(config, "rb") as file:  # noqa: PTH123 - as all of these
            return hashlib.sha256(file.read(MAX_CONFIG_SIZE)).hexdigest()
    except OSError:  # as in `_status`
        return "none"


def _status(file: str) -> str:
    try:
        status = os.stat(file)  # noqa: PTH116
    except OSError:  # it went this moment, is a link to nowhere or to itself: whoever loads the model will tell
        return "none"
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
