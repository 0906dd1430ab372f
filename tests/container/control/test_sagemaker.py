"""SageMaker's container contract: list, load, describe, unload, and what batch transform asks."""

import json
import shutil
import threading

import pytest

from container.control import operations
from container.settings import Mode
from tests.serve.integrity import check_integrity

TARGET = "X-Amzn-SageMaker-Target-Model"


@pytest.fixture(scope="module")
def models(tmp_path_factory, put):
    """What SageMaker unpacks: /opt/ml/models/{name}/model."""
    path = tmp_path_factory.mktemp("models")
    for name, factor in (("hash1", 2.0), ("hash2", 3.0)):
        put["multiple"](path / name, "model", factor)
    (path / "empty" / "model").mkdir(parents=True)
    broken = path / "broken" / "model" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model")
    return path


@pytest.fixture
def platform(start):
    """A server whose models a platform manages; none is loaded."""
    return start(mode=Mode.PLATFORM)


@pytest.fixture
def load(platform, models):
    """Loads one of the models."""

    def loaded(name, folder="hash1", **headers):
        body = json.dumps({"model_name": name, "url": f"{models}/{folder}/model"}).encode()
        return platform.http("POST", "/models", {"X-Amzn-SageMaker-" + key: v for key, v in headers.items()}, body)

    return loaded


def infer(running, path, json_inputs, **headers):
    """The answer for X = 1, 2, 3, 4."""
    body = json.dumps({"inputs": json_inputs(X=[1, 2, 3, 4])}).encode()
    return running.http("POST", path, {"X-Amzn-SageMaker-" + key: v for key, v in headers.items()}, body)


def test_a_loading_model_is_a_409_and_not_in_the_list(platform, load):
    """Of two loads under one name that come together one wins, and nobody sees a model that is not ready."""
    replies = []
    with platform.loads_held_up():
        threads = [threading.Thread(target=lambda: replies.append(load("m"))) for _ in range(2)]
        threads[0].start()
        while not platform.on_loop.call(lambda: "m" in platform.engine.cache.entries):
            pass
        threads[1].start()
        threads[1].join()
        assert [reply.status for reply in replies] == [409]
        assert platform.http("GET", "/models").json == {"models": []}
        assert platform.http("GET", "/models/m").status == 404
        assert platform.http("GET", "/ping").status == 200
    threads[0].join()
    assert sorted(reply.status for reply in replies) == [200, 409]


def test_two_names_for_one_folder_are_two_models(platform, load, json_inputs):
    """model_name is the key to everything."""
    load("a")
    load("b")
    assert [model["modelName"] for model in platform.http("GET", "/models").json["models"]] == ["a", "b"]
    platform.http("DELETE", "/models/a")
    assert infer(platform, "/models/b/invoke", json_inputs).status == 200


def test_the_target_models_name_is_an_alias_bound_at_load(platform, load, json_inputs):
    """What SageMaker calls the archive reaches the model, and no other model under its name."""
    load("m", "hash1", **{"Target-Model": "tenant/a.tar.gz"})
    load("n", "hash2", **{"Target-Model": "b.tar.gz"})
    ok = infer(platform, "/models/m/invoke", json_inputs, **{"Target-Model": "tenant/a.tar.gz"})
    assert ok.json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert (
        infer(platform, "/invocations", json_inputs, **{"Target-Model": "b.tar.gz"}).json["outputs"][0]["data"][0] == 3
    )
    forged = infer(platform, "/models/m/invoke", json_inputs, **{"Target-Model": "b.tar.gz"})
    assert (forged.status, "'b.tar.gz'" in forged.error, "'m'" in forged.error) == (400, True, True)
    platform.http("DELETE", "/models/n")
    assert infer(platform, "/invocations", json_inputs, **{"Target-Model": "b.tar.gz"}).status == 404


