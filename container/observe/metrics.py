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
from operator import itemgetter
from typing import TYPE_CHECKING

from container.observe.exposition import Exposition, labels_of
from model_handlers.base import total
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.system import memory
from model_handlers.system.devices import gpu_uuids, readings
from serve.statistics import EVICTION_REASONS, FAILURE_REASONS, FIRST_RESPONSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from container.process.service import Service
    from model_handlers.base import Footprint
    from model_handlers.metrics import Family, Reading
    from serve.control import Latencies
    from serve.engine import Engine
    from serve.loading.loader import Target
    from serve.statistics import ModelStats, Summary, TargetStats


_TOTAL = "_total"
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DURATIONS = {
    "nv_inference_request_duration_us": ("success", "Microseconds of successful requests, end to end, summed up"),
    "nv_inference_queue_duration_us": ("queue", "Microseconds that requests waited for an instance, summed up"),
    "nv_inference_compute_input_duration_us": ("compute_input", "Microseconds of putting batches together, summed up"),
    "nv_inference_compute_infer_duration_us": ("compute_infer", "Microseconds of executing the model, summed up"),
    "nv_inference_compute_output_duration_us": ("compute_output", "Microseconds of handing outputs out, summed up"),
}
_SUMMARIES = {
    "nv_inference_request_summary_us": "request",
    "nv_inference_queue_summary_us": "queue",
    "nv_inference_compute_input_summary_us": "compute_input",
    "nv_inference_compute_infer_summary_us": "compute_infer",
    "nv_inference_compute_output_summary_us": "compute_output",
}
_CACHE_SUMMARIES = {"nv_cache_hit_summary_per_model": "cache_hit", "nv_cache_miss_summary_per_model": "cache_miss"}
_TARGET_COUNTS = {
    "mme_model_cache_hits_total": ("hits", "Requests that found their model in memory"),
    "mme_model_cache_misses_total": ("misses", "Requests that did not find their model in memory"),
    "mme_model_loads_total": ("loads", "Loads that succeeded"),
    "mme_model_load_failures_total": ("load_failures", "Loads that failed"),
    "mme_model_refused_requests_total": ("refused", "Requests that failed because their model could not be loaded"),
}
_TARGET_SECONDS = {
    "mme_model_wait_seconds_total": ("wait", "Seconds that requests waited for the model to be loaded, summed up"),
    "mme_model_download_seconds_total": ("download", "Seconds of fetching and unpacking, summed up"),
    "mme_model_load_seconds_total": ("load", "Seconds of loading, without the download, summed up"),
    "mme_model_unload_seconds_total": ("unload", "Seconds of unloading, summed up"),
}
_TIMES = {
    "wait": "Seconds that a request waited for its model (ModelLoadingWaitTime)",
    "download": "Seconds of fetching and unpacking an archive (ModelDownloadingTime)",
    "load": "Seconds of loading a model, without the download (ModelLoadingTime)",
    "unload": "Seconds of unloading a model, requests under way included (ModelUnloadingTime)",
}
_GUESSED = "1 for what is known of a batch dimension that no configuration names: named, proven, unproven, refuted, "


