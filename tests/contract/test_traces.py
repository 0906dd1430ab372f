"""Traces of requests, as a collector of OpenTelemetry's gets them over HTTP."""

from __future__ import annotations

import queue
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.contract.models import ONE, lay_out, one_behind_the_other, pack, plus, y
from tests.contract.server import PATIENCE, Server, eventually

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARTS = ["queue", "batch", "compute", "scatter"]
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, told = request.get_response_sender(), {"context": request.trace().get_context() or ""}
            for number in range(3):
                tensor = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor], parameters=told))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.call(request) for request in requests]

    def call(self, request):
        n = request.inputs()[0].as_numpy()
        for model, name in (("called.tar.gz", "Y"), ("called.tar.gz", "Z")):
            x = pb_utils.Tensor("X", np.ones((1, 4), np.float32))
            pb_utils.InferenceRequest(model_name=model, inputs=[x], requested_output_names=[name]).exec()
        numbers = pb_utils.InferenceRequest(
            model_name="count.tar.gz",
            inputs=[pb_utils.Tensor("N", n)],
            requested_output_names=["OUT"],
            trace=request.trace(),
        ).exec(decoupled=True)
        numbers = [each for each in numbers if each.output_tensors()]
        told = {"mine": request.trace().get_context(), "its": json.loads(numbers[0].parameters())["context"]}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.array([len(numbers)], np.int32))],
            parameters={key: value or "" for key, value in told.items()},
        )
"""
WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        words = pb_utils.Tensor("OUT", np.full(400_000, b"word", object))
        return [pb_utils.InferenceResponse([words]) for _ in requests]
"""
WORDS_CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
COUNTER_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


class Collector:
    """Takes spans at /v1/traces, and keeps them."""

    def __init__(self) -> None:
        self.spans: list = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = zlib.decompress(body, 31)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        """One batch."""
        assert path == "/v1/traces"
        for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def trace(self, trace_id: str) -> list:
        """The spans of a trace once its root has come: the root, and the others by their begin."""

        def found():
            return sorted((s for s in self.spans if s.trace_id.hex() == trace_id), key=lambda s: s.start_time_unix_nano)

        spans = eventually(lambda: any(span.name == "infer" for span in found()) and found(), "the trace")
        (root,) = (span for span in spans if span.name == "infer")
        return [root, *(span for span in spans if span is not root)]


@pytest.fixture(scope="module")
def collector():
    """Somebody who collects."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector, tmp_path_factory):
    """A server of a store that traces every second request of those that say nothing."""
    folder = tmp_path_factory.mktemp("traced")
    pack(lay_out(folder / "plus", plus(1)), folder / "store" / "plus.tar.gz")
    for name, code, config in (("count", COUNTER, COUNTER_CONFIG), ("words", WORDS, WORDS_CONFIG)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        (folder / name / "config.pbtxt").write_text(config)
        pack(folder / name, folder / "store" / f"{name}.tar.gz")
    (folder / "call" / "1").mkdir(parents=True)
    (folder / "call" / "1" / "model.py").write_text(CALLER)
    (folder / "call" / "config.pbtxt").write_text(COUNTER_CONFIG.replace("decoupled: true", ""))
    pack(folder / "call", folder / "store" / "call.tar.gz")
    pack(lay_out(folder / "called", plus(1)), folder / "store" / "called.tar.gz")
    (folder / "both" / "whole" / "1").mkdir(parents=True)
    (folder / "both" / "whole" / "config.pbtxt").write_text(one_behind_the_other("one", "two"))
    for name, number in {"one": 1, "two": 2}.items():
        lay_out(folder / "both" / name, plus(number), "max_batch_size: 4")
    pack(folder / "both", folder / "store" / "both.tar.gz")
    environ = {
        "MME_MODEL_STORE": str(folder / "store"),
        "MME_LOAD_MODEL": "count.tar.gz,call.tar.gz,words.tar.gz",  # whose processes are the server's then, and not left behind by a test
        "MME_PING_MODE": "ready",
        "MME_TRACE_URL": collector.url,
        "MME_TRACE_RATE": "2",
        "MME_ENDPOINT_NAME": "traced-endpoint",
        "MME_GRPC_PORT": "0",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with Server(folder / "server", environ) as server:
        yield server


def attributes(span) -> dict:
    """By name."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def invoke(server, target="plus.tar.gz", document=ONE, **headers: str):
    """A request by SageMaker's route."""
    headers["X_Amzn_SageMaker_Target_Model"] = target
    return server.ask("POST", "/invocations", document, Content_Type="application/json", **headers)


