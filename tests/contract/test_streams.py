"""Answers of several responses, over every route: a decoupled Python model behind the real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import textwrap

import numpy as np
import pytest
import tritonclient.http
from botocore.exceptions import ClientError, EventStreamError
from tritonclient.utils import InferenceServerException

from tests.contract.server import PATIENCE, Server, eventually

CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

COUNTER = """
import os
import pathlib
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            threading.Thread(target=self.count, args=(request.get_response_sender(), n)).start()

    def count(self, sender, n):
        if n == -1:
            error = pb_utils.TritonError("nothing to count", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif n == -2:
            sender.send(self.response(0))
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("lost count")))
        elif n in (-5, -6):
            if n == -6:
                sender.send(self.response(0))
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not that one")))
            sender.send(self.response(2))
        elif n == -3:
            sender.send(self.response(0))
            os._exit(3)
        elif n == -4:
            while not sender.is_cancelled():
                sender.send(self.response(0))
                time.sleep(0.01)
            (pathlib.Path(pb_utils.get_model_dir()) / "left").touch()
        for i in range(n):
            sender.send(self.response(i))

    def response(self, i):
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("I", np.array([i], np.int32)),
            pb_utils.Tensor("TEXT", np.array([f"<{i}>".encode()], object)),
        ])
"""

ONE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("I", request.inputs()[0].as_numpy()),
                    pb_utils.Tensor("TEXT", np.array([b"one"], object)),
                ],
                parameters={"told": request.request_id()},
            )
            for request in requests
        ]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder with both models."""
    folder = tmp_path_factory.mktemp("repository")
    for name, source, config in (("counter", COUNTER, CONFIG + DECOUPLED), ("one", ONE, CONFIG)):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(textwrap.dedent(source))
        (version.parent / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server of it, with both models in memory."""
    with Server(tmp_path_factory.mktemp("server"), {"MME_MODEL_REPOSITORY": str(repository)}) as running:
        for name in ("counter", "one"):
            assert running.ask("POST", f"/v2/repository/models/{name}/load").status == 200
        yield running


@pytest.fixture
def own_server(serve, repository):
    """A server whose models' processes come and go with the test."""
    return serve({"MME_MODEL_REPOSITORY": str(repository)})


def tensors(n):
    """A request for n responses, as tensors."""
    return {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [n]}]}


def post(server, path, document, **headers):
    """The answer, whatever its length is."""
    return server.ask("POST", path, document, **headers)


def events(answer):
    """The documents of server-sent events."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    *parts, end = answer.body.split(b"\n\n")
    assert end == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def lines(answer):
    """The documents of a streamed answer on the container contract."""
    assert answer.headers["content-type"] == "application/jsonlines"
    return [json.loads(line) for line in answer.body.splitlines()]


def values(document):
    """The elements of both outputs."""
    return [output["data"][0] for output in document["outputs"]]


@pytest.mark.parametrize("n", [0, 1, 3, 200])
@pytest.mark.parametrize("route", ["/invocations", "/models/counter/invoke", "/endpoints/e/invocations"])
def test_each_response_is_a_line_on_the_container_contract(server, route, n):
    """In their order, one JSON document each, however many there are."""
    answer = post(server, route, tensors(n), X_Amzn_SageMaker_Target_Model="counter")

    assert answer.status == 200
    assert [values(line) for line in lines(answer)] == [[i, f"<{i}>"] for i in range(n)]


@pytest.mark.parametrize("n", [0, 1, 3, 200])
def test_generate_stream_sends_an_event_a_response(server, n):
    """Flat documents, in their order."""
    answer = post(server, "/v2/models/counter/versions/1/generate_stream", {"N": n, "id": "r"})

    assert [(each["I"], each["TEXT"], each["id"]) for each in events(answer)] == [(i, f"<{i}>", "r") for i in range(n)]


def test_generate_stream_serves_models_of_one_response(server):
    """As one event, with the parameters of the response."""
    (only,) = events(post(server, "/v2/models/one/generate_stream", {"N": 4, "id": "x"}))

    assert (only["I"], only["TEXT"], only["told"]) == (4, "one", "x")


@pytest.mark.parametrize(("model", "n"), [("one", 7), ("counter", 1)])
def test_generate_answers_with_the_one_response(server, model, n):
    """From a decoupled model too, if it sends exactly one."""
    answer = post(server, f"/v2/models/{model}/generate", {"N": n})

    assert answer.status == 200
    assert answer.json["model_name"] == model


@pytest.mark.parametrize("n", [0, 2, 100])
def test_generate_refuses_any_other_number_of_responses(server, n):
    """With Triton's sentence."""
    answer = post(server, "/v2/models/counter/generate", {"N": n})

    assert answer.status == 400
    assert "exactly 1 response" in answer.error


def test_infer_refuses_decoupled_models(server):
    """It has no form for several responses; tritonclient is told where to go, in Triton's words and by its status."""
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
    tensor = tritonclient.http.InferInput("N", [1], "INT32")
    tensor.set_data_from_numpy(np.array([1], np.int32))
    with pytest.raises(InferenceServerException, match=r"HTTP end point doesn't support .*generate_stream") as raised:
        client.infer("counter", [tensor])
    assert raised.value.status() == "501"
    raw = server.ask("POST", "/v2/models/counter/infer", b"\0\0\0\0", Inference_Header_Content_Length="0")
    assert (raw.status, "decoupled transaction policy" in raw.error) == (501, True)
    client.close()


