"""Every number of a request has a bound: none makes the server work or hold memory as much as it says."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from container.codec.decode import Decoder
from container.codec.encode import classified
from container.codec.json_numbers import MOST_VALUES, MOST_WHOLE
from container.codec.request import header_length
from container.control.routes import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import GrpcDecoder
from container.http1 import Limits
from model_handlers.config.bounds import MAX_ITEMS
from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.content_types import MOST_UNPACKED
from model_handlers.tensor import FP32, MAX_DIMS, MAX_ELEMENTS
from serve.model.model import queue_for
from serve.request import InferenceResponse
from serve.sources.archive import ExtractLimits
from tests.docs.sentences import ROOT

MEMORY = 4 << 20  # bytes that reading a request may take, whose longest has 160 KB
NUMBERS = (2**31 - 1, 2**32 - 1, 2**40 + 1, 2**63 - 1, 2**64 - 1, 2**64, 10**400, -1, -(2**63), 0, 1.5, "9" * 5000)
INT64 = [number for number in NUMBERS if isinstance(number, int) and -(2**63) <= number < 2**63]
QUEUE = """dynamic_batching { priority_levels: 2 default_priority_level: 1 default_queue_policy {
  default_timeout_microseconds: 1000 allow_timeout_override: true } } max_batch_size: 8"""
# Where a number can stand in a request's JSON: what to do with a document, given the number.
PLACES = {
    "priority": lambda document, number: document["parameters"].update(priority=number),
    "timeout": lambda document, number: document["parameters"].update(timeout=number),
    "sequence_id": lambda document, number: document["parameters"].update(sequence_id=number),
    "parameter": lambda document, number: document["parameters"].update(own=number),
    "shape": lambda document, number: document["inputs"][0].update(shape=[number]),
    "shapes": lambda document, number: document["inputs"][0].update(shape=[number] * MAX_DIMS),
    "data": lambda document, number: document["inputs"][0].update(data=[number]),
    "classification": lambda document, number: document["outputs"][0].update(parameters={"classification": number}),
}


@pytest.fixture(autouse=True, scope="module")
def imported():
    """Modules and caches that are filled by need are no memory of a request's."""
    for form in ("json", "binary"):
        decoded(form, "priority", 1)


def decoded(form, place, number):
    """The request of a body with that number in it, and how its client wants the answer."""
    document = {
        "parameters": {},
        "inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}],
        "outputs": [{"name": "Y"}],
    }
    if form == "binary":
        del document["inputs"][0]["data"]
        document["inputs"][0]["parameters"] = {"binary_data_size": 4}
    PLACES[place](document, number)
    header = json.dumps(document).encode()
    body = header if form == "json" else header + bytes(4)
    return Decoder().decode(body, None if form == "json" else len(header), "m", lambda _request, _result: None)


def outcome(make):
    """What `make` returns, or the error that it raises; it took no memory to speak of."""
    tracemalloc.start()
    try:
        return make()
    except MmeError as error:
        return error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY, f"{peak} bytes"


def check(found):
    """Refuse a request's outcome that is neither one clear error nor a request that a queue takes."""
    if isinstance(found, MmeError):
        assert found.kind in {Kind.INVALID_ARGUMENT, Kind.UNSUPPORTED}
        assert len(found.message) < 1000
        return
    request, _ = found
    request.batch_size, request.arrival_ns = 1, 10
    queue = queue_for("m", parse_config(QUEUE, model="m"), 1)
    queue.push(request)
    assert queue.take(20).batch == [request]


@pytest.mark.parametrize("form", ["json", "binary"])
@pytest.mark.parametrize("place", PLACES)
def test_no_number_of_a_request_is_work_or_memory(form, place):
    """It is refused in one sentence, or compared with what there is."""
    for number in NUMBERS:
        if form == "binary" and place == "data":
            continue
        check(outcome(lambda: decoded(form, place, number)))  # noqa: B023 - called at once


@pytest.mark.parametrize("number", NUMBERS)
def test_no_size_of_binary_data_is_believed(number):
    """It is held against the shape, and the shape against the body."""
    for shape in ([1], [number]):
        item = {"name": "X", "shape": shape, "datatype": "UINT8", "parameters": {"binary_data_size": number}}
        header = json.dumps({"inputs": [item]}).encode()
        found = outcome(lambda: Decoder().decode(header + b"x", len(header), "m", None))  # noqa: B023 - called at once
        assert isinstance(found, MmeError)
        assert found.kind is Kind.INVALID_ARGUMENT