def test_a_request_is_a_span_with_its_load_queue_batch_and_compute_below(server, collector):
    """In the trace that the custom attributes name, one after the other and inside the whole."""
    trace_id = "a" * 32
    assert invoke(server, X_Amzn_SageMaker_Custom_Attributes=f"trace_id={trace_id}").status == 200

    root, *parts = collector.trace(trace_id)
    assert [span.name for span in parts] == ["load", *PARTS]
    assert root.parent_span_id == b""
    assert root.kind == root.SPAN_KIND_SERVER
    assert {span.parent_span_id for span in parts} == {root.span_id}
    assert collector.services == {"traced-endpoint"}
    told = attributes(root)
    assert told["aws.sagemaker.target_model"] == told["triton.model_name"] == "plus.tar.gz"
    assert (told["triton.model_version"], told["url.path"], told["mme.responses"]) == ("1", "/invocations", 1)
    assert attributes(parts[0])["mme.load_ms"] > 0
    assert [attributes(span).get("mme.batch_size") for span in parts[1:]] == [None, 1, 1, 1]
    at = root.start_time_unix_nano
    for span in parts:
        assert at <= span.start_time_unix_nano <= span.end_time_unix_nano
        at = span.end_time_unix_nano
    assert at <= root.end_time_unix_nano


def test_a_traceparent_makes_it_part_of_the_clients_trace(server, collector):
    """Below the client's span; a model in memory has no load to wait for."""
    invoke(server)
    trace_id, parent = "b" * 32, "c" * 16
    answer = server.ask(
        "POST", "/v2/models/plus.tar.gz/infer", {**ONE, "id": "mine"}, traceparent=f"00-{trace_id}-{parent}-01"
    )
    assert answer.status == 200

    root, *parts = collector.trace(trace_id)
    assert root.parent_span_id.hex() == parent
    assert [span.name for span in parts] == PARTS
    assert attributes(root)["triton.request_id"] == "mine"


def test_a_stream_is_one_span_until_its_last_response(server, collector):
    """Which counts them."""
    trace_id = "d" * 32
    document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}]}
    answer = invoke(server, "count.tar.gz", document, traceparent=f"00-{trace_id}-{'c' * 16}-01")
    assert answer.status == 200

    root, *parts = collector.trace(trace_id)
    assert attributes(root)["mme.responses"] == 3
    assert [span.name for span in parts] == PARTS


def test_an_answer_that_is_streamed_all_the_same_has_one_response(server, collector):
    """An event of its own, of a model that answers once."""
    trace_id = "b1" * 16
    document = {"X": ONE["inputs"][0]["data"]}
    path = "/v2/models/plus.tar.gz/generate_stream"
    answer = server.ask("POST", path, document, traceparent=f"00-{trace_id}-{'c' * 16}-01")
    assert answer.status == 200

    assert attributes(collector.trace(trace_id)[0])["mme.responses"] == 1


def test_the_steps_of_an_ensemble_have_spans_of_their_own(server, collector):
    """Called as their models, one behind the other, each with its queue, batch and compute below it."""
    trace_id = "8" * 32
    answer = invoke(server, "both.tar.gz", traceparent=f"00-{trace_id}-{'c' * 16}-01")
    assert y(answer.json) == [4, 5, 6, 7]

    root, *spans = collector.trace(trace_id)
    below = {
        span.span_id: [part.name for part in spans if part.parent_span_id == span.span_id] for span in (root, *spans)
    }
    assert below[root.span_id] == ["load", "one", "two"]
    steps = [span for span in spans if span.name in {"one", "two"}]
    assert [below[span.span_id] for span in steps] == [PARTS, PARTS]
    assert steps[0].end_time_unix_nano <= steps[1].start_time_unix_nano
    assert attributes(root)["triton.model_name"] == "both.tar.gz"
    told = [(attributes(step)["triton.model_name"], attributes(step)["triton.model_version"]) for step in steps]
    assert told == [("one", "1"), ("two", "1")]


def test_a_session_is_created_and_closed_in_spans_as_well(server, collector):
    """Requests that ask the model for nothing."""
    session = "NEW_SESSION"
    for trace_id, word in (("b2" * 16, "NEW_SESSION"), ("b3" * 16, "CLOSE")):
        headers = {"X_Amzn_SageMaker_Session_Id": session, "traceparent": f"00-{trace_id}-{'c' * 16}-01"}
        session = invoke(server, document={"requestType": word}, **headers).json["sessionId"]

        (root,) = collector.trace(trace_id)
        assert root.status.code != root.status.STATUS_CODE_ERROR


