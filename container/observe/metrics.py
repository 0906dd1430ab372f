"""Statistics → Prometheus text, on the same port.

Inference counters carry Triton's names and labels, so that dashboards made for it go on working; what a multi-model
cache adds is named `mme_…`, and what the code of models counts as its authors name it. Nothing is counted here: the
event loop lists what there is, and a thread reads its counters, asks drivers and writes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from container.observe.exposition import Exposition, labels_of
from model_handlers.base import total
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.system import memory
from model_handlers.system.devices import gpu_uuids, readings
from serve.statistics import EVICTION_REASONS, FAILURE_REASONS, FIRST_RESPONSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from container.process.service import Service
    from model_handlers.base import Footprint
    from serve.engine import Engine
    from serve.loading.loader import Target
    from serve.statistics import ModelStats, Summary, TargetStats

    Samples = Iterable[tuple[str, float]]
    _Samples = Callable[["_Scope"], Samples]

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OF_A_MINUTE = "Microseconds, of the last minute"
_GUESSED = (
    "1 for what is known of a batch dimension that no configuration names: named, proven, unproven, refuted, other or "
    "off"
)
_REFUSED = "Requests that failed because their model could not be loaded"
_LOADED = "Bytes of those used that models took when they were loaded"
_RESERVED = "Bytes of those used that are promised to loads"
_IN_FLIGHT = "Bytes of requests and responses on the way, which no budget for models counts"


class Scrape:
    """One scrape: made on the loop, which lists what there is; its text is written by a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._now = _Now.of(service.engine)

    def text(self) -> list[bytes]:
        """Return the text, in pieces. Asks drivers, which takes milliseconds."""
        out, scope = Exposition(), _Scope(self._now, self._service)
        for row in FAMILIES:
            _write(out, row, scope)
        for family, found in METRICS.read():  # what the code of models counts
            kind = family.kind.value
            out.family(family.name, family.description or f"A {kind} of a model", kind)
            for each in found:
                labels = labels_of(each.labels)
                if family.kind is MetricKind.HISTOGRAM:
                    out.histogram(family.name, labels, each.buckets, each.counts, each.value)
                else:
                    out.sample(family.name, labels, each.value)
        for row in OF_THE_PROCESS:
            _write(out, row, scope)
        return out.text()


@dataclass(frozen=True, slots=True)
class _Now:
    """What there is to be counted, and what changes together, at one moment of the loop.

    Attributes:
        engine: whose.
        stats: (name, version) and counters of each model.
        targets: name and counters of each target.
        residents: name, bytes and target of what is in memory under its name.
        retiring: what is in memory beside.
        used: bytes of all that is in memory or promised.
        reserved: bytes that are promised.
        grown: bytes that executions took and no model is charged for.
    """

    engine: Engine
    stats: list[tuple[tuple[str, int], ModelStats]]
    targets: list[tuple[str, TargetStats]]
    residents: list[tuple[str, Footprint, Target]]
    retiring: list[Target]
    used: Footprint
    reserved: Footprint
    grown: Footprint

    @classmethod
    def of(cls, engine: Engine) -> _Now:
        """Take it, on the loop."""
        cache = engine.cache
        there = [(entry, entry.resident) for entry in cache.all_entries() if entry.resident is not None]
        named = cache.entries
        return cls(
            engine,
            list(engine.stats.items()),
            list(engine.registry.stats.items()),
            [(entry.name, entry.footprint, target) for entry, target in there if named.get(entry.name) is entry],
            [target for entry, target in there if named.get(entry.name) is not entry],
            cache.room.used(),
            cache.room.reserved,
            cache.room.grown,
        )


