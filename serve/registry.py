"""The registry: which names mean a model, where it comes from, what else it is called, and which models it consists of.

A name is registered when its next request is answered: the model is in memory, or was and comes back. A journal of that
is kept, so that the next worker answers the same names. An ensemble of a repository consists of models that are served
under their own names: they are loaded with it. On the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError, invalid_argument
from serve.cache.entry import Entry, Event, State
from serve.sources.catalog import ModelCatalog, unavailable, unknown
from serve.sources.source import Archived, Overridden, S3Model, Source, origin, source_of
from serve.state_file import Row, clock
from serve.statistics import EventType, TargetStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, KeysView, Mapping

    from serve.cache.model_cache import ModelCache
    from serve.state_file import Journal
    from serve.statistics import CacheEvent


_log = logging.getLogger("mme.engine")
_USE_SECONDS = 60.0
_REPLACED = "not loaded since the worker was replaced"


class Registry:
    """Names over a cache."""

    def __init__(
        self,
        cache: ModelCache,
        origins: ModelCatalog,
        *,
        journal: Journal,  # what is registered; what it holds was registered by the worker before
        limited: bool = False,  # whether requests may name only models that were loaded by name, not any that is there
        # names that are not brought back, whatever the journal says: the loads of these end the process
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.stats: dict[str, TargetStats] = {}  # name → what the cache did for it
        # names of models whose input is a request's body as it came, in memory or not
        self.body_takers: set[str] = set()
        self.versions: dict[str, list[int]] = {}  # name → those that it was served in last
        self._cache = cache
        self._origins = origins
        self._journal = journal
        self._served: set[str] | None = set() if limited else None
        self._noted_use = 0.0
        self.dependents = Dependents(cache)
        cache.events.listen(self.dependents.hear)
        self._leave_out(left_out)
        self._restore()
        self._called: dict[str, list[str]] = {}  # models that have other names, and those
        for alias, name in self._journal.aliases.items():
            self._called.setdefault(name, []).append(alias)
        self._watch_use()

    def _leave_out(self, names: frozenset[str]) -> None:
        found = sorted(names & self._journal.rows.keys())
        if not found:
            return
        self._journal.unloaded.update(found)
        for name in found:
            del self._journal.rows[name]
            self._changed(name)
        _log.warning(
            "not brought back, since two workers ended while they loaded them: %s; mend them, then load them by name",
            ", ".join(f"'{name}'" for name in found),
        )

    def _restore(self) -> None:
        rows, aliases = self._journal.rows, self._journal.aliases
        for row in list(rows.values()):
            try:
                self._restore_row(row)
            except MmeError as error:
                _log.warning("model '%s' is not registered any more: %s", row.name, error)
                del rows[row.name]
        for alias in [alias for alias, name in aliases.items() if name not in rows]:
            del aliases[alias]
        self._origins.overrides.sweep()
        if rows:
            _log.info("%d models are registered that the worker before had registered", len(rows))

    # -- names ---------------------------------------------------------------------------------------------------

    def canonical(self, name: str) -> str:
        """The registered name that a client means: aliases resolved, a store's archives with or without suffix."""
        if name in self._cache.entries:
            return name
        if name in self._journal.aliases:
            return self._journal.aliases[name]
        return self._origins.canonical(name)

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._journal.aliases

    def check_alias(self, name: str, alias: str) -> None:
        """Refuse a request that names one model in its path and another in its header.

        Nothing tells what clients call a model that was posted without a header: any name will do that is no other's.

        Raises:
            MmeError: INVALID_ARGUMENT; UNKNOWN_MODEL where nothing has the path's name, so that the platform loads it.
        """
        known = self.canonical(name)
        if self.canonical(alias) == known:
            return
        entry = self._cache.entries.get(known)
        if entry is None:
            self._origins.find(known)
        elif entry.source.posted and not (known in self._called or self.canonical(alias) in self._cache.entries):
            return
        raise invalid_argument(
            f"X-Amzn-SageMaker-Target-Model is '{alias}', which is not the target model that '{name}' was loaded as"
        )

    def call(self, name: str, alias: str) -> None:
        if alias and alias != name:
            self._journal.aliases[alias] = name
            self._called.setdefault(name, []).append(alias)
            self._journal.changed("aliases", alias)

    # -- entries -------------------------------------------------------------------------------------------------

    def entry(self, name: str, version: int | None = None) -> Entry:
        """The entry of a name that requests may use, made of what store or repository has under it if need be.

        Raises:
            MmeError: UNKNOWN_MODEL; UNKNOWN_VERSION for one that was loaded, or was to be, and may not be named now,
                UNAVAILABLE if they name a version that it had then; and as `ModelCatalog.find`.
        """
        entry = self._cache.entries.get(name)
        if self._served is not None and (name not in self._served or (entry is not None and self.lacks_parts(entry))):
            if entry is not None:
                failed = () if entry.failure is None else (entry.failure.version,)
                raise unavailable(name, version, [*self.versions.get(name, ()), *failed])
            self._origins.find(name)  # which may know better why it means no model
            raise unknown(name)
        if entry is not None and not (entry.unloaded and entry.source.posted):
            return entry
        return self.add(name, self._origins.find(name))

    def add(self, name: str, source: Source) -> Entry:
        """The entry of a name, which from now on comes from that source."""
        self.enable(name)
        entry = self._cache.entries.get(name)
        if entry is None:
            stats = self.stats.setdefault(name, TargetStats())
            entry = self._cache.entries[name] = Entry(name, source, stats)
        entry.source = source
        return entry

    def source(self, name: str) -> Source:
        """Where a name comes from when it is loaded, or loaded again; UNKNOWN_MODEL if that is nowhere."""
        entry = self._cache.entries.get(name)
        if entry is not None and not entry.unloaded and entry.source.posted:
            return origin(entry.source)
        return self._origins.find(name)

    def enable(self, name: str) -> None:
        """It is loaded by name: requests may name it."""
        if self._served is not None:
            self._served.add(name)

    def disable(self, name: str, awaited: tuple[str, ...] = ()) -> None:
        """It was unloaded, or did not load: where only what is loaded by name is served, requests may not name it.

        An ensemble that did not load for its steps is loaded again with one of those `awaited`.
        """
        self.dependents.note(name, awaited)
        if self._served is not None:
            self._served.discard(name)

    def lacks_parts(self, entry: Entry) -> bool:
        """Whether it is registered, and a model that it consists of is not, where no request brings that in."""
        if self._served is None or entry.name not in self.dependents.wholes or not entry.registered:
            return False
        return not all(self._is_there(part) for part in self.dependents.all_parts_of(entry.name))

    def lacking(self) -> frozenset[str]:
        """Names of the ensembles that lack parts, without a look at other models."""
        if self._served is None:
            return frozenset()
        entries = self._cache.entries
        return frozenset(name for name in self.dependents.wholes if self.lacks_parts(entries[name]))

    def _is_there(self, name: str) -> bool:
        entry = self._cache.entries.get(name)
        return entry is not None and (entry.registered or entry.state is State.UNLOADING)

    def serves(self, entry: Entry) -> bool:
        """Whether its next request is answered: it is registered, and an ensemble's models are, too."""
        return entry.registered and not self.lacks_parts(entry)

    def forget(self, entry: Entry) -> None:
        """Names without a model must not pile up, however many are asked for."""
        self._cache.forget(entry)
        self.versions.pop(entry.name, None)
        if entry.name in self._cache.entries:
            return
        entry.give_up()
        self.dependents.note(entry.name, ())
        self.note(entry)
        self.body_takers.discard(entry.name)
        if not entry.stats.loads:
            self.stats.pop(entry.name, None)
        for alias in self._called.pop(entry.name, ()):
            if self.aliases.get(alias) == entry.name:  # it may be another's by now
                del self._journal.aliases[alias]
                self._journal.changed("aliases", alias)

    # -- the journal ---------------------------------------------------------------------------------------------

    @property
    def unloaded(self) -> frozenset[str]:
        """Names that were unloaded by name, though store or repository have them, and ensembles of such models."""
        return self.lacking().union(self._journal.unloaded)

    def note(self, entry: Entry) -> None:
        """It may have been registered, or not be any more."""
        journal, name = self._journal, entry.name
        if entry.registered:
            url = entry.source.url if entry.source.posted else ""
            steps = self.dependents.parts(name)
            row = Row(name, url, name in self.body_takers, 0.0, *_override_of(entry.source), steps)
            if journal.rows.get(name) == row:
                return
            journal.rows[name] = row
            journal.unloaded.discard(name)
        elif name in journal.rows:
            del journal.rows[name]
            if entry.unloaded and not entry.source.posted:
                journal.unloaded.add(name)
        else:
            return
        self._changed(name)

    def _changed(self, name: str) -> None:
        self._journal.changed("models", name)
        self._journal.changed("unloaded", name)

    async def write(self, entry: Entry) -> None:
        """The same; return when it is on disk."""
        self.note(entry)
        await self._journal.flush()

    def leave_overrides(self) -> None:
        """Before models are closed: what the journal names is for the next worker, if there is one."""
        for name, row in self._journal.rows.items() if self._journal.is_kept else ():
            entry = self._cache.entries.get(name)
            if row.folder and entry is not None and isinstance(entry.source, Overridden) and entry.source.folder:
                entry.source.folder.leave()

    async def close(self) -> None:
        """Note nothing more: the next worker may have begun to keep the journal."""
        self._timer.cancel()
        await self._journal.close()

    def _watch_use(self) -> None:
        used = [entry for entry in self._cache.entries.values() if entry.last_used > self._noted_use]
        for entry in used:
            self._journal.changed("models", entry.name)
        self._noted_use = max((entry.last_used for entry in used), default=self._noted_use)
        self._timer = asyncio.get_running_loop().call_later(_USE_SECONDS, self._watch_use)

    def _restore_row(self, row: Row) -> None:
        entry = self.add(row.name, self._source_in(row))
        entry.tell(Event.RESTORE)
        entry.reason = _REPLACED
        self.dependents.note(row.name, row.steps)
        entry.last_used = row.used - clock() if row.used else 0.0
        if row.body:
            self.body_takers.add(row.name)
        base = origin(entry.source)
        if isinstance(base, Archived | S3Model) and row.used:
            base.artifacts.used(row.name, row.used)

    def _source_in(self, row: Row) -> Source:
        base: Source | None = None
        try:
            base = source_of(row.url) if row.url else self._origins.find(row.name)
        except MmeError:
            if not row.folder:
                raise
        if base is not None and not row.config:
            return base
        return self._origins.overrides.restored(row.name, base, row.config, row.folder)


