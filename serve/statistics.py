"""What happened to models: their requests, in Triton's terms, and what the cache did, told as it happens.

Counters, durations, histograms, recent quantiles. Durations are nanoseconds, summed: counting is a handful of integer
additions a batch. On the event loop only.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping  # noqa: TC003 - a compiled dataclass looks at its types
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from model_handlers.errors import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from model_handlers.config.model_config import ModelConfig
    from serve.options import Latencies
    from serve.request import Timings

    Listener = Callable[["CacheEvent"], None]


# Triton's, of the time to a first response, where a model's configuration names no others. Milliseconds.
DEFAULT_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)
_WINDOW_SECONDS = 60.0
_MOST = 4096  # values remembered of that time


class Summary:
    """Durations: how many, their sum, and quantiles of those of the last minute."""

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_MOST)

    def add(self, ns: int, now: float) -> None:
        """Count one that ended at `now`, by `time.monotonic()`."""
        self.count += 1
        self.ns += ns
        self._forget(now)
        self._recent.append((now, ns))

    def quantiles(self, wanted: Sequence[float], now: float) -> list[float]:
        """Nanoseconds, of each quantile; not a number where there is none of the last minute."""
        self._forget(now)
        recent = sorted([ns for _, ns in list(self._recent)])  # to which the loop may add meanwhile
        if not recent:
            return [float("nan")] * len(wanted)
        return [float(recent[min(int(quantile * len(recent)), len(recent) - 1)]) for quantile in wanted]

    def _forget(self, now: float) -> None:
        recent = self._recent
        while recent and recent[0][0] < now - _WINDOW_SECONDS:
            recent.popleft()


@dataclass(slots=True)
class Summaries:
    """Those of one version of one model."""

    request: Summary = field(default_factory=Summary)
    queue: Summary = field(default_factory=Summary)
    compute_input: Summary = field(default_factory=Summary)
    compute_infer: Summary = field(default_factory=Summary)
    compute_output: Summary = field(default_factory=Summary)
    cache_hit: Summary = field(default_factory=Summary)
    cache_miss: Summary = field(default_factory=Summary)

    def executed(self, waited_ns: int, total_ns: int, computed_ns: tuple[int, int, int]) -> None:
        """One request succeeded: its wait, its total, and input, inference and output of its execution."""
        now = time.monotonic()
        self.request.add(total_ns, now)
        self.queue.add(waited_ns, now)
        for summary, ns in zip(self._computed(), computed_ns, strict=True):
            summary.add(ns, now)

    def hit(self, ns: int) -> None:
        """One request was answered out of the response cache."""
        now = time.monotonic()
        self.request.add(ns, now)
        self.queue.add(0, now)
        self.cache_hit.add(ns, now)

    def missed(self, ns: int) -> None:
        """One was not found there, and its response was kept."""
        self.cache_miss.add(ns, time.monotonic())

    def _computed(self) -> Iterator[Summary]:
        yield from (self.compute_input, self.compute_infer, self.compute_output)


_log = logging.getLogger("mme.model")
_cache_log = logging.getLogger("mme.cache")
# Triton's reasons for a failed request.
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# Why a model left memory for another: that one's load, that it turned out larger than was reserved for it, that an
# execution of it ran out of memory, or that its archive found no room on disk.
EVICTION_REASONS = ("load", "growth", "execution", "disk")
_REASON_OF_KIND = {
    Kind.QUEUE_FULL: "REJECTED",
    Kind.QUEUE_TIMEOUT: "REJECTED",
    Kind.UNAVAILABLE: "REJECTED",
    Kind.CANCELLED: "CANCELED",
    Kind.EXECUTION_FAILED: "BACKEND",
    Kind.UNKNOWN: "BACKEND",
    Kind.OUT_OF_MEMORY: "BACKEND",
    Kind.TIMED_OUT: "BACKEND",
}
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
FIRST_RESPONSES = "nv_inference_first_response_histogram_ms"  # the metric whose buckets a configuration may set
_LAST_PLACE = 999  # of responses counted apart: those behind it are counted with it, for a model may send any number
# From a model whose pages are in memory to the longest load that SageMaker waits for.
BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 360.0)


@dataclass(slots=True)
class Duration:
    """How often, and how many nanoseconds in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class Histogram:
    """Durations by their length: how many fell between two bounds, and all of them together."""

    bounds: tuple[float, ...] = BOUNDS_SECONDS  # seconds, ascending
    # of those up to each bound and over the one before it; the last is of those over all
    counts: list[int] = field(default_factory=list)
    total: Duration = field(default_factory=Duration)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, ns: int) -> None:
        self.counts[bisect_left(self.bounds, ns / 1e9)] += 1
        self.total.add(ns)


