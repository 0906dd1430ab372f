"""What is registered, kept for the next worker of the same master: a worker that dies costs nobody his registration.

A journal belongs to one life of the process that starts workers. Its next worker finds what the one before it knew; a
server that is started anew finds nothing, since it is told again what to serve. Journals of lives that are over are
removed. On the event loop only; written lazily, or at once for who waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from serve.life import goes_on
from serve.state_file import LazyFile, StateFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from serve.cache.entry import Entry
    from serve.state_file import Change

FORM = "mme journal 2"
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
        self._changed: deque[tuple[str, str]] = deque()  # filled on the loop, emptied on the thread that writes
        self._entries = entries
        self._file: LazyFile | None = None
        if not life:
            return
        for path in directory.glob(f"{_PREFIX}*.json"):
            if not goes_on(path.name.removeprefix(_PREFIX).removesuffix(".json")):
                path.unlink(missing_ok=True)
        file = StateFile(directory / f"{_PREFIX}{life}.json", FORM)
        self._take(file.read())
        self._file = LazyFile(file, self, pool, delay=_DELAY)

    def __repr__(self) -> str:
        return f"<Journal of {len(self.rows)} models, {len(self.aliases)} aliases>"

    @property
    def is_kept(self) -> bool:
        """Whether anything of it is for another worker."""
        return self._file is not None

    def changed(self, section: str, key: str) -> None:
        """Somebody changed what is registered: what `section` has under `key`."""
        if self._file is not None:
            self._changed.append((section, key))
            self._file.changed()

    async def flush(self) -> None:
        """Return when every change is written."""
        if self._file is not None:
            await self._file.flush()

    async def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            await self._file.close()

    def snapshot(self) -> dict[str, Any]:
        """All of it; see `Source`. A list of what a dictionary has is made at one stroke."""
        there: dict[str, Iterable[str]]
        there = {"models": self.rows, "aliases": self.aliases, "unloaded": self.unloaded, "dormant": self.dormant}
        sections = {name: {key: self._value(name, key) for key in list(keys)} for name, keys in there.items()}
        return {name: {key: row for key, row in rows.items() if row is not None} for name, rows in sections.items()}

    def changes(self) -> list[Change]:
        """What was changed since this was asked last; see `Source`."""
        changed = [self._changed.popleft() for _ in range(len(self._changed))]
        return [(section, key, self._value(section, key)) for section, key in dict.fromkeys(changed)]

    def _value(self, section: str, key: str) -> Any:
        if section == "models":
            row = self.rows.get(key)
            return None if row is None else asdict(row) | {"used": self._used(row)}
        if section == "dormant":
            return sorted(parts) if (parts := self.dormant.get(key)) is not None else None
        return self.aliases.get(key) if section == "aliases" else key in self.unloaded or None

    def _used(self, row: Row) -> float:
        entry = self._entries.get(row.name)
        return entry.last_used + clock() if entry is not None and entry.last_used else row.used

    def _take(self, document: Mapping[str, Any]) -> None:
        """What the worker before knew; what makes no sense is left out."""
        try:
            rows = [Row(**row).checked() for row in document.get("models", {}).values()]
            self.rows = {row.name: row for row in rows}
            self.aliases = dict(document.get("aliases", ()))
            self.unloaded = set(document.get("unloaded", ()))
            self.dormant = {name: frozenset(parts) for name, parts in dict(document.get("dormant", ())).items()}
        except (TypeError, ValueError, AttributeError) as error:
            _log.warning("the journal of the worker before this one is ignored: %s", error)
            self.rows, self.aliases, self.unloaded, self.dormant = {}, {}, set(), {}


def clock() -> float:
    """What the wall clock reads when the one of entries reads 0."""
    return time.time() - time.monotonic()
