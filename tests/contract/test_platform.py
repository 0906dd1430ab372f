"""Multi-model as SageMaker runs it: it unpacks archives below /opt/ml/models, loads, invokes and unloads over HTTP."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.contract import models
from tests.contract.server import Server

BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
MULTI_MODEL = {"SAGEMAKER_MULTI_MODEL": "true"}
HEAVY_MEGABYTES = 8
CROWDED = {"MME_MEMORY_BUDGET": "60MB", "MME_WEIGHTS": "plain"}  # the heavy models' weights are the same


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    """SageMaker's side: a function that unpacks an archive where SageMaker would, and says where that is."""
    base = tmp_path_factory.mktemp("instance") / "opt/ml/models"

    def unpack(name: str, model: bytes, *, nested: bool = False, config: str = "") -> str:
        directory = base / name / "model"
        models.lay_out(directory / "encoder" if nested else directory, model, config)
        return str(directory)

    return unpack


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A container that SageMaker drives."""
    with Server(tmp_path_factory.mktemp("platform"), MULTI_MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """The same with memory for a few heavy models."""
    with Server(tmp_path_factory.mktemp("crowded"), {**MULTI_MODEL, **CROWDED}) as server:
        yield server


def load(server, name, url, **headers):
    """LOAD, as SageMaker sends it."""
    return server.ask("POST", "/models", {"model_name": name, "url": url}, Content_Type="application/json", **headers)


def invoke(server, name, body=models.ONE, **headers):
    """INVOKE."""
    return server.ask("POST", f"/models/{name}/invoke", body, **headers)


def listed(server):
    """The names in LIST, all pages."""
    names, token = [], ""
    while True:
        answer = server.ask("GET", f"/models?next_page_token={token}" if token else "/models")
        assert answer.status == 200
        names += [row["modelName"] for row in answer.json["models"]]
        token = answer.json.get("nextPageToken", "")
        if not token:
            return names


def test_list_and_ping_answer_before_anything_is_loaded(serve):
    """From the first second, on the port that SageMaker names, LIST is an empty list and /ping is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = serve({**MULTI_MODEL, "SAGEMAKER_BIND_TO_PORT": str(port)})

    assert server.port == port
    assert server.ask("GET", "/models").json == {"models": []}
    for method in ("GET", "POST"):
        ping = server.ask(method, "/ping")
        assert (ping.status, ping.body) == (200, b"")
    assert server.ask("GET", "/execution-parameters").status == 200


@pytest.mark.parametrize("nested", [False, True], ids=["config-at-the-root", "one-folder-inside"])
def test_life_of_a_model(server, platform, nested):
    """LOAD 200, again 409, GET and LIST tell its url, INVOKE answers, DELETE 200 then 404, and INVOKE is 404 again."""
    name = f"a1b2c3{nested:d}"
    url = platform(name, models.plus(10), nested=nested, config="max_batch_size: 8\n")

    assert load(server, name, url).status == 200
    again = load(server, name, url)
    assert again.status == 409
    assert name in again.error
    assert server.ask("GET", f"/models/{name}").json == {"modelName": name, "modelUrl": url}
    assert {"modelName": name, "modelUrl": url} in server.ask("GET", "/models").json["models"]
    answer = invoke(server, name)
    assert (answer.status, models.y(answer.json)) == (200, [11, 12, 13, 14])
    assert answer.headers["content-type"] == "application/json"

    assert server.ask("DELETE", f"/models/{name}").status == 200
    for gone in (server.ask("DELETE", f"/models/{name}"), server.ask("GET", f"/models/{name}"), invoke(server, name)):
        assert (gone.status, gone.error) == (404, f"Request for unknown model: '{name}' is not found")
    assert name not in listed(server)

    assert load(server, name, url).status == 200, "a model that was unloaded can be loaded again"
    assert models.y(invoke(server, name).json) == [11, 12, 13, 14]
    server.ask("DELETE", f"/models/{name}")