class Scrape:
    """One scrape: made on the loop, which lists what there is; its text is written by a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._now = _Now.of(service.engine)

    def text(self) -> list[bytes]:
        """Return the text, in pieces. Asks drivers, which takes milliseconds."""
        out, settings, logs = Exposition(), self._service.settings, self._service.logs
        _Families(out, self._now, settings.latencies, settings.metrics_models).write()
        out.one("mme_log_lines_dropped_total", "Lines of the log that nothing read", "counter", logs.dropped)
        write_machine(out)
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


class _Families:
    """Writes every family, on a thread."""

    def __init__(self, out: Exposition, now: _Now, latencies: Latencies, most: int) -> None:
        self._out = out
        self._now = now
        self._latencies = latencies
        self._stats = sorted(nlargest(most, now.stats, lambda each: _requests(each[1])), key=itemgetter(0))
        # The labels that a model's configuration adds begin with `_`.
        self._models = [(_labels(name, version, stats), stats) for (name, version), stats in self._stats]
        targets = sorted(nlargest(most, now.targets, lambda each: each[1].hits + each[1].misses), key=itemgetter(0))
        self._targets = [(labels_of({"model": name}), stats) for name, stats in targets]
        self._shown = {name for name, _ in targets}

    def write(self) -> None:
        """Do it."""
        self._inference()
        self._models_now()
        if self._latencies.summaries:
            self._summaries()
        self._batch_sizes()
        self._first_responses()
        self._responses()
        self._cache()
        self._cache_times()
        self._memory()
        self._of_models()

    def _family(self, name: str, text: str, samples: Iterable[tuple[str, float]], kind: str = "counter") -> None:
        self._out.family(name, text, kind)
        for labels, value in samples:
            self._out.sample(name, labels, value)

    def _inference(self) -> None:
        """Triton's counters."""
        models = self._models
        succeeded = ((labels, stats.success.count) for labels, stats in models)
        failures = (
            (f'{labels},reason="{why}"', stats.failures[why]) for labels, stats in models for why in FAILURE_REASONS
        )
        counts = ((labels, stats.inference_count) for labels, stats in models)
        executions = ((labels, stats.execution_count) for labels, stats in models)
        self._family("nv_inference_request_success", "Successful requests", succeeded)
        self._family("nv_inference_request_failure", "Failed requests to a loaded model, by reason", failures)
        self._family("nv_inference_count", "Inferences: batch elements", counts)
        self._family("nv_inference_exec_count", "Executions: batches", executions)
        for name, (field, text) in _DURATIONS.items() if self._latencies.counters else ():
            self._family(name, text, ((labels, getattr(stats, field).ns / 1000) for labels, stats in models))

    def _models_now(self) -> None:
        """Triton's gauges."""
        waiting: Counter[int] = Counter()  # by the statistics that count them, which several models may share
        for _, _, target in self._now.residents:
            for model in target.models():
                waiting[id(model.stats)] += model.queued
        models = self._models
        pending = ((labels, waiting[id(stats)]) for labels, stats in models if id(stats) in waiting)
        self._family("nv_inference_pending_request_count", "Requests that wait for an instance", pending, "gauge")
        loads = ((labels, stats.load_ns / 1e9) for labels, stats in models if stats.load_ns)
        self._family("nv_model_load_duration_secs", "Seconds that the model's last load took", loads, "gauge")
        guessed = ((f'{labels},state="{stats.batching}"', 1.0) for labels, stats in models if stats.batching)
        self._family("mme_guessed_batching", f"{_GUESSED}other or off", guessed, "gauge")

    def _summaries(self) -> None:
        """Quantiles, in microseconds."""
        now, quantiles = time.monotonic(), self._latencies.quantiles
        for name, field in (*_SUMMARIES.items(), *_CACHE_SUMMARIES.items()):
            self._out.family(name, "Microseconds, of the last minute", "summary")
            for labels, stats in self._models:
                if stats.summaries is None or (name in _CACHE_SUMMARIES and not stats.cached):
                    continue
                summary: Summary = getattr(stats.summaries, field)
                for quantile, ns in zip(quantiles, summary.quantiles(quantiles, now), strict=True):
                    self._out.sample(name, f'{labels},quantile="{quantile:g}"', ns / 1000)
                self._out.sample(f"{name}_count", labels, summary.count)
                self._out.sample(f"{name}_sum", labels, summary.ns / 1000)

    def _responses(self) -> None:
        """Of models whose responses are cached, under Triton's names; and what all of it takes."""
        for what, plural in (("hit", "hits"), ("miss", "misses")):
            cached = [(labels, getattr(stats, f"cache_{what}")) for labels, stats in self._models if stats.cached]
            counts = ((labels, each.count) for labels, each in cached)
            took = ((labels, each.ns / 1000) for labels, each in cached)
            self._family(f"nv_cache_num_{plural}_per_model", f"Cache {plural}", counts)
            self._family(f"nv_cache_{what}_duration_per_model", f"Microseconds of cache {plural}", took)
        cache, gauge = self._now.engine.responses, "gauge"
        self._out.one("mme_response_cache_budget_bytes", "Bytes that cached responses may take", gauge, cache.maxsize)
        self._out.one("mme_response_cache_used_bytes", "Bytes that cached responses take", gauge, cache.currsize)

    def _first_responses(self) -> None:
        """Of models whose configuration sets its buckets, which are milliseconds."""
        self._out.family(FIRST_RESPONSES, "Milliseconds from a request to its first response", "histogram")
        for labels, stats in self._models:
            kept = stats.first_response
            if kept is not None:
                bounds = [bound * 1000 for bound in kept.bounds]
                self._out.histogram(FIRST_RESPONSES, labels, bounds, list(kept.counts), kept.total.ns / 1e6)

    def _batch_sizes(self) -> None:
        name = "mme_batch_size"
        self._out.family(name, "Batch elements of each execution", "histogram")
        for (model, version), stats in self._stats:
            counts, inferences = [0] * (len(_BATCH_SIZES) + 1), 0
            for size, batch in list(stats.batches.items()):
                counts[bisect_left(_BATCH_SIZES, size)] += batch.compute_infer.count
                inferences += size * batch.compute_infer.count
            labels = labels_of({"model": model, "version": str(version)})
            self._out.histogram(name, labels, _BATCH_SIZES, counts, inferences)

    def _cache(self) -> None:
        targets = self._targets
        for name, (field, text) in _TARGET_COUNTS.items():
            self._family(name, text, ((labels, getattr(stats, field)) for labels, stats in targets))
        evictions = (
            (f'{labels},reason="{why}"', stats.evictions[why]) for labels, stats in targets for why in EVICTION_REASONS
        )
        self._family("mme_model_evictions_total", "Times the model left memory for another, by reason", evictions)
        freed = (
            (f'kind="{kind}",{labels}', size)
            for labels, stats in targets
            for kind, size in (("host", stats.evicted.host), ("device", stats.evicted.device))
        )
        self._family("mme_model_evicted_bytes_total", "Bytes that its evictions gave back", freed)
        for name, (field, text) in _TARGET_SECONDS.items():
            self._family(name, text, ((labels, getattr(stats, field).ns / 1e9) for labels, stats in targets))

    def _cache_times(self) -> None:
        """Of all models together: a histogram for each of hundreds would be thousands of time series."""
        for what, text in _TIMES.items():
            times, name = getattr(self._now.engine.times, what), f"mme_{what}_duration_seconds"
            self._out.family(name, text, "histogram")
            self._out.histogram(name, "", times.bounds, list(times.counts), times.total.ns / 1e9)

    def _memory(self) -> None:
        now, engine, gauge = self._now, self._now.engine, "gauge"
        residents = now.residents
        self._out.one("mme_loaded_models", "Models in memory (LoadedModelCount)", gauge, len(residents))
        left_out = len(now.targets) - len(self._targets)
        self._out.one("mme_models_left_out", "Models without series of their own (MME_METRICS_MODELS)", gauge, left_out)
        uuids, name = gpu_uuids(), "mme_model_memory_bytes"
        self._out.family(name, "Bytes that a model takes, as measured", gauge)
        for model, footprint, _ in residents:
            if model not in self._shown:
                continue
            on = {number: uuid for number, uuid in uuids.items() if footprint.on({number}).devices}
            self._bytes(name, footprint, on, model=model)
        grown = total((target.growth() for target in [*(each[2] for each in residents), *now.retiring]), now.grown)
        for what, footprint, text in (
            ("budget", engine.cache.room.budget, "Bytes of memory for models: budget"),
            ("used", now.used, "Bytes of memory for models: used"),
            ("loaded", now.used - grown - now.reserved, "Bytes of those used that models took when they were loaded"),
            ("grown", grown, "Bytes of those used that executions took since"),
            ("reserved", now.reserved, "Bytes of those used that are promised to loads"),
        ):
            self._out.family(f"mme_memory_{what}_bytes", text, gauge)
            self._bytes(f"mme_memory_{what}_bytes", footprint, uuids)
        text = "Bytes of requests and responses on the way, which no budget for models counts"
        self._out.one("mme_memory_in_flight_bytes", text, gauge, engine.on_the_way())
        disk = engine.origins.room
        if disk is not None:
            self._out.one("mme_disk_budget_bytes", "Bytes of disk for archives and weights", gauge, disk.budget)
            self._out.one("mme_disk_used_bytes", "Bytes of disk that archives and weights take", gauge, disk.used)
            text = "Archives that left the disk for others"
            self._out.one("mme_disk_evictions_total", text, "counter", disk.evictions)

    def _bytes(self, name: str, footprint: Footprint, uuids: Mapping[int, str], **labels: str) -> None:
        """A sample for the host, and one for each of these GPUs."""
        self._out.sample(name, labels_of({**labels, "kind": "host"}), footprint.host)
        sizes = dict(enumerate(footprint.devices))
        for number, uuid in uuids.items():
            told = labels_of({**labels, "kind": "device", "gpu_uuid": uuid})
            self._out.sample(name, told, sizes.get(number, 0))

    def _of_models(self) -> None:
        """What the code of models counts."""
        for family, found in METRICS.read():
            text, kind = family.description or f"A {family.kind.value} of a model", family.kind.value
            self._out.family(family.name, text, kind)
            for reading in found:
                self._reading(family, reading)

    def _reading(self, family: Family, reading: Reading) -> None:
        labels = labels_of(reading.labels)
        if family.kind is MetricKind.HISTOGRAM:
            self._out.histogram(family.name, labels, reading.buckets, reading.counts, reading.value)
        else:
            self._out.sample(family.name, labels, reading.value)