def test_an_error_before_the_first_response_has_its_own_status(server):
    """Nothing was streamed, so the client gets a plain error."""
    generated = post(server, "/v2/models/counter/generate_stream", {"N": -1})
    invoked = post(server, "/models/counter/invoke", tensors(-1))

    assert (generated.status, generated.error) == (400, "nothing to count")
    assert (invoked.status, invoked.error) == (400, "nothing to count")


def test_an_error_after_the_first_response_is_the_last_one(server):
    """The status is spent; event and line say what happened, and the answer ends well-formed."""
    first, last = events(post(server, "/v2/models/counter/generate_stream", {"N": -2}))
    line, end = lines(post(server, "/models/counter/invoke", tensors(-2)))

    assert (first["I"], last) == (0, {"error": "lost count"})
    assert (values(line), end) == ([0, "<0>"], {"error": "lost count"})


def test_responses_may_follow_an_error(server):
    """Which is an event or a line like them; it has the status of generate_stream's answer if it comes first."""
    path = "/v2/models/counter/generate_stream"
    between, begins = post(server, path, {"N": -6}), post(server, path, {"N": -5})
    line = lines(post(server, "/models/counter/invoke", tensors(-6)))

    assert (between.status, begins.status) == (200, 500)
    assert [each.get("error", each.get("I")) for each in events(between)] == [0, "not that one", 2]
    assert [each.get("error", each.get("I")) for each in events(begins)] == ["not that one", 2]
    assert [each.get("error") or values(each)[0] for each in line] == [0, "not that one", 2]


def test_an_error_is_the_answer_where_nothing_can_follow_it(server):
    """By generate, and on the container contract before anything else: the rest goes nowhere."""
    for path, body in (("/v2/models/counter/generate", {"N": -5}), ("/models/counter/invoke", tensors(-5))):
        answer = post(server, path, body)
        assert (answer.status, answer.error) == (500, "not that one")
    assert len(events(post(server, "/v2/models/counter/generate_stream", {"N": 2}))) == 2


def test_the_death_of_the_process_ends_its_streams(own_server):
    """Their clients are told at once how it died, and the next request is served by a new one."""
    first, last = events(post(own_server, "/v2/models/counter/generate_stream", {"N": -3}))

    assert first["I"] == 0
    assert "ended with exit code 3" in last["error"]
    assert len(events(post(own_server, "/v2/models/counter/generate_stream", {"N": 2}))) == 2


def test_a_client_that_leaves_cancels(own_server, repository):
    """The model sees it by is_cancelled, and stops."""
    client = http.client.HTTPConnection("127.0.0.1", own_server.port, timeout=PATIENCE)
    client.request("POST", "/v2/models/counter/generate_stream", json.dumps({"N": -4}))
    assert client.getresponse().readline().startswith(b"data: ")
    client.sock.close()
    client.close()

    eventually((repository / "counter" / "1" / "left").exists, "the model to notice")


def invoke_stream(client, model, document):
    """The parts of boto3's streamed answer; that API has no TargetModel, so the header is set by hand."""
    event = "before-call.sagemaker-runtime.InvokeEndpointWithResponseStream"

    def name_model(params, **_):
        params["headers"]["X-Amzn-SageMaker-Target-Model"] = model

    client.meta.events.register(event, name_model, "name-model")
    try:
        answer = client.invoke_endpoint_with_response_stream(
            EndpointName="e", Body=json.dumps(document), ContentType="application/json"
        )
        with contextlib.closing(answer["Body"]) as stream:
            return answer["ContentType"], [part["PayloadPart"]["Bytes"] for part in stream]
    finally:
        client.meta.events.unregister(event, unique_id="name-model")


def test_boto3_gets_each_response_as_a_part(server, runtime):
    """By invoke_endpoint_with_response_stream; a model of one response is one part."""
    client = runtime(server)
    kind, parts = invoke_stream(client, "counter", tensors(3))
    one_kind, one = invoke_stream(client, "one", tensors(3))

    assert (kind, one_kind) == ("application/jsonlines", "application/json")
    assert [values(json.loads(part)) for part in parts] == [[i, f"<{i}>"] for i in range(3)]
    assert values(json.loads(b"".join(one))) == [3, "one"]


def test_boto3_is_told_of_errors_in_its_own_form(server, runtime):
    """Before the first part as an error of the call, after it as one of the stream."""
    client = runtime(server)
    with pytest.raises(ClientError, match="nothing to count") as refused:
        invoke_stream(client, "counter", tensors(-1))
    with pytest.raises(EventStreamError, match="lost count") as broken:
        invoke_stream(client, "counter", tensors(-2))
    with pytest.raises(EventStreamError, match="not that one"):
        invoke_stream(client, "counter", tensors(-6))

    assert refused.value.response["Error"]["Code"] == "ModelError"
    assert broken.value.response["Error"]["Code"] == "ModelStreamError"


def test_the_inference_type_of_invocations_is_a_setting(serve, repository):
    """With SAGEMAKER_TRITON_INFERENCE_TYPE its bodies are those of generate_stream, and so are its answers."""
    server = serve({"MME_MODEL_REPOSITORY": str(repository), "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream"})
    answer = post(server, "/invocations", {"N": 2}, X_Amzn_SageMaker_Target_Model="counter")

    assert [each["I"] for each in events(answer)] == [0, 1]


def test_nothing_is_held_after_streams(own_server):
    """However they ended, no request is counted as being under way, and an unload returns."""
    for n in (0, 3, -1, -2, -5, -6):
        post(own_server, "/v2/models/counter/generate_stream", {"N": n})

    assert own_server.metric("nv_inference_pending_request_count", model="counter") == 0
    assert own_server.ask("POST", "/v2/repository/models/counter/unload").status == 200
