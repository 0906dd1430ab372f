"""KServe v2 over gRPC as Triton's own client speaks it: `tritonclient.grpc` from PyPI, unchanged.

plus, types, pick, labelled, versions   as in `test_kserve`
fours                                   waits for four requests before it executes, up to two seconds
sums                                    adds up what its sequences send
counter                                 a decoupled Python model of N responses; N below 0 makes it go wrong
one                                     a Python model that answers once, with a parameter of its own
codes                                   a Python model that says no, with the code that it is asked for
alone                                   a Python model without inputs
swapped                                 a Python model that returns its outputs in another order than config.pbtxt has
"""

from __future__ import annotations

import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.contract import models, sequence_models
from tests.contract.server import PATIENCE, Server, eventually

BATCHED = "max_batch_size: 8\n"
LABELLED = f'{BATCHED}output {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }}\n'
FOURS = "max_batch_size: 4\ndynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 2000000 }\n"
PATIENT = FOURS.replace("2000000", "6000000")  # those who left go when its time is over
SUMS = (
    "max_batch_size: 4\ninstance_group { count: 1 kind: KIND_CPU }\n"
    f"sequence_batching {{ {sequence_models.CONTROLS % 'TYPE_UINT64'} {sequence_models.IMPLICIT % ''} "
    "max_sequence_idle_microseconds: 60000000 }\n"
)
COUNTING = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
"""
COUNTER = """
import pathlib
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            threading.Thread(target=self.count, args=(request.get_response_sender(), n)).start()

    def count(self, sender, n):
        if n == -1:
            error = pb_utils.TritonError("nothing to count", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
        elif n == -2:
            sender.send(self.response(0), FINAL)
        elif n == -3:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("not that one")))
            sender.send(self.response(2))
            sender.send(flags=FINAL)
        elif n == -4:
            while not sender.is_cancelled():
                sender.send(self.response(0))
                time.sleep(0.01)
            (pathlib.Path(pb_utils.get_model_dir()) / "left").touch()
        for i in range(n):
            sender.send(self.response(i))
        if n >= 0:
            sender.send(flags=FINAL)

    def response(self, i):
        return pb_utils.InferenceResponse([pb_utils.Tensor("I", np.array([i], np.int32))])
"""
ONE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("I", request.inputs()[0].as_numpy())],
                parameters={"heard": request.parameters(), "half": 0.5, "big": 2**63, "yes": True},
            )
            for request in requests
        ]
"""
CODES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        codes = [int(request.inputs()[0].as_numpy()[0]) for request in requests]
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("so be it", code)) for code in codes]
"""
COUNTED = """
platform: "ensemble"
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step { model_name: "counter" input_map { key: "N" value: "N" } output_map { key: "I" value: "between" } }
  step { model_name: "one" input_map { key: "N" value: "between" } output_map { key: "I" value: "I" } }
}
"""
ALONE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.Tensor("I", np.array([len(request.inputs())], np.int32)) for request in requests]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
"""
SWAPPED = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("J", -array), pb_utils.Tensor("I", array)]) for array in arrays
        ]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of the models above."""
    folder = tmp_path_factory.mktemp("repository")
    models.lay_out(folder / "plus", models.plus(1), BATCHED)
    models.lay_out(folder / "types", models.every_type(), BATCHED)
    models.lay_out(folder / "pick", models.pick())
    models.lay_out(folder / "fours", models.plus(1), FOURS)
    models.lay_out(folder / "patient", models.plus(1), PATIENT)
    models.lay_out(folder / "versions", models.plus(1), "version_policy { specific { versions: [1, 3] } }\n")
    models.lay_out(folder / "versions", models.plus(3), version=3)
    labelled = models.lay_out(folder / "labelled", models.plus(1), LABELLED)
    (labelled / "labels.txt").write_text("ant\nbee\ncat\n")
    models.lay_out(folder / "sums", sequence_models.accumulator(), SUMS)
    for name, source, more in (
        ("counter", COUNTER, "model_transaction_policy { decoupled: true }\n"),
        ("one", ONE, ""),
        ("codes", CODES, ""),
        ("swapped", SWAPPED, 'output { name: "J" data_type: TYPE_INT32 dims: [ 1 ] }\n'),
    ):
        models.lay_out(folder / name, source, COUNTING + more)
    without = COUNTING.replace('input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }\n', "")
    models.lay_out(folder / "alone", ALONE, without)
    models.lay_out(folder / "counted", None, COUNTED)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, repository):
    """A server of it, all of whose models are ready."""
    environ = {
        "MME_MODEL_REPOSITORY": str(repository),
        "MME_ALLOW_LOAD_OVERRIDES": "true",
        "MME_PING_MODE": "ready",
        "MME_GRPC_PORT": "0",
        "MME_DRAIN_SECONDS": "2",
        "MME_MAX_BODY": "1MiB",
    }
    with Server(tmp_path_factory.mktemp("grpc"), environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Triton's client."""
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


