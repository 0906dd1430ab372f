"""CloudWatch's embedded metric format: that each line is a document CloudWatch takes, and that the numbers add up."""

import asyncio
import io
import json
import re
from dataclasses import replace

import pytest

from container.observe.emf import EmfReporter, dimension
from container.settings import Mode
from model_handlers.base import Footprint
from serve.statistics import CacheEvent, EventType
from tests.contract import models
from tests.waiting import eventually

UNITS = {
    "LoadedModelCount": "None",
    "MemoryUsed": "Bytes",
    "ModelCacheHit": "None",
    "ModelLoadingWaitTime": "Microseconds",
    "ModelLoadingTime": "Microseconds",
    "ModelDownloadingTime": "Microseconds",
    "ModelUnloadingTime": "Microseconds",
    "ModelLoadFailure": "Count",
}
NAMESPACE = re.compile(r"(?!AWS/)[A-Za-z0-9_./#:-]{1,255}")


def check(document):
    """Hold one document to the specification; return its dimensions and its metrics' values."""
    metadata = document["_aws"]
    assert set(metadata) == {"Timestamp", "CloudWatchMetrics"}
    assert isinstance(metadata["Timestamp"], int)
    assert 1.6e12 < metadata["Timestamp"] < 1e13, "milliseconds"
    (directive,) = metadata["CloudWatchMetrics"]
    assert set(directive) == {"Namespace", "Dimensions", "Metrics"}
    assert NAMESPACE.fullmatch(directive["Namespace"])
    (keys,) = directive["Dimensions"]
    assert 1 <= len(keys) <= 30
    for key in keys:
        assert isinstance(document[key], str)
        assert 1 <= len(document[key]) <= 1024
        assert document[key].isascii()
        assert document[key].isprintable()
    assert 1 <= len(directive["Metrics"]) <= 100
    for metric in directive["Metrics"]:
        assert metric == {"Name": metric["Name"], "Unit": UNITS[metric["Name"]]}
        check_target(document[metric["Name"]])
    names = [metric["Name"] for metric in directive["Metrics"]]
    assert set(document) == {"_aws", *keys, *names}, "what no directive names is no metric"
    return {key: document[key] for key in keys}, {name: document[name] for name in names}


def check_target(target):
    """A number, an array of at most 100, or statistics that some set of numbers has."""
    if isinstance(target, dict):
        assert set(target) == {"Min", "Max", "Sum", "Count"}
        low, high, total, count = (target[key] for key in ("Min", "Max", "Sum", "Count"))
        assert count > 0
        assert low * (count - 1) + high <= total <= high * (count - 1) + low
        return
    values = target if isinstance(target, list) else [target]
    assert 1 <= len(values) <= 100
    assert all(type(value) in {int, float} for value in values)


def samples(target):
    """How many values a target stands for, and their sum."""
    if isinstance(target, dict):
        return target["Count"], target["Sum"]
    return len(target), sum(target)


@pytest.fixture
def store(tmp_path):
    """A folder with the archives a, b and c."""
    for name in "abc":
        models.pack(models.lay_out(tmp_path / name, models.plus(1)), tmp_path / "store" / f"{name}.tar.gz")
    return tmp_path / "store"


@pytest.fixture
def served(start, store, tmp_path):
    """A function that starts a server of the store, with settings of its own, that is told when a period is over."""

    def make(**settings):
        names = {"endpoint_name": "ep", "variant_name": "blue", "emf_period": 3600.0}
        return start(
            mode=Mode.STORE, model_store=str(store), cache_dir=tmp_path / "cache", emf=True, **{**names, **settings}
        )

    return make


def ask(running, name, times=1):
    """So many requests for one model."""
    for _ in range(times):
        assert running.infer(f"{name}.tar.gz", models.ONE).status == 200


async def started(reporter):
    """Have a reporter write from now on."""
    reporter.start(asyncio.get_running_loop())


def period(running):
    """End a period: its documents, checked, the endpoint's first."""
    return [check(document) for document in running.on_loop.call(running.service.emf.documents, 1_763_600_000_000)]


def metric(running, name):
    """A sample of /metrics, summed over its labels."""
    lines = running.http("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[{{ ]", line))