def test_a_model_of_an_archive_made_by_mme_pack(server, tmp_path):
    """What `mme pack` wrote and the platform unpacked is a model."""
    archive = models.pack(models.lay_out(tmp_path / "plus", models.plus(3)), tmp_path / "plus.tar.gz")
    directory = tmp_path / "opt/ml/models/packed/model"
    shutil.unpack_archive(archive, directory)  # by no filter: Debian 12's Python has none

    assert load(server, "packed", str(directory)).status == 200
    assert models.y(invoke(server, "packed").json) == [4, 5, 6, 7]
    assert server.ask("DELETE", "/models/packed").status == 200


@pytest.fixture(scope="module")
def loaded(server, platform):
    """A model that stays: the name it is registered under, and its target model."""
    url = platform("deadbeef", models.plus(1), config="max_batch_size: 8\n")
    assert load(server, "deadbeef", url, X_Amzn_SageMaker_Target_Model="plus-1.tar.gz").status == 200
    return "deadbeef"


def test_binary_tensors_both_ways(server, loaded):
    """The binary content type carries tensors behind a JSON header of the length that it names, both ways."""
    tensor = np.arange(8, dtype=np.float32).reshape(2, 4)
    header = json.dumps(
        {
            "inputs": [{"name": "X", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}],
            "outputs": [{"name": "Y", "parameters": {"binary_data": True}}],
        }
    ).encode()

    answer = invoke(server, loaded, header + tensor.tobytes(), Content_Type=f"{BINARY}{len(header)}")

    assert answer.status == 200
    content_type = answer.headers["content-type"]
    assert content_type.startswith(BINARY)
    length = int(content_type.removeprefix(BINARY))
    (output,) = json.loads(answer.body[:length])["outputs"]
    assert output == {"name": "Y", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
    np.testing.assert_array_equal(np.frombuffer(answer.body[length:], np.float32).reshape(2, 4), tensor + 1)


@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        (b"not a model", "", "ONNX Runtime"),
        (b"", "", "ONNX Runtime"),
        (models.plus(1), "max_batch_size: -1\n", "max_batch_size"),
        (models.plus(1), "max_batch_sise: 8\n", "max_batch_sise"),
        (models.plus(1), "instance_group { passive: true }\n", "passive"),
        (models.plus(1), 'backend: "pytorch"\n', "pytorch"),
        (models.plus(1), 'input { name: "Q" data_type: TYPE_FP32 dims: [4] }\n', "Q"),
        (models.plus(1), 'input { name: "X" data_type: TYPE_INT8 dims: [4] }\nmax_batch_size: 4\n', "TYPE_INT8"),
    ],
    ids=["garbage", "empty", "negative", "unknown-field", "refused-field", "no-backend", "no-such-input", "other-type"],
)
def test_a_load_that_fails_leaves_nothing_registered(server, platform, request, model, config, named):
    """A model that can't be loaded is a 400 with the reason, is in no list, takes no memory and can be tried again."""
    name = request.node.callspec.id
    used = server.metric("mme_memory_used_bytes", kind="host")
    url = platform(name, model, config=config)

    for _ in range(2):
        answer = load(server, name, url)
        assert answer.status == 400
        assert named in answer.error

    assert name not in listed(server)
    assert server.ask("GET", f"/models/{name}").status == 404
    assert invoke(server, name).status == 404
    assert server.metric("mme_memory_used_bytes", kind="host") == used


def test_the_same_name_loads_after_a_failed_load_was_mended(server, platform):
    """A name whose load failed is free for the next one."""
    url = platform("mended", b"broken")
    assert load(server, "mended", url).status == 400
    shutil.rmtree(url)
    platform("mended", models.plus(5))

    assert load(server, "mended", url).status == 200
    assert models.y(invoke(server, "mended").json) == [6, 7, 8, 9]
    assert server.ask("DELETE", "/models/mended").status == 200