@pytest.fixture(scope="module")
def bare(server):
    """The published methods, for what Triton's client does not send."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name, array, datatype=""):
    """An input."""
    made = triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype))
    return made.set_data_from_numpy(array)


def row(*numbers):
    """An input X of `plus`."""
    return [tensor("X", np.array([numbers], np.float32))]


def count(n):
    """An input of `counter`."""
    return [tensor("N", np.array([n], np.int32))]


def typed(name="X", datatype="FP32", shape=(1, 4), **contents):
    """A request to `plus`, of elements in the field of their type."""
    given = pb.InferTensorContents(**contents) if contents else None
    inputs = [pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=given)]
    return pb.ModelInferRequest(model_name="plus", inputs=inputs)


class Stream:
    """Triton's client's stream, and what came of it."""

    def __init__(self, server, **options):
        self.client = triton.InferenceServerClient(server.grpc_address)
        self._came = queue.Queue()
        self.client.start_stream(lambda result, error: self._came.put((result, error)), **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def ask(self, *args, **options):
        """Send one request."""
        self.client.async_stream_infer(*args, **options)

    def next(self):
        """(response, error), the next one."""
        return self._came.get(timeout=PATIENCE)

    def responses(self, number):
        """The messages of so many good responses."""
        came = [self.next() for _ in range(number)]
        assert [error for _, error in came] == [None] * number
        return [result.get_response() for result, _ in came]


def elements(responses):
    """The one element of each, None of those without a tensor."""
    return [
        int.from_bytes(each.raw_output_contents[0], "little") if each.raw_output_contents else None
        for each in responses
    ]


def finals(responses):
    """What each says of being the last."""
    return [each.parameters["triton_final_response"].bool_param for each in responses]


# -- inference -----------------------------------------------------------------------------------------------------


def test_infer(client):
    """Tensors go both ways as they are, with the request's id and who answered."""
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    result = client.infer("plus", [tensor("X", x)], request_id="seven")

    np.testing.assert_array_equal(result.as_numpy("Y"), x + 1)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "plus", "1")
    assert [(output.name, output.datatype, list(output.shape)) for output in response.outputs] == [
        ("Y", "FP32", [2, 4])
    ]


def test_every_data_type(client):
    """Every data type survives the way there and back, to its limits, BYTES and FP16 included."""
    result = client.infer("types", [tensor(f"IN_{name}", values, name) for name, values in models.VALUES.items()])

    for name, sent in models.VALUES.items():
        came = result.as_numpy(f"OUT_{name}")
        if name == "BYTES":
            came = np.vectorize(bytes.decode, otypes="O")(came)
        np.testing.assert_array_equal(came, sent, err_msg=name)


def test_typed_contents(bare):
    """Elements in the field of their type are the same request."""
    answer = bare.ModelInfer(typed(fp32_contents=[1, 2, 3, 4]))

    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), [2, 3, 4, 5])