def test_a_target_model_may_have_any_letters(platform, load, json_inputs):
    """Headers are UTF-8, as boto3 writes them, or Latin-1, as HTTP once said."""
    for name, sent in (("日本.tar.gz", "日本.tar.gz".encode().decode("latin-1")), ("é.tar.gz", "é.tar.gz")):
        load("m", "hash1", **{"Target-Model": sent})
        reply = infer(platform, "/models/m/invoke", json_inputs, **{"Target-Model": sent})
        assert (reply.status, reply.json["model_name"]) == (200, name)
        assert infer(platform, "/invocations", json_inputs, **{"Target-Model": sent}).status == 200
        assert platform.http("DELETE", "/models/m", {TARGET: sent}).status == 200


def test_an_unload_that_names_another_target_model_is_refused(platform, load, json_inputs):
    """As an invocation is: both models go on serving."""
    load("m", "hash1", **{"Target-Model": "a.tar.gz"})
    load("n", "hash2", **{"Target-Model": "b.tar.gz"})
    for forged in ("b.tar.gz", "c.tar.gz"):
        refused = platform.http("DELETE", "/models/m", {TARGET: forged})
        assert (refused.status, f"'{forged}'" in refused.error) == (400, True)
    for target, name in (("a.tar.gz", "m"), ("b.tar.gz", "n")):
        assert infer(platform, f"/models/{name}/invoke", json_inputs, **{"Target-Model": target}).status == 200
    assert platform.http("DELETE", "/models/none", {TARGET: "a.tar.gz"}).status == 404
    assert platform.http("DELETE", "/models/m", {TARGET: "a.tar.gz"}).status == 200


def test_a_model_loaded_without_a_target_model_is_invoked_and_unloaded_with_one(platform, load, json_inputs):
    """Nothing says what clients call it; only the name of another model is refused."""
    load("m", "hash1")
    load("n", "hash2", **{"Target-Model": "b.tar.gz"})
    load("other", "hash2")
    header = {"Target-Model": "tenant/a.tar.gz"}
    assert infer(platform, "/models/m/invoke", json_inputs, **header).json["outputs"][0]["data"] == [2, 4, 6, 8]
    for target in ("b.tar.gz", "n", "other"):
        assert infer(platform, "/models/m/invoke", json_inputs, **{"Target-Model": target}).status == 400
        assert platform.http("DELETE", "/models/m", {TARGET: target}).status == 400
    assert infer(platform, "/models/n/invoke", json_inputs, **header).status == 400
    assert platform.http("DELETE", "/models/m", {TARGET: "tenant/a.tar.gz"}).status == 200


def test_a_model_is_called_as_clients_call_it(platform, load, json_inputs):
    """Answers, errors, statistics and metrics have the target model's name; the routes that load it have SageMaker's."""
    load("m", "hash1", **{"Target-Model": "tenant/a.tar.gz"})
    load("b", "hash2")
    header = {"Target-Model": "tenant/a.tar.gz"}
    assert infer(platform, "/models/m/invoke", json_inputs, **header).json["model_name"] == "tenant/a.tar.gz"
    assert infer(platform, "/models/m/invoke", json_inputs).json["model_name"] == "tenant/a.tar.gz"
    wrong = platform.http("POST", "/models/m/invoke", {TARGET: "tenant/a.tar.gz"}, b'{"inputs": []}')
    assert (wrong.status, "for model 'tenant/a.tar.gz'" in wrong.error) == (400, True)
    assert platform.http("GET", "/v2/models/m/stats").json["model_stats"][0]["name"] == "tenant/a.tar.gz"
    assert 'nv_inference_count{model="tenant/a.tar.gz"' in platform.http("GET", "/metrics").body.decode()
    listed = platform.http("GET", "/models").json["models"]
    assert [model["modelName"] for model in listed] == ["b", "m"]
    assert platform.http("GET", "/models/m").json == listed[1]


