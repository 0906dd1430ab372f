"""The repository index: a row for each version of a model that is served, or was last, and one for each other model.

Rows carry the protocol's fields, `name`, `version`, `state` and `reason`, and beside them what only a multi-model
cache has to tell; clients skip fields that they do not know. On the event loop only.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from serve.cache.entry import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from serve.cache.entry import Entry
    from serve.loading.loader import Target
    from serve.statistics import TargetStats

DOWN = "a process of it died too often; a load begins anew"
_CLOCK = time.time() - time.monotonic()  # one for all rows: the same use is always the same time


def index_rows(
    entries: Iterable[Entry[Target]],
    offered: Iterable[str],
    counted: Mapping[str, TargetStats],
    versions: Mapping[str, Sequence[int]],
    refused: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Every row, by name as Triton has them, and a model's by version.

    A model in memory has a row for each version, with `queued`, the requests that wait for an instance. `cache` is
    about all versions together: see `_cached`.

    Args:
        entries: the models that the cache knows.
        offered: names that store or repository has; those that the cache does not know have a row of their name.
        counted: what the cache did for a model, also for one that it does not know any more.
        versions: those that a model was served in last.
        refused: why a name is none that can be served.
    """
    rows: list[dict[str, Any]] = []
    known = set()
    for entry in entries:
        known.add(entry.name)
        rows += _rows_of(entry, versions.get(entry.name, ()))
    for name in offered:
        if name not in known:
            row: dict[str, Any] = {"name": name, **_unavailable(refused.get(name, ""))}
            rows.append({**row, **({"cache": _counted(counted[name])} if name in counted else {})})
    return sorted(rows, key=itemgetter("name"))


def _unavailable(reason: str) -> dict[str, str]:
    return {"state": State.UNAVAILABLE.value, "reason": reason} if reason else {}


def _rows_of(entry: Entry[Target], before: Sequence[int]) -> Iterator[dict[str, Any]]:
    cached = _cached(entry)
    if entry.state is State.READY and entry.resident is not None:
        for version, model in sorted(entry.resident.versions.items()):
            state = _unavailable(DOWN) if model.readiness.is_down() else {"state": entry.state.value}
            row = {"name": entry.name, "version": str(version), **state}
            yield {**row, "queued": model.queued, "cache": cached}
        if entry.failure is not None and (failed := entry.failure.version) not in (None, *entry.resident.versions):
            yield {"name": entry.name, "version": str(failed), **_unavailable(entry.failure.message), "cache": cached}
    else:
        reason = {"reason": entry.reason} if entry.reason else {}
        failed = entry.failure.version if entry.failure is not None else None
        for number in before if failed is None else [failed]:
            yield {"name": entry.name, "version": str(number), "state": entry.state.value, **reason, "cache": cached}
        if failed is None and not before:
            yield {"name": entry.name, "state": entry.state.value, **reason, "cache": cached}


def _cached(entry: Entry[Target]) -> dict[str, Any]:
    """Bytes, counters, and times in RFC 3339: of the last use, if there was one, and of the beginning of a load.

    Of the host's bytes `grown_bytes` are those that executions took, if they took any.
    """
    cached = {
        "host_bytes": entry.footprint.host,
        "device_bytes": entry.footprint.device,
        "gpu_bytes": list(entry.footprint.devices),
        "leases": entry.leases,
        "pinned": entry.pinned and entry.resident is not None,
        **_counted(entry.stats),
    }
    if entry.resident is not None and (growth := entry.resident.growth().host):
        cached["grown_bytes"] = growth
    if entry.last_used:
        cached["last_used"] = rfc3339(_CLOCK + entry.last_used)
    loading = entry.successor or entry
    if loading.task is not None:
        cached["loading_since"] = rfc3339(_CLOCK + loading.loading_since)
    return cached


def _counted(stats: TargetStats) -> dict[str, Any]:
    return {"hits": stats.hits, "misses": stats.misses, "loads": stats.loads, "refused": stats.refused}


def rfc3339(seconds: float) -> str:
    """A time in seconds since 1970 as text, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