def test_raw_contents_that_no_input_is_left_for_are_ignored(bare):
    """As Triton does; an input that there are none for is named."""
    x = np.array([1, 2, 3, 4], np.float32).tobytes()
    request = typed()
    request.raw_input_contents.extend([x, x])

    answer = bare.ModelInfer(request)

    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), [2, 3, 4, 5])
    request.inputs.extend([pb.ModelInferRequest.InferInputTensor(name=name, datatype="FP32") for name in "YZ"])
    with pytest.raises(grpc.RpcError, match="unable to find data for input tensor 'Z' for model 'plus' in request"):
        bare.ModelInfer(request)


def test_a_time_limit_below_zero_is_none(client):
    """Clients that say -1 for none are answered, as Triton answers them."""
    np.testing.assert_array_equal(client.infer("plus", row(1, 2, 3, 4), timeout=-1).as_numpy("Y"), [[2, 3, 4, 5]])


def test_parameters_reach_the_model_and_come_back(client):
    """Those of the client's own, of each type; what is reserved does not, and the model's come with the answer."""
    result = client.infer("one", count(1), parameters={"text": "a", "flag": True, "number": 3}, timeout=60_000_000)

    heard = result.get_response().parameters
    assert '"text"' in heard["heard"].string_param
    assert "timeout" not in heard["heard"].string_param
    assert (heard["half"].double_param, heard["big"].uint64_param, heard["yes"].bool_param) == (0.5, 2**63, True)


def test_classes(client):
    """In place of a tensor, by their names."""
    output = triton.InferRequestedOutput("Y", class_count=2)

    result = client.infer("labelled", row(1, 5, 3, 0), outputs=[output])

    assert result.as_numpy("Y").tolist() == [[b"6.000000:1:bee", b"4.000000:2:cat"]]


def test_versions(client):
    """The latest served version answers unless one is named."""
    assert client.infer("versions", row(0, 0, 0, 0)).as_numpy("Y")[0, 0] == 3
    assert client.infer("versions", row(0, 0, 0, 0), model_version="1").as_numpy("Y")[0, 0] == 1


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client, algorithm):
    """As gRPC does it itself."""
    result = client.infer("plus", row(1, 2, 3, 4), compression_algorithm=algorithm)

    np.testing.assert_array_equal(result.as_numpy("Y"), [[2, 3, 4, 5]])


def test_a_sequence_adds_up(client):
    """What a model keeps of a sequence comes back with its next request, whatever names the sequence."""
    one = [tensor("X", np.array([[1]], np.float32))]
    for name in (7, 2**40, -7):
        client.infer("sums", one, sequence_id=name, sequence_start=True)
        assert client.infer("sums", one, sequence_id=name).as_numpy("Y")[0, 0] == 2
        assert client.infer("sums", one, sequence_id=name, sequence_end=True).as_numpy("Y")[0, 0] == 3