def test_calls_of_other_models_have_spans_of_their_own(server, collector):
    """Below the caller's compute: with the load that the first waited for, an error where there was one, responses."""
    trace_id = "b7" * 16
    document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}]}
    answer = invoke(server, "call.tar.gz", document, traceparent=f"00-{trace_id}-{'c' * 16}-01")
    assert answer.json["outputs"][0]["data"] == [3]

    root, *spans = collector.trace(trace_id)
    below = {span.span_id: [part for part in spans if part.parent_span_id == span.span_id] for span in (root, *spans)}
    assert [span.name for span in below[root.span_id]] == PARTS
    compute = below[root.span_id][2]
    calls = below[compute.span_id]
    assert [span.name for span in calls] == ["called.tar.gz", "called.tar.gz", "count.tar.gz"]
    assert [[part.name for part in below[span.span_id]] for span in calls] == [["load", *PARTS], [], PARTS]
    assert [attributes(span).get("error.type") for span in calls] == [None, "INVALID_ARGUMENT", None]
    for span in calls:
        assert compute.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= compute.end_time_unix_nano


def test_a_model_is_told_of_the_span_that_it_executes_in(server, collector):
    """For spans of its own below it, and for models that it calls; of a trace that begins here, too."""
    document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}]}
    for trace_id, headers in (
        ("b8" * 16, {"traceparent": f"00-{'b8' * 16}-{'c' * 16}-01"}),
        ("b9" * 16, {"X_Amzn_SageMaker_Custom_Attributes": f"trace_id={'b9' * 16}"}),
    ):
        told = invoke(server, "call.tar.gz", document, **headers).json["parameters"]
        root = collector.trace(trace_id)[0]
        expected = f'{{"traceparent":"00-{trace_id}-{root.span_id.hex()}-01"}}'
        assert (told["mine"], told["its"]) == (expected, expected)
    untraced = invoke(server, "call.tar.gz", document, traceparent=f"00-{'ba' * 16}-{'c' * 16}-00")
    assert untraced.json["parameters"] == {"mine": "", "its": ""}


def test_a_failed_request_is_marked_and_says_why(server, collector):
    """With the sentence that the client got, once."""
    trace_id = "e" * 32
    answer = invoke(server, "gone.tar.gz", X_Amzn_SageMaker_Custom_Attributes=f"trace_id={trace_id}")
    assert answer.status == 404

    (root,) = collector.trace(trace_id)
    assert (root.status.code, root.status.message) == (root.status.STATUS_CODE_ERROR, answer.error)
    assert attributes(root)["error.type"] == "UNKNOWN_MODEL"


def test_a_failed_request_says_which_model_was_asked(server, collector):
    """Whoever looks for a model's requests finds those that it has refused, too."""
    trace_id = "ed" * 16
    document = {"inputs": [{"name": "Q", "shape": [1], "datatype": "FP32", "data": [0]}]}
    answer = invoke(server, "plus.tar.gz", document, traceparent=f"00-{trace_id}-{'c' * 16}-01")
    assert answer.status == 400

    told = attributes(collector.trace(trace_id)[0])
    assert (told["triton.model_name"], told["triton.model_version"]) == ("plus.tar.gz", "1")
    assert told["error.type"] == "INVALID_ARGUMENT"


def test_a_client_that_is_not_traced_is_not_traced_here(server, collector):
    """And of those that say nothing every second one is."""
    trace_id = "f" * 32
    assert invoke(server, traceparent=f"00-{trace_id}-{'c' * 16}-00").status == 200
    for number in range(6):
        assert invoke(server, X_Amzn_SageMaker_Inference_Id=f"counted-{number}").status == 200
    invoke(server, traceparent=f"00-{'9' * 32}-{'c' * 16}-01")
    collector.trace("9" * 32)

    roots = [span for span in collector.spans if span.name == "infer"]
    named = [attributes(span).get("aws.sagemaker.inference_id", "") for span in roots]
    assert len([name for name in named if name.startswith("counted-")]) == 3
    assert trace_id not in {span.trace_id.hex() for span in roots}