def _override_of(source: Source) -> tuple[str, str]:
    if not isinstance(source, Overridden):
        return "", ""
    return source.config, source.folder.path.name if source.folder is not None else ""


class Dependents:
    """Which ensembles consist of which served models. A pinned one keeps its models in memory."""

    def __init__(self, cache: ModelCache) -> None:
        self._cache = cache
        self._parts: dict[str, tuple[str, ...]] = {}  # of each ensemble that is registered, or waits for one of these
        self._wholes: dict[str, dict[str, None]] = {}  # of each of their models the ensembles

    def __repr__(self) -> str:
        return f"<Dependents of {len(self._parts)} ensembles>"

    @property
    def wholes(self) -> KeysView[str]:
        """Names of all ensembles that are registered, or wait for a model."""
        return self._parts.keys()

    def hear(self, event: CacheEvent) -> None:
        if event.type is EventType.LOADED:
            entry = self._cache.entries.get(event.name)
            self.note(event.name, () if entry is None else entry.steps)
            if event.name in self._wholes:
                self._keep(event.name)
        elif event.type is EventType.UNLOADED:
            for whole in self.all_wholes_of(event.name):
                resident = self._cache.entries[whole].resident
                if resident is not None:
                    resident.unwire()

    def note(self, whole: str, parts: Iterable[str]) -> None:
        """It consists of these models from now on, or waits for them."""
        before = self._parts.pop(whole, ())
        for part in before:
            del self._wholes[part][whole]
            if not self._wholes[part]:
                del self._wholes[part]
        now = tuple(dict.fromkeys(parts))
        if now:
            self._parts[whole] = now
        for part in now:
            self._wholes.setdefault(part, {})[whole] = None
        for part in {*before, *now}:
            self._keep(part)

    def _keep(self, name: str) -> None:
        """Have a model stay as long as an ensemble does that consists of it, and so on."""
        entry = self._cache.entries.get(name)
        if entry is None or entry.resident is None:
            return
        before = entry.pinned
        self._cache.keep(entry, pinned=any(self._cache.entries[whole].pinned for whole in self.wholes_of(name)))
        if entry.pinned is not before:
            for part in self.parts(name):
                self._keep(part)

    def wholes_of(self, name: str) -> list[str]:
        """The ensembles that consist of the model of that name, or wait for it."""
        return list(self._wholes.get(name, ()))

    def all_wholes_of(self, name: str) -> list[str]:
        """Those, and the ones that consist of them."""
        return _closure(name, self.wholes_of)

    def parts(self, name: str) -> tuple[str, ...]:
        """The models that an ensemble consists of, or did when it was in memory last."""
        noted = self._parts.get(name, ())
        entry = self._cache.entries.get(name) if noted else None
        return noted if entry is None or not entry.steps else tuple(dict.fromkeys(entry.steps))

    def all_parts_of(self, name: str) -> list[str]:
        """Those, and the ones that they consist of."""
        return _closure(name, self.parts)


def _closure(name: str, following: Callable[[str], Iterable[str]]) -> list[str]:
    found = list(following(name))
    for each in found:  # which grows
        found += [other for other in following(each) if other not in found]
    return found
