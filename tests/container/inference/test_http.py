"""The hot routes over real sockets, with a real engine behind them."""

import functools
import gc
import gzip
import json
import math
import re
import socket
import struct
import threading
import time
import zlib

import numpy as np
import pytest

from container.codec import NeedsThread, json_numbers
from container.codec import decode as decode_module
from container.codec.decode import Decoder
from container.codec.request import BINARY_TYPE
from container.control.routes import Flavor, HotTarget, InferenceType, only_reads, parse_target, parse_version
from container.inference import http
from container.settings import Mode, PingMode
from model_handlers.config.model_config import ModelConfig
from tests.exchanges import WaitingExchange

A = np.array([[1, 2, 3, 4]], dtype="<f4")
B = np.array([[10, 20, 30, 40]], dtype="<f4")
X = [1.0, 2.0, 3.0, 4.0]
INFER = "/v2/models/arithmetic/infer"
TARGET = "X-Amzn-SageMaker-Target-Model"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
LENGTH = "Inference-Header-Content-Length"
LOOP = "test loop"
ENCODED = ((bytes, {}), (gzip.compress, {"Content_Encoding": "gzip"}))  # a body, and the headers that say so


@pytest.fixture
def post(server):
    """A POST over a socket; documents become JSON."""

    def posted(path, document, **headers):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return server.http("POST", path, {name.replace("_", "-"): value for name, value in headers.items()}, body)

    return posted


@pytest.fixture
def sums(json_inputs):
    """A request that `arithmetic` answers."""
    return {"inputs": json_inputs(A=A, B=B)}


def binary_input(name, array, datatype="FP32"):
    """An input's description, its data elsewhere."""
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "parameters": size}


def outputs_of(reply):
    """The outputs of a JSON answer by name."""
    return {item["name"]: item["data"] for item in reply.json["outputs"]}


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (b"/ping", HotTarget(None)),
        (b"/ping?x=1", HotTarget(None)),
        (b"/ping/", HotTarget(None)),
        (b"/invocations", HotTarget(Flavor.SAGEMAKER)),
        (b"/invocations?a=b", HotTarget(Flavor.SAGEMAKER)),
        (b"/models/abc/invoke", HotTarget(Flavor.SAGEMAKER, "abc")),
        (b"/models/tenant/a.tar.gz/invoke", HotTarget(Flavor.SAGEMAKER, "tenant/a.tar.gz")),
        (b"/models/mod%C3%A8le%20x/invoke", HotTarget(Flavor.SAGEMAKER, "modèle x")),
        (b"/models/%FF/invoke", HotTarget(Flavor.SAGEMAKER, "\ufffd")),
        (b"/v2/models/m/infer", HotTarget(Flavor.KSERVE, "m", "", InferenceType.INFER)),
        (b"/v2/models/m/versions/3/infer", HotTarget(Flavor.KSERVE, "m", "3", InferenceType.INFER)),
        (b"/v2/models/a/b/versions/3/infer", HotTarget(Flavor.KSERVE, "a/b", "3", InferenceType.INFER)),
        (b"/v2/models/versions/infer", HotTarget(Flavor.KSERVE, "versions", "", InferenceType.INFER)),
        (b"//v2/models/m/infer", HotTarget(Flavor.KSERVE, "m", "", InferenceType.INFER)),
        (b"/v2/models/a%2fb/infer", HotTarget(Flavor.KSERVE, "a/b", "", InferenceType.INFER)),
        (b"/v2/models/m%2Finfer/infer", HotTarget(Flavor.KSERVE, "m/infer", "", InferenceType.INFER)),
        (b"/v2/models/a%252Fb%/infer?x=%2F", HotTarget(Flavor.KSERVE, "a%2Fb%", "", InferenceType.INFER)),
        (b"/v2/models/a%%32Fb/infer", HotTarget(Flavor.KSERVE, "a%2Fb", "", InferenceType.INFER)),
        (b"/v2/%6dodels/m/%69nfer", HotTarget(Flavor.KSERVE, "m", "", InferenceType.INFER)),
        (b"//invocations", HotTarget(Flavor.SAGEMAKER)),
        (b"/v2/models/m/generate", HotTarget(Flavor.KSERVE, "m", "", InferenceType.GENERATE)),
        (b"/v2/models/m/versions/3/generate_stream", HotTarget(Flavor.KSERVE, "m", "3", InferenceType.GENERATE_STREAM)),
        (b"/endpoints/e/invocations-response-stream", HotTarget(Flavor.RUNTIME, event_stream=True)),
        (b"/endpoints/any-name/invocations", HotTarget(Flavor.RUNTIME)),
        (b"/endpoints/any-name/invocations/", HotTarget(Flavor.RUNTIME)),
    ],
)
def test_hot_targets_are_known(target, route):
    """A query means nothing, nor slashes in front, or behind where no name is; names are decoded, and may hold slashes."""
    assert parse_target(target) == route


@pytest.mark.parametrize(
    "target",
    b"/ * /pings /models /models/a /models//invoke /v2/models/m /v2/models//infer /v2/models/m/stats /endpoints//invocations "
    b"/endpoints/a/b/invocations /endpoints/a/async-invocations /x/ping /invocations/x /models/x/invoke/y "
    b"/v2%2Fmodels/m/infer /v2/models%2Fm/infer /v2/models/m%2Finfer /models/x%2Finvoke %2Fping".split(b" "),
)
def test_other_targets_are_left_to_flask(target):
    """Whatever is no inference; a slash that is quoted is a character of a name, and separates nothing."""
    assert parse_target(target) is None