def test_a_period_tells_what_the_cache_did_under_sagemakers_names(served):
    """Loads, downloads, waits, hits, unloads and the models in memory; the same numbers as /metrics."""
    running = served()
    ask(running, "a", 3)
    ask(running, "b")
    running.http("DELETE", "/models/b.tar.gz")

    [(dimensions, metrics)] = period(running)

    assert dimensions == {"EndpointName": "ep", "VariantName": "blue"}
    assert set(metrics) == set(UNITS) - {"ModelLoadFailure"}
    assert metrics["LoadedModelCount"] == [1]
    used = metric(running, "mme_memory_used_bytes") + metric(running, "mme_memory_in_flight_bytes")
    assert metrics["MemoryUsed"] == [used] != [0]
    assert sorted(metrics["ModelCacheHit"]) == [0, 0, 1, 1]
    counted = {name: samples(target) for name, target in metrics.items()}
    for name, kind, count in (
        ("ModelLoadingWaitTime", "wait", 2),
        ("ModelDownloadingTime", "download", 2),
        ("ModelLoadingTime", "load", 2),
        ("ModelUnloadingTime", "unload", 1),
    ):
        assert counted[name][0] == count == metric(running, f"mme_{kind}_duration_seconds_count")
        in_all = metric(running, f"mme_{kind}_duration_seconds_sum") * 1e6
        assert counted[name][1] == pytest.approx(in_all, abs=count)
        assert in_all == pytest.approx(metric(running, f"mme_model_{kind}_seconds_total") * 1e6)
    assert counted["ModelLoadingWaitTime"][1] >= counted["ModelLoadingTime"][1] + counted["ModelDownloadingTime"][1]


def test_each_period_begins_anew(served):
    """What one document told, the next does not; without anything to tell, only the models in memory are."""
    running = served()
    ask(running, "a", 2)
    period(running)

    ((dimensions, metrics),) = period(running)
    assert dimensions == {"EndpointName": "ep", "VariantName": "blue"}
    assert (metrics["LoadedModelCount"], set(metrics)) == ([1], {"LoadedModelCount", "MemoryUsed"})
    ask(running, "a")
    [(_, metrics)] = period(running)
    assert metrics == {"LoadedModelCount": [1], "ModelCacheHit": [1], "MemoryUsed": metrics["MemoryUsed"]}


@pytest.mark.parametrize(
    ("requests", "target"), [(100, [1] * 100), (101, {"Min": 1, "Max": 1, "Sum": 101, "Count": 101})]
)
def test_more_values_than_an_array_may_have_are_statistics(served, requests, target):
    """Up to 100 values are told one by one, more by minimum, maximum, sum and count."""
    running = served()
    ask(running, "a")
    period(running)
    ask(running, "a", requests)

    [(_, metrics)] = period(running)

    assert metrics["ModelCacheHit"] == target


def test_statistics_are_those_of_the_values(served):
    """Of many times of different length none is lost to the smallest, the largest, the sum or the count."""
    running = served()
    times = [7_000, 3_000, *([5_000] * 150), 9_000_400]
    for ns in times:
        running.on_loop.call(running.engine.cache.events.tell, CacheEvent(EventType.UNLOADED, "a", ns))

    [(_, metrics)] = period(running)

    assert metrics["ModelUnloadingTime"] == {"Min": 3, "Max": 9000, "Sum": 9000 + 7 + 3 + 750, "Count": 153}


def test_the_most_requested_models_have_documents_of_their_own(served):
    """As many as the setting says, by requests of the period, with their own hits and times."""
    running = served(emf_top_models=2)
    ask(running, "a", 2)
    ask(running, "b", 5)
    ask(running, "c")

    _, *of_models = period(running)

    assert [dimensions["TargetModel"] for dimensions, _ in of_models] == ["b.tar.gz", "a.tar.gz"]
    (_, b), (_, a) = of_models
    assert (samples(b["ModelCacheHit"]), samples(a["ModelCacheHit"])) == ((5, 4), (2, 1))
    assert samples(a["ModelLoadingTime"])[0] == samples(a["ModelDownloadingTime"])[0] == 1
    assert "LoadedModelCount" not in a
    ask(running, "c")
    _, (dimensions, c) = period(running)
    assert (dimensions["TargetModel"], c) == ("c.tar.gz", {"ModelCacheHit": [1]})


def test_a_load_that_fails_is_told(served, store):
    """Of the endpoint and of the model; a name that nobody has is no failure."""
    running = served(emf_top_models=5)
    (store / "bad.tar.gz").write_bytes(b"no archive")
    for name, status in (("bad.tar.gz", 400), ("bad.tar.gz", 400), ("nobody.tar.gz", 404)):
        assert running.infer(name, models.ONE).status == status

    (_, metrics), (dimensions, bad) = period(running)

    assert metrics["ModelLoadFailure"] == bad["ModelLoadFailure"] == [1, 1]
    assert dimensions["TargetModel"] == "bad.tar.gz"
    assert [set(metrics) for _, metrics in period(running)] == [{"LoadedModelCount", "MemoryUsed"}]