@pytest.mark.parametrize(
    ("name", "version", "inputs", "status", "message"),
    [
        ("nobody", "", [("X", [[1, 2, 3, 4]], "FP32")], "NOT_FOUND", "Request for unknown model: 'nobody' is not"),
        ("plus", "7", [("X", [[1, 2, 3, 4]], "FP32")], "NOT_FOUND", "version 7 is not found"),
        ("plus", "x", [("X", [[1, 2, 3, 4]], "FP32")], "INVALID_ARGUMENT", "specified version string 'x'"),
        ("plus", "", [("Q", [[1, 2, 3, 4]], "FP32")], "INVALID_ARGUMENT", "'Q'"),
        ("plus", "", [("X", [[1, 2, 3, 4]], "FP64")], "INVALID_ARGUMENT", "data-type is 'FP64', but model 'plus' exp"),
        ("plus", "", [("X", [[1, 2, 3]], "FP32")], "INVALID_ARGUMENT", "unexpected shape for input 'X' for model"),
        ("pick", "", [("I", [[7]], "INT64")], "INTERNAL", "ONNX Runtime failed while running model 'pick'"),
        ("counter", "", [("N", [1], "INT32")], "UNIMPLEMENTED", "doesn't support models with decoupled transaction"),
        ("sums", "", [("X", [[1]], "FP32")], "INVALID_ARGUMENT", "sums"),
    ],
)
def test_errors_are_statuses_with_a_sentence(client, name, version, inputs, status, message):
    """What is wrong comes back in Triton's words with gRPC's code; the next request is served."""
    types = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64, "INT32": np.int32}
    tensors = [tensor(key, np.array(data, types[kind])) for key, data, kind in inputs]

    with pytest.raises(InferenceServerException) as raised:
        client.infer(name, tensors, version)

    assert message in raised.value.message()
    assert raised.value.status() == f"StatusCode.{status}"
    np.testing.assert_array_equal(client.infer("plus", row(1, 2, 3, 4)).as_numpy("Y"), [[2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("code", "status", "http"),
    [
        (0, "UNKNOWN", 400),
        (1, "INTERNAL", 500),
        (2, "NOT_FOUND", 404),
        (3, "INVALID_ARGUMENT", 400),
        (4, "UNAVAILABLE", 503),
        (5, "UNIMPLEMENTED", 501),
        (6, "ALREADY_EXISTS", 400),
        (7, "CANCELLED", 400),
    ],
)
def test_the_error_of_a_model_has_the_code_that_it_gave(server, client, code, status, http):
    """As Triton's map has it, in gRPC and in HTTP."""
    with pytest.raises(InferenceServerException) as raised:
        client.infer("codes", count(code))
    body = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [code]}]}
    answer = server.ask("POST", "/v2/models/codes/infer", body)

    assert (raised.value.status(), raised.value.message()) == (f"StatusCode.{status}", "so be it")
    assert (answer.status, answer.error) == (http, "so be it")


def test_a_model_without_inputs(server, client):
    """Is asked without a tensor, and told so if there is one."""
    assert client.infer("alone", []).as_numpy("I").tolist() == [0]
    assert server.ask("POST", "/v2/models/alone/infer", {"inputs": []}).json["outputs"][0]["data"] == [0]
    assert client.get_model_metadata("alone").inputs == []
    with pytest.raises(InferenceServerException, match="expected 0 inputs but got 1 inputs for model 'alone'"):
        client.infer("alone", count(1))


def test_outputs_have_the_order_in_which_the_model_returned_them(server, client):
    """Clients that read them by their place find what they find with Triton, whatever they ask for."""
    body = {"inputs": [{"name": "N", "shape": [1], "datatype": "INT32", "data": [3]}]}
    outputs = [triton.InferRequestedOutput(name) for name in "IJ"]

    for wanted in (None, outputs, outputs[::-1]):
        response = client.infer("swapped", count(3), outputs=wanted).get_response()
        assert [output.name for output in response.outputs] == ["J", "I"]
        assert [int.from_bytes(raw, "little", signed=True) for raw in response.raw_output_contents] == [-3, 3]
    told = server.ask("POST", "/v2/models/swapped/infer", body).json["outputs"]
    assert [(output["name"], output["data"]) for output in told] == [("J", [-3]), ("I", [3])]