@dataclass(slots=True)
class BatchStats:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


class Outcome(Enum):
    """What became of one response of a decoupled model; the value is the protocol's word for it."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"  # the news that there is none any more
    CANCEL = "cancel"


@dataclass(slots=True)
class ResponseStats:
    """All responses that were the first of their requests, or all that were the second, …."""

    # how long the model took for them, from the response before; compute_output: to hand them over
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    # both together, by what became of the response
    outcomes: dict[Outcome, Duration] = field(default_factory=lambda: {outcome: Duration() for outcome in Outcome})

    def as_dict(self) -> dict[str, Any]:
        return {
            "compute_infer": self.compute_infer.as_dict(),
            "compute_output": self.compute_output.as_dict(),
            **{outcome.value: duration.as_dict() for outcome, duration in self.outcomes.items()},
        }


@dataclass(slots=True)
class ModelStats:
    """Everything counted for one version of one model. It outlives the model: an evicted model keeps its numbers."""

    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStats] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    # of a decoupled model, by their place among the responses to their request
    responses: dict[int, ResponseStats] = field(default_factory=dict)
    # requests by the time until their first response; None where it is not kept
    first_response: Histogram | None = None
    buckets: tuple[float, ...] = ()  # of that, in milliseconds, where its configuration names none; () for none at all
    summaries: Summaries | None = None  # quantiles of what requests take, None where they are not kept
    # labels that its metrics carry, by the configuration that it was loaded with last
    tags: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""  # the repository that it is of, where that is told apart; "" elsewhere
    gpu_uuid: str = ""  # of the one GPU that it is on; "" without one, and for several
    load_ns: int = 0
    batching: str = ""  # what is known of its batch dimension, where that is guessed (see `Batching`); "" elsewhere
    cached: bool = False
    cache_hit: Duration = field(default_factory=Duration)
    # look-ups that found nothing, each with what it took to keep the response
    cache_miss: Duration = field(default_factory=Duration)

    def executed(self, size: int, timings: Timings) -> None:
        """One execution of `size` batched elements."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        batch = self.batches.get(size)
        if batch is None:
            batch = self.batches[size] = BatchStats()
        batch.compute_input.count += 1
        batch.compute_input.ns += timings.compute_input
        batch.compute_infer.count += 1
        batch.compute_infer.ns += timings.compute_infer
        batch.compute_output.count += 1
        batch.compute_output.ns += timings.compute_output

    def succeeded(self, requests: int, inferences: int, waited_ns: int, total_ns: int | None, timings: Timings) -> None:
        """`requests` of one execution succeeded; their times in the queue and in all, None while more is to be done."""
        self.inference_count += inferences
        self.queue.count += requests
        self.queue.ns += waited_ns
        self.compute_input.count += requests
        self.compute_input.ns += timings.compute_input * requests
        self.compute_infer.count += requests
        self.compute_infer.ns += timings.compute_infer * requests
        self.compute_output.count += requests
        self.compute_output.ns += timings.compute_output * requests
        if total_ns is not None:
            self.success.count += requests
            self.success.ns += total_ns
            if self.summaries is not None and requests == 1:
                self.summarise(waited_ns, total_ns, timings)

    def summarise(self, waited_ns: int, total_ns: int, timings: Timings) -> None:
        """One request succeeded, of those that `succeeded` counts together."""
        if self.summaries is not None:
            computed = (timings.compute_input, timings.compute_infer, timings.compute_output)
            self.summaries.executed(waited_ns, total_ns, computed)

    def responded(self, place: int, outcome: Outcome, infer_ns: int, output_ns: int = 0) -> None:
        """One response of a decoupled model, the first of its request in place 0."""
        place = min(place, _LAST_PLACE)
        counted = self.responses.get(place)
        if counted is None:
            counted = self.responses[place] = ResponseStats()
        if outcome in (Outcome.SUCCESS, Outcome.FAIL):
            counted.compute_infer.add(infer_ns)
            counted.compute_output.add(output_ns)
        counted.outcomes[outcome].add(infer_ns + output_ns)

    def began_to_answer(self, ns: int) -> None:
        if self.first_response is not None:
            self.first_response.add(ns)

    def keep_first_responses(self, config: ModelConfig) -> None:
        """Have them kept as a model's configuration says, from now on."""
        for family in config.histograms.keys() - {FIRST_RESPONSES}:
            _log.warning("model_metrics '%s' is no histogram that is kept", family, extra={"target_model": config.name})
        bounds = tuple(bucket / 1000 for bucket in config.histograms.get(FIRST_RESPONSES, self.buckets))
        if self.first_response is None or self.first_response.bounds != bounds:
            self.first_response = Histogram(bounds) if bounds else None

    def hit(self, ns: int) -> None:
        """One request was answered out of the response cache, without being executed; its wait counts as 0."""
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(ns)
        self.queue.add(0)
        self.cache_hit.add(ns)
        if self.summaries is not None:
            self.summaries.hit(ns)

    def missed(self, ns: int) -> None:
        """One was not found there, and its response was kept."""
        self.cache_miss.add(ns)
        if self.summaries is not None:
            self.summaries.missed(ns)

    def failed(self, kind: Kind, total_ns: int) -> None:
        self.fail.add(total_ns)
        self.failures[_REASON_OF_KIND.get(kind, "OTHER")] += 1

    def as_dict(self, name: str, version: str) -> dict[str, Any]:
        """The statistics extension's form of one model version."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": _dicts(self, "success", "fail", "queue", *_COMPUTE, "cache_hit", "cache_miss"),
            "response_stats": {str(place): counted.as_dict() for place, counted in sorted(self.responses.items())},
            "batch_stats": [
                {"batch_size": size, **_dicts(batch, *_COMPUTE)} for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


def _dicts(stats: ModelStats | BatchStats, *durations: str) -> dict[str, dict[str, int]]:
    return {name: getattr(stats, name).as_dict() for name in durations}


def new_stats(latencies: Latencies) -> ModelStats:
    return ModelStats(
        buckets=DEFAULT_BUCKETS if latencies.histograms else (), summaries=Summaries() if latencies.summaries else None
    )


@dataclass(slots=True)
class TargetStats:
    """What the cache did for one target model."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_failures: int = 0
    refused: int = 0  # requests, since it was not in memory and could not be loaded
    evictions: Counter[str] = field(default_factory=Counter)
    evicted: Footprint = field(default_factory=Footprint)  # bytes of all evictions together
    wait: Duration = field(default_factory=Duration)
    download: Duration = field(default_factory=Duration)
    load: Duration = field(default_factory=Duration)
    unload: Duration = field(default_factory=Duration)