def _requests(stats: ModelStats) -> int:
    return stats.success.count + stats.fail.count


def _labels(model: str, version: int, stats: ModelStats) -> str:
    namespace = {"namespace": stats.namespace} if stats.namespace else {}
    gpu = {"gpu_uuid": stats.gpu_uuid} if stats.gpu_uuid else {}
    tags = {f"_{tag}": value for tag, value in stats.tags.items()}
    return labels_of({"model": model, "version": str(version), **gpu, **namespace, **tags})


# Name, text, kind, field of a reading.
_OF_GPUS = (
    ("nv_gpu_utilization", "GPU utilization, 0.0 to 1.0", "gauge", "utilization"),
    ("nv_gpu_memory_total_bytes", "GPU memory, bytes", "gauge", "total"),
    ("nv_gpu_memory_used_bytes", "GPU memory in use by anybody, bytes", "gauge", "used"),
    ("nv_gpu_power_usage", "GPU power draw, watts", "gauge", "power"),
    ("nv_gpu_power_limit", "GPU power limit, watts", "gauge", "power_limit"),
    ("nv_energy_consumption", "GPU energy since the driver was loaded, joules", "counter", "energy"),
)


def write_machine(out: Exposition) -> None:
    """Write every family that has a value."""
    found = readings()
    for name, text, kind, field in _OF_GPUS:
        values = [(gpu.uuid, value) for gpu in found if (value := getattr(gpu, field)) is not None]
        if values:
            out.family(name, text, kind)
        for uuid, value in values:
            out.sample(name, labels_of({"gpu_uuid": uuid}), value)
    total, used = memory.machine_memory()
    # Triton's pool of pinned memory: there is none here, and who looks for it finds that.
    out.one("nv_pinned_memory_pool_total_bytes", "Pool of pinned memory, which is not needed", "gauge", 0)
    out.one("nv_pinned_memory_pool_used_bytes", "Pool of pinned memory in use", "gauge", 0)
    out.one("nv_cpu_utilization", "CPU utilization, 0.0 to 1.0", "gauge", memory.processor_share())
    out.one("nv_cpu_memory_total_bytes", "The machine's memory, bytes", "gauge", total)
    out.one("nv_cpu_memory_used_bytes", "The machine's memory in use, bytes", "gauge", used)
