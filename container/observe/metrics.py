"""Statistics → Prometheus text, on the same port.

Inference counters carry Triton's names and labels, so that dashboards made for it go on working; what a multi-model
cache adds is named `mme_…`, and what the code of models counts as its authors name it. Nothing is counted here:
drivers are asked on a thread, and the event loop reads counters and writes.

Thousands of models are a hundred thousand lines. The lines of each are kept, and written again once their values
change. All of it is done in slices, between which the loop serves requests: a thread beside it would take Python's
lock in the middle of them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from enum import Enum
from functools import partial
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from container.observe.exposition import family_head, histogram, labels_of, sample, samples, summary
from model_handlers.base import Footprint
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.system import memory
from model_handlers.system.devices import gpu_uuids, readings
from serve.statistics import EVICTION_REASONS, FAILURE_REASONS, FIRST_RESPONSES
from serve.threads import Slices

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator

    from container.process.service import Service
    from model_handlers.system.devices import Reading
    from serve.options import Latencies
    from serve.statistics import ModelStats, Summary, TargetStats

    Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
    Value = Callable[[Any], Any]
    Write = Callable[[str, str, Any], str]
    Pairs = list[tuple[str, float]]

_JOINED = 128  # models whose lines of a family are one piece of the text, less than what malloc asks the system for
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OF_A_MINUTE = "Microseconds, of the last minute"
_GUESSED = (
    "1 for what is known of a batch dimension that no configuration names: named, proven, unproven, refuted, other or "
    "off"
)
_REFUSED = "Requests that failed because their model could not be loaded"
_LOADED = "Bytes of those used that models took when they were loaded"
_IN_FLIGHT = "Bytes of requests and responses on the way, which no budget for models counts"


class Exporter:
    """Writes the metrics of a service, for one scrape at a time; `offload` runs on a thread what waits for drivers."""

    def __init__(self, service: Service, offload: Offload, clock: Callable[[], float] = time.perf_counter) -> None:
        self._service = service
        self._offload = offload
        self._clock = clock
        self._families = families(service.settings.latencies)
        self._tables = {of: _Table([each for each in self._families if each.of is of]) for of in (Of.MODEL, Of.TARGET)}

    async def scrape(self) -> list[bytes]:
        """Return the text in pieces, of the models that there are when this is called."""
        scrape = _Scrape(self._service, await self._offload(_ask_machine))
        models, targets = self._tables[Of.MODEL], self._tables[Of.TARGET]
        models.hold(scrape.models())
        targets.hold(scrape.targets())
        slices = Slices(self._clock)
        await scrape.look(slices)
        await models.update(scrape.of_model, slices)
        await targets.update(scrape.of_target, slices)
        pieces = []
        for family in self._families:
            for piece in self._written(family, scrape):
                pieces.append(piece)
                await slices.rest()
        return pieces

    def _written(self, family: Family, scrape: _Scrape) -> Iterator[bytes]:
        table = self._tables.get(family.of)
        if table is not None:
            yield family.head()
            yield from table.lines(family)
        elif family.of is Of.AUTHORS:
            yield from _of_authors()
        else:
            yield family.text(scrape)


class _Machine(NamedTuple):
    """What the machine is doing: its GPUs, the share of its processors that is busy, bytes of its memory."""

    gpus: tuple[Reading, ...]
    processors: float
    total: int
    used: int


def _ask_machine() -> _Machine:
    """Ask drivers. Takes milliseconds, so never on the event loop."""
    gpu_uuids()
    return _Machine(readings(), memory.processor_share(), *memory.machine_memory())


class _Scrape:
    """What one scrape finds, of which families of the server read their values.

    Attributes:
        used: bytes of models in memory or promised; reserved: those promised; grown: those that executions took.
        left_out: targets that have no series.
    """

    def __init__(self, service: Service, machine: _Machine) -> None:
        self.machine = machine
        self.engine = engine = service.engine
        self._entries, room = list(engine.cache.entries.values()), engine.cache.room
        self.used, self.reserved, self.grown = room.used(), room.reserved, room.grown
        self.in_flight, self.dropped = engine.on_the_way(), service.logs.dropped
        self._most = service.settings.metrics_models
        self.left_out = max(len(engine.registry.stats) - self._most, 0)
        self._queued: dict[int, int] = {}  # by the statistics that count them, which several models may share
        self._memory: dict[int, Footprint] = {}

    async def look(self, slices: Slices) -> None:
        """Ask models. Of each as little as can be is kept, since Python's collector goes through it without a rest."""
        self.loaded = 0
        for entry in self._entries:
            await slices.rest()
            for each in tuple(entry.retiring):
                self._grow(each.target.growth())
            target = entry.resident
            if target is None:
                continue
            self.loaded += 1
            self._grow(target.growth())
            self._memory[id(entry.stats)] = entry.footprint
            for model in target.models():
                key = id(model.stats)
                self._queued[key] = self._queued.get(key, 0) + model.queued
        # no less than nothing: some may have been charged for what they grew by since the look began
        self.taken_by_loads = (self.used - self.grown - self.reserved).beyond(Footprint())

    def _grow(self, growth: Footprint) -> None:
        if growth.host or growth.devices:
            self.grown += growth

    def models(self) -> _Counters:
        """Return the counters of models that have series, by name and version."""
        # copied: loads add to it, on their threads
        return _most(self._most, self.engine.stats.copy(), lambda stats: stats.success.count + stats.fail.count)

    def targets(self) -> _Counters:
        """Return the counters of targets that have series, by name."""
        return _most(self._most, self.engine.registry.stats, lambda stats: stats.hits + stats.misses)

    def of_model(self, key: tuple[str, int], stats: ModelStats) -> tuple[dict[str, str], Any]:
        """Return the labels of a model, and how many requests wait for it; None where it is not in memory."""
        name, version = key
        labels = {"model": name, "version": str(version)}
        if stats.gpu_uuid:
            labels["gpu_uuid"] = stats.gpu_uuid
        if stats.namespace:
            labels["namespace"] = stats.namespace
        for tag, value in stats.tags.items():  # which a configuration adds
            labels[f"_{tag}"] = value
        return labels, self._queued.get(id(stats))

    def of_target(self, name: str, stats: TargetStats) -> tuple[dict[str, str], Any]:
        """Return the labels of a target, and what it takes; None where it is not in memory."""
        return {"model": name}, self._memory.get(id(stats))