class _Scope:
    """What rows are asked for, prepared once a scrape.

    Attributes:
        models, targets: labels and counters of those with series of their own.
        named: the same models by name and version.
        shown: names of targets among these.
        queued: requests that wait, by the statistics that count them, which several models may share.
        grown: bytes that executions took since loads.
        The others are values of single samples.
    """

    def __init__(self, now: _Now, service: Service) -> None:
        most = service.settings.metrics_models
        self.now = now
        self.latencies = service.settings.latencies
        self.dropped = service.logs.dropped
        self.named = sorted(nlargest(most, now.stats, lambda each: _requests(each[1])), key=itemgetter(0))
        # The labels that a model's configuration adds begin with `_`.
        self.models = [(_labels(name, version, stats), stats) for (name, version), stats in self.named]
        targets = sorted(nlargest(most, now.targets, lambda each: each[1].hits + each[1].misses), key=itemgetter(0))
        self.targets = [(labels_of({"model": name}), stats) for name, stats in targets]
        self.shown = {name for name, _ in targets}
        self.uuids = gpu_uuids()
        self.gpus = readings()
        self.grown = total((each.growth() for each in [*(row[2] for row in now.residents), *now.retiring]), now.grown)
        self.taken_by_loads = now.used - self.grown - now.reserved
        self.loaded, self.left_out = len(now.residents), len(now.targets) - len(targets)
        self.budget, self.responses = now.engine.cache.room.budget, now.engine.responses
        self.disk, self.in_flight = now.engine.origins.room, now.engine.on_the_way()
        self.pinned, self.processors = 0, memory.processor_share()
        self.machine_total, self.machine_used = memory.machine_memory()
        self.queued: Counter[int] = Counter()
        for _, _, target in now.residents:
            for model in target.models():
                self.queued[id(model.stats)] += model.queued


class Family(NamedTuple):
    """One row: name, type, help, and what gives its samples.

    A sample is labels and a value; of a histogram labels, bounds, counts and total, of a summary labels, value by
    quantile, count and sum.

    Attributes:
        wanted: whether there is such a family at all, None for always.
    """

    name: str
    kind: str
    help: str
    samples: Callable[[_Scope], Iterable[Any]]
    wanted: Callable[[_Scope], Any] | None = None


def _write(out: Exposition, row: Family, scope: _Scope) -> None:
    if row.wanted is not None and not row.wanted(scope):
        return
    out.family(row.name, row.help, row.kind)
    if row.kind == "histogram":
        for labels, bounds, counts, sum_ in row.samples(scope):
            out.histogram(row.name, labels, bounds, counts, sum_)
    elif row.kind == "summary":
        for labels, quantiles, count, sum_ in row.samples(scope):
            for quantile, value in quantiles:
                out.sample(row.name, f'{labels},quantile="{quantile:g}"', value)
            out.sample(f"{row.name}_count", labels, count)
            out.sample(f"{row.name}_sum", labels, sum_)
    else:
        for labels, value in row.samples(scope):
            out.sample(row.name, labels, value)


def _any(_stats: ModelStats) -> bool:
    return True


def _one(path: str) -> _Samples:
    """One sample without labels: an attribute of the scope."""
    value = attrgetter(path)
    return lambda scope: (("", value(scope)),)


def _models(path: str, wanted: Callable[[ModelStats], Any] = _any, divisor: float = 1) -> _Samples:
    """A sample of each model that is wanted."""
    value = attrgetter(path)
    if divisor == 1:
        return lambda scope: ((labels, value(stats)) for labels, stats in scope.models if wanted(stats))
    return lambda scope: ((labels, value(stats) / divisor) for labels, stats in scope.models if wanted(stats))


def _targets(path: str, divisor: float = 0) -> _Samples:
    """A sample of each target."""
    value = attrgetter(path)
    if not divisor:
        return lambda scope: ((labels, value(stats)) for labels, stats in scope.targets)
    return lambda scope: ((labels, value(stats) / divisor) for labels, stats in scope.targets)


def _cached(stats: ModelStats) -> bool:
    return stats.cached


def _failures(scope: _Scope) -> Samples:
    for labels, stats in scope.models:
        for why in FAILURE_REASONS:
            yield f'{labels},reason="{why}"', stats.failures[why]


def _pending(scope: _Scope) -> Samples:
    queued = scope.queued
    return ((labels, queued[id(stats)]) for labels, stats in scope.models if id(stats) in queued)