def test_a_model_without_a_name_is_one_that_there_is_not(bare):
    """Whatever is asked of it; the statistics of none are those of all, whichever version is named."""
    for method, request in (
        ("ModelInfer", pb.ModelInferRequest()),
        ("ModelMetadata", pb.ModelMetadataRequest()),
        ("ModelConfig", pb.ModelConfigRequest()),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            getattr(bare, method)(request)
        assert raised.value.details() == "Request for unknown model: '' is not found"
    told = bare.ModelStatistics(pb.ModelStatisticsRequest(version="7"))
    assert {"plus", "types"} <= {each.name for each in told.model_stats}


def test_bytes_that_are_no_message_are_refused(server):
    """By name of what they should have been."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        for method in ("ModelInfer", "ModelMetadata"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff")
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"the request is no {method}Request message" in raised.value.details()


def test_a_message_that_is_too_large_is_refused(client):
    """At the limit that bodies have."""
    with pytest.raises(InferenceServerException, match="larger than max") as raised:
        client.infer("plus", [tensor("X", np.zeros((80_000, 4), np.float32))])
    assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


# -- clients that leave ----------------------------------------------------------------------------------------------


def waiting(server, model):
    """Requests that wait in a model's queue."""
    return server.metric("nv_inference_pending_request_count", model=model)


def cancelled(server, model):
    """Requests that were dropped because their clients had left."""
    return server.metric("nv_inference_request_failure", model=model, reason="CANCELED")


def test_requests_of_clients_that_left_are_not_executed(server, client):
    """Whether a client cancels, its deadline comes, or its stream ends: its request is dropped while it waits."""
    with Stream(server) as stream:
        call = client.async_infer("patient", row(1, 2, 3, 4), callback=lambda *_: None)
        stream.ask("patient", row(1, 2, 3, 4))
        eventually(lambda: waiting(server, "patient") == 2, "both to wait")
        call.cancel()
        stream.client.stop_stream(cancel_requests=True)
        with pytest.raises(InferenceServerException) as raised:
            client.infer("patient", row(1, 2, 3, 4), client_timeout=1)

    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"

    def counted():
        return client.get_inference_statistics("patient").model_stats[0].inference_stats

    for _ in range(4):  # who make a batch, for which those who left are passed over
        client.async_infer("patient", row(1, 2, 3, 4), callback=lambda *_: None)
    eventually(lambda: cancelled(server, "patient") == 3, "all to be dropped")
    eventually(lambda: counted().success.count == 4, "the others to be answered")
    assert client.get_inference_statistics("patient").model_stats[0].inference_count == 4


def test_a_decoupled_model_hears_that_its_client_left(server, repository):
    """And need not go on."""
    with Stream(server) as stream:
        stream.ask("counter", count(-4))
        stream.responses(2)
        stream.client.stop_stream(cancel_requests=True)

    eventually((repository / "counter" / "1" / "left").exists, "the model to hear of it")


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants_end", [False, True])
def test_responses_of_a_decoupled_model(server, wants_end):
    """Each as it comes, none of them the last; the news of the end is a response of its own for who wants it."""
    with Stream(server) as stream:
        stream.ask("counter", count(3), request_id="r", enable_empty_final_response=wants_end)
        responses = stream.responses(3 + wants_end)

    assert elements(responses) == [0, 1, 2, None][: 3 + wants_end]
    assert finals(responses) == [False, False, False, True][: 3 + wants_end]
    assert {(each.id, each.model_name) for each in responses} == {("r", "counter")}
    assert [each.model_version for each in responses] == ["1", "1", "1", ""][: 3 + wants_end]


@pytest.mark.parametrize(("model", "n", "element"), [("counter", -2, 0), ("one", 5, 5), ("counted", -2, 0)])
def test_a_last_response_says_so(server, model, n, element):
    """Where the model sent it with the flag, or answers once, as an ensemble's last step; no empty one follows."""
    with Stream(server) as stream:
        stream.ask(model, count(n), enable_empty_final_response=True)
        responses = stream.responses(1)
        stream.ask("plus", row(1, 2, 3, 4), request_id="next")
        (following,) = stream.responses(1)

    assert (elements(responses), finals(responses)) == ([element], [True])
    assert following.id == "next"


def test_responses_of_models_that_answer_once_keep_their_order(server):
    """However long each takes; errors have their turn as well, by the id of their request."""
    with Stream(server) as stream:
        for number in range(4):
            stream.ask("fours", row(number, 0, 0, 0), request_id=str(number))
            stream.ask("plus", row(number, 0, 0, 0), request_id=f"p{number}")
        stream.ask("nobody", row(0, 0, 0, 0), request_id="n")
        came = [response.id for response in stream.responses(8)]
        _, error = stream.next()

    assert came == ["0", "p0", "1", "p1", "2", "p2", "3", "p3"]
    assert "unknown model: 'nobody'" in error.message()


def test_requests_that_look_alike_are_answered_each_for_itself(server):
    """By its own id and tensor, though only the first of them is read as a whole; one that does not fit is told."""
    with Stream(server) as stream:
        for number in range(4):
            stream.ask("plus", row(number, 0, 0, 0), request_id=str(number))
            stream.ask("counter", count(1), request_id=f"c{number}")
        responses = stream.responses(8)
        stream.ask("plus", row(1, 2, 3), request_id="short")
        _, error = stream.next()

    sums = {each.id: np.frombuffer(each.raw_output_contents[0], np.float32)[0] for each in responses if each.id < "c"}
    assert sums == {str(number): number + 1 for number in range(4)}
    assert {each.id for each in responses if each.id >= "c"} == {f"c{number}" for number in range(4)}
    assert "unexpected shape for input 'X'" in error.message()


def test_an_error_is_one_message_of_a_stream(server):
    """The stream goes on."""
    with Stream(server) as stream:
        stream.ask("counter", count(-1), request_id="e")
        _, error = stream.next()
        assert "nothing to count" in error.message()
        stream.ask("plus", [tensor("X", np.zeros((1, 3), np.float32))])
        _, error = stream.next()
        assert "unexpected shape for input 'X'" in error.message()
        stream.ask("counter", count(1))
        assert elements(stream.responses(1)) == [0]


def test_responses_may_follow_an_error(bare):
    """Each message says whether it is the last of its request; an error names request and model, as a response does."""
    ask = pb.ModelInferRequest(
        model_name="counter", id="e", raw_input_contents=[(-3).to_bytes(4, "little", signed=True)]
    )
    ask.inputs.add(name="N", datatype="INT32", shape=[1])
    ask.parameters["triton_enable_empty_final_response"].bool_param = True
    last = pb.ModelInferRequest(model_name="counter", raw_input_contents=[(-1).to_bytes(4, "little", signed=True)])
    last.inputs.add(name="N", datatype="INT32", shape=[1])

    error, response, end = bare.ModelStreamInfer(iter([ask]), timeout=PATIENCE)
    [whole] = bare.ModelStreamInfer(iter([last]), timeout=PATIENCE)

    assert (error.error_message, response.error_message, whole.error_message) == (
        "not that one",
        "",
        "nothing to count",
    )
    assert (error.infer_response.id, error.infer_response.model_name) == ("e", "counter")
    assert elements([response.infer_response, end.infer_response]) == [2, None]
    came = [each.infer_response for each in (error, response, end, whole)]
    assert finals(came) == [False, False, True, True]


def test_an_error_is_the_status_of_a_stream_that_wants_it_so(server):
    """By the metadata `triton_grpc_error`."""
    with Stream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.ask("counter", count(-1))
        _, error = stream.next()
    with Stream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.ask("counter", count(-3))
        _, first = stream.next()
    with Stream(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.ask("nobody", count(1))
        _, refused = stream.next()

    assert (error.status(), error.message()) == ("StatusCode.INVALID_ARGUMENT", "nothing to count")
    assert (first.status(), first.message()) == ("StatusCode.INTERNAL", "not that one")
    assert refused.status() == "StatusCode.NOT_FOUND"


def test_a_stream_ends_when_its_requests_have_been_answered(bare):
    """And not before, though the client has nothing more to say."""
    ask = typed(fp32_contents=[1, 2, 3, 4])

    answers = list(bare.ModelStreamInfer(iter([ask] * 20), timeout=PATIENCE))

    assert len(answers) == 20
    assert not any(answer.error_message for answer in answers)


# -- everything else -----------------------------------------------------------------------------------------------


def test_server_and_models_are_live_and_ready(client):
    """Liveness and readiness of the server, of models and of versions; what is not there is not ready."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plus")
    assert client.is_model_ready("versions", "3")
    assert not client.is_model_ready("versions", "2")
    assert not client.is_model_ready("nobody")


def test_health(server):
    """The standard health service, which tells of the server whatever service a probe names."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        serving, service = b"\x08\x01", b"inference.GRPCInferenceService"
        for asked in (b"", bytes((0x0A, len(service))) + service, b"\x0a\x01x"):
            assert check(asked) == serving
            watching = watch(asked)
            assert next(watching) == serving
            watching.cancel()


def test_metadata(client):
    """Of the server, and of a model as a client sends its tensors."""
    server = client.get_server_metadata()
    assert (server.name, "statistics" in server.extensions) == ("mme", True)
    plus = client.get_model_metadata("plus")
    assert (plus.name, plus.platform, list(plus.versions)) == ("plus", "onnxruntime_onnx", ["1"])
    assert [(each.name, each.datatype, list(each.shape)) for each in plus.inputs] == [("X", "FP32", [-1, 4])]
    assert list(client.get_model_metadata("versions").versions) == ["1", "3"]


def test_model_config(client):
    """The configuration in effect, as the published message."""
    config = client.get_model_config("fours").config

    assert (config.name, config.backend, config.max_batch_size) == ("fours", "onnxruntime", 4)
    assert config.dynamic_batching.max_queue_delay_microseconds == 2_000_000
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [("X", 11, [4])]


def test_statistics(client):
    """Of one model, of all, and of nobody; requests over gRPC count like any others."""
    before = client.get_inference_statistics("plus").model_stats[0]
    client.infer("plus", row(1, 2, 3, 4))
    after = client.get_inference_statistics("plus", "1").model_stats[0]

    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert {"plus", "types"} <= {each.name for each in client.get_inference_statistics().model_stats}
    with pytest.raises(InferenceServerException, match="requested model 'nobody' is not available"):
        client.get_inference_statistics("nobody")


def test_the_repository(client, repository):
    """Models are listed, loaded and unloaded; a configuration and files may come with a load."""
    new = models.lay_out(repository / "new", models.plus(5), BATCHED)
    states = {each.name: each.state for each in client.get_model_repository_index().models}
    assert (states["plus"], states["new"]) == ("READY", "")
    client.load_model("new")
    assert client.infer("new", row(0, 0, 0, 0)).as_numpy("Y")[0, 0] == 5

    client.load_model("new", config='{"max_batch_size": 2}')
    assert client.get_model_config("new").config.max_batch_size == 2
    config = '{"backend": "onnxruntime"}'
    client.load_model("new", config=config, files={"file:1/model.onnx": models.plus(6)})
    assert client.infer("new", row(0, 0, 0, 0)).as_numpy("Y")[0, 0] == 6

    client.unload_model("new")
    (new / "1" / "model.onnx").write_bytes(b"none")
    with pytest.raises(InferenceServerException, match="load failed for model 'new'") as raised:
        client.load_model("new")
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        ("RepositoryIndex", pb.RepositoryIndexRequest),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
    ],
)
def test_a_repository_can_not_be_named(bare, method, request_of):
    """Refused in Triton's words, and nothing is loaded or unloaded."""
    with pytest.raises(grpc.RpcError) as raised:
        getattr(bare, method)(request_of(repository_name="other"))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() == "'repository_name' specification is not supported"


