"""Statistics → Prometheus text, on the same port. A Flask blueprint; the event loop reads numbers, a thread writes.

Inference counters carry Triton's names and labels, so that dashboards made for it go on working; what a multi-model
cache adds is named `mme_…`, and what the code of models counts as its authors name it. Nothing is counted here: the
collector turns the engine's counters, and the models', into families when somebody scrapes.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING

from flask import Blueprint, Response
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from container.machine_metrics import MachineCollector
from model_handlers.gpus import gpu_uuids
from model_handlers.metric_checks import MetricKind
from model_handlers.metrics import METRICS
from serve.stats import BOUNDS_SECONDS, EVICTION_REASONS, FAILURE_REASONS, FIRST_RESPONSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from container.on_loop import OnLoop
    from container.service import Service
    from container.views import View
    from model_handlers.base import Footprint
    from model_handlers.metrics import Family, Reading
    from serve.engine import Engine
    from serve.latencies import Latencies, Summary
    from serve.stats import ModelStats

_TOTAL = "_total"
# prometheus_client writes a counter whose name lacks `_total` as untyped, and knows no other way to write one: whatever
# is written so here is one, and some of those who scrape leave out what has no type.
_UNTYPED = re.compile(rb"^(# TYPE \S+) untyped$", re.MULTILINE)
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


def blueprint(service: Service, on_loop: OnLoop, _hot: View) -> Blueprint:
    """/metrics over a service."""
    routes = Blueprint("metrics", __name__)
    counted = _Collector(service.engine, service.settings.latencies)

    def metrics() -> Response:
        families = on_loop.call(list, counted.collect())
        dropped = service.logs.dropped
        families.append(CounterMetricFamily("mme_log_lines_dropped", "Lines of the log that nothing read", dropped))
        families += MachineCollector().collect()  # asking drivers takes milliseconds, which the loop does not have
        text = _UNTYPED.sub(rb"\1 counter", generate_latest(SimpleNamespace(collect=lambda: families)))
        return Response(text, content_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes.add_url_rule("/metrics", "metrics", metrics)
    return routes


class _Collector:
    """Families from the engine's counters."""

    def __init__(self, engine: Engine, latencies: Latencies) -> None:
        self._engine = engine
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        """Every family; iterated on the loop."""
        yield from self._inference()
        yield from self._models_now()
        if self._latencies.summaries:
            yield from self._summaries()
        yield self._batch_sizes()
        yield self._first_responses()
        yield from self._responses()
        yield from self._cache()
        yield from self._cache_times()
        yield from self._memory()
        yield from _of_models()

    def _models(self) -> list[tuple[dict[str, str], ModelStats]]:
        """Labels and counters of each version of each model; the labels that its configuration adds begin with `_`."""
        return [
            (_labels(name, version, stats), stats)
            for (name, version), stats in sorted(self._engine.stats.items(), key=lambda item: item[0])
        ]

    def _inference(self) -> Iterator[Metric]:
        """Triton's counters."""
        models = self._models()
        failures = [
            ({**labels, "reason": why}, stats.failures[why]) for labels, stats in models for why in FAILURE_REASONS
        ]
        counts = [(labels, stats.inference_count) for labels, stats in models]
        executions = [(labels, stats.execution_count) for labels, stats in models]
        succeeded = [(labels, stats.success.count) for labels, stats in models]
        yield _family("nv_inference_request_success", "Successful requests", succeeded)
        yield _family("nv_inference_request_failure", "Failed requests to a loaded model, by reason", failures)
        yield _family("nv_inference_count", "Inferences: batch elements", counts)
        yield _family("nv_inference_exec_count", "Executions: batches", executions)
        for name, (field, text) in _DURATIONS.items() if self._latencies.counters else ():
            yield _family(name, text, [(labels, getattr(stats, field).ns / 1000) for labels, stats in models])

    def _models_now(self) -> Iterator[Metric]:
        """Triton's gauges."""
        waiting: Counter[int] = Counter()  # by the statistics that count them, which several models may share
        for _, model_now in self._engine.resident_models():
            waiting[id(model_now.stats)] += model_now.queued
        models = self._models()
        pending = [(labels, waiting[id(stats)]) for labels, stats in models if id(stats) in waiting]
        yield _family("nv_inference_pending_request_count", "Requests that wait for an instance", pending, "gauge")
        loads = [(labels, stats.load_ns / 1e9) for labels, stats in models if stats.load_ns]
        yield _family("nv_model_load_duration_secs", "Seconds that the model's last load took", loads, "gauge")
        guessed = [({**labels, "state": stats.batching}, 1.0) for labels, stats in models if stats.batching]
        text = (
            "1 for what is known of a batch dimension that no configuration names: named, proven, unproven, refuted, "
        )
        yield _family("mme_guessed_batching", f"{text}other or off", guessed, "gauge")

    def _summaries(self) -> Iterator[Metric]:
        """Quantiles, in microseconds."""
        now, quantiles = time.monotonic(), self._latencies.quantiles
        for name, field in (*_SUMMARIES.items(), *_CACHE_SUMMARIES.items()):
            family = Metric(name, "Microseconds, of the last minute", "summary")
            for labels, stats in self._models():
                if stats.summaries is None or (name in _CACHE_SUMMARIES and not stats.cached):
                    continue
                summary: Summary = getattr(stats.summaries, field)
                for quantile, ns in zip(quantiles, summary.quantiles(quantiles, now), strict=True):
                    family.add_sample(name, {**labels, "quantile": f"{quantile:g}"}, ns / 1000)
                family.add_sample(f"{name}_count", labels, summary.count)
                family.add_sample(f"{name}_sum", labels, summary.ns / 1000)
            yield family

    def _responses(self) -> Iterator[Metric]:
        """Of models whose responses are cached, under Triton's names; and what all of it takes."""
        for what in ("hit", "miss"):
            plural = {"hit": "hits", "miss": "misses"}[what]
            cached = [(labels, getattr(stats, f"cache_{what}")) for labels, stats in self._models() if stats.cached]
            counts = [(labels, each.count) for labels, each in cached]
            took = [(labels, each.ns / 1000) for labels, each in cached]
            yield _family(f"nv_cache_num_{plural}_per_model", f"Cache {plural}", counts)
            yield _family(f"nv_cache_{what}_duration_per_model", f"Microseconds of cache {plural}", took)
        cache = self._engine.responses
        yield GaugeMetricFamily("mme_response_cache_budget_bytes", "Bytes that cached responses may take", cache.budget)
        yield GaugeMetricFamily("mme_response_cache_used_bytes", "Bytes that cached responses take", cache.used)

    def _first_responses(self) -> Metric:
        """Of models whose configuration sets its buckets, which are milliseconds."""
        family = Metric(FIRST_RESPONSES, "Milliseconds from a request to its first response", "histogram")
        for labels, stats in self._models():
            kept = stats.first_response
            if kept is None:
                continue
            bounds = (*map(floatToGoString, (bound * 1000 for bound in kept.bounds)), "+Inf")
            for bound, count in zip(bounds, accumulate(kept.counts), strict=True):
                family.add_sample(f"{FIRST_RESPONSES}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{FIRST_RESPONSES}_count", labels, kept.total.count)
            family.add_sample(f"{FIRST_RESPONSES}_sum", labels, kept.total.ns / 1e6)
        return family

    def _batch_sizes(self) -> Metric:
        family = HistogramMetricFamily(
            "mme_batch_size", "Batch elements of each execution", labels=["model", "version"]
        )
        for labels, stats in self._models():
            sizes = {size: batch.compute_infer.count for size, batch in stats.batches.items()}
            buckets = [
                (str(float(bound)), float(sum(count for size, count in sizes.items() if size <= bound)))
                for bound in _BATCH_SIZES
            ]
            total = sum(sizes.values())
            buckets.append(("+Inf", float(total)))
            family.add_metric(
                [labels["model"], labels["version"]], buckets, sum(size * count for size, count in sizes.items())
            )
        return family

    def _cache(self) -> Iterator[Metric]:
        counters = {
            field: CounterMetricFamily(f"mme_{name}", text, labels=["model"])
            for field, name, text in (
                ("hits", "model_cache_hits", "Requests that found their model in memory"),
                ("misses", "model_cache_misses", "Requests that did not find their model in memory"),
                ("loads", "model_loads", "Loads that succeeded"),
                ("load_failures", "model_load_failures", "Loads that failed"),
                ("refused", "model_refused_requests", "Requests that failed because their model could not be loaded"),
            )
        }
        seconds = {
            field: CounterMetricFamily(f"mme_model_{field}_seconds", text, labels=["model"])
            for field, text in (
                ("wait", "Seconds that requests waited for the model to be loaded, summed up"),
                ("download", "Seconds of fetching and unpacking, summed up"),
                ("load", "Seconds of loading, without the download, summed up"),
                ("unload", "Seconds of unloading, summed up"),
            )
        }
        for name, stats in sorted(self._engine.target_stats.items()):
            for field, family in counters.items():
                family.add_metric([name], getattr(stats, field))
            for field, family in seconds.items():
                family.add_metric([name], getattr(stats, field).ns / 1e9)
        yield from counters.values()
        yield from self._evictions()
        yield from seconds.values()

    def _cache_times(self) -> Iterator[Metric]:
        """Of all models together: a histogram for each of hundreds would be thousands of time series."""
        times = self._engine.times
        for name, text, histogram in (
            ("wait", "Seconds that a request waited for its model (ModelLoadingWaitTime)", times.wait),
            ("download", "Seconds of fetching and unpacking an archive (ModelDownloadingTime)", times.download),
            ("load", "Seconds of loading a model, without the download (ModelLoadingTime)", times.load),
            ("unload", "Seconds of unloading a model, requests under way included (ModelUnloadingTime)", times.unload),
        ):
            bounds = (*(str(bound) for bound in BOUNDS_SECONDS), "+Inf")
            reached = [float(count) for count in accumulate(histogram.counts)]
            buckets = list(zip(bounds, reached, strict=True))
            yield HistogramMetricFamily(f"mme_{name}_duration_seconds", text, buckets, histogram.total.ns / 1e9)

    def _evictions(self) -> Iterator[Metric]:
        evictions = CounterMetricFamily(
            "mme_model_evictions", "Times the model left memory for another, by reason", labels=["model", "reason"]
        )
        freed = CounterMetricFamily(
            "mme_model_evicted_bytes", "Bytes that its evictions gave back", labels=["model", "kind"]
        )
        for name, stats in sorted(self._engine.target_stats.items()):
            for reason in EVICTION_REASONS:
                evictions.add_metric([name, reason], stats.evictions[reason])
            freed.add_metric([name, "host"], stats.evicted.host)
            freed.add_metric([name, "device"], stats.evicted.device)
        yield from (evictions, freed)

    def _memory(self) -> Iterator[Metric]:
        cache = self._engine.cache
        yield GaugeMetricFamily("mme_loaded_models", "Models in memory (LoadedModelCount)", cache.resident_count)
        uuids = gpu_uuids()
        model = GaugeMetricFamily("mme_model_memory_bytes", "Bytes that a model takes, as measured")
        for entry in cache.entries.values():
            if entry.resident is not None:
                on = {number: uuid for number, uuid in uuids.items() if entry.footprint.on({number}).devices}
                _add_memory(model, entry.footprint, on, model=entry.name)
        yield model
        used, grown = cache.room.used(), self._engine.grown()
        reserved = cache.room.reserved
        for what, footprint, text in (
            ("budget", cache.room.budget, "Bytes of memory for models: budget"),
            ("used", used, "Bytes of memory for models: used"),
            ("loaded", used - grown - reserved, "Bytes of those used that models took when they were loaded"),
            ("grown", grown, "Bytes of those used that executions took since"),
            ("reserved", reserved, "Bytes of those used that are promised to loads"),
        ):
            family = GaugeMetricFamily(f"mme_memory_{what}_bytes", text)
            _add_memory(family, footprint, uuids)
            yield family
        yield GaugeMetricFamily(
            "mme_memory_in_flight_bytes",
            "Bytes of requests and responses on the way, which no budget for models counts",
            self._engine.on_the_way(),
        )
        disk = self._engine.disk_room
        if disk is not None:
            yield GaugeMetricFamily("mme_disk_budget_bytes", "Bytes of disk for archives and weights", disk.budget)
            yield GaugeMetricFamily("mme_disk_used_bytes", "Bytes of disk that archives and weights take", disk.used)
            yield CounterMetricFamily("mme_disk_evictions", "Archives that left the disk for others", disk.evictions)


