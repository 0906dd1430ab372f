"""A Triton model repository in S3 behind the real server: directories under a prefix, as they are on a disk elsewhere."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.contract import models
from tests.contract.server import Server, eventually, kill
from tests.contract.test_ensembles import PYTHON, ensemble, python_model

PREFIX = "team/repository"
BATCHING = "max_batch_size: 8\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What is uploaded: two models, the first of two versions, a Python model, and an ensemble of all."""
    root = tmp_path_factory.mktemp("repository")
    models.lay_out(root / "one", models.plus(1), "version_policy: { all {} }\nmax_batch_size: 8\n")
    models.lay_out(root / "one", models.plus(1), "version_policy: { all {} }\nmax_batch_size: 8\n", version=3)
    models.lay_out(root / "two", models.plus(2), BATCHING)
    python_model(root / "ten", PYTHON)
    ensemble(root / "chain", "one IN a", "ten a b", "two b OUT")
    return root


@pytest.fixture
def upload(s3, bucket, repository):
    """A function that puts a model, or one file of a model, under a prefix."""

    def put(prefix, *names, **contents):
        for name in names:
            for file in (path for path in (repository / name).rglob("*") if path.is_file()):
                s3.upload_file(str(file), bucket, f"{prefix}/{file.relative_to(repository).as_posix()}")
        for key, content in contents.items():
            s3.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=content)

    return put


@pytest.fixture
def start(serve, bucket, gate, aws, tmp_path):
    """A function that starts a server of what lies under prefixes; all of them have one cache."""

    def started(*prefixes, ready=True, exit_code=0, **environ):
        urls = ",".join(f"s3://{bucket}/{prefix}" for prefix in prefixes)
        own = {
            "MME_MODEL_REPOSITORY": urls,
            "MME_CACHE_DIR": str(tmp_path / "cache"),
            "MME_ALLOW_LOAD_OVERRIDES": "true",
        }
        server = serve({**own, **aws(gate.url), **environ}, ready=ready, exit_code=exit_code)
        server.cache = tmp_path / "cache"
        return server

    return started


def infer(server, name, version=None, data=(1, 2, 3, 4)):
    """The first output, or the error."""
    tensor = {"name": "IN" if name == "chain" else "X", "shape": [1, 4], "datatype": "FP32", "data": list(data)}
    path = f"/v2/models/{name}/versions/{version}/infer" if version else f"/v2/models/{name}/infer"
    answer = server.ask("POST", path, {"inputs": [tensor]})
    return answer.json["outputs"][0]["data"] if answer.status == 200 else (answer.status, answer.error)


def index(server):
    """Model and version → state, "" for a model that never was loaded."""
    rows = server.ask("POST", "/v2/repository/index", {}).json
    return {(row["name"], row.get("version", "")): row.get("state", "") for row in rows}


def load(server, name, verb="load", parameters=None):
    """What the model control API says: None, or the error."""
    answer = server.ask("POST", f"/v2/repository/models/{name}/{verb}", {"parameters": parameters or {}})
    return None if answer.status == 200 else (answer.status, answer.error)


def test_all_models_are_loaded_at_start_and_downloaded_once(upload, start, gate):
    """Versions, an ensemble and a Python model answer; a server that starts behind it finds all of them on disk."""
    upload(PREFIX, "one", "two", "ten", "chain")
    server = start(PREFIX)
    eventually(lambda: list(index(server).values()) == ["READY"] * 5, "all models")
    assert infer(server, "one") == infer(server, "one", 1) == infer(server, "one", 3) == [2, 3, 4, 5]
    assert infer(server, "chain") == [22, 32, 42, 52]
    status, error = infer(server, "nobody")
    assert status == 404
    assert "unknown model: 'nobody' is not found: there is nothing under s3://" in error
    assert load(server, "nobody") == (500, "failed to load 'nobody', failed to poll from model repository")
    assert ("nobody", "") not in index(server)
    downloads = [key for key in gate.downloads if PREFIX in key]
    of_all = [key for key in downloads if not key.endswith("/one/config.pbtxt")]  # read first, for its version policy
    assert len(of_all) == len(set(of_all))
    assert sum("/one/" in key for key in downloads) == 4
    server.stop()

    gate.downloads.clear()
    again = start(PREFIX)
    eventually(lambda: list(index(again).values()) == ["READY"] * 5, "all models")
    assert infer(again, "chain") == [22, 32, 42, 52]
    assert [key for key in gate.downloads if "/model." in key] == []