@pytest.mark.parametrize(
    ("method", "target", "reads"),
    [
        ("GET", b"/metrics", True),
        ("HEAD", b"/models?next_page_token=x", True),
        ("GET", b"/models/a", True),
        ("GET", b"/v2/health/ready", True),
        ("GET", b"/v2/models/stats", True),
        ("GET", b"/v2/models/m/ready?x=y", False),
        ("HEAD", b"/v2/models/a/b/versions/1/ready", False),
        ("GET", b"/v2/models/a/b/versions/1/stats", True),
        ("GET", b"/v2/models/m/trace/setting", True),
        ("GET", b"/v2/models/m", False),
        ("HEAD", b"/v2/models/m/versions/2", False),
        ("GET", b"/v2/models/m/config?x=/ready", False),
        ("GET", b"/v2/models/ready", False),
        ("GET", b"/v2/model%73/m", False),
        ("GET", b"//v2%2Fmodels/m", True),
        ("GET", b"/v2/models/m%2Fready", False),
        ("GET", b"//v2/models/m/ready", False),
        ("POST", b"/v2/repository/index", False),
        ("DELETE", b"/models/a", False),
    ],
)
def test_other_targets_only_read_or_may_load_change_or_ask_a_model(method, target, reads):
    """What tells of a model's configuration loads it, and what tells of its readiness runs its code."""
    assert only_reads(method, target) is reads


def test_the_memory_of_targets_is_bounded(server, monkeypatch):
    """Clients that ask for ever new targets, or long ones, do not grow the table, and are answered."""
    monkeypatch.setattr("container.inference.http._MAX_ROUTES", 8)
    for number in range(20):
        assert server.http("GET", f"/ping?{number}").status == 200
        assert len(server.service.routes._routes) <= 8
    assert server.http("GET", f"/ping?{'x' * 4000}").status == 200
    assert max(map(len, server.service.routes._routes)) < 4000


@pytest.mark.parametrize(("text", "number"), [("", None), ("1", 1), ("0", 0), ("12", 12)])
def test_a_version_is_a_number(text, number):
    """Nothing means the latest."""
    assert parse_version(text) == number


@pytest.mark.parametrize("text", ["x", "-x", "1.0", "%D9%A3", "9" * 20, "9" * 5000, "%20"])
def test_a_version_that_is_no_number_is_refused(text, post, sums):
    """With Triton's sentence, shortened; it is a 404 there unless it has digits alone."""
    reply = post(f"/v2/models/arithmetic/versions/{text}/infer", sums)
    assert reply.status == (400 if text.isdigit() else 404)
    assert reply.error.startswith("failed to get model version from specified version string")
    assert len(reply.error) < 300


# -- inference -------------------------------------------------------------------------------------------------------


def test_json_in_json_out(post, sums):
    """The plain case, on every route that carries it."""
    runtime = {TARGET: "arithmetic"}
    for path, headers in (
        (INFER, {}),
        ("/v2/models/arithmetic/versions/1/infer", {}),
        ("/models/arithmetic/invoke", {}),
        ("/invocations", runtime),
        ("/endpoints/e/invocations", runtime),
    ):
        reply = post(path, sums, **headers)
        assert reply.status == 200, reply
        assert outputs_of(reply) == {"SUM": [11, 22, 33, 44], "DIFF": [-9, -18, -27, -36]}
        assert reply.json["model_name"] == "arithmetic"
        assert reply.json["model_version"] == "1"


def test_binary_in_binary_out_in_sagemakers_form(post, binary_body):
    """The media type carries the length of the header both ways."""
    document = {
        "inputs": [binary_input("A", A), binary_input("B", B)],
        "outputs": [{"name": "SUM", "parameters": {"binary_data": True}}],
    }
    body, length = binary_body(document, A.tobytes(), B.tobytes())
    for _ in range(2):
        reply = post("/models/arithmetic/invoke", body, Content_Type=BINARY_TYPE.decode() + str(length))
        assert reply.status == 200
        media_type, _, size = reply.headers["content-type"].rpartition("=")
        assert media_type + "=" == BINARY_TYPE.decode()
        assert "inference-header-content-length" not in reply.headers
        header, data = json.loads(reply.body[: int(size)]), reply.body[int(size) :]
        assert header["outputs"] == [
            {"name": "SUM", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
        ]
        assert data == (A + B).tobytes()


def test_binary_in_binary_out_in_kserves_form(post, binary_body):
    """The header of KServe carries the length both ways, on a SageMaker route too."""
    document = {"parameters": {"binary_data_output": True}, "inputs": [binary_input("A", A), binary_input("B", B)]}
    body, length = binary_body(document, A.tobytes(), B.tobytes())
    for path in (INFER, "/models/arithmetic/invoke"):
        reply = post(path, body, **{LENGTH: str(length)})
        assert reply.headers["content-type"] == "application/octet-stream"
        assert (
            reply.body[int(reply.headers["inference-header-content-length"]) :] == (A + B).tobytes() + (A - B).tobytes()
        )


@pytest.mark.parametrize("path", [INFER, "/models/arithmetic/invoke"])
def test_json_in_binary_out(path, post, sums):
    """A JSON request that asks for binary data gets them in its route's form."""
    reply = post(path, sums | {"parameters": {"binary_data_output": True}})
    if path == INFER:
        length = int(reply.headers["inference-header-content-length"])
    else:
        length = int(reply.headers["content-type"].rpartition("=")[2])
    assert reply.body[length:] == (A + B).tobytes() + (A - B).tobytes()


def test_json_and_binary_data_mix_both_ways(post, binary_body, json_inputs):
    """Each tensor in its own form."""
    document = {
        "inputs": [*json_inputs(A=A), binary_input("B", B)],
        "outputs": [{"name": "DIFF"}, {"name": "SUM", "parameters": {"binary_data": True}}],
    }
    body, length = binary_body(document, B.tobytes())
    reply = post(INFER, body, **{LENGTH: str(length)})
    length = int(reply.headers["inference-header-content-length"])
    header = json.loads(reply.body[:length])
    by_name = {item["name"]: item for item in header["outputs"]}
    assert by_name["DIFF"]["data"] == [-9, -18, -27, -36]
    assert reply.body[length:] == (A + B).tobytes()


@pytest.mark.parametrize(
    "datatype",
    ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"],
)
def test_every_datatype_of_onnx_goes_through_a_model(datatype, post, binary_body):
    """Binary data come back bit for bit from a real model that copies them; so does a tensor without elements."""
    elements = {"BOOL": [True, False], "BYTES": ["", "é模"], "FP16": [0.5, -2], "FP32": [0.5, -2], "FP64": [0.5, -2]}
    values = elements.get(datatype, [1, 100])
    for chosen in (values, []):
        if datatype == "BYTES":
            data = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in chosen)
        else:
            name = {"BOOL": "?"}.get(datatype, datatype.lower().replace("fp", "float"))
            data = np.array(chosen, dtype=name).tobytes()
        tensor = {"name": "IN", "shape": [len(chosen)], "datatype": datatype}
        tensor["parameters"] = {"binary_data_size": len(data)}
        document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        body, length = binary_body(document, data)
        reply = post(f"/v2/models/echo-{datatype}/infer", body, **{LENGTH: str(length)})
        assert reply.status == 200, reply
        assert reply.body[int(reply.headers["inference-header-content-length"]) :] == data
        if datatype != "FP16":
            tensor = {"name": "IN", "shape": [len(chosen)], "datatype": datatype, "data": chosen}
            assert outputs_of(post(f"/v2/models/echo-{datatype}/infer", {"inputs": [tensor]})) == {"OUT": chosen}


