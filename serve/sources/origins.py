"""Where models come from: archives of a store, repositories on disk or in S3, folders; what a client sends once.

Looks names up; it knows neither who is in memory nor who is registered. `find` and `canonical` are for the event loop;
`find_all`, `scan` and `overridden` block on disk or network, and are for threads.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from serve.sources.archive import ExtractLimits
from serve.sources.artifacts import Artifacts
from serve.sources.credentials import credentials_for
from serve.sources.directories import Directories, open_bucket
from serve.sources.override import FOLDER, Overrides
from serve.sources.repositories import Repositories
from serve.sources.source import Archived, InBucket, InRepository, is_plain
from serve.sources.store import ARCHIVE_SUFFIX, open_store, validate_name, wrong_name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from model_handlers.model_calls import Override
    from serve.engine_options import EngineOptions
    from serve.sources.disk_room import DiskRoom
    from serve.sources.scripts import Scripts
    from serve.sources.source import Overridden, Source
    from serve.weights.store import WeightStore


class Origins:
    """Names over everything that has models.

    Attributes:
        artifacts: archives that requests may name, or None.

    Args:
        options: which store, repositories and folders there are.
        scripts: what is the same for all inference scripts.
        weights: what is made of archives.
        let_go: see `Artifacts`.
    """

    def __init__(
        self,
        options: EngineOptions,
        scripts: Callable[[], Scripts],
        weights: WeightStore,
        let_go: Callable[[str], bool],
    ) -> None:
        disk, budget = options.cache_directory, options.disk_budget
        self.artifacts: Artifacts | None = None
        if options.store:
            limits = ExtractLimits(max_files=options.max_archive_files)
            store = open_store(options.store)
            self.artifacts = Artifacts(store, disk, limits, budget=budget, let_go=let_go, derived=weights)
        self._directories: Directories | None = None
        if options.buckets:
            buckets = [open_bucket(url, credentials_for(url, options.credentials)) for url in options.buckets]
            self._directories = Directories(
                buckets,
                disk,
                budget=budget,
                let_go=let_go,
                derived=weights,
                config_name=options.scripts.config_name,
            )
        self._repositories: Repositories | None = None
        if options.repository is not None:
            folders = (options.repository, *options.more_repositories)
            self._repositories = Repositories(folders, scripts, namespaces=options.namespaces)
        self._folders = options.folders
        self._overrides = Overrides(options.cache_directory / FOLDER, options.life, options.disk_budget)

    def __repr__(self) -> str:
        return f"<Origins {self.artifacts or self._directories or self._repositories or sorted(self._folders)}>"

    @property
    def room(self) -> DiskRoom | None:
        """What is taken of the disk by what was downloaded; None where nothing is."""
        downloaded = self.artifacts or self._directories
        return downloaded.room if downloaded is not None else None

    def canonical(self, name: str) -> str:
        """The one name of what a name means: a store's archives may be named with or without suffix."""
        if self.artifacts is not None and not name.endswith(ARCHIVE_SUFFIX):
            return name + ARCHIVE_SUFFIX
        return name if self._repositories is None else self._repositories.canonical(name)

    def find(self, name: str) -> Source:
        """Where a name that nobody gave a url for would come from.

        Raises:
            MmeError: UNKNOWN_MODEL; and as `Repositories.find`.
        """
        if self.artifacts is not None:
            return Archived(self.artifacts, validate_name(name))
        if self._directories is not None:
            if not is_plain(name) or wrong_name(name):
                raise unknown(name)
            return InBucket(self._directories, name)
        if name in self._folders:
            return InRepository(self._folders[name])
        found = self._repositories.find(name) if self._repositories is not None else None
        if found is None:
            raise unknown(name)
        return found

    def find_all(self) -> list[str]:
        """Every name that there is. Blocks."""
        if self.artifacts is not None:
            return [stored.name for stored in self.artifacts.store.list()]
        if self._directories is not None:
            return list(self._directories.scan())
        return self._repositories.names() if self._repositories is not None else list(self._folders)

    def is_bare(self) -> bool:
        """Whether there is a store or a repository, and no model in it. Blocks.

        Raises:
            MmeError: UNAVAILABLE when it can't be read.
        """
        if self.artifacts is not None:
            return next(iter(self.artifacts.store.list()), None) is None
        return (self._directories is not None or self._repositories is not None) and not self.find_all()

    def scan(self) -> dict[str, str]:
        """Every name that the repositories have, and what its files look like. Blocks."""
        if self._directories is not None:
            return self._directories.scan()
        return self._repositories.scan() if self._repositories is not None else {}

    def offers(self, name: str) -> bool:
        """Whether a repository has a model of that name; one in S3, when it was asked last."""
        if self._directories is not None:
            return self._directories.has(name)
        with contextlib.suppress(MmeError):
            if self._repositories is not None and name not in self._folders:
                return self._repositories.has(name)
            return isinstance(self.find(name), InRepository)
        return False

    @property
    def refused(self) -> Mapping[str, str]:
        """Name → why it is none that can be served, as of the last look at all of them."""
        of_names = self._directories or self._repositories
        return of_names.refused if of_names is not None else {}

    def overridden(self, name: str, base: Source | None, override: Override) -> Overridden:
        """What a name means for one load. Blocks; see `Overrides.source`."""
        return self._overrides.source(name, base, override)

    def restored(self, name: str, base: Source | None, config: str, folder: str) -> Overridden:
        """The same in the next worker; see `Overrides.restored`."""
        return self._overrides.restored(name, base, config, folder)

    def sweep_overrides(self) -> None:
        """Everything is restored that is to be; see `Overrides.sweep`."""
        self._overrides.sweep()


def unavailable(name: str, version: int | None, known: Container[int]) -> MmeError:
    """There is such a model, but none of it is served.

    Args:
        name: the model's.
        version: that is asked for, None for the latest.
        known: versions that were served last, or were to be.
    """
    if version is None:
        return MmeError(Kind.UNKNOWN_VERSION, f"Request for unknown model: '{name}' has no available versions")
    if version not in known:
        return MmeError(Kind.UNKNOWN_VERSION, f"Request for unknown model: '{name}' version {version} is not found")
    return MmeError(Kind.UNAVAILABLE, f"Request for unknown model: '{name}' version {version} is not at ready state")


def unknown(name: str) -> MmeError:
    """There is no such model."""
    return MmeError(Kind.UNKNOWN_MODEL, f"Request for unknown model: '{name}' is not found")