def _add_memory(family: Metric, footprint: Footprint, uuids: Mapping[int, str], **labels: str) -> None:
    """A sample for the host, and one for each of these GPUs."""
    family.add_sample(family.name, {**labels, "kind": "host"}, footprint.host)
    sizes = dict(enumerate(footprint.devices))
    for number, uuid in uuids.items():
        family.add_sample(family.name, {**labels, "kind": "device", "gpu_uuid": uuid}, sizes.get(number, 0))


def _family(name: str, text: str, samples: Iterable[tuple[dict[str, str], float]], kind: str = "unknown") -> Metric:
    """A family of a sample for each labels and value; Triton's counters end as they like, so their kind is unknown."""
    family = Metric(name, text, kind)
    for labels, value in samples:
        family.add_sample(name, labels, value)
    return family


def _labels(model: str, version: int, stats: ModelStats) -> dict[str, str]:
    namespace = {"namespace": stats.namespace} if stats.namespace else {}
    gpu = {"gpu_uuid": stats.gpu_uuid} if stats.gpu_uuid else {}
    tags = {f"_{tag}": value for tag, value in stats.tags.items()}
    return {"model": model, "version": str(version), **gpu, **namespace, **tags}


def _of_models() -> Iterator[Metric]:
    """What the code of models counts."""
    for family, readings in METRICS.read():
        text = family.description or f"A {family.kind.value} of a model"
        if family.kind is MetricKind.HISTOGRAM:
            yield _histogram(family, text, readings)
            continue
        shown = Metric(family.name, text, "gauge" if family.kind is MetricKind.GAUGE else "unknown")
        if family.kind is MetricKind.COUNTER and family.name.endswith(_TOTAL):
            shown = Metric(family.name.removesuffix(_TOTAL), text, "counter")
        for reading in readings:
            shown.add_sample(family.name, reading.labels, reading.value)
        yield shown


def _histogram(family: Family, text: str, readings: list[Reading]) -> Metric:
    shown = Metric(family.name, text, "histogram")
    for reading in readings:
        bounds = (*map(floatToGoString, reading.buckets), "+Inf")
        for bound, count in zip(bounds, accumulate(reading.counts), strict=True):
            shown.add_sample(f"{family.name}_bucket", {**reading.labels, "le": bound}, count)
        shown.add_sample(f"{family.name}_count", reading.labels, sum(reading.counts))
        shown.add_sample(f"{family.name}_sum", reading.labels, reading.value)
    return shown
