"""Requests whose like was seen mean what protobuf makes of them, or are left to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import GrpcDecoder, contents, split
from model_handlers.errors import MmeError

_DTYPES = {"FP32": np.float32, "INT8": np.int8, "BYTES": None}


def _message(**said):
    message = pb.ModelInferRequest(model_name="m", id="1", **said)
    message.inputs.add(name="x", datatype="FP32", shape=[2])
    message.raw_input_contents.append(np.array([1, 2], np.float32).tobytes())
    return message


def _meaning(request):
    arrays = [(array.dtype, array.shape, array.tolist()) for array in request.inputs]
    return request.id, request.parameters or {}, request.layout.inputs, request.layout.outputs, arrays


def _ignore(*_):
    """Nobody waits."""


_names = st.sampled_from(["", "x", "name", "é" * 20])
_inputs = st.lists(
    st.tuples(_names, st.sampled_from(sorted(_DTYPES)), st.lists(st.integers(0, 3), max_size=3)), max_size=3
)
_raws = st.lists(st.sampled_from([b"", bytes(4), bytes(8), b"\1\0\0\0a", bytes(12), bytes(200)]), max_size=4)


@st.composite
def _messages(draw):
    message = pb.ModelInferRequest(
        model_name=draw(_names), model_version=draw(st.sampled_from(["", "1"])), id=draw(_names)
    )
    for name, datatype, shape in draw(_inputs):
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    for name in draw(st.lists(st.sampled_from(["y", "z"]), max_size=2)):
        output = message.outputs.add(name=name)
        if draw(st.booleans()):
            output.parameters["classification"].int64_param = draw(st.integers(0, 2))
    if draw(st.integers(0, 4)) == 0:
        message.parameters["p"].int64_param = 3
    if draw(st.integers(0, 2)) == 0:
        message.parameters["triton_enable_empty_final_response"].bool_param = draw(st.booleans())
    message.raw_input_contents.extend(draw(_raws))
    data = message.SerializeToString()
    if draw(st.integers(0, 3)) == 0:  # bytes of which no client means anything
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        data = data[:at] + bytes((draw(st.integers(0, 255)),)) + data[at + 1 :]
    return data


def _by_protobuf(decoder, data):
    try:
        message = pb.ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001 - protobuf has errors of its own
        return None
    try:
        request, options = decoder.decode(message, _ignore, data=data)
    except MmeError:
        return None
    return (message.model_name, message.model_version), _wish(options), _meaning(request)


def _wish(options):
    return options.outputs, options.binary, options.classes, options.places, options.empty_final


@given(st.lists(_messages(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=8))
def test_what_is_remembered_means_what_protobuf_says(pool, order):
    """Several messages, again and again, some of them damaged."""
    decoder = GrpcDecoder()
    for data in [*pool, *(pool[at % len(pool)] for at in order)]:
        try:
            found = decoder.remembered(data, _ignore)
        except MmeError:
            assert _by_protobuf(GrpcDecoder(), data) is None
            continue
        meant = _by_protobuf(decoder, data)
        if found is not None:
            plan, request = found
            assert (plan.target, _wish(plan.options), _meaning(request)) == meant


def test_the_like_of_a_request_needs_no_protobuf():
    """Other ids and other numbers, or none of an id."""
    decoder = GrpcDecoder()
    message = _message(parameters={"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)})
    data = message.SerializeToString()
    assert decoder.remembered(data, _ignore) is None
    assert _by_protobuf(decoder, data) is not None
    for request_id, numbers in (("2", [3, 4]), ("", [5, 6]), ("ü" * 200, [7, 8])):
        message.id = request_id
        message.raw_input_contents[0] = np.array(numbers, np.float32).tobytes()
        found = decoder.remembered(message.SerializeToString(), _ignore)
        assert found is not None
        assert (found[1].id, found[1].inputs[0].tolist()) == (request_id, numbers)


def _with_input_parameters():
    message = _message()
    message.inputs[0].parameters["p"].int64_param = 1
    return message


@pytest.mark.parametrize(
    "message",
    [_message(parameters={"sequence_id": pb.InferParameter(int64_param=1)}), _with_input_parameters()],
    ids=["parameters", "parameters of an input"],
)
def test_what_a_head_does_not_say_is_not_remembered(message):
    """What parameters mean may change from one request to the next."""
    decoder, data = GrpcDecoder(), message.SerializeToString()
    assert _by_protobuf(decoder, data) is not None
    assert decoder.remembered(data, _ignore) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a\x01m",
        b"\x0a\xff\xff\xff\xff\xff\xff\x01m\x3a\x00",
        b"\x0a\x05m\x3a\x00",
        b"\x08\x01\x3a\x00",
        b"\x1a\x011\x1a\x012\x3a\x00",
        b"\x1a\x01\xff\x3a\x00",
        b"\x0a\x90\x4e" + b"m" * 10_000 + b"\x3a\x00",
    ],
    ids=["empty", "no contents", "endless number", "cut", "no length", "two ids", "no text", "long"],
)
def test_a_message_without_a_head(data):
    """Protobuf reads it, or says what is wrong."""
    assert split(data) is None


def test_contents_that_others_follow():
    """They are left to protobuf, as are those that end too early."""
    assert contents(b"\x3a\x01a\x3a\x00", 0) == [(2, 3), (5, 5)]
    assert contents(b"\x3a\x01a\x0a\x01m", 0) is None
    assert contents(b"\x3a\x05a", 0) is None