def test_a_server_that_is_killed_while_it_downloads_leaves_no_half_model(upload, start, gate):
    """The next one on that disk downloads the model whole, and sweeps away what the first had of it."""
    prefix = "killed"
    upload(prefix, "one")
    key = f"{prefix}/one/1/model.onnx"
    with gate.held(key):
        first = start(prefix, ready=False, exit_code=-signal.SIGKILL)
        gate.wait_for([key])
        eventually(first.staging, "the directory that grows")
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
    assert first.staging() != []
    second = start(prefix)
    eventually(lambda: infer(second, "one") == [2, 3, 4, 5], "the whole model")
    assert second.staging() == []


def test_models_are_loaded_and_unloaded_by_the_control_api(upload, start, s3, bucket):
    """In mode explicit: an ensemble brings its parts along, a load takes what is there now, with another configuration."""
    prefix = "explicit"
    upload(prefix, "one", "two", "ten", "chain")
    server = start(prefix, MME_MODEL_CONTROL_MODE="explicit", MME_LOAD_MODEL="one")
    assert infer(server, "one") == [2, 3, 4, 5]
    assert infer(server, "two")[0] == 404
    assert index(server) == {
        ("one", "1"): "READY",
        ("one", "3"): "READY",
        **{(n, ""): "" for n in ("chain", "ten", "two")},
    }
    assert load(server, "chain") is None
    assert infer(server, "chain") == [22, 32, 42, 52]
    assert infer(server, "two") == [3, 4, 5, 6]

    upload(prefix, **{"two/1/model.onnx": models.plus(200)})
    assert load(server, "two") is None
    assert infer(server, "two") == [201, 202, 203, 204]
    assert infer(server, "chain") == [220, 230, 240, 250], "an ensemble is loaded anew with its part"

    assert load(server, "two", "unload") is None
    assert infer(server, "chain") == (404, "Request for unknown model: 'chain' has no available versions")
    assert load(server, "two") is None
    assert infer(server, "chain") == [220, 230, 240, 250], "an ensemble leaves and comes with its part"

    config = {"backend": "onnxruntime", "max_batch_size": 2}
    assert load(server, "two", parameters={"config": json.dumps(config)}) is None
    assert server.ask("GET", "/v2/models/two/config").json["max_batch_size"] == 2

    assert load(server, "chain", "unload", {"unload_dependents": True}) is None
    assert infer(server, "chain")[0] == 404
    assert {key: state for key, state in index(server).items() if key[0] == "ten"} == {("ten", "1"): "UNAVAILABLE"}
    for path, body in (("/infer", models.ONE), ("", None), ("/config", None)):
        method = "GET" if body is None else "POST"
        answer = server.ask(method, f"/v2/models/ten/versions/1{path}", body)
        assert (answer.status, answer.error) == (
            503,
            "Request for unknown model: 'ten' version 1 is not at ready state",
        )
        assert server.ask(method, f"/v2/models/ten/versions/2{path}", body).status == 404
        assert server.ask(method, f"/v2/models/ten{path}", body).status == 404
    assert server.ask("GET", "/v2/models/ten/stats").error == "requested model 'ten' is not available"
    assert load(server, "ten") is None
    assert infer(server, "ten") == [10, 20, 30, 40]

    s3.put_object(Bucket=bucket, Key=f"{prefix}/bad/", Body=b"")
    status, error = load(server, "bad")
    assert status == 400
    assert f"model 'bad' has no files in s3://{bucket}/{prefix}/bad/: put config.pbtxt and 1/model.onnx there" in error


