"""The server as processes: loads that take their time, signals, deaths, and what is there afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.contract import models
from tests.contract.server import SCRIPTS, clean_environment, eventually, post
from tests.processes import is_over

# Executes in the server's own process, for as long as a file is not there.
WAITS = """
import pathlib
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        while not pathlib.Path("{go}").exists():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
WAITS_CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "MME_PLACEMENT" value { string_value: "inline" } }
"""
# Says where it runs.
WHERE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        where = np.array([os.getcwd()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", where)]) for _ in requests]
"""
WHERE_CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
# Waits at its end for five others.
LAST_WORDS = """
import os
import pathlib
import time
import triton_python_backend_utils as pb_utils

OWN = pathlib.Path("{words}") / str(os.getpid())


class TritonPythonModel:
    def execute(self, requests):
        raise pb_utils.TritonModelException("it is for its end")

    def finalize(self):
        OWN.touch()
        until = time.monotonic() + 5
        while len(os.listdir(OWN.parent)) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        OWN.write_text("met" if len(os.listdir(OWN.parent)) == 6 else "alone")
"""
LAST_WORDS_CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }
instance_group { count: 3 kind: KIND_CPU }
"""


def slow_to_load(folder):
    """A model directory whose load waits until somebody writes the model into the pipe that is returned."""
    pipe = models.lay_out(folder, b"") / "1" / "model.onnx"
    pipe.unlink()
    os.mkfifo(pipe)
    return pipe


@contextlib.contextmanager
def filled_at_last(pipe, content):
    """Whatever happens in the block, whoever reads the pipe gets to its end."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(fd, True)
            with os.fdopen(fd, "wb") as file:
                file.write(content)


def ping(server):
    """The status of a ping, 0 where nobody listens any more."""
    try:
        return server.ask("GET", "/ping").status
    except ConnectionError:
        return 0