def _loads(scope: _Scope) -> Samples:
    return ((labels, stats.load_ns / 1e9) for labels, stats in scope.models if stats.load_ns)


def _guessed(scope: _Scope) -> Samples:
    return ((f'{labels},state="{stats.batching}"', 1.0) for labels, stats in scope.models if stats.batching)


def _summary(field: str, wanted: Callable[[ModelStats], Any] = _any) -> Callable[[_Scope], Iterable[Any]]:
    def samples(scope: _Scope) -> Iterable[Any]:
        quantiles, now = scope.latencies.quantiles, time.monotonic()
        for labels, stats in scope.models:
            if stats.summaries is not None and wanted(stats):
                found: Summary = getattr(stats.summaries, field)
                told = zip(quantiles, (ns / 1000 for ns in found.quantiles(quantiles, now)), strict=True)
                yield labels, told, found.count, found.ns / 1000

    return samples


def _batch_sizes(scope: _Scope) -> Iterable[Any]:
    for (model, version), stats in scope.named:
        counts, inferences = [0] * (len(_BATCH_SIZES) + 1), 0
        for size, batch in list(stats.batches.items()):
            counts[bisect_left(_BATCH_SIZES, size)] += batch.compute_infer.count
            inferences += size * batch.compute_infer.count
        yield labels_of({"model": model, "version": str(version)}), _BATCH_SIZES, counts, inferences


def _first_responses(scope: _Scope) -> Iterable[Any]:
    """Of models whose configuration sets its buckets, which are milliseconds."""
    for labels, stats in scope.models:
        kept = stats.first_response
        if kept is not None:
            yield labels, [bound * 1000 for bound in kept.bounds], list(kept.counts), kept.total.ns / 1e6


def _evictions(scope: _Scope) -> Samples:
    for labels, stats in scope.targets:
        for why in EVICTION_REASONS:
            yield f'{labels},reason="{why}"', stats.evictions[why]


def _evicted(scope: _Scope) -> Samples:
    for labels, stats in scope.targets:
        for kind, size in (("host", stats.evicted.host), ("device", stats.evicted.device)):
            yield f'kind="{kind}",{labels}', size


def _cache_times(what: str) -> Callable[[_Scope], Iterable[Any]]:
    """Of all models together: a histogram for each of hundreds would be thousands of time series."""

    def samples(scope: _Scope) -> Iterable[Any]:
        times = getattr(scope.now.engine.times, what)
        return (("", times.bounds, list(times.counts), times.total.ns / 1e9),)

    return samples


def _model_memory(scope: _Scope) -> Samples:
    for model, footprint, _ in scope.now.residents:
        if model in scope.shown:
            on = {number: uuid for number, uuid in scope.uuids.items() if footprint.on({number}).devices}
            yield from _bytes(footprint, on, model=model)


def _footprint(path: str) -> _Samples:
    value = attrgetter(path)
    return lambda scope: _bytes(value(scope), scope.uuids)


def _bytes(footprint: Footprint, uuids: Mapping[int, str], **labels: str) -> Samples:
    """A sample for the host, and one for each of these GPUs."""
    yield labels_of({**labels, "kind": "host"}), footprint.host
    sizes = dict(enumerate(footprint.devices))
    for number, uuid in uuids.items():
        yield labels_of({**labels, "kind": "device", "gpu_uuid": uuid}), sizes.get(number, 0)


def _gpus(field: str) -> _Samples:
    def samples(scope: _Scope) -> Samples:
        found = ((gpu.uuid, getattr(gpu, field)) for gpu in scope.gpus)
        return ((labels_of({"gpu_uuid": uuid}), value) for uuid, value in found if value is not None)

    return samples


def _any_gpu(field: str) -> Callable[[_Scope], bool]:
    return lambda scope: any(getattr(gpu, field) is not None for gpu in scope.gpus)


