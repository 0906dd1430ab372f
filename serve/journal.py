"""What is registered, kept for the next worker of the same master: a worker that dies costs nobody his registration.

A journal belongs to one life of the process that starts workers. Its next worker finds what the one before it knew; a
server that is started anew finds nothing, since it is told again what to serve. Journals of lives that are over are
removed. On the event loop only; written lazily, or at once for who waits for it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from serve.life import goes_on
from serve.state_file import LazyFile, StateFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from serve.cache.cache_entry import Entry

FORM = "mme journal 1"
_PREFIX = "journal-"
_DELAY = 1.0  # seconds from a change to the file, if nobody waits
_log = logging.getLogger("mme.state")


@dataclass(frozen=True, slots=True)
class Row:
    """One registered model.

    Attributes:
        name: that it is registered under.
        url: the folder that it came from, "" where store or repository have it.
        body: whether its input is a request's body as it came.
        used: when it was used last, in seconds since 1970.
        config: the configuration that a client loaded it with, as JSON; "" for its own.
        folder: the name of the folder with the files that it was loaded with; "" for its own.
    """

    name: str
    url: str = ""
    body: bool = False
    used: float = 0.0
    config: str = ""
    folder: str = ""

    def checked(self) -> Row:
        """It, if its values are of their types, which a file may have otherwise.

        Raises:
            TypeError: they are not.
        """
        texts = (self.name, self.url, self.config, self.folder)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.used, int | float):
            raise TypeError(f"a row that is none: {self}")
        return self


class Journal:
    """The registered models and their other names, in a file.

    Attributes:
        rows: name → what is registered.
        aliases: other name → name.
        unloaded: names that somebody unloaded, which a start-up list must not bring back.
        dormant: who left because a part of it was unloaded, or did not load for its parts → all its parts.

    Args:
        directory: where journals lie.
        life: whose journal it is; "" keeps none.
        entries: every model that the cache knows, which tell when they were used last; read on a thread.
        pool: threads to write on.
    """

    def __init__(self, directory: Path, life: str, entries: Mapping[str, Entry[Any]], pool: Executor) -> None:
        self.rows: dict[str, Row] = {}
        self.aliases: dict[str, str] = {}
        self.unloaded: set[str] = set()
        self.dormant: dict[str, frozenset[str]] = {}
        self._entries = entries
        self._file: LazyFile | None = None
        if not life:
            return
        for path in directory.glob(f"{_PREFIX}*.json"):
            if not goes_on(path.name.removeprefix(_PREFIX).removesuffix(".json")):
                path.unlink(missing_ok=True)
        file = StateFile(directory / f"{_PREFIX}{life}.json", FORM)
        self._take(file.read())
        self._file = LazyFile(file, self._snapshot, pool, delay=_DELAY)

    def __repr__(self) -> str:
        return f"<Journal of {len(self.rows)} models, {len(self.aliases)} aliases>"

    @property
    def is_kept(self) -> bool:
        """Whether anything of it is for another worker."""
        return self._file is not None

    def changed(self) -> None:
        """Somebody changed what is registered."""
        if self._file is not None:
            self._file.changed()

    async def flush(self) -> None:
        """Return when every change is written."""
        if self._file is not None:
            await self._file.flush()

    async def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            await self._file.close()

    def _snapshot(self) -> dict[str, Any]:
        """Taken on a thread: a copy of a dictionary is made at one stroke."""
        rows, aliases, unloaded = self.rows.copy(), self.aliases.copy(), self.unloaded.copy()
        dormant = self.dormant.copy()
        return {
            "models": [asdict(row) | {"used": self._used(row)} for row in rows.values()],
            "aliases": aliases,
            "unloaded": sorted(unloaded),
            "dormant": {name: sorted(parts) for name, parts in dormant.items()},
        }

    def _used(self, row: Row) -> float:
        entry = self._entries.get(row.name)
        return entry.last_used + clock() if entry is not None and entry.last_used else row.used

    def _take(self, document: Mapping[str, Any]) -> None:
        """What the worker before knew; what makes no sense is left out."""
        try:
            rows = [Row(**row).checked() for row in document.get("models", ())]
            self.rows = {row.name: row for row in rows}
            self.aliases = dict(document.get("aliases", ()))
            self.unloaded = set(document.get("unloaded", ()))
            self.dormant = {name: frozenset(parts) for name, parts in dict(document.get("dormant", ())).items()}
        except (TypeError, ValueError, KeyError) as error:
            _log.warning("the journal of the worker before this one is ignored: %s", error)
            self.rows, self.aliases, self.unloaded, self.dormant = {}, {}, set(), {}


def clock() -> float:
    """What the wall clock reads when the one of entries reads 0."""
    return time.time() - time.monotonic()