def test_requests_without_a_header_are_raw(post):
    """The whole body is the only input; every output is binary."""
    data = np.arange(5, dtype="<f4").tobytes()
    reply = post("/v2/models/echo-FP32/infer", data, **{LENGTH: "0"})
    length = int(reply.headers["inference-header-content-length"])
    assert reply.body[length:] == data
    assert json.loads(reply.body[:length])["outputs"][0]["shape"] == [5]
    reply = post("/models/echo-FP32/invoke", data, Content_Type=BINARY_TYPE.decode() + "0")
    assert reply.headers["content-type"] == BINARY_TYPE.decode() + str(length)


def test_a_raw_request_that_does_not_fit_is_refused(post):
    """By model and input."""
    reply = post(INFER, b"", **{LENGTH: "0"})
    assert (reply.status, "Raw request must only have 1 input" in reply.error) == (400, True)
    reply = post("/v2/models/echo-FP32/infer", b"abc", **{LENGTH: "0"})
    assert reply.error.startswith("input byte size mismatch for input 'IN' for model 'echo-FP32'")
    assert post("/v2/models/nobody/infer", b"abc", **{LENGTH: "0"}).error.endswith("'nobody' is not found")
    assert post("/v2/models/broken/infer", b"abc", **{LENGTH: "0"}).status == 400


def test_models_with_the_same_header_answer_for_themselves(post, binary_body):
    """One plan serves every model; answers differ by name, type and value, also when requests alternate."""
    array = np.array(X, dtype="<f4")
    document = {"inputs": [binary_input("X", array)], "parameters": {"binary_data_output": True}}
    body, length = binary_body(document, array.tobytes())
    for _ in range(2):
        for model, expected in (
            ("twice", array * 2),
            ("thrice", array * 3),
            ("twice%20as%20integers", (array * 2).astype("<i4")),
            ("mod%C3%A8le-%E6%A8%A1%E5%9E%8B", array * 5),
        ):
            reply = post(f"/v2/models/{model}/infer", body, **{LENGTH: str(length)})
            length_out = int(reply.headers["inference-header-content-length"])
            header = json.loads(reply.body[:length_out])
            assert reply.body[length_out:] == expected.tobytes()
            assert header["outputs"][0]["datatype"] == ("INT32" if "integers" in model else "FP32")


# -- requested outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [["SUM"], ["DIFF"], ["SUM", "DIFF"], ["DIFF", "SUM"], ["SUM", "SUM"], []])
def test_requested_outputs_are_given_once_and_no_others(wanted, post, sums):
    """A subset, all of them, one twice, none named."""
    reply = post(INFER, sums | {"outputs": [{"name": name} for name in wanted]})
    assert [output["name"] for output in reply.json["outputs"]] == [
        name for name in ("SUM", "DIFF") if not wanted or name in wanted
    ]


def test_unknown_outputs_are_refused(post, sums):
    """By name."""
    reply = post(INFER, sums | {"outputs": [{"name": "NONE"}]})
    sentence = "unexpected inference output 'NONE' for model 'arithmetic', allowed outputs are: SUM, DIFF"
    assert (reply.status, reply.error) == (400, sentence)


def test_the_request_id_comes_back(post, sums):
    """First in the answer, and only if there is one."""
    assert post(INFER, sums | {"id": "r-1 é"}).json["id"] == "r-1 é"
    assert "id" not in post(INFER, sums).json


def test_accept_asks_for_binary_data_where_the_request_does_not_say(post, sums):
    """On SageMaker's routes; what the request says of its outputs comes first, and KServe's route does not look."""
    binary = {"Accept": "application/vnd.sagemaker-triton.binary+json"}
    for path in ("/models/arithmetic/invoke", "/endpoints/e/invocations"):
        headers = {TARGET: "arithmetic"}
        reply = post(path, sums, **headers, **binary)
        assert reply.headers["content-type"].startswith(BINARY_TYPE.decode())
        assert reply.body.endswith((A + B).tobytes() + (A - B).tobytes())
        explicit = sums | {"outputs": [{"name": "SUM", "parameters": {"binary_data": False}}]}
        assert outputs_of(post(path, explicit, **headers, **binary)) == {"SUM": [11, 22, 33, 44]}
        explicit = sums | {"parameters": {"binary_data_output": False}}
        assert "SUM" in outputs_of(post(path, explicit, **headers, **binary))
        for accept in ("application/json", "*/*", "text/csv"):
            assert "SUM" in outputs_of(post(path, sums, **headers, Accept=accept))
    assert "SUM" in outputs_of(post(INFER, sums, **binary))


