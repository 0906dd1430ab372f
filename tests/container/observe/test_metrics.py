"""The metrics as Prometheus reads them, and that the numbers add up."""

import json
import math
import sys
import threading

import psutil
import pytest

from container.inference.limits import by_thread
from container.observe import exposition, metrics
from container.observe.metrics import Exporter
from container.settings import Mode
from model_handlers.base import Footprint
from model_handlers.errors import Kind
from model_handlers.system import devices
from serve.options import Latencies
from serve.request import Timings
from serve.statistics import EVICTION_REASONS, Histogram, ModelStats, TargetStats, new_stats
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.metric_text import families_of


@pytest.fixture
def own(start, tmp_path, put):
    """A server of its own with nothing counted yet, and room for all its models."""
    put["arithmetic"](tmp_path, "arithmetic")
    put["multiple"](tmp_path, 'odd "name"\\模', 2.0)
    return start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=("arithmetic",))


def scrape(running):
    """Families by name, and samples by name and labels."""
    reply = running.http("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in families_of(reply.body.decode())}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    return families, samples


def of(samples, name, **labels):
    """One sample's value."""
    return samples[(name, *sorted(labels.items()))]


def post(running, path, document):
    """A POST of JSON."""
    return running.http("POST", path, {}, json.dumps(document).encode())


def test_the_text_parses_and_every_family_explains_itself(own):
    """Names are legal, every family has a type and a help, no sample comes twice."""
    families, samples = scrape(own)
    assert all(family.documentation for family in families.values())
    text = own.http("GET", "/metrics").body.decode()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == len(samples)
    assert {"nv_inference_request_success", "nv_inference_count", "mme_model_loads", "mme_loaded_models"} <= set(
        families
    )


def test_tags_of_a_configuration_are_labels_of_its_metrics(start, tmp_path, put, json_inputs):
    """Of Triton's, each with an underscore before it; other models have none."""
    put["multiple"](tmp_path, "tagged", 2.0)
    (tmp_path / "tagged" / "config.pbtxt").write_text('metric_tags { key: "team" value: "search \\"a\\"" }')
    put["multiple"](tmp_path, "plain", 2.0)
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path)
    for name in ("tagged", "plain"):
        assert post(running, f"/v2/models/{name}/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])}).status == 200
    _, samples = scrape(running)
    for name in ("nv_inference_request_success", "nv_inference_count"):
        assert of(samples, name, model="tagged", version="1", _team='search "a"') == 1
        assert of(samples, name, model="plain", version="1") == 1
    assert of(samples, "nv_inference_pending_request_count", model="tagged", version="1", _team='search "a"') == 0


def test_namespaces_are_labels_where_repositories_are_told_apart(start, tmp_path, put):
    """The folder of the repository, of every model."""
    for folder in ("r1", "r2"):
        put["multiple"](tmp_path / folder, "both", 2.0)
    folders = {"model_repository": tmp_path / "r1", "more_repositories": (tmp_path / "r2",)}
    _, samples = scrape(start(mode=Mode.REPOSITORY, model_namespacing=True, **folders))
    for folder in ("r1", "r2"):
        labels = {"model": f"{folder}/both", "version": "1", "namespace": str(tmp_path / folder)}
        assert of(samples, "nv_inference_request_success", **labels) == 0


def test_requests_are_counted_as_triton_counts_them(own, json_inputs):
    """Successes by request, inferences by row, failures by reason; every request in exactly one of them."""
    rows = {1: [[1, 2, 3, 4]], 3: [[1, 2, 3, 4]] * 3}
    for size in (1, 3, 3):
        document = {"inputs": json_inputs(A=rows[size], B=rows[size])}
        assert post(own, "/v2/models/arithmetic/infer", document).status == 200
    for _ in range(2):
        assert post(own, "/v2/models/arithmetic/infer", {"inputs": json_inputs(A=rows[1])}).status == 400

    _, samples = scrape(own)

    labels = {"model": "arithmetic", "version": "1"}
    assert of(samples, "nv_inference_request_success", **labels) == 3
    assert of(samples, "nv_inference_count", **labels) == 7
    assert of(samples, "nv_inference_exec_count", **labels) == 3
    failures = {
        reason: of(samples, "nv_inference_request_failure", **labels, reason=reason)
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 2}
    assert of(samples, "nv_inference_pending_request_count", **labels) == 0
    parts = [
        of(samples, f"nv_inference_{part}_duration_us", **labels)
        for part in ("queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert 0 < sum(parts) <= of(samples, "nv_inference_request_duration_us", **labels)
    (stats,) = own.http("GET", "/v2/models/arithmetic/stats").json["model_stats"]
    nanoseconds = stats["inference_stats"]["success"]["ns"]
    assert of(samples, "nv_inference_request_duration_us", **labels) == pytest.approx(nanoseconds / 1000)


def test_batch_sizes_are_a_histogram_of_executions(own, json_inputs):
    """Buckets are cumulative, count and sum agree with executions and inferences."""
    for size in (1, 3, 8):
        rows = [[1, 2, 3, 4]] * size
        post(own, "/v2/models/arithmetic/infer", {"inputs": json_inputs(A=rows, B=rows)})
    _, samples = scrape(own)
    labels = {"model": "arithmetic", "version": "1"}
    buckets = sorted(
        (float(dict(key[1:])["le"]), value) for key, value in samples.items() if key[0] == "mme_batch_size_bucket"
    )
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert dict(buckets)[1.0] == 1
    assert dict(buckets)[4.0] == 2
    assert dict(buckets)[math.inf] == 3
    assert of(samples, "mme_batch_size_count", **labels) == of(samples, "nv_inference_exec_count", **labels) == 3
    assert of(samples, "mme_batch_size_sum", **labels) == of(samples, "nv_inference_count", **labels) == 12


def test_the_cache_counts_hits_misses_loads_and_bytes(own, json_inputs):
    """A first request is a miss, later ones are hits; bytes of models sum to what the budget says is used."""
    odd = 'odd "name"\\模'
    document = {"inputs": json_inputs(X=[1, 2, 3, 4])}
    for _ in range(3):
        assert post(own, "/v2/models/odd%20%22name%22%5C%E6%A8%A1/infer", document).status == 200

    _, samples = scrape(own)

    assert of(samples, "mme_model_cache_misses_total", model=odd) == 1
    assert of(samples, "mme_model_cache_hits_total", model=odd) == 2
    assert of(samples, "mme_model_loads_total", model=odd) == 1
    assert of(samples, "mme_model_load_seconds_total", model=odd) > 0
    assert of(samples, "mme_model_evictions_total", model=odd, reason="load") == 0
    assert of(samples, "mme_model_evicted_bytes_total", model=odd, kind="host") == 0
    assert of(samples, "mme_loaded_models") == 2
    held = sum(
        value for key, value in samples.items() if key[0] == "mme_model_memory_bytes" and ("kind", "host") in key
    )
    assert held == of(samples, "mme_memory_used_bytes", kind="host") > 0
    assert of(samples, "mme_memory_budget_bytes", kind="host") == 1 << 30
    parts = [of(samples, f"mme_memory_{part}_bytes", kind="host") for part in ("loaded", "grown", "reserved")]
    assert sum(parts) == held
    assert of(samples, "mme_memory_in_flight_bytes") >= 0


def test_times_of_the_cache_are_histograms_of_all_models_together(own, json_inputs):
    """A cold request is one wait and one load, an unload one unload; buckets are cumulative up to the count."""
    assert (
        post(own, "/v2/models/odd%20%22name%22%5C%E6%A8%A1/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])}).status
        == 200
    )
    own.http("POST", "/v2/repository/models/arithmetic/unload")

    families, samples = scrape(own)

    for kind, count in (("wait", 1), ("load", 2), ("unload", 1), ("download", 0)):
        name = f"mme_{kind}_duration_seconds"
        assert families[name].type == "histogram"
        buckets = sorted(
            (float(dict(key[1:])["le"]), value) for key, value in samples.items() if key[0] == f"{name}_bucket"
        )
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1] == (math.inf, count)
        assert of(samples, f"{name}_count") == count
        seconds = sum(value for key, value in samples.items() if key[0] == f"mme_model_{kind}_seconds_total")
        assert of(samples, f"{name}_sum") == pytest.approx(seconds)


def test_an_unloaded_model_keeps_its_counters_and_frees_its_bytes(own, json_inputs):
    """Counters never go back; gauges tell of now."""
    rows = [[1, 2, 3, 4]]
    post(own, "/v2/models/arithmetic/infer", {"inputs": json_inputs(A=rows, B=rows)})
    own.http("POST", "/v2/repository/models/arithmetic/unload")
    _, samples = scrape(own)
    assert of(samples, "nv_inference_request_success", model="arithmetic", version="1") == 1
    assert of(samples, "mme_model_loads_total", model="arithmetic") == 1
    assert of(samples, "mme_loaded_models") == 0
    assert of(samples, "mme_memory_used_bytes", kind="host") == 0
    assert ("mme_model_memory_bytes", ("kind", "host"), ("model", "arithmetic")) not in samples


def test_requests_whose_model_does_not_load_are_counted(own):
    """Each of them, also those that are told what the last load failed of."""
    broken = own.service.settings.model_repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model")
    for _ in range(4):
        assert post(own, "/v2/models/broken/infer", {"inputs": []}).status == 400
    _, samples = scrape(own)
    assert of(samples, "mme_model_refused_requests_total", model="broken") == 4
    assert of(samples, "mme_model_load_failures_total", model="broken") == 2
    assert not [key for key in samples if key[0].startswith("nv_") and "broken" in str(key)]


def test_names_that_nobody_has_do_not_grow_the_metrics(own):
    """A client that asks for ever new names adds no time series."""
    for number in range(20):
        assert post(own, f"/v2/models/nobody{number}/infer", {"inputs": []}).status == 404
    _, samples = scrape(own)
    assert not [key for key in samples if "nobody" in str(key)]


def test_drivers_are_asked_on_a_thread(own, monkeypatch):
    """What takes milliseconds keeps no request waiting."""
    threads = []
    monkeypatch.setattr(metrics, "readings", lambda: threads.append(threading.current_thread()) or ())

    scrape(own)

    assert len(threads) == 1
    assert own.on_loop.call(threading.current_thread) not in threads


def scraped(running, exporter):
    """The lines of a scrape, without those of the machine, which never stand still."""
    pieces = running.on_loop.run(exporter.scrape())
    assert max(map(len, pieces)) < 1 << 18  # which are joined at one stroke
    return [line for line in b"".join(pieces).splitlines() if not line.startswith((b"nv_cpu", b"mme_memory_in"))]


def test_others_go_on_while_many_models_are_written(own, monkeypatch):
    """Each model is dozens of lines; of what has not changed none is written again."""
    own.on_loop.call(own.engine.stats.update, {(f"m{number}", 1): ModelStats() for number in range(500)})
    write, written, rests = exposition.sample, [], []
    monkeypatch.setattr(exposition, "sample", lambda *line: written.append(line) or write(*line))
    exporter = Exporter(own.service, by_thread, clock=lambda: rests.append(1) or 0.0)

    lines = scraped(own, exporter)
    at_first = len(written)
    assert scraped(own, exporter) == lines

    assert len(lines) > 500 * 20
    assert at_first > 500
    assert len(written) < 1.1 * at_first
    assert len(rests) > 2 * 500


def test_a_long_text_is_sent_in_pieces(own):
    """No write of it keeps the event loop for long; what comes is the same text."""
    own.on_loop.call(own.engine.stats.update, {(f"m{number}", 1): ModelStats() for number in range(300)})

    rest = own.http("GET", "/metrics").body

    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert pieces.pop() == b""
    assert max(map(len, pieces)) <= 1 << 16
    assert len(b"".join(pieces)) > 1 << 18
    assert len([*families_of(b"".join(pieces).decode())]) > 20


OF_A_MODEL = (
    lambda stats, size: stats.executed(size, Timings(0, size, 2 * size, size)),
    lambda stats, size: stats.succeeded(1, size, size, 2 * size, Timings(0, size, size, size)),
    lambda stats, size: stats.failed(list(Kind)[size], size),
    lambda stats, _: setattr(stats, "cached", True),
    lambda stats, size: stats.hit(size),
    lambda stats, size: stats.missed(size),
    lambda stats, size: setattr(stats, "first_response", Histogram((float(size),))),
    lambda stats, size: stats.began_to_answer(size * 10**9),
    lambda stats, size: setattr(stats, "load_ns", size),
    lambda stats, size: setattr(stats, "batching", f"state {size}"),
    lambda stats, size: setattr(stats, "gpu_uuid", f"GPU-{size}"),
    lambda stats, size: setattr(stats, "namespace", f"r{size}"),
    lambda stats, size: setattr(stats, "tags", {"tag": str(size)}),
)
OF_A_TARGET = (
    *(
        lambda stats, size, name=name: setattr(stats, name, size)
        for name in ("hits", "misses", "loads", "load_failures", "refused")
    ),
    *(lambda stats, size, name=name: getattr(stats, name).add(size) for name in ("wait", "download", "load", "unload")),
    lambda stats, size: stats.evictions.update([EVICTION_REASONS[size % len(EVICTION_REASONS)]]),
    lambda stats, size: setattr(stats, "evicted", Footprint(size)),
)


def test_whatever_changes_is_written_again(start, tmp_path):
    """The lines of a later scrape are those of a first one."""
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, latencies=Latencies(summaries=True))
    later = Exporter(running.service, by_thread)
    stats, targets = new_stats(running.service.settings.latencies), TargetStats()
    running.on_loop.call(running.engine.stats.update, {("m", 1): stats, ("other", 2): ModelStats()})
    running.on_loop.call(running.engine.registry.stats.update, {"m": targets})
    seen = scraped(running, later)
    for size, (counters, count) in enumerate(
        [*((stats, each) for each in OF_A_MODEL), *((targets, each) for each in OF_A_TARGET)], 1
    ):
        count(counters, size)
        first = scraped(running, Exporter(running.service, by_thread))
        assert scraped(running, later) == first
        assert first != seen
        seen = first


def test_models_beyond_a_number_have_no_series(start, tmp_path, put, json_inputs):
    """Those requested most have; what all of them take is counted as ever."""
    for name in ("a", "b", "c"):
        put["multiple"](tmp_path, name, 2.0)
    running = start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=("a", "b", "c"), metrics_models=1)
    assert post(running, "/v2/models/b/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])}).status == 200

    _, samples = scrape(running)

    assert {dict(labels)["model"] for _, *labels in samples if "model" in dict(labels)} == {"b"}
    assert of(samples, "mme_loaded_models") == 3
    assert of(samples, "mme_models_left_out") == 2
    assert of(samples, "mme_memory_used_bytes", kind="host") > 0


def test_other_methods_are_a_405(own):
    """A scrape is a GET."""
    assert own.http("POST", "/metrics").status == 405


def test_the_machine_shows_its_processors_and_memory(own):
    """Under Triton's names; where there is no GPU there are no GPU metrics."""
    samples = scrape(own)[1]

    assert of(samples, "nv_cpu_memory_total_bytes") == psutil.virtual_memory().total
    assert 0 < of(samples, "nv_cpu_memory_used_bytes") < of(samples, "nv_cpu_memory_total_bytes")
    assert 0 <= of(samples, "nv_cpu_utilization") <= 1
    assert {uuid for name, *labels in samples if name.startswith("nv_gpu") for _, uuid in labels} == {
        gpu.uuid for gpu in devices.gpus()
    }


def test_gpus_show_memory_load_and_power(own, monkeypatch):
    """One sample a GPU under Triton's names and label; what a driver does not say is left out. NVML is a stand-in."""
    gpus = [FakeGpu("GPU-1", 80_000, 20_000), FakeGpu("GPU-2", silent=True)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    families, samples = scrape(own)

    assert of(samples, "nv_gpu_memory_total_bytes", gpu_uuid="GPU-1") == 80_000
    assert of(samples, "nv_gpu_memory_used_bytes", gpu_uuid="GPU-1") == 20_000
    assert of(samples, "nv_gpu_utilization", gpu_uuid="GPU-1") == 0.25
    assert of(samples, "nv_gpu_power_usage", gpu_uuid="GPU-1") == 60.5
    assert of(samples, "nv_gpu_power_limit", gpu_uuid="GPU-1") == 700
    assert of(samples, "nv_energy_consumption", gpu_uuid="GPU-1") == 123
    assert [sample.labels for sample in families["nv_gpu_power_usage"].samples] == [{"gpu_uuid": "GPU-1"}]
    assert len(families["nv_gpu_memory_used_bytes"].samples) == 2