def test_memory_that_a_platform_makes_room_in_is_no_failure(start, tmp_path):
    """A 507 is how SageMaker learns that others have to go; a broken model is told."""
    running = start(mode=Mode.PLATFORM, emf=True, emf_period=3600.0, memory_budget=1)
    for name, config, status in (("full", "", 507), ("broken", "no_such_field: 1", 400)):
        url = str(models.lay_out(tmp_path / name / "model", models.plus(1), config))
        body = json.dumps({"model_name": name, "url": url}).encode()
        assert running.http("POST", "/models", {}, body).status == status

    [(_, metrics)] = period(running)

    assert metrics["ModelLoadFailure"] == [1]


def test_a_platforms_model_is_named_as_clients_name_it(start, tmp_path):
    """SageMaker loads a model under a name of its own; the dimension is the TargetModel."""
    running = start(mode=Mode.PLATFORM, emf=True, emf_top_models=5, emf_period=3600.0)
    folder = models.lay_out(tmp_path / "0a1b" / "model", models.plus(1))
    body = json.dumps({"model_name": "0a1b", "url": str(folder)}).encode()
    header = {"X-Amzn-SageMaker-Target-Model": "tenant/bert.tar.gz"}
    assert running.http("POST", "/models", header, body).status == 200
    assert running.http("POST", "/models/0a1b/invoke", header, json.dumps(models.ONE).encode()).status == 200

    _, (dimensions, metrics) = period(running)

    assert dimensions == {"EndpointName": "unknown", "VariantName": "AllTraffic", "TargetModel": "tenant/bert.tar.gz"}
    assert "ModelLoadingWaitTime" not in metrics, "nobody waited for what the platform loaded"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tenant/bert 0.tar.gz", "tenant/bert 0.tar.gz"),
        ("modèle", "mod%C3%A8le"),
        ("a\nb\x7f", "a%0Ab%7F"),
        ("x" * 2000, "x" * 1024),
    ],
)
def test_names_become_what_cloudwatch_takes(name, shown):
    """Printable ASCII stays, everything else is written as in a URL, and the length is limited."""
    assert dimension(name) == shown


def test_a_forgotten_model_counts_anew(served):
    """Counters that began again are not told as less than nothing."""
    running = served(emf_top_models=1)
    ask(running, "a", 3)
    period(running)
    running.http("DELETE", "/models/a.tar.gz")
    running.on_loop.call(running.engine.registry.stats.clear)
    ask(running, "a", 2)

    (_, whole), (_, of_a) = period(running)

    assert sorted(whole["ModelCacheHit"]) == sorted(of_a["ModelCacheHit"]) == [0, 1]


def test_the_end_of_a_server_writes_what_is_left(start, store, tmp_path):
    """The last, unfinished period is written when the service closes; models that unload because of it are not in it."""
    running = start(mode=Mode.STORE, model_store=str(store), cache_dir=tmp_path / "cache")
    lines = io.BytesIO()
    reporter = running.on_loop.call(EmfReporter, running.engine, running.service.settings, lines.write)
    running.service.emf = reporter
    running.on_loop.run(started(reporter))
    ask(running, "a")
    running.on_loop.run(running.service.close())

    [line] = lines.getvalue().splitlines()
    _, metrics = check(json.loads(line))
    assert set(metrics) == set(UNITS) - {"ModelUnloadingTime", "ModelLoadFailure"}


def test_nobody_reading_ends_the_metrics_and_nothing_else(served, caplog):
    """A closed standard output is said once in the log; the server goes on."""
    running, written = served(), []

    def closed(_lines):
        written.append(True)
        raise BrokenPipeError(32, "Broken pipe")

    reporter = running.on_loop.call(
        EmfReporter, running.engine, replace(running.service.settings, emf_period=0.001), closed
    )
    running.on_loop.run(started(reporter))
    eventually(lambda: written)
    running.on_loop.run(asyncio.sleep(0.01))

    assert written == [True]
    assert [record.message for record in caplog.records if record.name == "mme.emf"] == [
        "CloudWatch metrics end here: standard output: [Errno 32] Broken pipe"
    ]
    ask(running, "a")


def test_a_listener_that_fails_costs_no_load(served, caplog):
    """Whoever listens to the cache and raises is logged; the load and the other listeners go on."""
    running = served()
    events = running.engine.cache.events
    heard = []

    def fails(_event):
        raise ZeroDivisionError

    running.on_loop.call(events.listen, fails)
    running.on_loop.call(events.listen, heard.append)
    ask(running, "a")

    assert [event.type for event in heard] == [EventType.LOADED, EventType.WAITED]
    assert heard[0].footprint.host > 0
    assert heard[1].footprint == Footprint()
    assert "a listener failed: a model loaded" in caplog.text
