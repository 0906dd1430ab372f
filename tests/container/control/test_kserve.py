"""KServe v2 beside inference: health, metadata, configuration, statistics, repository."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from container.settings import Mode

INFER = "/v2/models/arithmetic/infer"
SUMMED = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}


@pytest.fixture
def own(start, tmp_path, put):
    """A server with a repository of its own: `twice` in memory, `thrice` not, `bad` broken."""
    put["multiple"](tmp_path, "twice", 2.0)
    put["multiple"](tmp_path, "thrice", 3.0)
    broken = tmp_path / "bad" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model")
    return start(mode=Mode.REPOSITORY, model_repository=tmp_path, load_models=("twice",), allow_load_overrides=True)


def ask(running, path, document=None):
    """A POST with a JSON body, or none."""
    return running.http("POST", path, {}, b"" if document is None else json.dumps(document).encode())


def index(running, document=None):
    """The repository index by name."""
    return {row["name"]: row for row in ask(running, "/v2/repository/index", document).json}


def test_a_model_is_ready_when_it_would_answer(own):
    """200 and KServe's document, or 400 with a sentence; asking loads nothing."""
    assert own.http("GET", "/v2/models/twice/ready").json == {"name": "twice", "ready": True}
    assert own.http("GET", "/v2/models/twice/versions/1/ready").status == 200
    for path in ("twice/versions/2", "thrice", "nobody", "bad"):
        reply = own.http("GET", f"/v2/models/{path}/ready")
        assert reply.status == 400
        assert reply.error.startswith("Model version not ready")
    assert list(own.engine.cache.entries) == ["twice"]


# -- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_add_up(own, json_inputs):
    """One success a request, one queue a success, inferences and executions by batch, failures apart."""
    document = {"inputs": json_inputs(X=[1, 2, 3, 4])}
    for _ in range(5):
        assert ask(own, "/v2/models/twice/infer", document).status == 200
    for _ in range(2):
        assert ask(own, "/v2/models/twice/infer", {"inputs": json_inputs(X=[1, 2, 3])}).status == 400

    (row,) = own.http("GET", "/v2/models/twice/stats").json["model_stats"]

    fields = ("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats")
    assert tuple(row) == (*fields, "response_stats", "batch_stats", "memory_usage"), "in Triton's order"
    assert (row["name"], row["version"]) == ("twice", "1")
    assert (row["inference_count"], row["execution_count"]) == (5, 5)
    assert row["last_inference"] > 1_600_000_000_000
    stats = row["inference_stats"]
    assert set(stats) == SUMMED
    assert [stats[key]["count"] for key in ("success", "fail", "queue", "compute_infer")] == [5, 2, 5, 5]
    parts = sum(stats[key]["ns"] for key in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts <= stats["success"]["ns"]
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in row["batch_stats"]] == [(1, 5)]


