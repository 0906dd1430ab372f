"""Where models come from: archives of a store, folders of repositories, folders by name; and what a client sends once.

Looks names up; it knows neither who is in memory nor who is registered. `find` and `canonical` are for the event loop;
`find_all`, `scan` and `overridden` block on disk or network, and are for threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from serve.sources.artifacts import Artifacts
from serve.sources.override import FOLDER, Overrides
from serve.sources.repositories import Repositories
from serve.sources.source import Archived, InRepository
from serve.sources.store import ARCHIVE_SUFFIX, open_store, validate_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model_handlers.outside import Override
    from serve.engine_options import EngineOptions
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
        self.artifacts: Artifacts | None = None
        if options.store:
            self.artifacts = Artifacts(
                open_store(options.store),
                options.cache_directory,
                budget=options.disk_budget,
                let_go=let_go,
                derived=weights,
            )
        self._repositories: Repositories | None = None
        if options.repository is not None:
            folders = (options.repository, *options.more_repositories)
            self._repositories = Repositories(folders, scripts, namespaces=options.namespaces)
        self._folders = options.folders
        self._overrides = Overrides(options.cache_directory / FOLDER, options.life, options.disk_budget)

    def __repr__(self) -> str:
        return f"<Origins {self.artifacts or self._repositories or sorted(self._folders)}>"

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
        return self._repositories.names() if self._repositories is not None else list(self._folders)

    def scan(self) -> dict[str, str]:
        """Every name that the repositories have, and what its files look like. Blocks."""
        return self._repositories.scan() if self._repositories is not None else {}

    @property
    def refused(self) -> Mapping[str, str]:
        """Name → why it is none that can be served, as of the last look at all of them."""
        return self._repositories.refused if self._repositories is not None else {}

    def overridden(self, name: str, base: Source | None, override: Override) -> Overridden:
        """What a name means for one load. Blocks; see `Overrides.source`."""
        return self._overrides.source(name, base, override)

    def restored(self, name: str, base: Source | None, config: str, folder: str) -> Overridden:
        """The same in the next worker; see `Overrides.restored`."""
        return self._overrides.restored(name, base, config, folder)

    def sweep_overrides(self) -> None:
        """Everything is restored that is to be; see `Overrides.sweep`."""
        self._overrides.sweep()


def unavailable(name: str) -> MmeError:
    """There is such a model, but none of it is served."""
    return MmeError(Kind.UNKNOWN_VERSION, f"Request for unknown model: '{name}' has no available versions")


def unknown(name: str) -> MmeError:
    """There is no such model."""
    return MmeError(Kind.UNKNOWN_MODEL, f"Request for unknown model: '{name}' is not found")