_COUNTS, _SUMMARISES, _DISK = attrgetter("latencies.counters"), attrgetter("latencies.summaries"), attrgetter("disk")
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("nv_inference_request_success", "counter", "Successful requests", _models("success.count")),
    ("nv_inference_request_failure", "counter", "Failed requests to a loaded model, by reason", _failures),
    ("nv_inference_count", "counter", "Inferences: batch elements", _models("inference_count")),
    ("nv_inference_exec_count", "counter", "Executions: batches", _models("execution_count")),
    *(
        (f"nv_inference_{name}_duration_us", "counter", text, _models(f"{field}.ns", divisor=1000), _COUNTS)
        for name, field, text in (
            ("request", "success", "Microseconds of successful requests, end to end, summed up"),
            ("queue", "queue", "Microseconds that requests waited for an instance, summed up"),
            ("compute_input", "compute_input", "Microseconds of putting batches together, summed up"),
            ("compute_infer", "compute_infer", "Microseconds of executing the model, summed up"),
            ("compute_output", "compute_output", "Microseconds of handing outputs out, summed up"),
        )
    ),
    ("nv_inference_pending_request_count", "gauge", "Requests that wait for an instance", _pending),
    ("nv_model_load_duration_secs", "gauge", "Seconds that the model's last load took", _loads),
    ("mme_guessed_batching", "gauge", _GUESSED, _guessed),
    *(
        (f"nv_inference_{what}_summary_us", "summary", _OF_A_MINUTE, _summary(what), _SUMMARISES)
        for what in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    ),
    ("nv_cache_hit_summary_per_model", "summary", _OF_A_MINUTE, _summary("cache_hit", _cached), _SUMMARISES),
    ("nv_cache_miss_summary_per_model", "summary", _OF_A_MINUTE, _summary("cache_miss", _cached), _SUMMARISES),
    ("mme_batch_size", "histogram", "Batch elements of each execution", _batch_sizes),
    (FIRST_RESPONSES, "histogram", "Milliseconds from a request to its first response", _first_responses),
    *(
        row
        for what, plural in (("hit", "hits"), ("miss", "misses"))
        for row in (
            (f"nv_cache_num_{plural}_per_model", "counter", f"Cache {plural}", _models(f"cache_{what}.count", _cached)),
            (
                f"nv_cache_{what}_duration_per_model",
                "counter",
                f"Microseconds of cache {plural}",
                _models(f"cache_{what}.ns", _cached, 1000),
            ),
        )
    ),
    ("mme_response_cache_budget_bytes", "gauge", "Bytes that cached responses may take", _one("responses.maxsize")),
    ("mme_response_cache_used_bytes", "gauge", "Bytes that cached responses take", _one("responses.currsize")),
    ("mme_model_cache_hits_total", "counter", "Requests that found their model in memory", _targets("hits")),
    ("mme_model_cache_misses_total", "counter", "Requests that did not find their model in memory", _targets("misses")),
    ("mme_model_loads_total", "counter", "Loads that succeeded", _targets("loads")),
    ("mme_model_load_failures_total", "counter", "Loads that failed", _targets("load_failures")),
    ("mme_model_refused_requests_total", "counter", _REFUSED, _targets("refused")),
    ("mme_model_evictions_total", "counter", "Times the model left memory for another, by reason", _evictions),
    ("mme_model_evicted_bytes_total", "counter", "Bytes that its evictions gave back", _evicted),
    *(
        (f"mme_model_{what}_seconds_total", "counter", text, _targets(f"{what}.ns", 1e9))
        for what, text in (
            ("wait", "Seconds that requests waited for the model to be loaded, summed up"),
            ("download", "Seconds of fetching and unpacking, summed up"),
            ("load", "Seconds of loading, without the download, summed up"),
            ("unload", "Seconds of unloading, summed up"),
        )
    ),
    *(
        (f"mme_{what}_duration_seconds", "histogram", text, _cache_times(what))
        for what, text in (
            ("wait", "Seconds that a request waited for its model (ModelLoadingWaitTime)"),
            ("download", "Seconds of fetching and unpacking an archive (ModelDownloadingTime)"),
            ("load", "Seconds of loading a model, without the download (ModelLoadingTime)"),
            ("unload", "Seconds of unloading a model, requests under way included (ModelUnloadingTime)"),
        )
    ),
    ("mme_loaded_models", "gauge", "Models in memory (LoadedModelCount)", _one("loaded")),
    ("mme_models_left_out", "gauge", "Models without series of their own (MME_METRICS_MODELS)", _one("left_out")),
    ("mme_model_memory_bytes", "gauge", "Bytes that a model takes, as measured", _model_memory),
    ("mme_memory_budget_bytes", "gauge", "Bytes of memory for models: budget", _footprint("budget")),
    ("mme_memory_used_bytes", "gauge", "Bytes of memory for models: used", _footprint("now.used")),
    ("mme_memory_loaded_bytes", "gauge", _LOADED, _footprint("taken_by_loads")),
    ("mme_memory_grown_bytes", "gauge", "Bytes of those used that executions took since", _footprint("grown")),
    (
        "mme_memory_reserved_bytes",
        "gauge",
        "Bytes of those used that are promised to loads",
        _footprint("now.reserved"),
    ),
    ("mme_memory_in_flight_bytes", "gauge", _IN_FLIGHT, _one("in_flight")),
    ("mme_disk_budget_bytes", "gauge", "Bytes of disk for archives and weights", _one("disk.budget"), _DISK),
    ("mme_disk_used_bytes", "gauge", "Bytes of disk that archives and weights take", _one("disk.used"), _DISK),
    ("mme_disk_evictions_total", "counter", "Archives that left the disk for others", _one("disk.evictions"), _DISK),
)
_OF_THE_PROCESS: tuple[tuple[Any, ...], ...] = (
    ("mme_log_lines_dropped_total", "counter", "Lines of the log that nothing read", _one("dropped")),
    *(
        (name, kind, text, _gpus(field), _any_gpu(field))
        for name, kind, text, field in (
            ("nv_gpu_utilization", "gauge", "GPU utilization, 0.0 to 1.0", "utilization"),
            ("nv_gpu_memory_total_bytes", "gauge", "GPU memory, bytes", "total"),
            ("nv_gpu_memory_used_bytes", "gauge", "GPU memory in use by anybody, bytes", "used"),
            ("nv_gpu_power_usage", "gauge", "GPU power draw, watts", "power"),
            ("nv_gpu_power_limit", "gauge", "GPU power limit, watts", "power_limit"),
            ("nv_energy_consumption", "counter", "GPU energy since the driver was loaded, joules", "energy"),
        )
    ),
    # Triton's pool of pinned memory: there is none here, and a look-up says so.
    ("nv_pinned_memory_pool_total_bytes", "gauge", "Pool of pinned memory, which is not needed", _one("pinned")),
    ("nv_pinned_memory_pool_used_bytes", "gauge", "Pool of pinned memory in use", _one("pinned")),
    ("nv_cpu_utilization", "gauge", "CPU utilization, 0.0 to 1.0", _one("processors")),
    ("nv_cpu_memory_total_bytes", "gauge", "The machine's memory, bytes", _one("machine_total")),
    ("nv_cpu_memory_used_bytes", "gauge", "The machine's memory in use, bytes", _one("machine_used")),
)
FAMILIES = tuple(Family(*row) for row in _ROWS)
OF_THE_PROCESS = tuple(Family(*row) for row in _OF_THE_PROCESS)


def _requests(stats: ModelStats) -> int:
    return stats.success.count + stats.fail.count


def _labels(model: str, version: int, stats: ModelStats) -> str:
    namespace = {"namespace": stats.namespace} if stats.namespace else {}
    gpu = {"gpu_uuid": stats.gpu_uuid} if stats.gpu_uuid else {}
    tags = {f"_{tag}": value for tag, value in stats.tags.items()}
    return labels_of({"model": model, "version": str(version), **gpu, **namespace, **tags})
