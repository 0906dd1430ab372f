"""KServe v2 beside inference: health, metadata, configuration, statistics, repository."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

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


def test_the_server_says_what_it_is(server):
    """Name, version and the extensions that are served."""
    document = server.http("GET", "/v2").json
    assert document["name"] == "mme"
    assert document["version"] == version("mme")
    assert {"binary_tensor_data", "statistics", "model_repository", "model_configuration"} <= set(
        document["extensions"]
    )


@pytest.mark.parametrize("what", ["live", "ready"])
def test_health_is_a_status_and_says_so(what, server):
    """The status is Triton's; the body, which Triton leaves empty, is KServe's."""
    reply = server.http("GET", f"/v2/health/{what}")
    assert (reply.status, reply.json) == (200, {what: True})


def test_metadata_show_shapes_as_a_client_sends_them(server):
    """The batch dimension first where the model batches; versions as strings."""
    for path in ("/v2/models/arithmetic", "/v2/models/arithmetic/versions/1"):
        document = server.http("GET", path).json
        tensors = {
            key: [(t["name"], t["datatype"], t["shape"]) for t in document.pop(key)] for key in ("inputs", "outputs")
        }
        assert document == {"name": "arithmetic", "versions": ["1"], "platform": "onnxruntime_onnx"}
        assert tensors["inputs"] == [("A", "FP32", [-1, 4]), ("B", "FP32", [-1, 4])]
        assert tensors["outputs"] == [("SUM", "FP32", [-1, 4]), ("DIFF", "FP32", [-1, 4])]
    assert server.http("GET", "/v2/models/twice").json["inputs"][0]["shape"] == [4]


def test_the_configuration_is_the_completed_one(server):
    """In the protocol's field names, with what the model file added."""
    document = server.http("GET", "/v2/models/arithmetic/config").json
    assert document["name"] == "arithmetic"
    assert document["max_batch_size"] == 8
    assert document["backend"] == "onnxruntime"
    assert [(each["name"], each["data_type"]) for each in document["input"]] == [("A", "TYPE_FP32"), ("B", "TYPE_FP32")]
    assert document["dynamic_batching"]["preferred_batch_size"] == [8]


@pytest.mark.parametrize("suffix", ["", "/config"])
@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("nobody", 404, "Request for unknown model: 'nobody' is not found"),
        ("arithmetic/versions/9", 404, "version 9 is not found"),
        ("arithmetic/versions/x", 404, "failed to get model version from specified version string 'x'"),
        ("arithmetic/versions/-1", 404, "invalid model version specified '-1' , version should be an integral"),
        ("broken", 400, "can't load model 'broken'"),
    ],
)
def test_unknown_models_and_versions_are_refused(model, status, words, suffix, server):
    """With Triton's statuses and sentences."""
    reply = server.http("GET", f"/v2/models/{model}{suffix}")
    assert (reply.status, words in reply.error) == (status, True)


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


@pytest.mark.parametrize(
    ("query", "names"), [("", "twice thrice bad"), ("?ready=true", "twice"), ("?ready=false", "twice thrice bad")]
)
def test_the_index_can_be_read_by_a_get(query, names, own):
    """The same rows as by a POST, which is Triton's way; `ready` is in the query then."""
    rows = own.http("GET", f"/v2/repository/index{query}").json
    assert {row["name"] for row in rows} == set(names.split())
    assert own.http("GET", "/v2/repository/index?ready=1").error == "Invalid value for 'ready': expected a boolean"


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
    entry = own.on_loop.call(own.engine.cache.lease, "twice")
    try:
        with ThreadPoolExecutor(1) as pool, own.loads_held_up():
            pool.submit(ask, own, "/v2/models/thrice/infer", document)
            rows = index(own)
            while rows["thrice"].get("state") != "LOADING":
                rows = index(own)
    finally:
        own.on_loop.call(entry.release)

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


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("nobody", 500, "failed to load 'nobody', failed to poll from model repository"),
        ("bad", 400, "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: ONNX Runtime"),
    ],
)
def test_a_load_that_fails_says_why(name, status, words, own):
    """And leaves the others alone."""
    reply = ask(own, f"/v2/repository/models/{name}/load")
    assert (reply.status, words in reply.error) == (status, True)
    assert own.http("GET", "/v2/models/twice/ready").status == 200


def test_an_unknown_model_is_unloaded_without_a_word(own):
    """As Triton does."""
    assert ask(own, "/v2/repository/models/nobody/unload").status == 200
    assert ask(own, "/v2/repository/models/twice/unload", {"parameters": {"unload_dependents": True}}).status == 200


@pytest.mark.parametrize(
    ("path", "document", "status", "words"),
    [
        ("index", {"ready": 1}, 400, "Invalid value for 'ready': expected a boolean"),
        ("index", [], 400, "the body must be a JSON object"),
        ("models/twice/load", {"parameters": {"config": "{"}}, 400, "failed to load 'twice', failed to poll"),
        ("models/%2E%2E%2Ftwice/load", None, 400, "Model name cannot be empty or a way to another directory"),
        ("models/twice/load", {"parameters": {"conf": "{}"}}, 400, "Unrecognized load parameter 'conf' with type"),
        ("models/twice/load", {"parameters": {"file:1/model.onnx": "AA=="}}, 400, "'config' must be specified"),
        (
            "models/twice/load",
            {"parameters": {"config": "{}", "file:../x": "AA=="}},
            400,
            "Invalid file parameter 'file:../x' with normalized path '../x' must stay within model directory.",
        ),
        (
            "models/twice/load",
            {"parameters": {"config": "{}", f"file:{'A' * 256}": "AA=="}},
            400,
            "Invalid file path 'AAA",
        ),
        ("models/twice/load", {"parameters": []}, 200, ""),
        ("models/twice/load", {"parameters": "x"}, 400, "'parameters' must be an object"),
        ("models/twice/unload", {"parameters": {"unload_dependents": 1}}, 400, "'unload_dependents'"),
        ("models/twice/unload", {"parameters": {"other": True}}, 400, "'other'"),
        ("models/twice/unload", [1], 400, "the body must be a JSON object"),
    ],
)
def test_repository_requests_that_make_no_sense_are_refused(path, document, status, words, own):
    """By the name of the field; what was served before still is."""
    reply = ask(own, f"/v2/repository/{path}", document)
    assert reply.status == status
    if words:
        assert words in reply.error
    assert own.http("GET", "/v2/models/twice/ready").status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2"),
        ("POST", "/v2/health/live"),
        ("PUT", "/v2/repository/index"),
        ("PUT", INFER),
        ("POST", "/v2/models/stats"),
    ],
)
def test_other_methods_are_a_405(method, path, server):
    """In JSON."""
    reply = server.http(method, path)
    assert (reply.status, reply.error.startswith("Method Not Allowed")) == (405, True)


@pytest.mark.parametrize("route", ["infer", "generate", "versions/1/infer", "versions/1/generate_stream"])
def test_inference_is_posted(route, server):
    """What is got from those routes is no model of that name."""
    reply = server.http("GET", f"/v2/models/arithmetic/{route}")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.error.startswith("Method Not Allowed")


@pytest.mark.parametrize("path", ["index", "models/m/load", "models/m/unload"])
def test_a_repository_can_not_be_named(path, server):
    """As in Triton, which has the route and not the feature."""
    reply = server.http("POST", f"/v2/repository/mine/{path}")
    assert (reply.status, reply.error) == (501, "'repository_name' specification is not supported")