def test_a_load_that_can_not_be_is_told_as_triton_does(client):
    """Its clients look for these words; the model that is there serves on."""
    with pytest.raises(InferenceServerException, match="failed to load 'plus', failed to poll from model repository"):
        client.load_model("plus", config='"max_batch_size": 16')
    with pytest.raises(InferenceServerException, match="Invalid file path 'AAA") as raised:
        client.load_model("plus", config="{}", files={f"file:{'A' * 256}": b"a"})
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert client.is_model_ready("plus")


def test_traces_go_nowhere_here(client):
    """Settings are told, and changed but for the one that needs somewhere to send traces."""
    assert client.get_trace_settings(as_json=True)["settings"]["trace_level"] == {"value": ["OFF"]}
    with pytest.raises(InferenceServerException, match="MME_TRACE_URL"):
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    client.update_trace_settings("plus", {"trace_rate": "1"})
    assert client.get_trace_settings("plus", as_json=True)["settings"]["trace_rate"] == {"value": ["1"]}
    assert client.get_trace_settings(as_json=True)["settings"]["trace_rate"] == {"value": ["1000"]}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("register_system_shared_memory", ("a", "b", 8)),
        ("unregister_system_shared_memory", ()),
        ("register_cuda_shared_memory", ("a", b"", 0, 8)),
        ("unregister_cuda_shared_memory", ()),
    ],
)
def test_memory_is_not_shared_unless_it_is_asked_for(client, method, arguments):
    """Regions are refused in Triton's words; that there are none is told, and no extension of it."""
    with pytest.raises(InferenceServerException, match="Start the server with '--allow-client-shm=true'") as raised:
        getattr(client, method)(*arguments)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    assert not client.get_system_shared_memory_status().regions
    assert not client.get_cuda_shared_memory_status().regions
    assert "system_shared_memory" not in client.get_server_metadata().extensions


