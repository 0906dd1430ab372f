"""Where models come from: archives of a store, repositories on disk or in S3, folders; what a client sends once.

`find` and `canonical` are for the event loop; `find_all` and `scan` block on disk or network.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from model_handlers.config.bounds import MAX_CONFIG_SIZE
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.system.disk import disk_errors, etag_of, identity_of
from serve.sources.archive import ExtractLimits
from serve.sources.artifacts import Artifacts
from serve.sources.layout import COMPILED, CONFIG_NAME, list_models, may_be_model
from serve.sources.override import FOLDER, Overrides
from serve.sources.s3_repository import Directories, open_bucket
from serve.sources.source import Archived, InRepository, S3Model, is_plain
from serve.sources.store import ARCHIVE_SUFFIX, credentials_for, open_store, validate_name, wrong_name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

    from serve.options import EngineOptions
    from serve.sources.disk_budget import DiskBudget
    from serve.sources.scripts import Scripts
    from serve.sources.source import Source
    from serve.weights.store import WeightStore


class ModelCatalog:
    """Names over all that has models: `artifacts` of a store, repositories, folders; `overrides` for one load."""

    def __init__(
        self,
        options: EngineOptions,
        scripts: Callable[[], Scripts],
        weights: WeightStore,
        evict: Callable[[str], bool],
    ) -> None:
        disk, budget = options.cache_directory, options.disk_budget
        self.artifacts: Artifacts | None = None
        if options.store:
            limits = ExtractLimits(max_files=options.max_archive_files)
            store = open_store(options.store)
            self.artifacts = Artifacts(store, disk, limits, budget=budget, evict=evict, derived=weights)
        self._directories: Directories | None = None
        if options.buckets:
            buckets = [open_bucket(url, credentials_for(url, options.credentials)) for url in options.buckets]
            self._directories = Directories(
                buckets,
                disk,
                budget=budget,
                evict=evict,
                derived=weights,
                config_name=options.scripts.config_name,
            )
        self._repositories: Repositories | None = None
        if options.repository is not None:
            folders = (options.repository, *options.more_repositories)
            self._repositories = Repositories(folders, scripts, namespaces=options.namespaces)
        self._folders = options.folders
        self.overrides = Overrides(options.cache_directory / FOLDER, options.life, options.disk_budget)

    def __repr__(self) -> str:
        return f"<ModelCatalog {self.artifacts or self._directories or self._repositories or sorted(self._folders)}>"

    @property
    def room(self) -> DiskBudget | None:
        """What downloads take of the disk; None where nothing is downloaded."""
        downloaded = self.artifacts or self._directories
        return downloaded.room if downloaded is not None else None

    def canonical(self, name: str) -> str:
        """The one name of what a name means: a store's archives may be named with or without suffix."""
        if self.artifacts is not None and not name.endswith(ARCHIVE_SUFFIX):
            return name + ARCHIVE_SUFFIX
        return name if self._repositories is None else self._repositories.canonical(name)

    def find(self, name: str) -> Source:
        """Where a name comes from that was posted without a url."""
        if self.artifacts is not None:
            return Archived(self.artifacts, validate_name(name))
        if self._directories is not None:
            if not is_plain(name) or wrong_name(name):
                raise unknown(name)
            return S3Model(self._directories, name)
        if name in self._folders:
            return InRepository(self._folders[name])
        found = self._repositories.find(name) if self._repositories is not None else None
        if found is None:
            raise unknown(name)
        return found

    def find_all(self) -> list[str]:
        if self.artifacts is not None:
            return [stored.name for stored in self.artifacts.store.list()]
        if self._directories is not None:
            return list(self._directories.scan())
        return self._repositories.names() if self._repositories is not None else list(self._folders)

    def is_bare(self) -> bool:
        """Whether there is a store or a repository, and no model in it."""
        if self.artifacts is not None:
            return next(iter(self.artifacts.store.list()), None) is None
        return (self._directories is not None or self._repositories is not None) and not self.find_all()

    def scan(self) -> dict[str, str]:
        """Every name that the repositories have, and what its files look like."""
        if self._directories is not None:
            return self._directories.scan()
        return self._repositories.scan() if self._repositories is not None else {}

    def offers(self, name: str) -> bool:
        """Whether a repository has a model of that name; one in S3, when it was asked last."""
        if self._directories is not None:
            return self._directories.has(name)
        with suppress(MmeError):
            if self._repositories is not None and name not in self._folders:
                return self._repositories.has(name)
            return isinstance(self.find(name), InRepository)
        return False

    @property
    def refused(self) -> Mapping[str, str]:
        """Name → why it can't be served, as of the last look at all of them."""
        of_names = self._directories or self._repositories
        return of_names.refused if of_names is not None else {}


def unavailable(name: str, version: int | None, known: Container[int]) -> MmeError:
    """There is such a model, but none of it is served; `known` are versions that were, or were to be."""
    if version is None:
        return MmeError(Kind.UNKNOWN_VERSION, f"Request for unknown model: '{name}' has no available versions")
    if version not in known:
        return MmeError(Kind.UNKNOWN_VERSION, f"Request for unknown model: '{name}' version {version} is not found")
    return MmeError(Kind.UNAVAILABLE, f"Request for unknown model: '{name}' version {version} is not at ready state")


def unknown(name: str) -> MmeError:
    return MmeError(Kind.UNKNOWN_MODEL, f"Request for unknown model: '{name}' is not found")


class Repositories:
    """The models of local repositories, one folder each: which names there are, and which folder each of them means.

    A name that two repositories have is refused (`refused`: name → why), or, with namespaces, is the name of two
    models: `<repository>/<name>` means one of them. A name that only one has means it either way.
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
        """Where a model is, None if it is nowhere. Looks at two or three names: may be called on the event loop.

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
        """Whether `names` would tell that model: its folder may outlive it."""
        source = self.find(name)
        return source is not None and may_be_model(source.path, self._scripts())

    def names(self) -> list[str]:
        """Every name, in order; reads directories."""
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

    A config.pbtxt that is written again with the same words is the same. What Python keeps of code is not looked at.
    """

    def place(directory: str) -> tuple[int, ...]:
        with suppress(OSError):  # it went this moment, or is a link to nowhere or to itself: its load will tell
            return identity_of(os.stat(directory))[:2]  # noqa: PTH116
        return ()

    def look(file: str, *, is_config: bool) -> str:
        with suppress(OSError):
            if not is_config:
                return etag_of(os.stat(file))  # noqa: PTH116
            with open(file, "rb") as config:  # noqa: PTH123 - names are texts here
                return hashlib.sha256(config.read(MAX_CONFIG_SIZE)).hexdigest()
        return ""

    digest = hashlib.sha256()
    walked = {place(str(path))}
    with disk_errors(f"model directory {path} cannot be read"):
        # A version may be a link, which leads elsewhere from one moment to the next; and links may lead in a circle.
        for base, directories, files in os.walk(path, followlinks=True):
            digest.update(os.fsencode(f"{base}\0"))
            places = {name: place(os.path.join(base, name)) for name in sorted(directories)}  # noqa: PTH118
            places.pop(COMPILED, None)
            directories[:] = [name for name, where in places.items() if where not in walked]
            walked.update(places.values())
            for name, where in places.items():
                digest.update(os.fsencode(f"{name}\0{where}\0"))
            for file in sorted(files):
                is_config = base == str(path) and file == CONFIG_NAME
                digest.update(os.fsencode(f"{file}\0{look(os.path.join(base, file), is_config=is_config)}\0"))  # noqa: PTH118
    return digest.hexdigest()[:32]