class EventType(Enum):
    """What happened to a target model."""

    WAITED = "waited"  # a request, until its model was there
    LOADED = "loaded"
    FAILED = "failed"  # to load
    EVICTED = "evicted"  # chosen to leave; UNLOADED follows
    UNLOADED = "unloaded"


@dataclass(slots=True)
class CacheEvent:
    """One thing that happened."""

    type: EventType
    name: str
    ns: int = 0  # nanoseconds that waiting, loading (without the download) or unloading took
    download_ns: int = 0  # nanoseconds of a load's download, 0 when it was on disk
    footprint: Footprint = field(default_factory=Footprint)  # what the model takes, or took
    why: str = ""  # FAILED: the error; EVICTED: the model that needs the room; UNLOADED: the reason
    kind: Kind | None = None  # FAILED: of the error
    at: float = field(default_factory=time.time)  # when, in seconds since 1970


class CacheEvents:
    """Tells listeners, as histograms, CloudWatch and the dashboard, of loads, evictions and unloads.

    Also of requests that waited for a load; never of one whose model was there.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def tell(self, event: CacheEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - a load must not fail because it could not be counted
                _cache_log.exception(
                    "a listener failed: a model %s", event.type.value, extra={"target_model": event.name}
                )


class CacheTimes:
    """How long requests waited, and how long downloads, loads and unloads took, of all models together."""

    def __init__(self) -> None:
        self.wait = Histogram()
        self.download = Histogram()
        self.load = Histogram()
        self.unload = Histogram()

    def hear(self, event: CacheEvent) -> None:
        if event.type is EventType.WAITED:
            self.wait.add(event.ns)
        elif event.type is EventType.UNLOADED:
            self.unload.add(event.ns)
        elif event.type is EventType.LOADED:
            self.load.add(event.ns)
            if event.download_ns:
                self.download.add(event.download_ns)
