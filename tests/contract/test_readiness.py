"""`is_ready` of a Python model's class, asked by Triton's clients over HTTP and gRPC: nobody else waits for it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.contract import models
from tests.contract.server import Server, eventually, post

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 2 kind: KIND_CPU }
"""
ONE = CONFIG.replace("count: 2", "count: 1")
AROUND = """
platform: "ensemble"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "mortal" input_map { key: "N" value: "N" } output_map { key: "PID" value: "PID" } } }
"""
INLINE = 'parameters { key: "MME_PLACEMENT" value { string_value: "inline" } }\n'
MODEL = """
import asyncio
import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

DEADLY = 13


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])
        self.instance = args["model_instance_name"][-1]

    def execute(self, requests):
        self.wait("execute")
        if requests[0].inputs()[0].as_numpy()[0] == DEADLY:
            os._exit(3)
        pid = pb_utils.Tensor("PID", np.array([os.getpid()], np.int32))
        return [pb_utils.InferenceResponse([pid]) for _ in requests]

    def wait(self, who):
        (self.folder / f"entered-{who}-{self.instance}").touch()
        while (self.folder / f"hold-{who}").exists():
            time.sleep(0.001)

    def says(self):
        self.wait("is_ready")
        said = (self.folder / f"says-{self.instance}").read_text()
        if said == "raise":
            raise ValueError("no database")
        return {"yes": True, "no": False, "word": "yes", "nothing": None}[said]
"""
PLAIN = "\n    def is_ready(self):\n        return self.says()\n"
COROUTINE = "\n    async def is_ready(self):\n        await asyncio.sleep(0)\n        return self.says()\n"
SLOW = "\n    def initialize(self, args):\n        self.folder = Path(args['model_repository'])\n        self.instance = '0'\n        self.wait('initialize')\n"
MANY = 300
MODELS = {
    "plain": (MODEL + PLAIN, CONFIG),
    "coroutine": (MODEL + COROUTINE, CONFIG),
    "inline": (MODEL + PLAIN, CONFIG + INLINE),
    "silent": (MODEL, CONFIG),
    "mortal": (MODEL + PLAIN, ONE),
    "around": ("", AROUND),
}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Processes that are started again are the server's, which ends them behind the last test."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """The models above, all of which are ready."""
    folder = tmp_path_factory.mktemp("repository")
    for name, (source, config) in MODELS.items():
        models.lay_out(folder / name, source or None, config)
        for instance in "01":
            (folder / name / f"says-{instance}").write_text("yes")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server of them, over HTTP and gRPC."""
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_PING_MODE": "ready", "MME_GRPC_PORT": "0"}
    with Server(tmp_path_factory.mktemp("readiness"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def clients(server):
    """Triton's two clients."""
    with (
        tritonclient.http.InferenceServerClient(server.address) as http,
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as grpc,
    ):
        yield http, grpc


@pytest.fixture
def hold(repository):
    """Have a model's method wait from now on; what it returns lets it go on, as does the end of the test."""
    held = []

    def hold(model, who):
        held.append(repository / model / f"hold-{who}")
        held[-1].touch()
        for instance in "01":
            (repository / model / f"entered-{who}-{instance}").unlink(missing_ok=True)
        return held[-1].unlink

    yield hold
    for file in held:
        file.unlink(missing_ok=True)


def entered(repository, model, who):
    """Wait until every instance is in that method."""
    files = [repository / model / f"entered-{who}-{instance}" for instance in "01"]
    eventually(lambda: all(file.exists() for file in files), f"{model} to enter {who}")


def ask(server, model, number=0):
    """The answer to a request."""
    document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [number]}]}
    return server.ask("POST", f"/v2/models/{model}/infer", document)


def infer(server, model):
    """The process that answers."""
    answer = ask(server, model)
    assert answer.status == 200, answer.body
    return answer.json["outputs"][0]["data"][0]


def probe(server, model, base=""):
    """The status of Triton's route."""
    return server.ask("GET", f"{base}/v2/models/{model}/ready").status


def state(server, model):
    """What the index says of its version, and why."""
    [row] = [row for row in server.ask("POST", "/v2/repository/index", {}).json if row["name"] == model]
    return row["state"], row.get("reason")


@pytest.mark.parametrize("model", ["plain", "coroutine", "inline"])
@pytest.mark.parametrize("word", ["no", "raise", "word", "nothing"])
def test_a_model_is_ready_when_all_its_instances_say_so(server, clients, repository, model, word):
    """One that says no, fails, or says neither yes nor no is not; it is asked each time, and goes on to answer."""
    file = repository / model / ("says-0" if model == "inline" else "says-1")  # in the serving process there is one
    assert [client.is_model_ready(model) for client in clients] == [True, True]
    try:
        file.write_text(word)
        assert [client.is_model_ready(model, "1") for client in clients] == [False, False]
        refused = server.ask("GET", f"/v2/models/{model}/ready")
        assert (refused.status, refused.error) == (400, f"Model version not ready: '{model}'")
        assert clients[0].is_server_ready()
        infer(server, model)
    finally:
        file.write_text("yes")
    assert [client.is_model_ready(model) for client in clients] == [True, True]