@pytest.mark.parametrize("key", ["inputs", "outputs", "parameters"])
def test_no_list_of_a_request_is_longer_than_its_bound(key):
    """The event loop looks at each entry."""
    document = {"inputs": [], "outputs": [], "parameters": {}}
    document[key] = {f"k{i}": 1 for i in range(MAX_ITEMS + 1)} if key == "parameters" else [{}] * (MAX_ITEMS + 1)
    with pytest.raises(MmeError, match=f"a request may have at most {MAX_ITEMS} {key}, got {MAX_ITEMS + 1}"):
        Decoder().decode(json.dumps(document).encode(), None, "m", None)
    message = pb.ModelInferRequest(model_name="m")
    for index in range(MAX_ITEMS + 1):
        if key == "parameters":
            message.parameters[f"k{index}"].int64_param = 1
        else:
            getattr(message, key).add(name="X", datatype="FP32") if key == "inputs" else message.outputs.add(name="Y")
    with pytest.raises(MmeError, match=f"a request may have at most {MAX_ITEMS} {key}, got {MAX_ITEMS + 1}"):
        GrpcDecoder().decode(message, None)


@pytest.mark.parametrize("depth", [65, 900, 1100, 100_000])
def test_no_nesting_is_deeper_than_its_bound(depth):
    """Neither that of data nor that of anything else."""
    nested = "[" * depth + "]" * depth
    for text in (
        f'{{"inputs": [{{"name": "X", "shape": [0], "datatype": "FP32", "data": {nested}}}]}}',
        f'{{"inputs": {nested}}}',
        f'{{"parameters": {{"p": {nested}}}, "inputs": []}}',
        f'{{"parameters": {{"p": NaN, "q": {nested}}}, "inputs": []}}',
    ):
        with pytest.raises(MmeError) as raised:
            Decoder().decode(text.encode(), None, "m", None)
        assert raised.value.kind is Kind.INVALID_ARGUMENT
        assert len(raised.value.message) < 1000


@pytest.mark.parametrize("number", INT64)
@pytest.mark.parametrize("place", ["priority", "timeout", "sequence_id", "own", "shape", "shapes", "classification"])
def test_no_number_of_a_message_is_work_or_memory(place, number):
    """The same over gRPC."""
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
    message.inputs.add(
        name="X", datatype="FP32", shape={"shape": [number], "shapes": [number] * MAX_DIMS}.get(place, [1])
    )
    output = message.outputs.add(name="Y")
    if place == "classification":
        output.parameters[place].int64_param = number
    elif not place.startswith("shape"):
        message.parameters[place].int64_param = number
    check(outcome(lambda: GrpcDecoder().decode(message, lambda _request, _result: None)))


@pytest.mark.parametrize("count", [1, 2**31 - 1, 2**63 - 1, 2**64 - 1])
def test_there_are_no_more_classes_than_there_are(count):
    """Whatever number is asked for."""
    response = InferenceResponse("m", "1", [("Y", FP32, np.array([[3, 1, 2]], np.float32))])
    ((_, _, classes),) = classified(response, {"Y": count}, {}, batches=True).outputs
    assert classes.shape == (1, min(count, 3))


@pytest.mark.parametrize("text", ["1" * 30, "-1", "2147483648", "9" * 5000, "inf", "", " ", "1e3", "0x10", "\u0661"])
def test_no_length_of_a_json_header_is_believed(text):
    """In either of its two places; the sentence quotes the beginning."""
    binary = f"application/vnd.sagemaker-triton.binary+json;json-header-size={text}"
    for headers in ({"inference-header-content-length": text}, {"content-type": binary}):
        with pytest.raises(MmeError) as raised:
            header_length(headers, 10, kserve=False)
        assert raised.value.kind is Kind.INVALID_ARGUMENT
        assert len(raised.value.message) < 200


@pytest.mark.parametrize("text", ["-1", "1" * 100, "9" * 5000, "inf", "1.5", "1e3", "²"])
def test_no_version_has_more_digits_than_its_bound(text):
    """A number of a path, a header or a message."""
    with pytest.raises(MmeError, match="version should be an integral value") as raised:
        parse_version(text)
    assert len(raised.value.message) < 300


def test_the_documentation_says_what_requests_and_archives_may_hold():
    """With the numbers of the code."""
    http, archive = Limits(), ExtractLimits()
    text = (ROOT / "docs" / "configuration.md").read_text()
    for row in (
        f"| {MAX_ITEMS:,} each |",
        f"| {MAX_DIMS} dimensions, {MAX_ELEMENTS:,} elements |",
        f"| {MOST_WHOLE:,} bytes and {MOST_VALUES:,} values |",
        f"| {http.request_line:,} bytes; {http.header_count} of {http.headers:,} bytes together |",
        f"| {archive.max_files:,} files and folders (`MME_MAX_ARCHIVE_FILES`), {archive.max_bytes:,} bytes unpacked |",
        f"| {MOST_UNPACKED:,} bytes unpacked, or twice the body where that is more |",
        f"| {archive.max_name_length:,} bytes, {archive.max_depth} names |",
    ):
        assert row in text
