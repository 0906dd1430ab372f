"""Self-managed: archives in S3 or in a folder, loaded when they are asked for, unloaded when memory fills."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import botocore.exceptions
import numpy as np
import pytest

from tests.contract import models
from tests.contract.server import Server, eventually

PREFIX = "tenant/models"
HEAVY_MEGABYTES = 8
PLAIN = {"MME_WEIGHTS": "plain"}  # nine models of the same weights would cost the memory of one
BUDGET = "60MB"  # holds two to seven of them, by how much of its working memory the allocator keeps


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A folder of archives made by `mme pack`: plus-1, plus-2, plus-3, and one heavy model under nine names."""
    source, store = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    for number in (1, 2, 3):
        directory = models.lay_out(source / f"plus-{number}", models.plus(number), "max_batch_size: 8\n")
        models.pack(directory, store / f"plus-{number}.tar.gz")
    heavy = models.pack(models.lay_out(source / "heavy", models.plus(0, HEAVY_MEGABYTES)), store / "heavy-0.tar.gz")
    for number in range(1, 9):
        shutil.copy(heavy, store / f"heavy-{number}.tar.gz")
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory, archives, bucket, s3, gate, aws):
    """A server whose store is a prefix in S3, behind a gate."""
    for archive in archives.iterdir():
        s3.upload_file(str(archive), bucket, f"{PREFIX}/{archive.name}")
    environ = {"MME_MODEL_STORE": f"s3://{bucket}/{PREFIX}", "MME_MEMORY_BUDGET": BUDGET, **PLAIN, **aws(gate.url)}
    with Server(tmp_path_factory.mktemp("from-s3"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def from_folder(tmp_path_factory, archives):
    """A server whose store is a folder, started by `mme serve` and its flags."""
    command = ("mme", "serve", "--model-store", str(archives), "--memory-budget", BUDGET, "--weights", "plain")
    with Server(tmp_path_factory.mktemp("from-folder"), {}, command=command) as server:
        yield server


@pytest.fixture(scope="module", params=["s3", "folder"])
def either(request):
    """Both servers, one after the other: the store makes no difference."""
    return request.getfixturevalue({"s3": "server", "folder": "from_folder"}[request.param])


def invoke(client, target, body=models.ONE, **more):
    """InvokeEndpoint, by boto3."""
    more.setdefault("ContentType", "application/json")
    return client.invoke_endpoint(
        EndpointName="anything",
        TargetModel=target,
        Body=body if isinstance(body, bytes) else json.dumps(body),
        **more,
    )


def timing(answer):
    """The Server-Timing header of a boto3 answer."""
    return answer["ResponseMetadata"]["HTTPHeaders"]["server-timing"]


def loads(server, target):
    """How often the server loaded that model."""
    return server.metric("mme_model_loads_total", model=target)


def test_boto3_reaches_each_model_by_its_target(either, runtime):
    """invoke_endpoint with a TargetModel loads the archive of that name once and answers; then it is a hit."""
    client = runtime(either)
    for number in (1, 2):
        target = f"plus-{number}.tar.gz"
        cold = invoke(client, target)
        assert models.y(json.load(cold["Body"])) == [1 + number, 2 + number, 3 + number, 4 + number]
        assert cold["ContentType"] == "application/json"
        assert cold["InvokedProductionVariant"] == "AllTraffic"
        assert "cache;desc=miss" in timing(cold)
        assert "download;dur=" in timing(cold)

        warm = invoke(client, target)
        assert models.y(json.load(warm["Body"])) == [1 + number, 2 + number, 3 + number, 4 + number]
        assert "cache;desc=hit" in timing(warm)
        assert loads(either, target) == 1


def test_an_archive_may_be_called_without_its_suffix(either, runtime, archives, bucket, s3):
    """As the SageMaker SDK's `add_model` calls it where its user does; it is told from one that is not there."""
    shutil.copy(archives / "plus-2.tar.gz", archives / "two")
    s3.upload_file(str(archives / "plus-2.tar.gz"), bucket, f"{PREFIX}/two")
    client = runtime(either)
    for target in ("two", "two.tar.gz"):
        assert models.y(json.load(invoke(client, target)["Body"])) == [3, 4, 5, 6]
    with pytest.raises(client.exceptions.ValidationError, match="is not in the store"):
        invoke(client, "two.tar")


def test_a_target_model_may_have_any_letters(either, runtime, archives, bucket, s3):
    """boto3 writes its name in UTF-8; it is the same in S3, in a folder, and in a path."""
    name = "modèle-日本.tar.gz"
    shutil.copy(archives / "plus-2.tar.gz", archives / name)
    s3.upload_file(str(archives / "plus-2.tar.gz"), bucket, f"{PREFIX}/{name}")

    assert models.y(json.load(invoke(runtime(either), name)["Body"])) == [3, 4, 5, 6]
    assert loads(either, name) == 1
    assert either.ask("POST", f"/models/{quote(name)}/invoke", models.ONE).json["model_name"] == name
    assert either.ask("DELETE", f"/models/{quote(name)}").status == 200


def test_boto3_sends_and_gets_binary_tensors(either, runtime):
    """Binary tensors pass through boto3 both ways by the content type, and custom attributes come back."""
    tensor = np.arange(8, dtype=np.float32).reshape(2, 4)
    header = json.dumps(
        {
            "inputs": [{"name": "X", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="

    answer = invoke(
        runtime(either),
        "plus-1.tar.gz",
        header + tensor.tobytes(),
        ContentType=f"{kind}{len(header)}",
        CustomAttributes="c0ffee",
    )

    body, length = answer["Body"].read(), int(answer["ContentType"].removeprefix(kind))
    np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32).reshape(2, 4), tensor + 1)
    assert answer["CustomAttributes"] == "c0ffee"


def test_start_up_models_are_loaded_before_anybody_asks(serve, archives, runtime):
    """--load-model loads at start, by the archive's name with or without its ending; the first request is a hit."""
    flags = ("--model-store", str(archives), "--load-model", "plus-3", "--load-model", "plus-1.tar.gz")
    server = serve({"MME_PING_MODE": "ready"}, command=("mme", "serve", *flags))

    for number in (1, 3):
        answer = invoke(runtime(server), f"plus-{number}.tar.gz")
        assert models.y(json.load(answer["Body"])) == [1 + number, 2 + number, 3 + number, 4 + number]
        assert "cache;desc=hit" in timing(answer)


def test_a_model_that_is_not_in_the_store(either, runtime):
    """An unknown TargetModel is boto3's ValidationError with the name in it; nothing is remembered of it."""
    client = runtime(either)
    for target in ("nobody.tar.gz", "../plus-1.tar.gz", "a//b.tar.gz"):
        with pytest.raises(botocore.exceptions.ClientError) as raised:
            invoke(client, target)
        error = raised.value.response["Error"]
        assert error["Code"] in {"ValidationError", "ModelError"}
        assert target in json.dumps(raised.value.response)
    assert "nobody.tar.gz" not in json.dumps(either.ask("POST", "/v2/repository/index", {}).json)
    assert models.y(json.load(invoke(client, "plus-1.tar.gz")["Body"])) == [2, 3, 4, 5]


def test_a_wrong_request_is_a_model_error(either, runtime):
    """What the container refuses with 400 reaches the caller as boto3's ModelError with the container's sentence."""
    client = runtime(either)
    with pytest.raises(client.exceptions.ModelError) as raised:
        invoke(client, "plus-1.tar.gz", {"inputs": []})

    response = raised.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert response["OriginalStatusCode"] == 400
    assert "plus-1.tar.gz" in json.loads(response["OriginalMessage"])["error"]


@pytest.mark.parametrize("either", ["s3", pytest.param("folder", marks=pytest.mark.long)], indirect=True)
def test_the_least_recently_used_leave_when_memory_fills(either, runtime):
    """Under a small budget the least used are evicted, the one in use stays, and an evicted model answers again."""
    client = runtime(either)
    targets = [f"heavy-{number}.tar.gz" for number in range(9)]
    favourite = targets[0]
    resident = [favourite]  # in the order of their last use, as we know it
    invoke(client, favourite)
    gone = []
    for target in targets[1:]:
        assert "cache;desc=hit" in timing(invoke(client, favourite)), "whoever was used last stays"
        header = timing(invoke(client, target))
        evicted = [part.split('"')[1] for part in header.split(", ") if part.startswith("evict")]
        evicted = [name for name in evicted if name.startswith("heavy")]
        assert evicted == resident[1 : 1 + len(evicted)], "the least recently used go first"
        resident = [name for name in resident if name not in evicted] + [target]
        gone += evicted
        assert either.metric("mme_memory_used_bytes", kind="host") <= 60e6

    assert gone
    for target in gone:
        assert either.metric("mme_model_evictions_total", model=target, reason="load") == 1
        assert either.metric("mme_model_evicted_bytes_total", model=target, kind="host") >= HEAVY_MEGABYTES * 1_000_000
        lines = [line for line in either.lines if line["message"].startswith("evicted")]
        (line,) = (line for line in lines if line["target_model"] == target)
        assert (line["reason"], line["beneficiary"] in targets) == ("load", True)
    listed = [row["modelName"] for row in either.ask("GET", "/models").json["models"]]
    assert set(targets) <= set(listed), "evicted models stay registered"
    back = invoke(client, gone[0])
    assert models.y(json.load(back["Body"])) == [1, 2, 3, 4]
    assert "cache;desc=miss" in timing(back)
    assert "download;dur=0.00" in timing(back), "its archive is still on disk"


def test_a_pinned_model_stays_when_memory_fills(serve, runtime, archives):
    """Named by a pattern, a model that nobody uses again is in memory still after all others had to go."""
    environ = {"MME_MODEL_STORE": str(archives), "MME_MEMORY_BUDGET": BUDGET, "MME_PIN": "heavy-0*", **PLAIN}
    server = serve(environ | {"MME_EVICTION": "gdsf"})
    client = runtime(server)
    for number in range(9):
        invoke(client, f"heavy-{number}.tar.gz")

    evicted = [server.metric("mme_model_evictions_total", model=f"heavy-{number}.tar.gz") for number in range(9)]
    assert evicted[0] == 0
    assert sum(evicted) > 0
    assert "cache;desc=hit" in timing(invoke(client, "heavy-0"))


def test_the_disk_budget_holds(serve, runtime, archives):
    """Archives leave the disk least recently used first, with the models that they hold in memory; all are answered."""
    budget = 3 * HEAVY_MEGABYTES * 1_000_000
    server = serve({"MME_MODEL_STORE": str(archives), "MME_DISK_BUDGET": f"{budget + 100_000}", **PLAIN})
    client = runtime(server)
    for number in (*range(9), 0):
        answer = invoke(client, f"heavy-{number}.tar.gz")
        assert models.y(json.load(answer["Body"])) == [1, 2, 3, 4]
        assert "download;dur=0.00" not in timing(answer)
        assert server.metric("mme_disk_used_bytes") <= server.metric("mme_disk_budget_bytes") == budget + 100_000
        assert len(server.unpacked()) == min(number + 1, 3) or not number
    assert server.metric("mme_disk_evictions_total") == 7
    assert server.metric("mme_model_evictions_total", model="heavy-1.tar.gz", reason="disk") == 1
    assert "cache;desc=hit" in timing(invoke(client, "heavy-8.tar.gz"))


def test_weights_count_as_what_archives_take(serve, runtime, archives):
    """Of an archive whose weights lie on disk again there is room for two; the budget holds all the same."""
    budget = 4 * HEAVY_MEGABYTES * 1_000_000 + 200_000
    server = serve({"MME_MODEL_STORE": str(archives), "MME_DISK_BUDGET": str(budget)})
    client = runtime(server)
    for number in range(9):
        answer = invoke(client, f"heavy-{number}.tar.gz")
        assert models.y(json.load(answer["Body"])) == [1, 2, 3, 4]
        assert server.metric("mme_disk_used_bytes") <= budget
        assert len(server.unpacked()) < 4
    assert server.metric("mme_disk_evictions_total") > 5


def test_models_on_disk_are_served_while_s3_is_away(serve, gate, runtime, bucket, s3, archives, aws, tmp_path):
    """After a restart without S3, what was unpacked before is loaded and answers, with one warning; the rest does not."""
    for number in (1, 2):
        s3.upload_file(str(archives / f"plus-{number}.tar.gz"), bucket, f"away/plus-{number}.tar.gz")
    environ = {"MME_MODEL_STORE": f"s3://{bucket}/away", "MME_CACHE_DIR": str(tmp_path / "cache")}
    before = serve({**environ, **aws(gate.url)})
    for number in (1, 2):
        invoke(runtime(before), f"plus-{number}.tar.gz")
    assert before.stop() == 0

    server = serve({**environ, **aws("http://127.0.0.1:9")})
    client = runtime(server)
    for number in (1, 2):
        answer = invoke(client, f"plus-{number}.tar.gz")
        assert models.y(json.load(answer["Body"])) == [1 + number, 2 + number, 3 + number, 4 + number]
    with pytest.raises(client.exceptions.ServiceUnavailable):
        invoke(client, "plus-3.tar.gz")
    warnings = [line for line in server.lines if "served from disk" in line["message"]]
    assert [line["level"] for line in warnings] == ["warning"]
    assert server.ask("GET", "/ping").status == 200


@pytest.mark.parametrize("platform", [False, True], ids=["self-managed", "platform"])
def test_a_request_that_finds_no_memory_does_not_hurt_its_model(serve, tmp_path, platform):
    """What asks for too much is a 507, and the model goes on; only where nobody else decides, others left for it."""
    greedy = models.lay_out(tmp_path / "models/greedy", models.greedy())
    other = models.lay_out(tmp_path / "models/other", models.plus(1))
    if platform:
        server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
        for folder in (greedy, other):
            assert server.ask("POST", "/models", {"model_name": folder.name, "url": str(folder)}).status == 200
    else:
        server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "models"), "MME_PING_MODE": "ready"})

    def ask(size):
        tensor = {"name": "SIZE", "shape": [1], "datatype": "INT64", "data": [size]}
        return server.ask("POST", "/models/greedy/invoke", {"inputs": [tensor]})

    assert ask(1000).json["outputs"][0]["data"] == [1000]
    for _ in range(2):
        answer = ask(1 << 50)  # beyond the address space of a process
        assert answer.status == 507
        assert "greedy" in answer.error
        assert ask(1000).json["outputs"][0]["data"] == [1000]
    evictions = server.metric("mme_model_evictions_total", model="other", reason="execution")
    assert evictions == (0 if platform else 1)
    assert models.y(server.ask("POST", "/models/other/invoke", models.ONE).json) == [2, 3, 4, 5]


def test_a_model_can_be_unloaded_for_good(either, runtime):
    """DELETE of a store's model frees memory and disk; its next request fetches it anew."""
    client = runtime(either)
    invoke(client, "plus-2.tar.gz")
    before = either.unpacked()

    assert either.ask("DELETE", "/models/plus-2.tar.gz").status == 200

    assert len(either.unpacked()) == len(before) - 1
    assert either.ask("DELETE", "/models/plus-2.tar.gz").status == 404
    again = invoke(client, "plus-2.tar.gz")
    assert models.y(json.load(again["Body"])) == [3, 4, 5, 6]
    assert "cache;desc=miss" in timing(again)


def test_fifty_clients_of_a_cold_model_cause_one_load(server, gate, runtime, bucket, s3, archives):
    """A cold TargetModel hit by 50 clients at once is downloaded and loaded once, and all 50 are answered."""
    target = "crowd.tar.gz"
    key = f"{PREFIX}/{target}"
    s3.upload_file(str(archives / "plus-2.tar.gz"), bucket, key)
    client = runtime(server)
    with gate.held(key), ThreadPoolExecutor(50) as pool:
        answers = [pool.submit(invoke, client, target, models.x([n, n, n, n])) for n in range(50)]
        eventually(lambda: server.metric("mme_model_cache_misses_total", model=target) == 50, "all to wait")
        gate.release(key)
        bodies = [json.load(answer.result()["Body"]) for answer in answers]

    assert [models.y(body) for body in bodies] == [[n + 2] * 4 for n in range(50)]
    assert loads(server, target) == 1
    assert gate.downloads.count(key) == 1


def test_nothing_waits_for_a_load_that_takes_its_time(server, gate, runtime, bucket, s3, archives):
    """While downloads are stuck, a resident model answers, /ping, GET and even an unload are done before them."""
    targets = [f"slow-{number}.tar.gz" for number in range(4)]  # more than may load at once
    for target in targets:
        s3.upload_file(str(archives / "plus-1.tar.gz"), bucket, f"{PREFIX}/{target}")
    client = runtime(server)
    invoke(client, "plus-1.tar.gz")
    invoke(client, "plus-3.tar.gz")
    keys = [f"{PREFIX}/{target}" for target in targets]
    with ThreadPoolExecutor(4) as pool, gate.held(*keys):
        slow = [pool.submit(invoke, client, target) for target in targets]
        for target in targets:
            eventually(lambda t=target: server.metric("mme_model_cache_misses_total", model=t) == 1, "it to wait")
        gate.wait_for(keys, 2)  # as many as may load at once

        for _ in range(20):
            assert models.y(json.load(invoke(client, "plus-1.tar.gz")["Body"])) == [2, 3, 4, 5]
            assert server.ask("GET", "/ping").status == 200
            assert server.ask("GET", "/models").status == 200
            assert server.ask("GET", "/v2/models/plus-1.tar.gz/ready").status == 200
        assert server.ask("DELETE", "/models/plus-3.tar.gz").status == 200
        assert not any(answer.done() for answer in slow)
        for key in keys:
            gate.release(key)
        assert [models.y(json.load(answer.result()["Body"])) for answer in slow] == [[2, 3, 4, 5]] * 4


def test_a_model_that_loads_for_too_long_is_not_ready_yet(serve, gate, runtime, bucket, s3, archives, aws):
    """A load that outlasts the request's patience is boto3's ModelNotReadyException; it goes on and answers later."""
    target = "late.tar.gz"
    key = f"{PREFIX}/{target}"
    s3.upload_file(str(archives / "plus-1.tar.gz"), bucket, key)
    environ = {"MME_MODEL_STORE": f"s3://{bucket}/{PREFIX}", "MME_REQUEST_TIMEOUT": "0.3", **aws(gate.url)}
    server = serve(environ)
    client = runtime(server)
    with gate.held(key):
        with pytest.raises(client.exceptions.ModelNotReadyException) as raised:
            invoke(client, target)
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 429
        assert target in raised.value.response["Error"]["Message"]
    eventually(lambda: loads(server, target) == 1, "the load to go on")
    assert models.y(json.load(invoke(client, target)["Body"])) == [2, 3, 4, 5]


def test_a_new_version_of_an_archive_is_served_after_an_unload(server, runtime, bucket, s3, archives):
    """The etag decides: after an unload a replaced archive is fetched and served."""
    target, client = "changing.tar.gz", runtime(server)
    for number in (1, 3):
        s3.upload_file(str(archives / f"plus-{number}.tar.gz"), bucket, f"{PREFIX}/{target}")
        assert models.y(json.load(invoke(client, target)["Body"]))[0] == 1 + number
        assert server.ask("DELETE", f"/models/{target}").status == 200


def test_a_store_that_can_not_be_reached_is_not_the_models_fault(serve, runtime, aws, tmp_path):
    """With S3 away a request is ServiceUnavailable, with the store in the sentence; the server lives on."""
    server = serve({"MME_MODEL_STORE": "s3://bucket/models", **aws("http://127.0.0.1:9")})
    client = runtime(server)

    with pytest.raises(client.exceptions.ServiceUnavailable) as raised:
        invoke(client, "plus-1.tar.gz")

    assert "s3://bucket/models" in str(raised.value)
    assert server.ask("GET", "/ping").status == 200
