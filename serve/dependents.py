"""Which models of a repository consist of which others. On the event loop only.

An ensemble of a repository holds its parts itself: they are loaded with it and leave with it. Beside that, each of them
may be served under its own name. What changes the one is told the other here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.cache.events import EventType
from serve.sources.source import InBucket, InRepository, origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from serve.cache.entry import Entry
    from serve.cache.events import CacheEvent


class Dependents:
    """Wholes and parts among the models that names mean.

    Args:
        entries: those models.
    """

    def __init__(self, entries: Mapping[str, Entry[Any]]) -> None:
        self._entries = entries
        self._wholes: dict[str, dict[str, None]] = {}  # of each member those that were loaded with it, still or not

    def __repr__(self) -> str:
        return f"<Dependents of {len(self._wholes)} members>"

    def hear(self, event: CacheEvent) -> None:
        """A model may have been loaded with members."""
        if event.type is EventType.LOADED:
            self.loaded(self._entries[event.name])

    def loaded(self, whole: Entry[Any]) -> None:
        """It is in memory now."""
        if isinstance(origin(whole.source), InRepository | InBucket):
            for member in whole.leased().members:
                self._wholes.setdefault(member, {})[whole.name] = None

    def wholes_of(self, name: str) -> list[str]:
        """The models in memory that hold the model of that name as a part of theirs."""
        part = self._entries.get(name)
        member = "" if part is None else _member(part)
        found = self._wholes.get(member, {})
        for each in list(found):
            whole = self._entries.get(each)
            if whole is None or whole.resident is None or member not in whole.resident.members:
                del found[each]
        if part is None or not found:
            self._wholes.pop(member, None)
            return []
        return [each for each in found if _holds(self._entries[each], part)]

    def held_by(self, name: str) -> frozenset[str]:
        """The models, registered or not, that a model in memory consists of."""
        return frozenset(part.name for part in self._parts(name))

    def parts_of(self, name: str) -> list[str]:
        """The registered models that a model in memory consists of, and no other one in memory does."""
        return [part.name for part in self._parts(name) if part.registered and self.wholes_of(part.name) == [name]]

    def _parts(self, name: str) -> Iterator[Entry[Any]]:
        whole = self._entries.get(name)
        if whole is None or whole.resident is None:
            return
        here = origin(whole.source)
        folders = (here.path.parent, *here.others) if isinstance(here, InRepository) else ()
        for member in whole.resident.members:
            for each in (member, *(f"{folder.name}/{member}" for folder in folders)):  # see `Repositories.find`
                part = self._entries.get(each)
                if part is not None and _holds(whole, part):
                    yield part


def _member(part: Entry[Any]) -> str:
    """What those call a model that hold it."""
    there = origin(part.source)
    if isinstance(there, InRepository):
        return there.path.name
    return there.name if isinstance(there, InBucket) else ""


def _holds(whole: Entry[Any], part: Entry[Any]) -> bool:
    if whole.resident is None or whole is part:
        return False
    here, there = origin(whole.source), origin(part.source)
    if isinstance(here, InBucket) and isinstance(there, InBucket):
        return there.name in whole.resident.members
    if not isinstance(here, InRepository) or not isinstance(there, InRepository):
        return False
    beside = there.path.parent in {here.path.parent, *here.others}
    return beside and there.path.name in whole.resident.members