_HOST = 'kind="host"'


def _bytes(footprint: Footprint) -> Pairs:
    """Return those of the host, and those of each GPU."""
    sizes = dict(enumerate(footprint.devices))
    uuids = ((labels_of({"gpu_uuid": uuid}), number) for number, uuid in gpu_uuids().items())
    return [(_HOST, footprint.host), *((f'{uuid},kind="device"', sizes.get(number, 0)) for uuid, number in uuids)]


def _taken(name: str, labels: str, footprint: Footprint) -> str:
    """Return a sample of the host, and of each GPU that a model takes any of."""
    return _kinds(name, labels, [pair for pair in _bytes(footprint) if pair[0] == _HOST or pair[1]])


def _kinds(name: str, labels: str, values: Pairs) -> str:
    """Return a sample of each kind of memory, whose labels come by name, as all do."""
    return "".join([sample(name, f"{kind},{labels}", value) for kind, value in values])


_Counters = dict["Hashable", Any]  # of models or targets, by key


def _most(most: int, found: dict[Any, Any], used: Value) -> _Counters:
    """Return those used most, in the order in which they became known."""
    if len(found) <= most:
        return found
    wanted = {key for key, _ in nlargest(most, found.items(), lambda each: used(each[1]))}
    return {key: counters for key, counters in found.items() if key in wanted}


class Of(Enum):
    """What the samples of a family tell of."""

    MODEL = "each version of each model"
    TARGET = "each target"
    SERVER = "the server"
    AUTHORS = "what the code of models counts: many families, in place of one"


class Family(NamedTuple):
    """Samples of one name: of what they tell, type, help, and which values they are made of.

    Attributes:
        value: gives the value for a model's or target's counters, or for a `_Scrape`; None where there is none. Not
            given where it is the one that a scrape knows of a model or target beside its counters.
        write: makes lines of name, labels and value.
    """

    of: Of
    name: str
    kind: str
    help: str
    value: Value | None = None
    write: Write = sample

    def head(self) -> bytes:
        """Return how it begins."""
        return family_head(self.name, self.help, self.kind).encode()

    def text(self, scrape: Any) -> bytes:
        """Return all of it, of the server; nothing where there is no value."""
        value = None if self.value is None else self.value(scrape)
        return b"" if value is None else self.head() + self.write(self.name, "", value).encode()


class _Kept:
    """What was written of a model or a target: labels, values and lines, by family."""

    def __init__(self, counters: Any) -> None:
        self.counters = counters
        self.labels: dict[str, str] | None = None
        self.text = ""
        self.values: list[Any] = []
        self.lines: list[bytes] = []

    def describe(self, labels: dict[str, str], families: int) -> None:
        """Have these labels, and nothing written of so many families yet."""
        self.labels, self.text = labels, labels_of(labels)
        self.values, self.lines = [None] * families, [b""] * families


