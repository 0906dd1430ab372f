"""Which models of a repository consist of which others. PURE.

An ensemble of a repository holds its parts itself: they are loaded with it and leave with it. Beside that, each of them
may be served under its own name. What changes the one is told the other here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.sources.source import InBucket, InRepository, origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serve.cache.cache_entry import Entry


def wholes_of(name: str, entries: Mapping[str, Entry[Any]]) -> list[str]:
    """The models in memory that hold the model of that name as a part of theirs."""
    part = entries.get(name)
    return [] if part is None else [entry.name for entry in entries.values() if _holds(entry, part)]


def held_by(name: str, entries: Mapping[str, Entry[Any]]) -> frozenset[str]:
    """The models, registered or not, that a model in memory consists of."""
    whole = entries.get(name)
    return frozenset(entry.name for entry in entries.values() if whole is not None and _holds(whole, entry))


def parts_of(name: str, entries: Mapping[str, Entry[Any]]) -> list[str]:
    """The registered models that a model in memory consists of, and no other one in memory does."""
    whole = entries.get(name)
    if whole is None:
        return []
    parts = [entry for entry in entries.values() if entry.registered and _holds(whole, entry)]
    others = [entry for entry in entries.values() if entry is not whole]
    return [part.name for part in parts if not any(_holds(entry, part) for entry in others)]


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
