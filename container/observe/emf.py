"""SageMaker's metrics of multi-model endpoints for CloudWatch: JSON lines on standard output, one document a period.

CloudWatch Logs makes metrics of lines in its embedded metric format (EMF), wherever it gets them from: SageMaker, the
CloudWatch agent, FireLens. Names and units are SageMaker's, but for `ModelLoadFailure`, which it has no name for. The
namespace is not: AWS/ belongs to Amazon, which publishes the same names there as its own front end sees them. Beside
the document of the endpoint there is one for each of the models requested most, if the operator wants those.

Nothing is counted for a request whose model is in memory: the difference of two readings of the cache's counters is
what a period's requests found. Everything runs on the event loop.

A metric is an array of its values, which the specification limits to 100; where a period has more, it is their
minimum, maximum, sum and count, the form that AWS's own libraries write.
"""

from __future__ import annotations

import heapq
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from container.observe.logs import LinePipe
from container.settings import Mode
from model_handlers.errors import Kind
from serve.statistics import EventType

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from container.settings import Settings
    from serve.engine import Engine
    from serve.statistics import CacheEvent

_log = logging.getLogger("mme.emf")
_MOST_VALUES = 100  # in an array
_LONGEST_DIMENSION = 1024
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
_MICROSECONDS = ("ModelLoadingWaitTime", "ModelLoadingTime", "ModelDownloadingTime", "ModelUnloadingTime")
_FAILED = "ModelLoadFailure"
UNITS = {
    "LoadedModelCount": "None",
    "ModelCacheHit": "None",
    "MemoryUsed": "Bytes",
    **dict.fromkeys(_MICROSECONDS, "Microseconds"),
    _FAILED: "Count",
}
_TIMED = {
    EventType.WAITED: "ModelLoadingWaitTime",
    EventType.LOADED: "ModelLoadingTime",
    EventType.UNLOADED: "ModelUnloadingTime",
}


@dataclass(slots=True)
class _Values:
    """The values of one metric in one period, as far as an array holds them, and their statistics."""

    values: list[int] = field(default_factory=list)
    low: int = 0
    high: int = 0
    total: int = 0
    count: int = 0

    def add(self, value: int, times: int = 1) -> None:
        if not times:
            return
        self.low = min(self.low, value) if self.count else value
        self.high = max(self.high, value)
        self.total += value * times
        self.count += times
        self.values += [value] * min(times, _MOST_VALUES - len(self.values))

    def target(self) -> list[int] | dict[str, int]:
        """What the document says."""
        if self.count <= _MOST_VALUES:
            return self.values
        return {"Min": self.low, "Max": self.high, "Sum": self.total, "Count": self.count}


_Metrics = dict[str, _Values]


class EmfReporter:
    """Writes what the cache of an engine did, period by period."""

    def __init__(self, engine: Engine, settings: Settings, write: Callable[[bytes], object] | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._write = write or _to_standard_output()
        self._timer: asyncio.TimerHandle | None = None
        self._heard: _Metrics = {}
        self._heard_of: dict[str, _Metrics] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        # A name without a model is a client's mistake; memory that is full is what SageMaker makes room after.
        self._no_failures = {Kind.UNKNOWN_MODEL} | ({Kind.OUT_OF_MEMORY} if settings.mode is Mode.PLATFORM else set())
        engine.cache.events.listen(self._hear)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write a period's documents whenever one is over, until `close`."""
        self._timer = loop.call_later(self._settings.emf_period, self._period_over, loop)

    def close(self) -> None:
        """Write what the period that is not over yet has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._report()

    def documents(self, timestamp: int) -> list[dict[str, Any]]:
        """End the period: the endpoint's document, then those of models.

        Args:
            timestamp: milliseconds since 1970.
        """
        found = self._found()
        hits, misses = (sum(counts[which] for counts in found.values()) for which in (0, 1))
        used = self._engine.cache.room.used().host + self._engine.on_the_way()
        metrics = {
            "LoadedModelCount": _values_of((len(self._engine.cache.ready.models), 1)),
            "ModelCacheHit": _values_of((1, hits), (0, misses)),
            "MemoryUsed": _values_of((used, 1)),
            **self._heard,
        }
        documents = [self._document(timestamp, metrics, {})]
        top = heapq.nlargest(self._settings.emf_top_models, found.items(), key=lambda item: sum(item[1]))
        for name, (hits, misses) in top:
            metrics = {"ModelCacheHit": _values_of((1, hits), (0, misses)), **self._heard_of.get(name, {})}
            documents.append(self._document(timestamp, metrics, {"TargetModel": dimension(name)}))
        self._heard, self._heard_of = {}, {}
        return documents

    def _found(self) -> dict[str, tuple[int, int]]:
        """What this period's requests found, for every model that had any: hits and misses."""
        found = {}
        counted = {name: (stats.hits, stats.misses) for name, stats in self._engine.registry.stats.items()}
        for name, (hits, misses) in counted.items():
            before = self._counted.get(name, (0, 0))
            if hits < before[0] or misses < before[1]:  # it was forgotten meanwhile, and counts from 0 again
                before = (0, 0)
            if (hits, misses) != before:
                found[name] = (hits - before[0], misses - before[1])
        self._counted = counted
        return found

    def _document(self, timestamp: int, metrics: _Metrics, more: dict[str, str]) -> dict[str, Any]:
        settings = self._settings
        dimensions = {"EndpointName": settings.endpoint_name, "VariantName": settings.variant_name, **more}
        told = {name: metrics[name].target() for name in UNITS if name in metrics and metrics[name].count}
        directive = {
            "Namespace": settings.emf_namespace,
            "Dimensions": [list(dimensions)],
            "Metrics": [{"Name": name, "Unit": UNITS[name]} for name in told],
        }
        return {"_aws": {"Timestamp": timestamp, "CloudWatchMetrics": [directive]}, **dimensions, **told}

    def _hear(self, event: CacheEvent) -> None:
        if event.type is EventType.FAILED and event.kind not in self._no_failures:
            self._add(event.name, _FAILED, 1)
        metric = _TIMED.get(event.type)
        if metric is None:
            return
        self._add(event.name, metric, round(event.ns / 1000))
        if event.download_ns:
            self._add(event.name, "ModelDownloadingTime", round(event.download_ns / 1000))

    def _add(self, name: str, metric: str, value: int) -> None:
        self._heard.setdefault(metric, _Values()).add(value)
        if self._settings.emf_top_models:
            self._heard_of.setdefault(name, {}).setdefault(metric, _Values()).add(value)

    def _period_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._report():
            self.start(loop)

    def _report(self) -> bool:
        """Write the documents; False where they are not read any more."""
        documents = self.documents(time.time_ns() // 1_000_000)
        try:
            self._write(b"".join(orjson.dumps(document) + b"\n" for document in documents))
        except OSError as error:
            _log.error("CloudWatch metrics end here: standard output: %s", error)
            return False
        return True


def _values_of(*found: tuple[int, int]) -> _Values:
    """Of values and how often there is each."""
    values = _Values()
    for value, times in found:
        values.add(value, times)
    return values


def dimension(name: str) -> str:
    """A model's name as CloudWatch takes it: at most 1,024 characters, what is not printable ASCII as in a URL."""
    return quote(name, safe=_PRINTABLE)[:_LONGEST_DIMENSION]


def _to_standard_output() -> Callable[[bytes], None]:
    """Writes without ever waiting for what reads it."""

    def told(count: int) -> bytes:
        _log.warning("CloudWatch metrics of %d periods were dropped, since nothing read standard output", count)
        return b""

    return LinePipe(sys.stdout.fileno(), told).write