def test_what_went_wrong_is_in_the_log(server, repository):
    """With the place in the model's code; of a model that just says no there is nothing to say."""
    try:
        for word in ("no", "raise", "word"):
            (repository / "plain" / "says-0").write_text(word)
            assert probe(server, "plain") == 400
    finally:
        (repository / "plain" / "says-0").write_text("yes")
    for words in (
        "is_ready failed: ValueError: no database",
        "is_ready returned <class 'str'>, expected True or False",
    ):
        eventually(lambda words=words: words in server.log, words)


def test_a_model_may_execute_while_it_is_asked_and_be_asked_while_it_executes(server, repository, hold):
    """Neither waits for the other."""
    with ThreadPoolExecutor(4) as threads:
        release = hold("plain", "execute")
        executing = [threads.submit(infer, server, "plain") for _ in range(2)]
        entered(repository, "plain", "execute")
        assert probe(server, "plain") == 200
        release()
        assert len({execution.result() for execution in executing}) == 2

        release = hold("plain", "is_ready")
        asked = threads.submit(probe, server, "plain")
        entered(repository, "plain", "is_ready")
        infer(server, "plain")
        release()
        assert asked.result() == 200


def test_nobody_else_waits_for_models_that_think_or_load(server, repository, hold):
    """However many ask for it: of the server, of other models, and of what is loaded, all is answered as ever."""
    models.lay_out(repository / "slow", MODEL + SLOW, ONE)
    ready, loaded = hold("coroutine", "is_ready"), hold("slow", "initialize")
    ask_ready = b"GET /v2/models/coroutine/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ask_load = post("/v2/repository/models/slow/load", {})
    with ExitStack() as connections:
        asked = [connections.enter_context(server.connect()).send(ask_load) for _ in range(MANY)]
        eventually((repository / "slow" / "entered-initialize-0").exists, "the load")
        # last, since a model that thinks for five seconds is not ready
        asked += [connections.enter_context(server.connect()).send(ask_ready) for _ in range(MANY)]
        entered(repository, "coroutine", "is_ready")
        for path in ("/v2/health/ready", "/ping", "/v2/models/silent/ready", "/v2/models/stats", "/metrics"):
            assert server.ask("GET", path).status == 200
        infer(server, "silent")
        assert server.worker.num_threads() < 100
        ready()
        loaded()
        assert {connection.answer().status for connection in asked} == {200}


def test_a_model_whose_process_dies_meanwhile_is_not_ready(server, repository, hold):
    """Who asked is told at once. The next request starts it again, so that it is ready before and after that."""
    pid = infer(server, "plain")
    with ThreadPoolExecutor(1) as threads:
        release = hold("plain", "is_ready")
        asked = threads.submit(probe, server, "plain")
        entered(repository, "plain", "is_ready")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "process of 'plain_" in server.log and "SIGKILL" in server.log, "the death")
        release()
        assert asked.result() == 400
    assert probe(server, "plain") == 200
    assert pid not in {infer(server, "plain") for _ in range(3)}
    assert probe(server, "plain") == 200


@pytest.mark.parametrize("model", ["mortal", "around"])
def test_a_model_that_died_too_often_is_not_ready_and_a_load_begins_anew(server, clients, repository, model):
    """So is an ensemble of one. Until then it is not ready, though nothing of it changed and its code is not asked."""
    assert [ask(server, model, 13).status for _ in range(6)] == [500] * 6
    refused = ask(server, model)
    assert (refused.status, "died too often" in refused.error) == (503, True)
    assert [client.is_model_ready(model) for client in clients] == [False, False]
    assert state(server, model) == ("UNAVAILABLE", "a process of it died too often; a load begins anew")
    assert server.ask("POST", f"/v2/repository/models/{model}/load").status == 200
    assert [client.is_model_ready(model) for client in clients] == [True, True]
    assert state(server, model) == ("READY", None)
    infer(server, model)


def test_an_ensemble_is_ready_when_the_models_of_its_steps_are(server, clients, repository):
    """Each of its instances is asked, as of any other model."""
    try:
        (repository / "mortal" / "says-0").write_text("no")
        assert [client.is_model_ready("around") for client in clients] == [False, False]
    finally:
        (repository / "mortal" / "says-0").write_text("yes")
    assert [client.is_model_ready("around") for client in clients] == [True, True]