@pytest.mark.parametrize(("name", "target"), [("m", "b.tar.gz"), ("n", "a.tar.gz"), ("a.tar.gz", "")])
def test_neither_name_is_given_twice(platform, load, name, target):
    """A name of SageMaker's and a target model are one model until it is unloaded."""
    load("m", "hash1", **{"Target-Model": "a.tar.gz"})
    again = load(name, "hash2", **{"Target-Model": target})
    assert (again.status, again.error) == (409, "model 'a.tar.gz' is already loaded; unload it first to load it anew")
    assert platform.http("DELETE", "/models/m").status == 200
    assert load(name, "hash2", **{"Target-Model": target}).status == 200


def test_a_model_that_is_not_loaded_is_not_found_whatever_the_header_says(platform, load, json_inputs):
    """Or SageMaker, which sends the target model with each request, would not load what was unloaded."""
    load("m", "hash1", **{"Target-Model": "a.tar.gz"})
    load("n", "hash2", **{"Target-Model": "b.tar.gz"})
    assert platform.http("DELETE", "/models/m").status == 200
    for target in ("a.tar.gz", "b.tar.gz", "c.tar.gz"):
        gone = infer(platform, "/models/m/invoke", json_inputs, **{"Target-Model": target})
        assert (gone.status, gone.error) == (404, "Request for unknown model: 'm' is not found")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff", "failed to parse the request JSON buffer"),
        (b"[" * 3000, "failed to parse the request JSON buffer"),
        (b'{"model_name": "", "url": "/x"}', "the body must name 'model_name'"),
        (b'{"model_name": "m", "url": ["/x"]}', "the body must name 'url'"),
        (b'{"model_name": "m", "url": "/opt/ml/models/../../../etc"}', "must be an absolute path without '..'"),
        (b'{"model_name": "m", "url": "/opt/a\\u0000b"}', "must be an absolute path without '..'"),
        (b'{"model_name": "m", "url": "/proc/self/cwd"}', "points into a system folder"),
        (b'{"model_name": "m", "url": "//proc/self/cwd"}', "points into a system folder"),
        (b'{"model_name": "m", "url": "//sys/kernel"}', "points into a system folder"),
        (b'{"model_name": "m", "url": "/dev/shm"}', "points into a system folder"),
        (b'{"model_name": "m", "url": "/sys"}', "points into a system folder"),
        (b'{"model_name": "m", "url": "/etc/passwd"}', "is not a folder"),
        (b'{"model_name": "m", "url": "/%s"}' % (b"x" * 5000), "is not a folder"),
    ],
)
def test_a_load_that_makes_no_sense_is_a_400(body, words, platform):
    """One sentence that names the field, and nothing is registered."""
    reply = platform.http("POST", "/models", {}, body)
    assert reply.status == 400
    assert words in reply.error
    assert len(reply.error) <= 2048
    assert platform.http("GET", "/models").json == {"models": []}


@pytest.mark.parametrize(("folder", "words"), [("empty", "no model found in 'm'"), ("broken", "can't load model 'm'")])
def test_a_model_that_does_not_load_leaves_nothing_behind(folder, words, platform, load):
    """The load's own answer says why, and the name is free for the next load."""
    reply = load("m", folder)
    assert (reply.status, words in reply.error) == (400, True)
    assert platform.http("GET", "/models").json == {"models": []}
    assert platform.http("GET", "/models/m").status == 404
    platform.on_loop.call(check_integrity, platform.engine.cache)
    assert load("m").status == 200


def test_names_may_hold_anything_that_a_path_can_carry(platform, models, json_inputs):
    """Opaque to us, slashes, spaces and other scripts included."""
    for name, quoted in (
        ("a b/c", "a%20b/c"),
        ("模型", "%E6%A8%A1%E5%9E%8B"),
        ("x%2Fy", "x%252Fy"),
        ("x/z", "x%2Fz"),
        ("100%", "100%25"),
        ("q?r#s", "q%3Fr%23s"),
    ):
        body = json.dumps({"model_name": name, "url": f"{models}/hash1/model"}).encode()
        assert platform.http("POST", "/models", {}, body).status == 200
        assert platform.http("GET", f"/models/{quoted}").json["modelName"] == name
        assert infer(platform, f"/models/{quoted}/invoke", json_inputs).json["model_name"] == name
        assert platform.http("DELETE", f"/models/{quoted}").status == 200