def test_repositories_that_are_polled_follow_their_bucket(upload, start, s3, bucket):
    """Two prefixes are one repository. What comes is loaded, what changes is loaded anew with the ensembles made of it, what goes is unloaded, also while no worker looks."""
    prefix = "polled"
    upload(prefix, "two")
    server = start(prefix, f"{prefix}-too", MME_MODEL_CONTROL_MODE="poll", MME_REPOSITORY_POLL_SECS="0.2")
    eventually(lambda: infer(server, "two") == [3, 4, 5, 6], "the model of the start")
    assert load(server, "two")[0] == 503
    upload(prefix, "one")
    upload(f"{prefix}-too", "ten", "chain")
    eventually(lambda: infer(server, "chain") == [22, 32, 42, 52], "what came")
    upload(prefix, **{"two/1/model.onnx": models.plus(3)})
    eventually(lambda: infer(server, "two") == [4, 5, 6, 7], "what changed")
    eventually(lambda: infer(server, "chain") == [23, 33, 43, 53], "what is made of it")
    s3.delete_object(Bucket=bucket, Key=f"{prefix}-too/chain/config.pbtxt")
    eventually(lambda: "chain" not in {name for name, _ in index(server)}, "what went")
    assert infer(server, "chain")[0] == 404
    assert infer(server, "two") == [4, 5, 6, 7]

    server.worker.suspend()
    for key in ("1/model.onnx", "3/model.onnx", "config.pbtxt"):
        s3.delete_object(Bucket=bucket, Key=f"{prefix}/one/{key}")
    kill(server)
    eventually(lambda: {name for name, _ in index(server)} == {"ten", "two"}, "what went meanwhile")
    eventually(lambda: infer(server, "two") == [4, 5, 6, 7], "what stayed")


def test_a_repository_that_can_not_be_read_yet_is_read_later(upload, start, s3, s3_url, aws, serve, tmp_path):
    """No bucket: the log names it and the server is there; once it is made, its models are loaded."""
    url = f"s3://{s3_url.removeprefix('http://')}/made-later-{tmp_path.stat().st_ino}/r"
    environ = {**aws("http://127.0.0.1:9"), "MME_MODEL_REPOSITORY": url, "MME_REPOSITORY_POLL_SECS": "0.2"}
    server = serve(environ)
    eventually(lambda: "nothing is loaded at start until store or repository can be read" in server.log, "the log")
    name = url.split("/")[3]
    assert f"/{name}/r/ does not exist: create it, or name another" in server.log
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="r/late/1/model.onnx", Body=models.plus(5))
    eventually(lambda: ("late", "1") in index(server), "the model")
    assert infer(server, "late") == [6, 7, 8, 9]


def test_credentials_may_come_from_a_file_as_tritons(upload, start, tmp_path, bucket):
    """Those of the longest prefix; what can't be read, or used, keeps the server from starting."""
    upload("keyed", "one")
    file = tmp_path / "credentials.json"
    known = {"key_id": "test", "secret_key": "test", "region": "us-east-1", "session_token": "", "profile": ""}
    nobody = {"profile": "nobody"}
    file.write_text(json.dumps({"s3": {"": nobody, f"s3://{bucket}": known}, "gs": {"": "path"}}))
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_DEFAULT_REGION": ""}
    server = start("keyed", TRITON_CLOUD_CREDENTIAL_PATH=str(file), **none)
    eventually(lambda: infer(server, "one") == [2, 3, 4, 5], "the model")
    assert server.stop() == 0

    file.write_text('{"s3": {"": {"key_id": "7"}}}')
    with pytest.raises(AssertionError, match="ended at once"):
        start("keyed", TRITON_CLOUD_CREDENTIAL_PATH=str(file))
    file.write_text(json.dumps({"s3": {"": nobody}}))
    environ = {"MME_MODEL_REPOSITORY": f"s3://{bucket}/keyed", "TRITON_CLOUD_CREDENTIAL_PATH": str(file)}
    last = Server(tmp_path / "last", environ, ready=False)
    with pytest.raises((AssertionError, OSError)):
        last.__enter__()
    assert "The config profile (nobody) could not be found" in last.log
    assert last.log.count("Booting worker") == 1
    assert "Traceback" not in last.log
