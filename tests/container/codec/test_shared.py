"""Tensors in regions of shared memory: read when a request is decoded, written when it is answered."""

from __future__ import annotations

import json

import numpy as np
import pytest

from container.codec.decode import Decoder
from container.codec.encode import encode, encode_line
from container.steps.shared_memory import DISABLED
from model_handlers.errors import Kind
from model_handlers.tensor import BY_NAME, encode_bytes_elements
from tests.shared_objects import registered, shared_object

SIZE = 256
F4 = np.array([1.5, -2], "<f4")


@pytest.fixture
def shared():
    """An object that a client has made."""
    with shared_object(SIZE) as made:
        yield made


@pytest.fixture
def regions(shared):
    """All of it as the region "r"."""
    return registered("r", shared)


@pytest.fixture
def decode(regions):
    """Decodes a document, and what lies behind it, by one decoder."""
    decoder = Decoder(regions=regions)

    def decoded(document, data=b"", *, binary=False):
        header = json.dumps(document).encode()
        length = len(header) if data or binary else None
        return decoder.decode(header + data, length, "m", lambda *_: None)

    return decoded


def tensor(size=8, offset=0, shape=(2,), datatype="FP32", name="X", region="r", **more):
    """An input that lies in a region."""
    parameters = {"shared_memory_region": region, "shared_memory_byte_size": size} | more
    if offset:
        parameters["shared_memory_offset"] = offset
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": parameters}


def output(size=8, offset=0, name="Y", **more):
    """A requested output that is to be in a region."""
    return {"name": name, "parameters": tensor(size, offset)["parameters"] | more}


@pytest.mark.parametrize("datatype", BY_NAME)
def test_every_datatype_is_read_and_written(datatype, arrays, shared, decode, respond):
    """Every bit of its extreme values, there and back."""
    array = arrays[datatype]
    data = encode_bytes_elements(array) if datatype == "BYTES" else array.tobytes()
    shared.buf[8 : 8 + len(data)] = data

    request, reply = decode(
        {"inputs": [tensor(len(data), 8, (1, 2), datatype)], "outputs": [output(len(data), offset=128)]}
    )
    assert (request.inputs[0].shape, request.inputs[0].dtype) == ((1, 2), BY_NAME[datatype].dtype)
    parts, length = encode(respond(("Y", datatype, request.inputs[0])), reply)

    assert bytes(shared.buf[128 : 128 + len(data)]) == data
    assert length is None
    (told,) = json.loads(b"".join(parts))["outputs"]
    assert told == {"name": "Y", "datatype": datatype, "shape": [1, 2]}


def test_a_tensor_without_elements_lies_anywhere(shared, decode, respond):
    """None of its bytes is read or written."""
    request, reply = decode({"inputs": [tensor(0, 9, (0, 4))], "outputs": [output(0, SIZE - 1)]})
    assert request.inputs[0].shape == (0, 4)
    encode(respond(("Y", "FP32", request.inputs[0])), reply)
    assert bytes(shared.buf[:SIZE]) == bytes(SIZE)


@pytest.mark.parametrize("binary", [False, True])
def test_what_lies_there_is_read_anew_each_time(binary, shared, decode):
    """A header that was met before means what the region holds now; what was read stays as it was."""
    document = {"id": "1", "inputs": [tensor()]}
    shared.buf[:8] = F4.tobytes()
    first, _ = decode(document, binary=binary)
    shared.buf[:8] = (2 * F4).tobytes()
    second, _ = decode(document, binary=binary)

    assert first.inputs[0].tolist() == F4.tolist()
    assert second.inputs[0].tolist() == (2 * F4).tolist()
    assert first.layout is second.layout
    assert (first.id, second.id) == ("1", "1")


def test_beside_tensors_that_are_sent(shared, decode, respond):
    """Binary data are those of the inputs that lie nowhere else, and an output's beside one that is written."""
    shared.buf[:8] = F4.tobytes()
    inputs = [
        {"name": "A", "shape": [1], "datatype": "UINT8", "parameters": {"binary_data_size": 1}},
        tensor(),
        {"name": "J", "shape": [1], "datatype": "INT64", "data": [7]},
        {"name": "B", "shape": [1], "datatype": "UINT8", "parameters": {"binary_data_size": 1}},
    ]
    outputs = [output(offset=16), {"name": "Z", "parameters": {"binary_data": True}}]
    request, reply = decode({"inputs": inputs, "outputs": outputs}, b"\x01\x02")
    assert [array.tolist() for array in request.inputs] == [[1], F4.tolist(), [7], [2]]

    parts, length = encode(respond(("Y", "FP32", F4), ("Z", "FP32", F4)), reply)
    body = b"".join(parts)
    assert body[length:] == bytes(shared.buf[16:24]) == F4.tobytes()
    described = json.loads(body[:length])["outputs"]
    assert [each.get("parameters") for each in described] == [None, {"binary_data_size": 8}]
    assert not any("data" in each for each in described)