# -- the end -------------------------------------------------------------------------------------------------------


def test_nobody_holds_a_model_any_more(server):
    """Whatever became of the requests before, each has ended its lease, and no socket of theirs is left."""

    def leases():
        rows = server.ask("POST", "/v2/repository/index").json
        return {row["name"]: row["cache"]["leases"] for row in rows if row.get("cache", {}).get("leases")}

    eventually(lambda: not leases(), "the leases to end")
    eventually(lambda: len(connections(server)) <= 2, "connections to end, but for those of the module's clients")


def connections(server):
    """To its port of gRPC."""
    port = server.grpc_port
    return [each for each in server.worker.net_connections("tcp") if each.laddr.port == port and each.raddr]


def test_a_server_that_goes_answers_and_ends_what_is_open(tmp_path, repository):
    """Requests under way are answered, streams and watches end, and nobody waits longer than for that.

    A stream whose client had not ended it says so: else a request that came too late would be waited for for ever.
    """
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_GRPC_PORT": "0", "MME_LOAD_MODEL": "fours,plus"}
    with (
        Server(tmp_path / "server", environ | {"MME_PING_MODE": "ready"}) as server,
        Stream(server) as stream,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watching) == b"\x08\x01"
        stream.ask("plus", row(1, 2, 3, 4))
        stream.responses(1)
        stream.ask("fours", row(1, 2, 3, 4), request_id="last")
        done = "nv_inference_request_success"  # it waits for two seconds, which may be over when we look
        eventually(lambda: waiting(server, "fours") or server.metric(done, model="fours"), "it to wait")

        server.process.terminate()

        assert stream.responses(1)[0].id == "last"
        _, error = stream.next()
        assert (error.status(), error.message()) == (
            "StatusCode.UNAVAILABLE",
            "the server is going; ask again, on another connection",
        )
        with pytest.raises(InferenceServerException, match="no longer in valid state"):
            stream.ask("plus", row(1, 2, 3, 4))
        assert list(watching) == [b"\x08\x02"]
        assert server.process.wait(PATIENCE) == 0


def test_a_port_that_is_taken_ends_the_server(tmp_path, server, repository):
    """With a sentence that names it, instead of being started again and again."""
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_GRPC_PORT": str(server.grpc_port)}
    second = Server(tmp_path / "second", environ | {"MME_MODEL_CONTROL_MODE": "explicit"}, ready=False)

    with pytest.raises((AssertionError, OSError)):
        second.__enter__()

    assert f"cannot listen to gRPC requests at {server.grpc_address}" in second.log
    assert "Traceback" not in second.log