def test_resident_models_answer_while_another_loads(serve, tmp_path):
    """While a framework reads a model file that takes for ever, /ping, GET, invokes and an UNLOAD are all done."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    base = tmp_path / "opt/ml/models"
    for name in ("one", "two"):
        url = str(models.lay_out(base / name / "model", models.plus(1)))
        assert server.ask("POST", "/models", {"model_name": name, "url": url}).status == 200
    pipe = slow_to_load(base / "slow/model")

    with ThreadPoolExecutor(3) as pool, filled_at_last(pipe, models.plus(5)):
        body = {"model_name": "slow", "url": str(base / "slow/model")}
        loading = pool.submit(server.ask, "POST", "/models", body)
        index = "/v2/repository/index"
        eventually(
            lambda: ("slow", "LOADING") in [(row["name"], row["state"]) for row in server.ask("GET", index).json],
            "the load to begin",
        )
        early = pool.submit(server.ask, "POST", "/models/slow/invoke", models.ONE)

        for _ in range(20):
            assert models.y(server.ask("POST", "/models/one/invoke", models.ONE).json) == [2, 3, 4, 5]
            assert ping(server) == 200
            names = [row["modelName"] for row in server.ask("GET", "/models").json["models"]]
            assert names == ["one", "two"], "a model that still loads is not listed"
        assert server.ask("POST", "/models", body).status == 409
        assert server.ask("GET", "/models/slow").status == 404
        assert server.ask("DELETE", "/models/two").status == 200
        assert not loading.done()
        assert not early.done()

        pipe.write_bytes(models.plus(5))
        assert loading.result().status == 200
        assert models.y(early.result().json) == [6, 7, 8, 9], "an invoke that came during the load waited for it"
        pipe.unlink()
        pipe.touch()


def test_a_sigterm_lets_what_was_accepted_finish(serve, tmp_path):
    """SIGTERM during an inference: both that runs and those that wait are answered, pings are not, exit code 0."""
    models.lay_out(tmp_path / "repository" / "waits", WAITS.format(go=tmp_path / "go"), WAITS_CONFIG)
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "repository"), "MME_PING_MODE": "ready"})
    path, body = "/v2/models/waits/infer", {"inputs": [{"name": "N", "shape": [1], "datatype": "INT64", "data": [7]}]}
    with ThreadPoolExecutor(1) as pool, server.connect() as connection:
        running = pool.submit(server.ask, "POST", path, body)
        connection.send(post(path, body) + b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="waits") == 1, "one to wait")

        server.process.terminate()
        try:
            eventually(lambda: ping(server) in {503, 0}, "pings to be refused")
        finally:
            (tmp_path / "go").touch()

        assert running.result().status == 200
        waited = connection.answer()
        assert waited.status == 200
        assert waited.json["outputs"][0]["data"] == [7]
        late = connection.answer()
        assert (late.status, late.headers["connection"]) == (503, "close")
        assert connection.ended()
    assert server.stop() == 0
    assert ping(server) == 0


def test_a_sigterm_before_the_start_is_over_ends_it(tmp_path):
    """It is kept until somebody handles it: nothing is served, and the exit code is that of any other SIGTERM."""
    environ = clean_environment(tmp_path, SAGEMAKER_MULTI_MODEL="true", MME_HOST="127.0.0.1", MME_PORT="0")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the process has that from its first moment
    try:
        process = subprocess.Popen([SCRIPTS / "serve"], env=environ, stderr=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.terminate()
    said = process.communicate(timeout=60)[1]

    assert process.returncode == 0, said
    assert "Listening at" in said
    assert "Booting worker" not in said


def test_a_sigterm_loses_no_request_on_kept_connections(serve):
    """Each is answered until an answer says that the connection closes: none is closed while a request is on its way."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true"})
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(server.connect()) for _ in range(8)]
        asked = 0
        while kept:
            asked += 1
            if asked == 3:
                server.process.terminate()
            answers = [(each, each.send(b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n").answer()) for each in kept]
            assert {answer.status for _, answer in answers} == {200}
            kept = [each for each, answer in answers if answer.headers.get("connection") != "close"]
        assert asked >= 3


def test_a_sigterm_ends_idle_connections_soon(serve):
    """Idle connections do not keep a server from ending."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "MME_DRAIN_SECONDS": "600"})
    with server.connect() as idle, server.connect() as silent:
        assert idle.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n").answer().status == 200
        assert server.stop() == 0
        assert idle.ended()
        assert silent.ended()


def test_a_drain_that_takes_too_long_is_cut(serve, tmp_path):
    """Whoever is not answered within MME_DRAIN_SECONDS is left without an answer, and the log says how many."""
    repository = tmp_path / "repository"
    config = (
        "max_batch_size: 4\ndynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 60000000 }\n"
    )
    models.lay_out(repository / "fours", models.plus(1), config)
    server = serve({"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_DRAIN_SECONDS": "0.2"})
    with server.connect() as waiting:
        waiting.send(post("/v2/models/fours/infer", models.ONE))
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="fours") == 1, "it to wait")

        assert server.stop() == 0

        with contextlib.suppress(ConnectionResetError):
            assert waiting.socket.recv(1) == b""
    assert "1 requests were not answered within" in server.log


@pytest.mark.parametrize(
    ("placement", "waits"),
    [("inline", True), pytest.param("process", True, marks=pytest.mark.long), ("process", False)],
)
def test_models_that_are_stuck_do_not_keep_the_server(serve, tmp_path, placement, waits):
    """It ends of itself when the drain is over, and their processes with it, whether or not anybody waits for them."""
    repository = tmp_path / "repository"
    config = WAITS_CONFIG.replace('"inline"', f'"{placement}"')
    for name in ("a", "b"):
        began = tmp_path / name
        code = WAITS.format(go=tmp_path / "never").replace(
            "        while", f"        open('{began}', 'w').close()\n        while"
        )
        models.lay_out(repository / name, code, config)
    server = serve({"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_DRAIN_SECONDS": "0.2"})
    with server.connect() as first, server.connect() as second:
        for name, connection in (("a", first), ("b", second)):
            document = {"inputs": [{"name": "N", "datatype": "INT64", "shape": [1], "data": [1]}]}
            connection.send(post(f"/v2/models/{name}/infer", document))
        eventually(lambda: all((tmp_path / name).exists() for name in ("a", "b")), "both to be stuck")
        if not waits:
            left = [server.other_end(connection) for connection in (first, second)]
            first.reset()
            second.reset()
            eventually(lambda: not server.sockets() & set(left), "the server to hear that its clients left")
        processes = list(server.processes)

        assert server.stop() == 0

    assert "models still execute; ending without them" in server.log  # it was not killed for being late
    assert ("2 requests were not answered" in server.log) is waits
    eventually(lambda: not any(process.is_running() for process in processes), "their processes to end")


def test_models_say_their_last_words_side_by_side(serve, tmp_path):
    """On SIGTERM finalize of all models and instances runs at the same time; here each waits for all others."""
    words = tmp_path / "words"
    words.mkdir()
    for name in ("a", "b"):
        models.lay_out(tmp_path / "repository" / name, LAST_WORDS.format(words=words), LAST_WORDS_CONFIG)
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "repository"), "MME_PING_MODE": "ready"})
    eventually(lambda: ping(server) == 200, "the models to be there")

    assert server.stop() == 0

    assert [path.read_text() for path in words.iterdir()] == ["met"] * 6


def test_a_load_that_never_ends_does_not_keep_the_server(serve, tmp_path):
    """A SIGTERM while a framework is stuck in a load ends the server in time, and whoever waits for it is told."""
    server = serve({"SAGEMAKER_MULTI_MODEL": "true", "MME_DRAIN_SECONDS": "0"})
    slow_to_load(tmp_path / "slow/model")
    with server.connect() as waiting:
        waiting.send(post("/models", {"model_name": "slow", "url": str(tmp_path / "slow/model")}))
        index = "/v2/repository/index"
        eventually(lambda: server.ask("POST", index, {}).json, "the load to begin")

        assert server.stop() == 0

        answer = waiting.answer()
        assert answer.status == 503
        assert answer.error == "the load of model 'slow' was cut short: this server is shutting down"


def test_a_sigterm_in_a_download_is_told_and_leaves_nothing(serve, gate, bucket, s3, aws, tmp_path):
    """A request that waits for a download is told that the server ends, and nothing of it is left in the cache."""
    archive = models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), tmp_path / "plus.tar.gz")
    s3.upload_file(str(archive), bucket, "plus.tar.gz")
    cache = tmp_path / "cache"
    environ = {
        "MME_MODEL_STORE": f"s3://{bucket}",
        "MME_DRAIN_SECONDS": "0",
        "MME_CACHE_DIR": str(cache),
        **aws(gate.url),
    }
    first = serve(environ)
    with gate.held("plus.tar.gz"), first.connect() as waiting:
        waiting.send(post("/models/plus/invoke", models.ONE))
        gate.wait_for(["plus.tar.gz"])

        assert first.stop() == 0
        answer = waiting.answer()
        assert answer.status == 503
        assert answer.error == "the load of model 'plus.tar.gz' was cut short: this server is shutting down"
    assert [path.name for path in cache.iterdir() if path.is_dir() and path.name not in {".locks", ".sums"}] == []

    second = serve(environ)
    assert models.y(second.ask("POST", "/models/plus/invoke", models.ONE).json) == [2, 3, 4, 5]


def test_a_worker_that_dies_is_replaced(serve, tmp_path):
    """After SIGKILL of the worker, in the middle of a load, the next one serves, and what was half done is gone."""
    store = tmp_path / "store"
    models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), store / "plus.tar.gz")
    server = serve({"MME_MODEL_STORE": str(store)})
    invoke = {"X_Amzn_SageMaker_Target_Model": "plus.tar.gz"}
    assert server.ask("POST", "/invocations", models.ONE, **invoke).status == 200
    dead = server.worker
    (server.cache / ".staging-left").mkdir()  # as a load in its middle leaves it

    dead.send_signal(signal.SIGKILL)
    eventually(lambda: is_over(dead), "its end")
    eventually(lambda: ping(server) == 200, "another worker")

    assert server.worker.pid != dead.pid
    answer = server.ask("POST", "/invocations", models.ONE, **invoke)
    assert models.y(answer.json) == [2, 3, 4, 5]
    assert "download;dur=0.00" in answer.headers["server-timing"], "its archive is still unpacked"
    assert server.staging() == []
    assert server.stop() == 0


def test_a_second_start_finds_what_the_first_unpacked(tmp_path, serve):
    """The cache folder outlives a server: the next one does not fetch an archive that has not changed."""
    store = tmp_path / "store"
    models.pack(models.lay_out(tmp_path / "plus", models.plus(1)), store / "plus.tar.gz")
    cache = tmp_path / "cache"
    timings = []
    for _ in range(2):
        server = serve({"MME_MODEL_STORE": str(store), "MME_CACHE_DIR": str(cache)})
        answer = server.ask("POST", "/invocations", models.ONE, X_Amzn_SageMaker_Target_Model="plus")
        assert models.y(answer.json) == [2, 3, 4, 5]
        timings.append("download;dur=0.00" in answer.headers["server-timing"])
        assert server.stop() == 0
    assert timings == [False, True]
    shutil.rmtree(cache)


def test_models_run_where_the_server_was_started(serve, tmp_path, monkeypatch):
    """Relative paths of theirs mean what they mean under Triton."""
    models.lay_out(tmp_path / "repository" / "where", WHERE, WHERE_CONFIG)
    started = tmp_path / "started"
    started.mkdir()
    monkeypatch.chdir(started)
    server = serve({"MME_MODEL_REPOSITORY": str(tmp_path / "repository"), "MME_PING_MODE": "ready"})
    document = {"inputs": [{"name": "N", "datatype": "INT64", "shape": [1], "data": [1]}]}

    answer = server.ask("POST", "/v2/models/where/infer", document)

    assert answer.json["outputs"][0]["data"] == [str(started)]