def test_tritons_client_changes_what_is_traced(server, collector):
    """Level, rate and count of the server; null is what it was started with; what can't be so is refused."""
    with tritonclient.http.InferenceServerClient(server.address) as client:
        first = client.get_trace_settings()
        assert (first["trace_level"], first["trace_rate"], first["trace_count"]) == (["TIMESTAMPS"], "2", "-1")
        assert client.get_trace_settings("plus.tar.gz") == first

        assert client.update_trace_settings(settings={"trace_level": ["OFF"]})["trace_level"] == ["OFF"]
        invoke(server, traceparent=f"00-{'7' * 32}-{'c' * 16}-01")
        client.update_trace_settings(settings={"trace_level": None, "trace_count": "1"})
        invoke(server, traceparent=f"00-{'6' * 32}-{'c' * 16}-01")
        invoke(server, traceparent=f"00-{'5' * 32}-{'c' * 16}-01")
        assert client.get_trace_settings()["trace_count"] == "0"
        assert client.update_trace_settings(settings={"trace_count": None}) == first
        client.update_trace_settings("plus.tar.gz", {"trace_level": ["OFF"]})
        invoke(server, traceparent=f"00-{'3' * 32}-{'c' * 16}-01")
        assert client.update_trace_settings("plus.tar.gz", {"trace_level": None}) == first
    invoke(server, traceparent=f"00-{'4' * 32}-{'c' * 16}-01")
    collector.trace("6" * 32)
    collector.trace("4" * 32)
    assert not {span.trace_id.hex() for span in collector.spans} & {"7" * 32, "5" * 32, "3" * 32}


def test_the_last_spans_are_sent_when_the_server_ends(serve, tmp_path):
    """Although they are sent by batches of some seconds; and a collector that is gone keeps nobody from ending."""
    pack(lay_out(tmp_path / "plus", plus(1)), tmp_path / "store" / "plus.tar.gz")
    with Collector() as collector:
        environ = {"MME_MODEL_STORE": str(tmp_path / "store"), "MME_TRACE_URL": collector.url, "MME_TRACE_RATE": "1"}
        server = serve(environ)
        assert invoke(server).status == 200
        assert server.stop() == 0
        assert {span.name for span in collector.spans} == {"infer", "load", *PARTS}
        assert collector.services == {"mme"}


@pytest.fixture
def grpc_client(server):
    """Triton's client of the other protocol."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        yield client


def test_a_request_over_grpc_is_a_span_as_well(collector, grpc_client):
    """Its metadata say whose trace it is; an error is the span's, also before anything was submitted."""
    trace_id, parent = "a1" * 16, "8" * 16
    x = tritonclient.grpc.InferInput("X", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}

    grpc_client.infer("plus.tar.gz", [x], request_id="mine", headers=headers)

    root, *parts = collector.trace(trace_id)
    assert [span.name for span in parts][-4:] == PARTS
    told = attributes(root)
    assert (told["rpc.system"], told["rpc.method"], told["triton.request_id"]) == ("grpc", "ModelInfer", "mine")
    assert root.parent_span_id.hex() == parent
    with pytest.raises(InferenceServerException):
        grpc_client.infer("nobody", [x], headers={"traceparent": f"00-{'a3' * 16}-{parent}-01"})
    (root,) = collector.trace("a3" * 16)
    assert attributes(root)["error.type"] == "UNKNOWN_MODEL"


def test_each_request_of_a_stream_is_a_span(collector, grpc_client):
    """With all its responses."""
    n = tritonclient.grpc.InferInput("N", [1], "INT32").set_data_from_numpy(np.zeros(1, np.int32))
    trace_id = "a2" * 16
    came = queue.Queue()
    headers = {"traceparent": f"00-{trace_id}-{'5' * 16}-01"}
    grpc_client.start_stream(lambda result, error: came.put((result, error)), headers=headers)
    grpc_client.async_stream_infer("count.tar.gz", [n])
    assert [came.get(timeout=PATIENCE)[1] for _ in range(3)] == [None] * 3
    grpc_client.stop_stream()

    told = attributes(collector.trace(trace_id)[0])
    assert (told["rpc.method"], told["mme.responses"]) == ("ModelStreamInfer", 3)


@pytest.mark.parametrize(("protocol", "trace_id"), [("http", "a4" * 16), ("grpc", "a5" * 16), ("stream", "a6" * 16)])
def test_a_long_answer_is_in_its_span(server, collector, grpc_client, protocol, trace_id):
    """Until it was written: a thread does that, which takes tens of milliseconds."""
    n = tritonclient.grpc.InferInput("N", [1], "INT32").set_data_from_numpy(np.zeros(1, np.int32))
    headers = {"traceparent": f"00-{trace_id}-{'5' * 16}-01"}
    if protocol == "http":
        document = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [1]}]}
        assert invoke(server, "words.tar.gz", document, **headers).status == 200
    elif protocol == "grpc":
        grpc_client.infer("words.tar.gz", [n], headers=headers)
    else:
        came = queue.Queue()
        grpc_client.start_stream(lambda result, error: came.put((result, error)), headers=headers)
        grpc_client.async_stream_infer("words.tar.gz", [n])
        assert came.get(timeout=PATIENCE)[1] is None
        grpc_client.stop_stream()

    root, *parts = collector.trace(trace_id)
    assert [span.name for span in parts] == PARTS
    assert root.end_time_unix_nano - parts[-1].end_time_unix_nano > 10_000_000