def test_list_comes_in_pages(server, platform):
    """LIST shows 100 models a page, each model once; a page with nothing behind it has no token, full or not."""
    url = platform("many", models.plus(0))
    before = listed(server)
    names = [f"many-{number:03d}" for number in range(101 - len(before))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: load(server, name, url), names[1:]))
        assert {answer.status for answer in answers} == {200}
        exactly = server.ask("GET", "/models").json
        assert (len(exactly["models"]), "nextPageToken" in exactly) == (100, False)

        assert load(server, names[0], url).status == 200
        first, everybody = server.ask("GET", "/models").json, listed(server)
        assert len(first["models"]) == 100
        assert first["nextPageToken"]
        assert sorted(everybody) == sorted(before + names)

        gone = list(pool.map(lambda name: server.ask("DELETE", f"/models/{name}"), names))
    assert {answer.status for answer in gone} == {200}
    assert listed(server) == before
    assert server.ask("GET", "/models?next_page_token=%25%25").status == 400


def test_a_full_budget_is_507_and_nobody_is_evicted(crowded, platform):
    """When memory does not suffice LOAD is 507, whoever is loaded still answers; after an UNLOAD the model fits."""
    loaded, refused = [], None
    for number in range(20):
        name = f"heavy-{number}"
        answer = load(crowded, name, platform(name, models.plus(number, HEAVY_MEGABYTES)))
        if answer.status != 200:
            refused = name
            break
        loaded.append(name)

    assert answer.status == 507
    assert refused in answer.error
    assert len(loaded) >= 2
    assert listed(crowded) == loaded
    assert invoke(crowded, refused).status == 404
    for number, name in enumerate(loaded):
        assert models.y(invoke(crowded, name).json) == [1 + number, 2 + number, 3 + number, 4 + number]
    assert sum(crowded.metric("mme_model_evictions_total", model=name) for name in loaded) == 0
    budget = crowded.metric("mme_memory_budget_bytes", kind="host")
    assert crowded.metric("mme_memory_used_bytes", kind="host") <= budget == 60e6

    url = platform(f"{refused}-again", models.plus(0, HEAVY_MEGABYTES))
    for name in loaded:  # SageMaker unloads and tries again
        assert crowded.ask("DELETE", f"/models/{name}").status == 200
        if load(crowded, refused, url).status == 200:
            break
    assert invoke(crowded, refused).status == 200


def test_a_model_larger_than_the_whole_budget_is_507(crowded, platform):
    """A model that could never fit is 507 at once, and says what would help."""
    answer = load(crowded, "giant", platform("giant", models.plus(0, 64)))

    assert answer.status == 507
    assert "MME_MEMORY_BUDGET" in answer.error
    assert "giant" not in listed(crowded)


def test_a_reload_over_kserve_takes_the_model_from_where_it_was(server, platform):
    """Triton's load of a model that is loaded loads it anew from the folder that LOAD named, under both its names."""
    url = platform("again", models.plus(1))
    load(server, "again", url, X_Amzn_SageMaker_Target_Model="again.tar.gz")
    shutil.rmtree(url)
    platform("again", models.plus(2))

    assert server.ask("POST", "/v2/repository/models/again/load").status == 200

    assert models.y(invoke(server, "again", X_Amzn_SageMaker_Target_Model="again.tar.gz").json) == [3, 4, 5, 6]
    assert server.ask("DELETE", "/models/again").status == 200


def test_loads_and_unloads_of_one_name_that_race_end_in_order(server, platform):
    """However LOAD, INVOKE and UNLOAD of one name cross, each gets a documented status, and the last word holds."""
    url = platform("contested", models.plus(1))
    documented = {"load": {200, 409, 503}, "invoke": {200, 404, 503}, "unload": {200, 404}}

    def call(what):
        if what == "load":
            return what, load(server, "contested", url).status
        if what == "invoke":
            return what, invoke(server, "contested").status
        return what, server.ask("DELETE", "/models/contested").status

    with ThreadPoolExecutor(6) as pool:
        for what, status in pool.map(call, ["load", "invoke", "unload", "invoke", "load", "unload"] * 15):
            assert status in documented[what], what

    server.ask("DELETE", "/models/contested")
    assert "contested" not in listed(server)
    assert invoke(server, "contested").status == 404
    assert load(server, "contested", url).status == 200
    assert models.y(invoke(server, "contested").json) == [2, 3, 4, 5]
    assert server.ask("DELETE", "/models/contested").status == 200