def test_the_folder_may_go_once_the_model_is_loaded(platform, load, models, tmp_path, json_inputs):
    """SageMaker may clean its disk under a model in memory."""
    shutil.copytree(models / "hash1", tmp_path / "h")
    body = json.dumps({"model_name": "m", "url": f"{tmp_path}/h/model"}).encode()
    platform.http("POST", "/models", {}, body)
    shutil.rmtree(tmp_path / "h")
    assert infer(platform, "/models/m/invoke", json_inputs).status == 200


# -- pages -----------------------------------------------------------------------------------------------------------


def pages(source):
    """All pages of `source(token)`, by following the tokens."""
    found, token = [], ""
    while True:
        document = source(token)
        found.append([model["modelName"] for model in document["models"]])
        if "nextPageToken" not in document:
            return found
        token = document["nextPageToken"]
        assert len(found) < 50


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, [0]), (1, [1]), (100, [100]), (101, [100, 1]), (200, [100, 100]), (205, [100, 100, 5])]
)
def test_a_page_has_a_hundred_models(count, sizes):
    """Every model once, in order; a token only where there is more."""
    models = [(f"m{number:03}", f"/{number}") for number in range(count)]
    found = pages(lambda token: operations.page(models, token))
    assert [len(each) for each in found] == sizes
    assert [name for each in found for name in each] == [name for name, _ in models]


def test_pages_over_http(platform, load, monkeypatch):
    """The token goes through a query as it is, means the same twice, and survives models that come and go."""
    monkeypatch.setattr(operations, "PAGE", 2)
    for name in ("a/b", "c d", "e+f", "模型", "zz"):
        assert load(name).status == 200

    def listed(token):
        return platform.http("GET", f"/models?next_page_token={token}" if token else "/models").json

    assert pages(listed) == [["a/b", "c d"], ["e+f", "zz"], ["模型"]]
    token = listed("")["nextPageToken"]
    assert token == listed("")["nextPageToken"]
    assert token.replace("-", "").replace("_", "").replace("=", "").isalnum()
    assert "c d" not in token
    platform.http("DELETE", "/models/c%20d")
    platform.http("DELETE", "/models/a/b")
    assert [model["modelName"] for model in listed(token)["models"]] == ["e+f", "zz"]


@pytest.mark.parametrize("token", ["!!", "x", "abc", "%C3%A9", "a+b/", "%00", "//8=", "x" * 4001])
def test_a_token_that_we_did_not_give_out_is_a_400(token, platform):
    """Quoted in a short sentence."""
    reply = platform.http("GET", f"/models?next_page_token={token}")
    assert reply.status == 400
    assert reply.error.startswith("next_page_token '")
    assert len(reply.error) < 250


# -- the rest --------------------------------------------------------------------------------------------------------


def test_execution_parameters_are_those_of_the_settings(start):
    """In the form that batch transform asks for."""
    running = start(mode=Mode.PLATFORM, max_concurrent_transforms=3, batch_strategy="MULTI_RECORD", max_payload_in_mb=9)
    assert running.http("GET", "/execution-parameters").json == {
        "MaxConcurrentTransforms": 3,
        "BatchStrategy": "MULTI_RECORD",
        "MaxPayloadInMB": 9,
    }


def test_single_model_mode_serves_the_one_model(start, tmp_path, put, json_inputs):
    """/invocations needs no target."""
    put["multiple"](tmp_path, "only", 2.0)
    running = start(mode=Mode.SINGLE, model_dir=tmp_path)
    assert infer(running, "/invocations", json_inputs).json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert [model["modelName"] for model in running.http("GET", "/models").json["models"]] == ["only"]