def test_the_accept_header_does_not_make_it_binary(shared, decode, respond):
    """An output that is written is in no body, and neither is one of several responses."""
    _, reply = decode({"inputs": [], "outputs": [output(binary_data=False)]})
    _, length = encode(respond(("Y", "FP32", F4)), reply.accepting_binary())
    assert length is None
    assert bytes(shared.buf[:8]) == F4.tobytes()
    assert b'"data"' not in encode_line(respond(("Y", "FP32", 3 * F4)), reply.places)
    assert bytes(shared.buf[:8]) == (3 * F4).tobytes()


def test_unregistering_waits_for_the_answer(regions, shared, decode, respond):
    """A request that named a region before is answered there."""
    document = {"inputs": [], "outputs": [output()]}
    _, reply = decode(document)
    regions.unregister("r")
    encode(respond(("Y", "FP32", F4)), reply)
    assert bytes(shared.buf[:8]) == F4.tobytes()


@pytest.mark.parametrize(
    ("kind", "wrong", "sentence"),
    [
        (Kind.NOT_FOUND, {"region": "s"}, "Unable to find shared memory region: 's'"),
        (Kind.INVALID_ARGUMENT, {"offset": SIZE}, "Invalid offset for shared memory region: 'r'"),
        (Kind.INVALID_ARGUMENT, {"offset": SIZE - 4}, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            Kind.INVALID_ARGUMENT,
            {"size": 12},
            "input byte size mismatch for input 'X'. Expected 8 for shape [2] of FP32",
        ),
        (
            Kind.INVALID_ARGUMENT,
            {"size": -8},
            "'shared_memory_byte_size' of input 'X' must be a number of bytes, got -8",
        ),
        (Kind.INVALID_ARGUMENT, {"offset": 1.5}, "'shared_memory_offset' of input 'X' must be a number of bytes"),
        (Kind.INVALID_ARGUMENT, {"region": 1}, "'shared_memory_region' of input 'X' must be a string, got 1"),
        (
            Kind.INVALID_ARGUMENT,
            {"datatype": "BYTES"},
            "expected 2 string elements for inference input 'X' for model 'm'",
        ),
        (
            Kind.INVALID_ARGUMENT,
            {"binary_data_size": 8},
            "But set 'binary_data_size' in 'parameters', 'shared_memory_reg",
        ),
    ],
)
def test_what_is_wrong_with_an_input_has_one_sentence(kind, wrong, sentence, shared, decode, refusal):
    """It names the region, or the field of the input."""
    shared.buf[:8] = b"\x04\x00\x00\x00abcd"
    assert sentence in refusal(decode, {"inputs": [tensor(**wrong)]}, kind=kind)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"classification": 1}, "output 'Y' can not be in a shared memory region and have 'classification' as well"),
        ({"binary_data": True}, "output 'Y' can not be in a shared memory region and have 'binary_data' as well"),
        ({"shared_memory_byte_size": SIZE + 1}, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            {"shared_memory_byte_size": "8"},
            "'shared_memory_byte_size' of output 'Y' must be a number of bytes, got '8'",
        ),
    ],
)
def test_what_is_wrong_with_an_output_has_one_sentence(wrong, sentence, decode, refusal):
    """It is known before the model is asked."""
    assert sentence in refusal(decode, {"inputs": [], "outputs": [output(**wrong)]})


def test_a_size_must_be_told(decode, refusal):
    """Of inputs and of outputs."""
    bare = {"name": "Y", "parameters": {"shared_memory_region": "r"}}
    sentence = "has 'shared_memory_region' and no 'shared_memory_byte_size'"
    assert sentence in refusal(decode, {"inputs": [], "outputs": [bare]})
    assert sentence in refusal(decode, {"inputs": [bare | {"shape": [2], "datatype": "FP32"}]})


def test_an_output_that_needs_more_room_is_refused(shared, decode, respond, refusal):
    """By both sizes; nothing is written."""
    _, reply = decode({"inputs": [], "outputs": [output(7)]})
    sentence = refusal(encode, respond(("Y", "FP32", F4)), reply, kind=Kind.INTERNAL)
    assert sentence == (
        "shared memory size specified with the request for output 'Y' (7 bytes) should be at least 8 bytes to hold the "
        "results"
    )
    assert bytes(shared.buf[:8]) == bytes(8)


def test_a_smaller_output_leaves_the_rest_alone(shared, decode, respond):
    """Who reads it knows its length from its shape, or from the lengths of its strings."""
    shared.buf[:16] = b"x" * 16
    _, reply = decode({"inputs": [], "outputs": [output(16)]})
    encode(respond(("Y", "FP32", F4)), reply)
    assert bytes(shared.buf[:16]) == F4.tobytes() + b"x" * 8


def test_where_clients_share_no_memory_it_is_said_so(refusal):
    """By the tensor that names a region, and with how to switch it on."""
    off = Decoder()
    for document, who in (
        ({"inputs": [tensor()]}, "input 'X'"),
        ({"inputs": [], "outputs": [output()]}, "output 'Y'"),
    ):
        body = json.dumps(document).encode()
        sentence = refusal(off.decode, body, None, "m", lambda *_: None, kind=Kind.UNSUPPORTED)
        assert sentence == f"{who} names a shared memory region. {DISABLED}"