def test_statistics_count_batches_by_their_size(own, server, json_inputs):
    """A request of three rows is three inferences and one execution of size 3."""
    before = server.http("GET", "/v2/models/arithmetic/stats").json["model_stats"][0]
    rows = [[1, 2, 3, 4]] * 3
    ask(server, INFER, {"inputs": json_inputs(A=rows, B=rows)})
    after = server.http("GET", "/v2/models/arithmetic/stats").json["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 1
    assert 3 in [batch["batch_size"] for batch in after["batch_stats"]]


def test_statistics_of_all_models_and_of_those_that_are_not_there(own, json_inputs):
    """Without a name every model that was ever in memory; an unknown one is refused with Triton's sentence."""
    ask(own, "/v2/models/thrice/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])})
    rows = own.http("GET", "/v2/models/stats").json["model_stats"]
    assert [row["name"] for row in rows] == ["thrice", "twice"]
    reply = own.http("GET", "/v2/models/nobody/stats")
    assert (reply.status, reply.error) == (400, "requested model 'nobody' is not available")
    reply = own.http("GET", "/v2/models/twice/versions/3/stats")
    assert reply.error == "requested model version is not available for model 'twice'"


# -- repository ------------------------------------------------------------------------------------------------------


def test_the_index_lists_what_is_there_and_what_could_be(own):
    """In memory with version and state, failed with the reason, never loaded with the name alone."""
    ask(own, "/v2/models/bad/infer", {"inputs": []})
    rows = index(own)
    bad = rows["bad"]
    assert (bad["state"], "can't load model 'bad'" in bad["reason"]) == ("UNAVAILABLE", True)
    assert {"name": "twice", "version": "1", "state": "READY"}.items() <= rows["twice"].items()
    assert rows["thrice"] == {"name": "thrice"}
    assert set(rows) == {"twice", "thrice", "bad"}
    assert set(index(own, {"ready": True})) == {"twice"}
    assert set(index(own, {"ready": False})) == {"twice", "thrice", "bad"}


def test_the_index_tells_what_the_cache_knows(own, json_inputs):
    """Bytes while in memory, leases and requests that wait, hits, misses and loads for good, and the last use."""
    before = datetime.now(UTC) - timedelta(seconds=1)
    for model in ("twice", "thrice", "thrice"):
        assert ask(own, f"/v2/models/{model}/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])}).status == 200
    ask(own, "/v2/models/bad/infer", {"inputs": []})
    ask(own, "/v2/repository/models/twice/unload")

    rows = index(own)

    thrice = rows["thrice"]
    assert thrice["queued"] == 0
    assert thrice["cache"]["host_bytes"] == own.engine.cache.entries["thrice"].footprint.host > 0
    assert {"device_bytes": 0, "leases": 0, "hits": 1, "misses": 1, "loads": 1}.items() <= thrice["cache"].items()
    assert before < datetime.fromisoformat(thrice["cache"]["last_used"]) < datetime.now(UTC) + timedelta(seconds=1)
    blank = {"host_bytes": 0, "device_bytes": 0, "gpu_bytes": [], "leases": 0, "pinned": False, "hits": 0, "loads": 0}
    assert rows["bad"]["cache"] == {**blank, "misses": 1, "refused": 1}
    assert {"hits": 1, "misses": 0, "loads": 1, "host_bytes": 0}.items() <= rows["twice"]["cache"].items()


def test_the_index_shows_a_load_under_way_and_who_holds_a_model(own, json_inputs):
    """A load by when it began, a request that executes as a lease."""
    document = {"inputs": json_inputs(X=[1, 2, 3, 4])}
    lease = own.on_loop.call(own.engine.cache.ready.lease, "twice")
    try:
        with ThreadPoolExecutor(1) as pool, own.loads_held_up():
            pool.submit(ask, own, "/v2/models/thrice/infer", document)
            rows = index(own)
            while rows["thrice"].get("state") != "LOADING":
                rows = index(own)
    finally:
        own.on_loop.call(lease.release)

    began = datetime.fromisoformat(rows["thrice"]["cache"]["loading_since"])
    assert abs(began - datetime.now(UTC)) < timedelta(minutes=1)
    assert rows["twice"]["cache"]["leases"] == 1
    assert "loading_since" not in index(own)["thrice"]["cache"]


def test_questions_about_models_that_load_keep_no_others_waiting(own):
    """However many ask for the metadata and the configuration of models that are not in memory."""

    def misses(name):
        stats = own.engine.registry.stats.get(name)
        return stats.misses if stats is not None else 0

    paths = ["/v2/models/thrice", "/v2/models/thrice/config"] * 6
    with ThreadPoolExecutor(len(paths)) as pool:
        with own.loads_held_up():
            asked = [pool.submit(own.http, "GET", path) for path in paths]
            while own.on_loop.call(misses, "thrice") < len(paths):
                pass
            for path in ("/v2/health/ready", "/v2/models/twice/ready", "/metrics", "/models"):
                assert own.http("GET", path).status == 200
            assert not any(reply.done() for reply in asked)
        assert [reply.result().status for reply in asked] == [200] * len(paths)


def test_load_and_unload_change_the_index(own, json_inputs):
    """Both answer 200 with an empty body; a loaded model that is loaded again is loaded anew."""
    for action, state in (("load", "READY"), ("load", "READY"), ("unload", "UNAVAILABLE")):
        reply = ask(own, f"/v2/repository/models/thrice/{action}")
        assert (reply.status, reply.body) == (200, b"")
        assert index(own)["thrice"].get("state") == state
    assert (index(own)["thrice"]["version"], index(own)["thrice"]["reason"]) == ("1", "unloaded")
    assert ask(own, "/v2/models/thrice/infer", {"inputs": json_inputs(X=[1, 2, 3, 4])}).status == 200


def test_a_load_reads_the_model_as_it_is_now(own, tmp_path, put, json_inputs):
    """A file that changed on disk is served after the next load, and not before; answers are of the new types."""
    document = {"inputs": json_inputs(X=[1, 2, 3, 4]), "parameters": {"binary_data_output": True}}

    def answered():
        reply = ask(own, "/v2/models/twice/infer", document)
        length = int(reply.headers["inference-header-content-length"])
        return json.loads(reply.body[:length])["outputs"][0]["datatype"]

    assert answered() == "FP32"
    (tmp_path / "twice" / "1" / "model.onnx").unlink()
    put["multiple"](tmp_path / "new", "twice", 7.0, "INT32")
    (tmp_path / "new" / "twice" / "1" / "model.onnx").rename(tmp_path / "twice" / "1" / "model.onnx")
    assert answered() == "FP32"
    assert ask(own, "/v2/repository/models/twice/load").status == 200
    assert answered() == "INT32"