def test_the_default_of_accept_can_be_set(start, repository, sums):
    """SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT holds for requests without an Accept header."""
    running = start(
        mode=Mode.REPOSITORY,
        model_repository=repository,
        load_models=("arithmetic",),
        default_accept="application/vnd.sagemaker-triton.binary+json",
    )
    body = json.dumps(sums).encode()
    reply = running.http("POST", "/models/arithmetic/invoke", {}, body)
    assert reply.headers["content-type"].startswith(BINARY_TYPE.decode())
    reply = running.http("POST", "/models/arithmetic/invoke", {"Accept": "application/json"}, body)
    assert reply.headers["content-type"] == "application/json"


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "C"}, "'C' for model 'arithmetic'"),
        ({"name": "B"}, "input 'B' already exists in request for model 'arithmetic'"),
        ({"datatype": "FP64"}, "inference input 'A' data-type is 'FP64', but model 'arithmetic' expects 'FP32'"),
        (
            {"shape": [1, 3], "data": [1, 2, 3]},
            "unexpected shape for input 'A' for model 'arithmetic'. Expected [-1,4]",
        ),
        ({"shape": [4]}, "input 'B' batch size does not match other inputs for 'arithmetic'"),
        ({"shape": [2, 4], "data": X * 2}, "input 'B' batch size does not match other inputs for 'arithmetic'"),
        ({"shape": [0, 4], "data": []}, "input 'B' batch size does not match other inputs for 'arithmetic'"),
        ({"data": [1, 2, 3]}, "input 'A' has shape [1, 4], which is 4 elements, but 'data' holds 3"),
        ({"data": [1, 2, 3, "4"]}, "'data' of input 'A' holds elements that are not FP32"),
        ({"data": [[[[1, 2], [3, 4]]]]}, None),
        ({"shape": [0, 1 << 62, 1 << 62], "data": []}, "'shape' of input 'A' has too many elements"),
    ],
)
def test_a_request_that_does_not_fit_the_model_is_refused_by_name(change, words, post, sums):
    """Names, types, shapes and counts; afterwards the next request is served."""
    changed = {"inputs": [sums["inputs"][0] | change, sums["inputs"][1]]}
    reply = post(INFER, changed)
    if words is None:
        assert reply.status == 200
    else:
        assert reply.status == 400
        assert words in reply.error
    assert post(INFER, sums).status == 200


def test_batches_are_bounded(post, json_inputs):
    """A batch larger than the model's is refused, one of its very size is served."""
    nine, eight = np.zeros((9, 4)), np.zeros((8, 4))
    reply = post(INFER, {"inputs": json_inputs(A=nine, B=nine)})
    assert reply.error == "inference request batch-size must be <= 8 for 'arithmetic'"
    assert post(INFER, {"inputs": json_inputs(A=eight, B=eight)}).status == 200


@pytest.mark.parametrize("text", ["-1", "99999", "99999999999999999999", "x", "", "1.5", "0x1"])
@pytest.mark.parametrize("header", ["Content-Type", LENGTH])
def test_a_header_size_that_lies_is_refused(header, text, post, sums):
    """Negative, too large, huge, no number, in both headers; the connection's next request is served."""
    value = BINARY_TYPE.decode() + text if header == "Content-Type" else text
    reply = post("/models/arithmetic/invoke", sums, **{header: value})
    assert reply.status == 400
    assert re.match(r"Unable to parse|inference header size should be in range \(0, \d+\)", reply.error)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/models/nobody/infer", 404), ("/models/nobody/invoke", 404), ("/endpoints/e/invocations", 400)],
)
def test_an_unknown_model_is_refused_as_each_protocol_does(path, status, server, post, sums):
    """And leaves no trace in the table of models."""
    reply = post(path, sums, **({TARGET: "nobody"} if "endpoints" in path else {}))
    assert reply.status == status
    sentence = "Request for unknown model: 'nobody' is not found"
    assert reply.json == ({"Message": sentence} if "endpoints" in path else {"error": sentence})
    assert "nobody" not in server.engine.cache.entries


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "%2Fetc", "..", ".", "a%00b", "x%2Fy", "%FF"])
def test_names_that_are_no_names_are_unknown(name, post, sums):
    """Nothing outside of the repository is looked at."""
    assert post(f"/models/{name}/invoke", sums).status in {404, 405, 400}
    assert "is not found" in post("/invocations", sums, **{TARGET: "../arithmetic"}).error


def test_an_unknown_version_is_refused(post, sums):
    """By number, with those that there are."""
    reply = post("/v2/models/arithmetic/versions/7/infer", sums)
    assert reply.status == 404
    assert reply.error == "Request for unknown model: 'arithmetic' version 7 is not found; served versions are 1"


