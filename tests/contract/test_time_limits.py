"""Time limits behind a real server: of a request, from its arrival; of an execution, whose process is ended then."""

from __future__ import annotations

import json
import textwrap
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.contract.server import Server, eventually, post

CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
"""
LIMIT = 'parameters {{ key: "MME_EXECUTION_TIMEOUT" value: {{ string_value: "{0}" }} }}'
MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        deed, _, argument = request.request_id().partition(" ")
        sent = pb_utils.InferenceResponse([pb_utils.Tensor("PID", np.array([os.getpid()], np.int32))])
        if deed == "sleep":
            time.sleep(float(argument))
        while deed == "until" and not os.path.exists(argument):
            time.sleep(0.01)
        if deed == "stream":
            count, gap = argument.split()
            for _ in range(int(count)):
                time.sleep(float(gap))
                request.get_response_sender().send(sent)
            time.sleep(0 if float(gap) else 12)
        return sent
"""
DECOUPLED = MODEL.replace(
    "return [self.answer(request) for request in requests]",
    """for request in requests:
            sent = self.answer(request)
            request.get_response_sender().send(sent, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)""",
)


def lay_out(repository, name, config="", model=MODEL):
    """A model in the repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(textwrap.dedent(model))
    (folder.parent / "config.pbtxt").write_text(CONFIG + config)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder with a model that the server loads at its start, with all that processes of models need."""
    folder = tmp_path_factory.mktemp("repository")
    lay_out(folder, "first")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server that grants a request one second."""
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_GRPC_PORT": "0", "SAGEMAKER_MODEL_SERVER_TIMEOUT": "1"}
    with Server(tmp_path_factory.mktemp("server"), environ) as running:
        eventually(lambda: running.ask("GET", "/v2/health/ready").status == 200, "the model")
        yield running


@pytest.fixture
def put(server, repository):
    """A function that loads another model, for as long as the test lasts."""
    names = []

    def load(name, *args):
        lay_out(repository, name, *args)
        names.append(name)
        assert server.ask("POST", f"/v2/repository/models/{name}/load").status == 200

    yield load
    for name in names:
        assert server.ask("POST", f"/v2/repository/models/{name}/unload").status == 200


def body(deed, **parameters):
    """A request that says what is to be done with it."""
    return {
        "id": deed,
        "parameters": parameters,
        "inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}],
    }


def ask(server, model, deed="", **parameters):
    """The answer to one request."""
    return server.ask("POST", f"/v2/models/{model}/infer", body(deed, **parameters))


def process_of(server, model):
    """The process that answers, once it does."""
    answers = []
    eventually(lambda: answers.append(ask(server, model)) or answers[-1].status == 200, "an answer")
    return answers[-1].json["outputs"][0]["data"][0]


def test_an_execution_that_takes_too_long_is_a_504_and_its_process_is_ended(server, put):
    """The limit of a request counts where the model names none, below a minute too; the next finds a new process."""
    put("plain")
    before = process_of(server, "plain")
    late = ask(server, "plain", "sleep 12")

    assert late.status == 504
    assert process_of(server, "plain") != before


def test_a_request_that_waits_is_a_504_and_what_executes_goes_on(server, put, tmp_path):
    """Its time counts from its arrival; no client's timeout, deadline or end ends the process either."""
    put("patient", LIMIT.format(60))
    before = process_of(server, "patient")
    go_on = f"until {tmp_path / 'go on'}"
    with ThreadPoolExecutor(3) as pool, server.connect() as leaving:
        leaving.send(post("/v2/models/patient/infer", body(go_on)))
        leaving.close()
        asked = [pool.submit(ask, server, "patient", *each) for each in ((go_on,), ("",))]
        asked.append(pool.submit(ask, server, "patient", go_on, timeout=1000))
        with triton.InferenceServerClient(server.grpc_address) as client:
            number = triton.InferInput("N", [1], "INT32")
            number.set_data_from_numpy(np.ones(1, np.int32))
            with pytest.raises(triton.InferenceServerException) as past:
                client.infer("patient", [number], request_id=go_on, client_timeout=0.1)
            with pytest.raises(triton.InferenceServerException, match="limit of a request") as late:
                client.infer("patient", [number], request_id=go_on)
        answers = [each.result() for each in asked]

    assert [answer.status for answer in answers] == [504, 504, 504]
    assert all("within 1 s, the server's limit of a request" in answer.error for answer in answers)
    assert {past.value.status(), late.value.status()} == {str(grpc.StatusCode.DEADLINE_EXCEEDED)}
    (tmp_path / "go on").touch()
    assert process_of(server, "patient") == before


def test_ends_for_the_time_they_took_have_a_count_of_their_own(server, put):
    """After five new processes in ten minutes the model is a 503, which says why, until the window is over."""
    put("hasty", LIMIT.format(0.2))
    statuses = [ask(server, "hasty", "sleep 12").status for _ in range(6)]
    refused = ask(server, "hasty")

    assert statuses == [504] * 6
    assert refused.status == 503
    assert "took longer than MME_EXECUTION_TIMEOUT or the limit of a request too often" in refused.error
    assert "5 restarts within 600 s" in refused.error
    assert "gave no answer within 0.2 s" in refused.error


def test_each_response_of_a_decoupled_model_has_the_whole_time(server, put):
    """Its stream may last longer than that; one that falls silent is told, and its process ended."""
    put("streams", "model_transaction_policy { decoupled: true }", DECOUPLED)
    before = process_of_stream(server)
    stream = server.ask("POST", "/v2/models/streams/generate_stream", {"id": "stream 4 0.4", "N": [1]})
    silent = server.ask("POST", "/v2/models/streams/generate_stream", {"id": "stream 1 0", "N": [1]})

    assert [event["PID"] for event in events(stream)] == [before] * 5
    assert [event.get("PID") for event in events(silent)] == [before, None]
    assert "within 1 s" in events(silent)[-1]["error"]
    assert process_of_stream(server) != before


def events(answer):
    """The documents of a stream of events."""
    return [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]


def process_of_stream(server):
    """The process that answers, once it does."""
    answers = []

    def asked():
        answers.append(events(server.ask("POST", "/v2/models/streams/generate_stream", {"N": [1]})))
        return "PID" in answers[-1][0]

    eventually(asked, "an answer")
    return answers[-1][0]["PID"]