class _Table:
    """Families of which each model, or each target, has lines of its own; these are kept from scrape to scrape."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families
        self._place = {family.name: place for place, family in enumerate(families)}
        self._kept: dict[Any, _Kept] = {}

    def hold(self, found: _Counters) -> None:
        """Have lines for these, and for no others."""
        kept = self._kept
        for key in [key for key, known in kept.items() if found.get(key) is not known.counters]:
            del kept[key]
        kept |= {key: _Kept(counters) for key, counters in found.items() if key not in kept}

    async def update(self, describe: Callable[[Any, Any], tuple[dict[str, str], Any]], slices: Slices) -> None:
        """Write what has changed; `describe` returns the labels of each, and what is known of it beside counters."""
        getters = [family.value for family in self._families]
        for key, known in self._kept.items():
            labels, beside = describe(key, known.counters)
            if known.labels != labels:
                known.describe(labels, len(getters))
            self._write(known, [beside if getter is None else getter(known.counters) for getter in getters])
            await slices.rest()

    def _write(self, known: _Kept, values: list[Any]) -> None:
        """Write lines whose values have changed."""
        if values == known.values:
            return
        for place, (family, value) in enumerate(zip(self._families, values, strict=True)):
            if value != known.values[place]:
                known.lines[place] = b"" if value is None else family.write(family.name, known.text, value).encode()
        known.values = values

    def lines(self, family: Family) -> Iterator[bytes]:
        place, kept = self._place[family.name], list(self._kept.values())
        for start in range(0, len(kept), _JOINED):
            yield b"".join([each.lines[place] for each in kept[start : start + _JOINED]])


def _of_authors() -> Iterator[bytes]:
    for family, found in METRICS.read():
        kind = family.kind.value
        yield family_head(family.name, family.description or f"A {kind} of a model", kind).encode()
        for each in found:
            labels = labels_of(each.labels)
            if family.kind is MetricKind.HISTOGRAM:
                yield histogram(family.name, labels, (each.buckets, each.counts, each.value)).encode()
            else:
                yield sample(family.name, labels, each.value).encode()


def _per(path: str, divisor: float) -> Value:
    value = attrgetter(path)
    return lambda counters: value(counters) / divisor


def _where(wanted: str, value: Value) -> Value:
    """The value of those of which the attribute says so."""
    says = attrgetter(wanted)
    return lambda counters: value(counters) if says(counters) else None


def _by_reason(path: str, reasons: tuple[str, ...]) -> Value:
    counted, labels = attrgetter(path), [(why, f'reason="{why}"') for why in reasons]
    nothing = [(label, 0) for _, label in labels]

    def value(counters: Any) -> list[tuple[str, int]]:
        counts = counted(counters)
        return [(label, counts[why]) for why, label in labels] if counts else nothing

    return value


def _batch_sizes(stats: ModelStats) -> Any:
    counts, inferences = [0] * (len(_BATCH_SIZES) + 1), 0
    for size, batch in list(stats.batches.items()):
        counts[bisect_left(_BATCH_SIZES, size)] += batch.compute_infer.count
        inferences += size * batch.compute_infer.count
    return _BATCH_SIZES, counts, inferences


def _first_responses(stats: ModelStats) -> Any:
    """Of models whose configuration sets its buckets, which are milliseconds."""
    kept = stats.first_response
    return kept and ([bound * 1000 for bound in kept.bounds], list(kept.counts), kept.total.ns / 1e6)


def _guessed(stats: ModelStats) -> Pairs:
    return [(f'state="{stats.batching}"', 1.0)] if stats.batching else []


def _quantiles(path: str, quantiles: tuple[float, ...]) -> Value:
    summary_of = attrgetter(path)

    def value(stats: ModelStats) -> Any:
        if stats.summaries is None:
            return None
        found: Summary = summary_of(stats.summaries)
        microseconds = [ns / 1000 for ns in found.quantiles(quantiles, time.monotonic())]
        return list(zip(quantiles, microseconds, strict=True)), found.count, found.ns / 1000

    return value


def _evicted(stats: TargetStats) -> Pairs:
    return [(_HOST, stats.evicted.host), ('kind="device"', stats.evicted.device)]


def _times(what: str) -> Value:
    """Of all models together: a histogram for each of hundreds would be thousands of time series."""
    times = attrgetter(f"engine.times.{what}")
    return lambda scrape: (times(scrape).bounds, list(times(scrape).counts), times(scrape).total.ns / 1e9)


def _footprint(path: str) -> Value:
    footprint = attrgetter(path)
    return lambda scrape: _bytes(footprint(scrape))


def _gpus(field: str) -> Value:
    reading = attrgetter(field)

    def value(scrape: _Scrape) -> Pairs | None:
        found = [(labels_of({"gpu_uuid": gpu.uuid}), reading(gpu)) for gpu in scrape.machine.gpus]
        return [pair for pair in found if pair[1] is not None] or None

    return value


def _family(kind: str, of: Of, name: str, text: str, value: Value | str | None = None, write: Write = sample) -> Family:
    return Family(of, name, kind, text, attrgetter(value) if isinstance(value, str) else value, write)


def families(latencies: Latencies) -> tuple[Family, ...]:
    """Return all that there are, where these latencies are shown."""
    return (
        *_of_models(latencies),
        *_OF_CACHES,
        *_OF_MEMORY,
        Family(Of.AUTHORS, "", "", ""),
        *_OF_THE_PROCESS,
    )


def _of_models(latencies: Latencies) -> Iterator[Family]:
    counter, gauge = partial(_family, "counter", Of.MODEL), partial(_family, "gauge", Of.MODEL)
    failed = "Failed requests to a loaded model, by reason"
    yield counter("nv_inference_request_success", "Successful requests", "success.count")
    yield counter("nv_inference_request_failure", failed, _by_reason("failures", FAILURE_REASONS), samples)
    yield counter("nv_inference_count", "Inferences: batch elements", "inference_count")
    yield counter("nv_inference_exec_count", "Executions: batches", "execution_count")
    for name, field, text in (
        ("request", "success", "Microseconds of successful requests, end to end, summed up"),
        ("queue", "queue", "Microseconds that requests waited for an instance, summed up"),
        ("compute_input", "compute_input", "Microseconds of putting batches together, summed up"),
        ("compute_infer", "compute_infer", "Microseconds of executing the model, summed up"),
        ("compute_output", "compute_output", "Microseconds of handing outputs out, summed up"),
    ):
        if latencies.counters:
            yield counter(f"nv_inference_{name}_duration_us", text, _per(f"{field}.ns", 1000))
    yield gauge("nv_inference_pending_request_count", "Requests that wait for an instance")
    took = _where("load_ns", _per("load_ns", 1e9))
    yield gauge("nv_model_load_duration_secs", "Seconds that the model's last load took", took)
    yield gauge("mme_guessed_batching", _GUESSED, _guessed, samples)
    for name, field in (
        *((f"nv_inference_{what}_summary_us", what) for what in ("request", "queue", *_COMPUTE)),
        ("nv_cache_hit_summary_per_model", "cache_hit"),
        ("nv_cache_miss_summary_per_model", "cache_miss"),
    ):
        if latencies.summaries:
            value = _quantiles(field, latencies.quantiles)
            value = _where("cached", value) if field.startswith("cache") else value
            yield _family("summary", Of.MODEL, name, _OF_A_MINUTE, value, summary)
    measured = partial(_family, "histogram", Of.MODEL, write=histogram)
    yield measured("mme_batch_size", "Batch elements of each execution", _batch_sizes)
    yield measured(FIRST_RESPONSES, "Milliseconds from a request to its first response", _first_responses)
    for what, plural in (("hit", "hits"), ("miss", "misses")):
        count, took = attrgetter(f"cache_{what}.count"), _per(f"cache_{what}.ns", 1000)
        yield counter(f"nv_cache_num_{plural}_per_model", f"Cache {plural}", _where("cached", count))
        text = f"Microseconds of cache {plural}"
        yield counter(f"nv_cache_{what}_duration_per_model", text, _where("cached", took))


_server_counter, _server_gauge = partial(_family, "counter", Of.SERVER), partial(_family, "gauge", Of.SERVER)
_target_counter = partial(_family, "counter", Of.TARGET)
_EVICTIONS = "Times the model left memory for another, by reason"
_OF_CACHES = (
    _server_gauge(
        "mme_response_cache_budget_bytes", "Bytes that cached responses may take", "engine.responses.maxsize"
    ),
    _server_gauge("mme_response_cache_used_bytes", "Bytes that cached responses take", "engine.responses.currsize"),
    _target_counter("mme_model_cache_hits_total", "Requests that found their model in memory", "hits"),
    _target_counter("mme_model_cache_misses_total", "Requests that did not find their model in memory", "misses"),
    _target_counter("mme_model_loads_total", "Loads that succeeded", "loads"),
    _target_counter("mme_model_load_failures_total", "Loads that failed", "load_failures"),
    _target_counter("mme_model_refused_requests_total", _REFUSED, "refused"),
    _target_counter("mme_model_evictions_total", _EVICTIONS, _by_reason("evictions", EVICTION_REASONS), samples),
    _target_counter("mme_model_evicted_bytes_total", "Bytes that its evictions gave back", _evicted, _kinds),
    *(
        _target_counter(f"mme_model_{what}_seconds_total", f"Seconds {text}, summed up", _per(f"{what}.ns", 1e9))
        for what, text in (
            ("wait", "that requests waited for the model to be loaded"),
            ("download", "of fetching and unpacking"),
            ("load", "of loading, without the download"),
            ("unload", "of unloading"),
        )
    ),
    *(
        Family(Of.SERVER, f"mme_{what}_duration_seconds", "histogram", f"Seconds {text})", _times(what), histogram)
        for what, text in (
            ("wait", "that a request waited for its model (ModelLoadingWaitTime"),
            ("download", "of fetching and unpacking an archive (ModelDownloadingTime"),
            ("load", "of loading a model, without the download (ModelLoadingTime"),
            ("unload", "of unloading a model, requests under way included (ModelUnloadingTime"),
        )
    ),
    _server_gauge("mme_loaded_models", "Models in memory (LoadedModelCount)", "loaded"),
    _server_gauge("mme_models_left_out", "Models without series of their own (MME_METRICS_MODELS)", "left_out"),
    _family("gauge", Of.TARGET, "mme_model_memory_bytes", "Bytes that a model takes, as measured", write=_taken),
)
_OF_MEMORY = (
    *(
        _server_gauge(f"mme_memory_{name}_bytes", text, _footprint(path), samples)
        for name, text, path in (
            ("budget", "Bytes of memory for models: budget", "engine.cache.room.budget"),
            ("used", "Bytes of memory for models: used", "used"),
            ("loaded", _LOADED, "taken_by_loads"),
            ("grown", "Bytes of those used that executions took since", "grown"),
            ("reserved", "Bytes of those used that are promised to loads", "reserved"),
        )
    ),
    _server_gauge("mme_memory_in_flight_bytes", _IN_FLIGHT, "in_flight"),
    *(
        make(f"mme_disk_{name}", text, _where("engine.origins.room", attrgetter(f"engine.origins.room.{field}")))
        for make, name, text, field in (
            (_server_gauge, "budget_bytes", "Bytes of disk for archives and weights", "budget"),
            (_server_gauge, "used_bytes", "Bytes of disk that archives and weights take", "used"),
            (_server_counter, "evictions_total", "Archives that left the disk for others", "evictions"),
        )
    ),
)
_OF_THE_PROCESS = (
    _server_counter("mme_log_lines_dropped_total", "Lines of the log that nothing read", "dropped"),
    *(
        make(name, text, _gpus(field), samples)
        for make, name, text, field in (
            (_server_gauge, "nv_gpu_utilization", "GPU utilization, 0.0 to 1.0", "utilization"),
            (_server_gauge, "nv_gpu_memory_total_bytes", "GPU memory, bytes", "total"),
            (_server_gauge, "nv_gpu_memory_used_bytes", "GPU memory in use by anybody, bytes", "used"),
            (_server_gauge, "nv_gpu_power_usage", "GPU power draw, watts", "power"),
            (_server_gauge, "nv_gpu_power_limit", "GPU power limit, watts", "power_limit"),
            (_server_counter, "nv_energy_consumption", "GPU energy since the driver was loaded, joules", "energy"),
        )
    ),
    # Triton's pool of pinned memory: there is none here, and a look-up says so.
    _server_gauge("nv_pinned_memory_pool_total_bytes", "Pool of pinned memory, which is not needed", lambda _: 0),
    _server_gauge("nv_pinned_memory_pool_used_bytes", "Pool of pinned memory in use", lambda _: 0),
    _server_gauge("nv_cpu_utilization", "CPU utilization, 0.0 to 1.0", "machine.processors"),
    _server_gauge("nv_cpu_memory_total_bytes", "The machine's memory, bytes", "machine.total"),
    _server_gauge("nv_cpu_memory_used_bytes", "The machine's memory in use, bytes", "machine.used"),
)