@pytest.mark.parametrize("path", ["/models/arithmetic/invoke", "/v2/models/arithmetic/infer"])
def test_what_other_servers_take_is_told_the_inputs_of_the_model(path, post):
    """Once it is in memory, by KServe, which loads no model for a request that is wrong."""
    post("/models/arithmetic/invoke", {"instances": [1]})
    reply = post(path, {"instances": [1]})
    assert reply.status == 400
    assert reply.error == (
        "the request must have 'inputs': an array of objects with name, shape, datatype and data; "
        "model 'arithmetic' takes 'A' FP32 [-1, 4], 'B' FP32 [-1, 4]"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_model_that_does_not_load_says_why(times, post, json_inputs):
    """Each time it is asked for."""
    for _ in range(times):
        reply = post("/models/broken/invoke", {"inputs": json_inputs(X=X)})
        assert reply.status == 400
        assert reply.error.startswith("ONNX Runtime can't load model 'broken'")


def test_a_model_that_fails_while_it_runs_is_a_server_error(post, json_inputs):
    """500 by every protocol, with the framework's words; SageMaker must not see a 507 in it."""
    document = {"inputs": json_inputs(X=X)}
    for path in ("/v2/models/fails/infer", "/models/fails/invoke"):
        reply = post(path, document)
        assert reply.status == 500
        assert reply.error.startswith("ONNX Runtime failed while running model 'fails'")


def test_nan_and_infinities_come_and_go_in_json_and_as_binary_data(post, json_inputs):
    """NaN is null in JSON, and itself as binary data; an infinity that a client sends is one."""
    document = {"inputs": json_inputs(X=[0, 1, math.inf, 1])}
    reply = post("/v2/models/quotient/infer", document)
    assert reply.status == 200
    assert b"[null,1.0,null,1.0]" in reply.body
    reply = post("/v2/models/quotient/infer", document | {"parameters": {"binary_data_output": True}})
    values = np.frombuffer(reply.body[int(reply.headers["inference-header-content-length"]) :], "<f4")
    assert np.array_equal(values, [math.nan, 1, math.nan, 1], equal_nan=True)


def test_too_little_memory_is_a_507(start, repository, json_inputs):
    """A model that can never fit is refused at once, by SageMaker's status for memory."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",), memory_budget=1)
    for path in ("/models/twice/invoke", "/v2/models/twice/infer"):
        reply = running.http("POST", path, {}, json.dumps({"inputs": json_inputs(X=X)}).encode())
        assert reply.status == 507
        assert "twice" in reply.error


# -- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_compressed_bodies_are_inflated(encoding, compress, post, sums, binary_body):
    """JSON, and binary data whose header length counts inflated bytes."""
    assert "SUM" in outputs_of(post(INFER, compress(json.dumps(sums).encode()), Content_Encoding=encoding))
    body, length = binary_body({"inputs": [binary_input("A", A), binary_input("B", B)]}, A.tobytes(), B.tobytes())
    reply = post(INFER, compress(body), Content_Encoding=encoding, **{LENGTH: str(length)})
    assert "SUM" in outputs_of(reply)


def telling(found, function):
    """The function; the name of each thread that it does not send to another one is added to what was found."""

    def called(*arguments):
        found.append(threading.current_thread().name)
        try:
            return function(*arguments)
        except NeedsThread:
            found.pop()
            raise

    return called


@pytest.fixture
def threads(monkeypatch):
    """The threads that inflated bodies, and that decoded requests."""
    found = []
    told = functools.partial(telling, found)
    monkeypatch.setattr(http, "inflate", told(http.inflate))
    monkeypatch.setattr(http, "inflate_quickly", told(http.inflate_quickly))
    monkeypatch.setattr(Decoder, "decode", told(Decoder.decode))
    return found


def test_a_large_compressed_body_is_inflated_by_a_thread(post, sums, binary_body, threads, server):
    """Answered as any other, and so is one that can't be inflated; a small one is not worth a thread."""
    parameters = {f"key {number}": str(np.random.default_rng(number).random()) for number in range(2000)}
    body = zlib.compress(json.dumps({**sums, "parameters": parameters}).encode())
    assert len(body) > 1 << 14
    assert "SUM" in outputs_of(post(INFER, body, Content_Encoding="deflate"))
    assert post(INFER, body[:-1], Content_Encoding="deflate").error.startswith("the body's deflate data end too early")
    assert [name == LOOP for name in threads] == [False, True, False]  # the middle one decoded
    threads.clear()
    assert "SUM" in outputs_of(post(INFER, zlib.compress(json.dumps(sums).encode()), Content_Encoding="deflate"))
    assert threads == [LOOP, LOOP]


@pytest.mark.parametrize("route", ["/v2/models/echo-BYTES/infer", "/models/echo-BYTES/invoke"])
def test_a_large_body_of_strings_is_decoded_by_a_thread(route, server, binary_body, threads):
    """Answered as any other, and so is one that holds another number of them; a small one is not worth a thread."""
    words = [b"word", b"x" * (1 << 20)]
    data = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    header = {"inputs": [binary_input("IN", np.frombuffer(data, np.uint8), "BYTES") | {"shape": [2]}]}
    header["outputs"] = [{"name": "OUT", "parameters": {"binary_data": True}}]
    body, length = binary_body(header, data)
    headers = {LENGTH: str(length)} if "v2" in route else {"Content-Type": BINARY_TYPE.decode() + str(length)}
    reply = server.http("POST", route, headers, body)
    assert (reply.status, reply.body.endswith(data)) == (200, True)
    header["inputs"][0]["shape"] = [3]
    wrong, length = binary_body(header, data)
    headers = {LENGTH: str(length)} if "v2" in route else {"Content-Type": BINARY_TYPE.decode() + str(length)}
    assert "expected 3 string elements" in server.http("POST", route, headers, wrong).error
    assert LOOP not in threads
    assert len(threads) == 2


# -- large JSON ------------------------------------------------------------------------------------------------------


@pytest.fixture
def readers(monkeypatch):
    """The threads that read JSON ahead; all JSON is large enough."""
    found = []
    told = functools.partial(telling, found)
    monkeypatch.setattr(http, "LARGE", 0)
    monkeypatch.setattr(decode_module, "LARGE", 0)
    monkeypatch.setattr(Decoder, "decode_long", told(Decoder.decode_long))
    monkeypatch.setattr(http, "decode_generate", told(http.decode_generate))
    monkeypatch.setattr(json_numbers, "_ARRAY", 0)
    monkeypatch.setattr(json_numbers, "_PIECE", 1)
    return found


def test_large_json_is_read_by_a_thread(server, readers, monkeypatch):
    """What is no longer than what the loop reads in a moment, the loop reads."""
    monkeypatch.undo()
    read_long = Decoder.decode_long
    monkeypatch.setattr(Decoder, "decode_long", lambda *_: readers.append(1) or read_long(*_))
    for count, read in ((1000, []), (100_000, [1])):
        document = {"inputs": [{"name": "IN", "shape": [count], "datatype": "FP32", "data": [0.5] * count}]}
        assert outputs_of(server.infer("echo-FP32", document)) == {"OUT": [0.5] * count}
        assert readers == read


@pytest.mark.parametrize(
    "path", [INFER, "/models/arithmetic/invoke", "/v2/models/quotient/generate", "/endpoints/e/invocations"]
)
@pytest.mark.parametrize("session", [False, True])
def test_what_is_read_ahead_is_answered_as_any_other(path, session, server, sums, readers, monkeypatch):
    """On every route, in sessions, with binary data behind it; and refused as any other."""
    headers = {TARGET: "arithmetic"}
    if session:
        headers["X-Amzn-SageMaker-Session-Id"] = "NEW_SESSION"
    inputs = sums["inputs"]
    bodies = [
        ({}, json.dumps(sums).encode()),
        ({}, b'{"X": [1, 2, 3, 4]}'),
        ({}, b'{"X": [[1], [2], [3], [4]], "inputs": []}'),
        ({}, json.dumps(sums).encode()[:-1]),
        ({}, json.dumps({"inputs": [inputs[0], inputs[1] | {"data": [1, 2, 3, "4"]}]}).encode()),
        ({}, json.dumps({"inputs": [inputs[0], inputs[1] | {"data": [[1, 2], [3]]}]}).encode()),
        ({"Content-Encoding": "gzip"}, gzip.compress(json.dumps(sums).encode())),
    ]
    header = json.dumps({"inputs": [inputs[0], binary_input("B", B)]}).encode()
    length = {"Content-Type": f"{BINARY_TYPE.decode()}{len(header)}"}
    bodies += [(length, header + B.tobytes()), (length, header + B.tobytes()[1:])]

    def asked():
        replies = [server.http("POST", path, headers | more, body) for more, body in bodies]
        return [(reply.status, reply.body) for reply in replies]

    ahead = asked()
    assert set(readers) == {name for name in readers if name.startswith("offload")} != set()
    monkeypatch.undo()
    assert ahead == asked()
    assert {status for status, _ in ahead} >= {200, 400} - ({400} if "endpoints" in path else set())


def test_large_generate_is_read_once_its_model_is_in_memory(start, repository, readers):
    """By a thread; what a version that is not there would make of it is not read."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    for version in ("", "/versions/1", "/versions/2"):
        reply = running.http("POST", f"/v2/models/twice{version}/generate", {}, b'{"X": [1, 2, 3, 4]}')
        assert reply.status == (404 if version.endswith("2") else 200)
    assert [name == LOOP for name in readers] == [False, False]


def test_generate_of_a_model_in_memory_is_no_task(start, repository):
    """It is queued at once, as any other inference; of others it is one, which waits for the load."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    routes = running.service.routes

    def ask(number):
        exchange = WaitingExchange("POST", b"/v2/models/twice/generate", {}, b'{"X": [1, 2, 3, %d]}' % number)
        routes.dispatch(exchange, pytest.fail)
        return exchange, len(routes._tasks)

    tasks = []
    for number in (4, 5):
        exchange, count = running.on_loop.call(ask, number)
        status, _, body = exchange.wait()
        assert (status, json.loads(body)["Y"]) == (200, [2, 4, 6, 2 * number])
        tasks.append(count)
    assert tasks == [1, 0]


def test_what_is_for_a_script_is_not_read(server, post, sums, readers, monkeypatch):
    """It gets the body as it is, unless the route is KServe's."""
    monkeypatch.setattr(ModelConfig, "takes_raw_body", property(lambda config: config.name == "arithmetic"))
    assert post("/models/arithmetic/invoke", sums).status == 400  # it is none
    assert readers == []
    assert post(INFER, sums).status == 200
    assert len(readers) == 1


def test_a_cold_model_is_loaded_for_what_was_read_ahead(start, repository, json_inputs, readers):
    """And tells what is wrong with it, where it is SageMaker's."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    wrong = json.dumps({"inputs": json_inputs(X=X)}).encode()[:-1]
    assert running.http("POST", "/models/twice/invoke", {}, wrong).status == 400
    assert running.engine.index.is_resident("twice")
    assert running.http("POST", "/v2/models/thrice/infer", {}, wrong).status == 400
    assert not running.engine.index.is_resident("thrice")
    assert outputs_of(running.infer("thrice", {"inputs": json_inputs(X=X)})) == {"Y": [3.0, 6.0, 9.0, 12.0]}
    assert len(readers) == 3


def test_a_client_that_leaves_while_its_body_is_read_is_not_served(server, sums, monkeypatch):
    """The model hears nothing of it."""
    reads, left = threading.Event(), threading.Event()
    read_long = Decoder.decode_long

    def read(*arguments):
        reads.set()
        left.wait(60)
        return read_long(*arguments)

    monkeypatch.setattr("container.codec.decode.LARGE", 0)
    monkeypatch.setattr(Decoder, "decode_long", read)
    exchange = WaitingExchange("POST", INFER.encode(), {}, json.dumps(sums).encode())
    count = server.http("GET", "/v2/models/arithmetic/stats").body
    server.on_loop.call(server.control.handle, exchange)
    assert reads.wait(60)
    server.on_loop.call(lambda exchange: exchange.on_disconnect(), exchange)
    left.set()
    monkeypatch.undo()
    while server.on_loop.call(lambda: len(server.service.routes._tasks)):
        time.sleep(0.001)
    assert server.http("GET", "/v2/models/arithmetic/stats").body == count


def body_from(reader):
    """The body of one answer of several on a connection."""
    head = b"".join(iter(reader.readline, b"\r\n"))
    return reader.read(int(re.search(rb"Content-Length: (\d+)", head)[1]))


def test_answers_keep_their_order_behind_large_json(server, json_inputs):
    """On one connection, whatever is asked behind it."""
    count = 100_000
    large = {"inputs": [{"name": "IN", "shape": [count], "datatype": "FP32", "data": [0.5] * count}]}
    asked = [
        ("POST", "/v2/models/echo-FP32/infer", json.dumps(large | {"id": "first"}).encode()),
        ("POST", INFER, json.dumps({"id": "second", "inputs": json_inputs(A=A, B=B)}).encode()),
        ("POST", "/v2/models/echo-FP32/infer", json.dumps(large | {"id": "third"}).encode()),
        ("GET", "/ping", b""),
    ]
    lines = "{} {} HTTP/1.1\r\nHost: test\r\nContent-Length: {}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        sending = threading.Thread(
            target=connection.sendall,
            args=(b"".join(lines.format(way, path, len(body)).encode() + body for way, path, body in asked),),
        )
        sending.start()
        with connection.makefile("rb") as reader:
            answers = [body_from(reader) for _ in asked]
        sending.join()
    assert [json.loads(each)["id"] for each in answers[:3]] == ["first", "second", "third"]
    assert answers[3] == b""


def test_bodies_that_do_not_inflate_are_refused(start, repository, sums):
    """Unknown encodings, garbage and bombs, each with its status, and the next request is served."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("arithmetic",), max_body_bytes=4096)

    def ask(body, encoding):
        return running.http("POST", INFER, {"Content-Encoding": encoding}, body)

    assert ask(b"x", "br").status == 501
    assert ask(b"x", "gzip").status == 400
    bomb = ask(gzip.compress(bytes(1 << 20)), "gzip")
    assert (bomb.status, bomb.error) == (400, "the body is larger than 4096 bytes once decompressed")
    assert ask(gzip.compress(json.dumps(sums).encode()), "gzip").status == 200


@pytest.mark.parametrize(("encoding", "inflate"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_answers_are_compressed_where_clients_ask_for_it(encoding, inflate, server, sums, binary_body):
    """KServe's infer alone: SageMaker's routes, generate and errors come as they are; the header's length stays."""
    accepts = {"Accept-Encoding": f"{encoding}, identity;q=0.5"}
    reply = server.http("POST", INFER, accepts, json.dumps(sums).encode())
    assert (reply.status, reply.headers["content-encoding"], reply.headers["vary"]) == (
        200,
        encoding,
        "Accept-Encoding",
    )
    assert [output["name"] for output in json.loads(inflate(reply.body))["outputs"]] == ["SUM", "DIFF"]

    wants = {"inputs": [binary_input("A", A), binary_input("B", B)], "parameters": {"binary_data_output": True}}
    body, length = binary_body(wants, A.tobytes(), B.tobytes())
    reply = server.http("POST", INFER, {LENGTH: str(length), **accepts}, body)
    whole = inflate(reply.body)
    described = json.loads(whole[: int(reply.headers[LENGTH.lower()])])
    assert sum(output["parameters"]["binary_data_size"] for output in described["outputs"]) == 2 * A.nbytes
    assert whole.endswith((A - B).tobytes())

    for path, status in (("/models/arithmetic/invoke", 200), ("/v2/models/none/infer", 404)):
        reply = server.http("POST", path, accepts, json.dumps(sums).encode())
        assert (reply.status, "content-encoding" in reply.headers) == (status, False), path


def test_a_large_answer_is_compressed_beside_the_loop(server, binary_body):
    """More bytes than are compressed at once."""
    zeros = np.zeros(1 << 18, np.float32)
    wants = {"inputs": [binary_input("IN", zeros)], "parameters": {"binary_data_output": True}}
    body, length = binary_body(wants, zeros.tobytes())
    headers = {LENGTH: str(length), "Accept-Encoding": "gzip"}
    reply = server.http("POST", "/v2/models/echo-FP32/infer", headers, body)
    assert (reply.status, reply.headers["content-encoding"]) == (200, "gzip")
    assert len(reply.body) < zeros.nbytes // 10
    assert gzip.decompress(reply.body).endswith(zeros.tobytes())


def test_who_sends_an_unknown_encoding_is_told_the_known_ones(server):
    """In a header as well, as Triton does."""
    reply = server.http("POST", INFER, {"Content-Encoding": "br"}, b"x")
    assert (reply.status, reply.headers["accept-encoding"]) == (501, "gzip, deflate")


def test_json_that_grows_over_the_limit_is_refused(start, repository):
    """What counts are the bytes of the tensor, of whose text there are fewer."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, max_body_bytes=4096)
    document = {"inputs": [{"name": "IN", "shape": [1024], "datatype": "FP64", "data": [0] * 1024}]}
    reply = running.infer("echo-FP64", json.dumps(document, separators=(",", ":")).encode())
    assert reply.status == 400
    assert reply.error.startswith("JSON input 'IN' has a byte_size (8192 bytes) that exceeds the maximum allowed value")


# -- what goes along -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/models/arithmetic/invoke", "/invocations", "/endpoints/e/invocations", INFER])
def test_custom_attributes_come_back(path, post, sums):
    """On success and on every kind of error, as they were sent."""
    headers = {ATTRIBUTES: 'trace=1; k="v" \xe9', TARGET: "arithmetic"}
    for document in (sums, {}, b"no json"):
        assert post(path, document, **headers).headers[ATTRIBUTES.lower()] == 'trace=1; k="v" \xe9'
    assert ATTRIBUTES.lower() not in post(path, sums, **{TARGET: "arithmetic"}).headers
    if path != INFER:
        assert post("/invocations", sums, **{ATTRIBUTES: "a", TARGET: "nobody"}).headers[ATTRIBUTES.lower()] == "a"


def test_server_timing_tells_of_the_load(start, repository, json_inputs):
    """A request that waited for a load says so, on any route and in any form; one that did not says so to boto3 alone."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    document = json.dumps({"inputs": json_inputs(X=X)}).encode()
    miss = r"cache;desc=miss, download;dur=\d+\.\d\d, load;dur=\d+\.\d\d, infer;dur=\d+\.\d{3}"
    cold = running.http("POST", "/models/twice/invoke", {}, document)
    assert re.fullmatch(miss, cold.headers["server-timing"])
    warm = running.http("POST", "/models/twice/invoke", {}, document)
    assert "server-timing" not in warm.headers
    runtime = running.http("POST", "/endpoints/e/invocations", {TARGET: "twice"}, document)
    assert re.fullmatch(r"cache;desc=hit, infer;dur=\d+\.\d{3}", runtime.headers["server-timing"])
    raw = [running.http("POST", "/v2/models/echo-FP32/infer", {LENGTH: "0"}, bytes(4)) for _ in range(2)]
    assert re.fullmatch(miss, raw[0].headers["server-timing"])
    assert "server-timing" not in raw[1].headers


def test_a_raw_request_counts_once(start, repository):
    """One that waits for the load is a miss, the next a hit."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    for _ in range(3):
        assert running.http("POST", "/v2/models/echo-FP32/infer", {LENGTH: "0"}, bytes(4)).status == 200
    stats = running.engine.registry.stats["echo-FP32"]
    assert (stats.hits, stats.loads) == (2, 1)
    assert stats.misses == 1


def test_a_client_that_leaves_while_its_model_loads_is_not_served(start, repository, json_inputs):
    """Whatever its request is made of, and however late; it is counted, and a session of its own is over."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("arithmetic",))
    document = json.dumps({"inputs": json_inputs(X=X)}).encode()
    for number, (target, headers, body) in enumerate(
        (
            (b"/v2/models/twice/infer", {}, document),
            (b"/v2/models/twice/infer", {LENGTH.lower(): "0"}, np.array(X, "<f4").tobytes()),
            (b"/v2/models/twice/generate", {}, b'{"X": [1, 2, 3, 4]}'),
            (b"/models/twice/invoke", {"x-amzn-sagemaker-session-id": "NEW_SESSION"}, document),
        ),
        1,
    ):
        exchange = WaitingExchange("POST", target, headers, body)
        with running.loads_held_up():
            running.on_loop.call(running.control.handle, exchange)
            running.on_loop.call(lambda exchange: exchange.on_disconnect(), exchange)
        assert running.http("GET", "/v2/models/twice").status == 200  # whoever waited longer has been served

        stats = running.engine.stats["twice", 1]
        assert (stats.failures["CANCELED"], stats.success.count) == (number, 0), target
        assert running.http("POST", "/v2/repository/models/twice/unload").status == 200
    assert len(running.service.routes._sessions.known) == 0


def test_a_path_and_a_header_that_disagree_are_refused(post, sums):
    """A client must not reach one model under the name of another."""
    reply = post("/models/arithmetic/invoke", sums, **{TARGET: "twice"})
    assert reply.status == 400
    assert "'twice'" in reply.error
    assert post("/models/arithmetic/invoke", sums, **{TARGET: "arithmetic"}).status == 200


def test_without_a_model_to_serve_the_client_is_told_to_name_one(post, sums):
    """/invocations of a server of many models."""
    reply = post("/invocations", sums)
    assert reply.status == 400
    assert "X-Amzn-SageMaker-Target-Model" in reply.error


# -- ping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_empty_and_healthy(method, server):
    """By each method that SageMaker may use."""
    reply = server.http(method, "/ping")
    assert (reply.status, reply.body) == (200, b"")


def test_ping_waits_for_the_model_and_for_nobody_who_loads(start, repository, json_inputs):
    """In ready mode it is 503 until the model is there; it answers while the loader is busy."""
    running = start(
        mode=Mode.SINGLE, model_dir=repository, default_model_name="twice", ping_mode=PingMode.READY, load_threads=1
    )
    assert running.http("GET", "/ping").status == 200
    assert running.http("POST", "/invocations", {}, json.dumps({"inputs": json_inputs(X=X)}).encode()).status == 200
    running.service.routes.starting = True
    assert running.http("GET", "/ping").status == 503
    running.service.routes.starting = False
    with running.loads_held_up():
        assert running.http("GET", "/ping").status == 200


def test_ping_says_when_the_server_goes(start, repository):
    """503 while it drains; inference is still answered."""
    running = start(mode=Mode.REPOSITORY, model_repository=repository, load_models=("nobody",))
    running.service.routes.draining = True
    assert running.http("GET", "/ping").status == 503
    assert running.http("GET", "/v2/health/ready").status == 400
    assert running.http("GET", "/v2/health/live").status == 200


# -- sessions --------------------------------------------------------------------------------------------------------


def test_sessions_may_be_switched_off(server, post, sums, monkeypatch):
    """Then a request that asks for one is refused, and KServe's routes know no such header anyway."""
    monkeypatch.setattr(server.service.routes._sessions, "_enabled", False)
    asked = {"X_Amzn_SageMaker_Session_Id": "NEW_SESSION"}
    reply = post("/models/arithmetic/invoke", sums, **asked)

    assert reply.status == 400
    assert "SAGEMAKER_ENABLE_STATEFUL_SESSIONS=true" in reply.error
    assert post(INFER, sums, **asked).status == 200


@pytest.mark.parametrize("document", [b"{", b"[1]", b'{"requestType": "CLOSE"', b'{"requestType": "OTHER"}'])
def test_what_is_no_word_about_a_session_is_a_request(post, document):
    """And no request either, in these cases; no session comes of it."""
    reply = post("/models/arithmetic/invoke", document, X_Amzn_SageMaker_Session_Id="NEW_SESSION")

    assert reply.status == 400
    assert "x-amzn-sagemaker-new-session-id" not in {name.lower() for name in reply.headers}


def test_a_model_without_sequences_has_sessions_too(post, sums):
    """They are created, last and end; what they mean is for the model to say."""
    path = "/models/arithmetic/invoke"
    created = post(path, sums, X_Amzn_SageMaker_Session_Id="NEW_SESSION")
    headers = {name.lower(): value for name, value in created.headers.items()}
    session = headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]

    assert outputs_of(created) == outputs_of(post(path, sums, X_Amzn_SageMaker_Session_Id=session))
    closed = post(path, {"requestType": "CLOSE"}, X_Amzn_SageMaker_Session_Id=session)
    assert (closed.status, closed.json) == (200, {"sessionId": session})
    assert post(path, sums, X_Amzn_SageMaker_Session_Id=session).status == 400


def test_a_model_that_is_not_there_has_no_sessions(post):
    """Its error is what the client is told."""
    reply = post("/models/nobody/invoke", {"requestType": "NEW_SESSION"}, X_Amzn_SageMaker_Session_Id="NEW_SESSION")

    assert reply.status == 404


@pytest.mark.parametrize("large", [http.LARGE, 0])
def test_what_is_answered_is_gone_at_once(large, post, sums, binary_body, monkeypatch):
    """Nothing of a request waits for the collector of garbage, its body least of all, whatever its answer is."""
    monkeypatch.setattr(http, "LARGE", large)
    monkeypatch.setattr(decode_module, "LARGE", large)
    body, length = binary_body({"inputs": [binary_input("A", A), binary_input("B", B)]}, A.tobytes(), B.tobytes())
    out_of_range = {"inputs": [{"name": "A", "shape": [1], "datatype": "INT8", "data": [1000]}]}
    paths = (INFER, "/models/arithmetic/invoke", "/v2/models/arithmetic/generate", "/v2/models/unknown/infer")
    bodies = (json.dumps(sums).encode(), b"{", b"{}", json.dumps(out_of_range).encode())
    requests = [(path, form(each), encoded) for path in paths for each in bodies for form, encoded in ENCODED]
    post(INFER, body, **{LENGTH: str(length)})
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        statuses = {post(path, each, **headers).status for path, each, headers in requests}
        statuses.add(post(INFER, body, **{LENGTH: str(length)}).status)
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert statuses == {200, 400, 404}
    assert not left & {"Exchange", "Call", "InferenceRequest", "frame", "MmeError"}
