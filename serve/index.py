"""Look-ups of models by name, and the repository index. On the event loop only.

The index has a row for each version of a model that is served, or was last, and one for each other model. Rows carry
the protocol's fields, `name`, `version`, `state` and `reason`, and beside them what only a multi-model cache has to
tell; clients skip fields that they do not know.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument
from serve.cache.entry import State
from serve.sources.catalog import unknown
from serve.sources.source import Overridden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from model_handlers.config.model_config import ModelConfig
    from serve.cache.entry import Entry
    from serve.loading.loader import Target
    from serve.model.warmup import Labels
    from serve.registry import Registry
    from serve.sources.catalog import ModelCatalog
    from serve.statistics import ModelStats, TargetStats

DOWN = "a process of it died too often; a load begins anew"
_UNAVAILABLE = State.FAILED.shown
_CLOCK = time.time() - time.monotonic()  # one for all rows: the same use is always the same time


@dataclass(eq=False, repr=False)
class ModelIndex:
    """What is known of the models that the cache has, and of those that store or repository have."""

    entries: Mapping[str, Entry]
    stats: Mapping[tuple[str, int], ModelStats]
    registry: Registry
    origins: ModelCatalog

    def rows(self, offered: Iterable[str] = ()) -> list[dict[str, Any]]:
        """The repository index, by name as Triton has it, and a model's rows by version.

        A model in memory has a row for each version, with `queued`, the requests that wait for an instance. `cache` is
        about all versions together. Names of `offered` that the cache does not know have a row of their name.
        """
        counted, versions, lacking = self.registry.stats, self.registry.versions, self.registry.lacking()
        rows: list[dict[str, Any]] = []
        for entry in self.entries.values():
            rows += _rows_of(entry, versions.get(entry.name, ()), lacks_parts=entry.name in lacking)
        for name in offered:
            if name not in self.entries:
                row: dict[str, Any] = {"name": name, **_unavailable(self.origins.refused.get(name, ""))}
                rows.append({**row, **({"cache": _counted(counted[name])} if name in counted else {})})
        return sorted(rows, key=itemgetter("name"))

    def statistics(self, name: str = "", version: int | None = None) -> list[dict[str, Any]]:
        """What was counted of one model, or with "" of all that are registered, in memory or not.

        Raises:
            MmeError: INVALID_ARGUMENT for a model or a version of which nothing was counted.
        """
        wanted = self.registry.canonical(name) if name else ""
        found = [row for row in self._counted() if not wanted or row[0] == wanted]
        rows = [stats.as_dict(model, str(number)) for model, number, stats in found if version in (None, number)]
        if wanted and not rows:
            what = "requested model version is not available for model" if found else "requested model"
            raise invalid_argument(f"{what} '{name}'{'' if found else ' is not available'}")
        return rows

    def _counted(self) -> Iterator[tuple[str, int, ModelStats]]:
        """Of registered models and of those that they consist of; what was unloaded is told by metrics."""
        lacking = self.registry.lacking()
        served = [entry for entry in self.entries.values() if entry.name not in lacking]
        held = {id(model.stats) for entry in served if entry.resident for model in entry.resident.models()}
        away = {entry.name for entry in served if entry.registered and entry.resident is None}
        for (name, version), stats in sorted(dict(self.stats).items()):  # loads add to it, on their threads
            if id(stats) in held or name.partition(":")[0] in away:
                yield name, version, stats

    def registered(self) -> list[tuple[str, str]]:
        """(name, url) of every registered model, by name: those in memory, and those that were evicted."""
        lacking = self.registry.lacking()
        served = (entry for entry in self.entries.values() if entry.registered and entry.name not in lacking)
        return sorted((entry.name, entry.source.url) for entry in served)

    def url(self, name: str) -> str:
        """Where a registered model came from. Raises UNKNOWN_MODEL."""
        entry = self.entries.get(name)
        if entry is None or not self.registry.serves(entry):
            raise unknown(name)
        url: str = entry.source.url
        return url

    def _resident(self, name: str) -> Target | None:
        entry = self.entries.get(name)
        return None if entry is None else entry.resident

    def versions(self, name: str) -> list[int]:
        """The served versions of a model, [] if it is not in memory."""
        target = self._resident(name)
        return [] if target is None else sorted(target.versions)

    def class_names(self, name: str, version: str) -> tuple[bool, Labels]:
        """Of a model in memory: whether it batches, and what the classes of its outputs are called."""
        target = self._resident(name)  # it may have left, or been replaced, in the very moment of its last answer
        if target is None:
            return False, {}
        model = target.versions.get(int(version), target.latest)
        return model.config.max_batch_size > 0, target.labels

    def config(self, name: str, version: int | None = None) -> ModelConfig | None:
        """A model's configuration; None if it is not in memory, or the version is not."""
        target = self._resident(name)
        if target is None:
            return None
        model = target.latest if version is None else target.versions.get(version)
        return None if model is None else model.config

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a request would be answered: in memory, or evicted and back with the next request."""
        entry = self.entries.get(name)
        if entry is None or not self.registry.serves(entry) or entry.state is State.RETURNING:
            return False
        return version is None or entry.resident is None or version in entry.resident.versions

    async def says_ready(self, name: str, version: int | None = None) -> bool:
        """The same, and if it is in memory and its code has a say in that, whether this says so."""
        if not self.is_ready(name, version):
            return False
        target = self._resident(name)
        return target is None or await target.version(version).ask_ready()

    def is_overridden(self, name: str) -> bool:
        """Whether it is registered as a client loaded it, with another configuration or with other files."""
        entry = self.entries.get(name)
        return entry is not None and self.registry.serves(entry) and isinstance(entry.source, Overridden)

    def is_resident(self, name: str) -> bool:
        """Whether the model is in memory to take requests: one that leaves takes none any more."""
        entry = self.entries.get(name)
        return entry is not None and entry.state.serves


def _unavailable(reason: str) -> dict[str, str]:
    return {"state": _UNAVAILABLE, "reason": reason} if reason else {}


def _rows_of(entry: Entry, before: Sequence[int], *, lacks_parts: bool) -> Iterator[dict[str, Any]]:
    cached = _cached(entry)
    if entry.state.serves and entry.resident is not None and not lacks_parts:
        for version, model in sorted(entry.resident.versions.items()):
            state = _unavailable(DOWN) if model.is_down() else {"state": entry.state.shown}
            row = {"name": entry.name, "version": str(version), **state}
            yield {**row, "queued": model.queued, "cache": cached}
        if entry.failure is not None and (failed := entry.failure.version) not in (None, *entry.resident.versions):
            yield {"name": entry.name, "version": str(failed), **_unavailable(entry.failure.message), "cache": cached}
    else:
        now, why = shown_as(entry, lacks_parts=lacks_parts)
        what = {"state": now, **({"reason": why} if why else {}), "cache": cached}
        failed = entry.failure.version if entry.failure is not None else None
        for number in before if failed is None else [failed]:
            yield {"name": entry.name, "version": str(number), **what}
        if failed is None and not before:
            yield {"name": entry.name, **what}


def shown_as(entry: Entry, *, lacks_parts: bool) -> tuple[str, str]:
    """A model's state in Triton's words, and why it serves nothing, "" where that is not known.

    An ensemble that lacks a step is shown as one that left.
    """
    if not lacks_parts or entry.residency is None:
        return entry.state.shown, entry.reason
    if entry.load is not None:
        return State.LOADING.shown, ""
    return _UNAVAILABLE, entry.failure.message if entry.failure is not None else "unloaded"


def _cached(entry: Entry) -> dict[str, Any]:
    """Bytes, counters, and times in RFC 3339: of the last use, if there was one, and of the beginning of a load.

    Of the host's bytes `grown_bytes` are those that executions took, if they took any.
    """
    cached = {
        "host_bytes": entry.footprint.host,
        "device_bytes": entry.footprint.device,
        "gpu_bytes": list(entry.footprint.devices),
        "leases": entry.leases,
        "pinned": entry.pinned,
        **_counted(entry.stats),
    }
    if entry.resident is not None and (growth := entry.resident.growth().host):
        cached["grown_bytes"] = growth
    if entry.last_used:
        cached["last_used"] = rfc3339(_CLOCK + entry.last_used)
    if entry.load is not None:
        cached["loading_since"] = rfc3339(_CLOCK + entry.load.began)
    return cached


def _counted(stats: TargetStats) -> dict[str, Any]:
    return {"hits": stats.hits, "misses": stats.misses, "loads": stats.loads, "refused": stats.refused}


def rfc3339(seconds: float) -> str:
    """A time in seconds since 1970 as text, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
