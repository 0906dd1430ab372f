"""Responses: JSON and binary outputs, mixed at will, and heads that are kept."""

import json
import struct

import numpy as np
import orjson
import pytest

from container.codec import encode as module
from container.codec.encode import encode, encode_line
from container.codec.request import OutputOptions
from model_handlers.errors import Kind
from model_handlers.tensor import BY_NAME, encode_bytes_elements

JSON_TYPES = [name for name, data_type in BY_NAME.items() if data_type.json]
F4 = np.array([[1.5, -2]], dtype="<f4")


def reply(outputs=None, *, binary=None, remember=True):
    """What a decoder makes of a request."""
    return OutputOptions(outputs, binary=binary, remember=remember)


@pytest.mark.parametrize("datatype", BY_NAME)
def test_every_datatype_is_written_as_binary_data(datatype, arrays, respond, written):
    """All fourteen datatypes leave with name, type, shape and every bit of their extreme values."""
    array = arrays[datatype].reshape(1, 2)
    header, data = written(respond(("Y", datatype, array)), reply(binary=True))
    expected = encode_bytes_elements(array) if datatype == "BYTES" else array.tobytes()
    assert data == expected
    assert header["outputs"] == [
        {"name": "Y", "datatype": datatype, "shape": [1, 2], "parameters": {"binary_data_size": len(expected)}}
    ]


@pytest.mark.parametrize("datatype", JSON_TYPES)
def test_every_datatype_that_json_can_carry_is_written_as_json(datatype, arrays, respond, written):
    """Values are exact, the data flat."""
    array = np.array([["", "\0 é模"]], dtype=np.object_) if datatype == "BYTES" else arrays[datatype].reshape(1, 2)
    header, data = written(respond(("Y", datatype, array)), reply())
    assert data is None
    assert header["outputs"] == [
        {"name": "Y", "datatype": datatype, "shape": [1, 2], "data": array.ravel().tolist()}
    ] or np.array_equal(np.array(header["outputs"][0]["data"], array.dtype), array.ravel())


@pytest.mark.parametrize("count", [1, 2, 40_000])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_and_infinities_are_null_or_as_triton_writes_them(count, datatype, respond):
    """Null, which every parser reads; literals where they are asked for; also where a large output is in pieces."""
    array = np.array([1, np.nan, np.inf, -np.inf] * count, dtype=BY_NAME[datatype].dtype)
    response = respond(("null", "FP32", F4), ("Y", datatype, array), ("t", "BYTES", np.array([b"null"], object)))
    (body,), _ = encode(response, reply())
    assert body.count(b"1.0,null,null,null") == orjson.dumps(orjson.loads(body)).count(b"1.0,null,null,null") == count
    assert encode_line(response) == body + b"\n"
    (body,), _ = encode(response, reply(), literal=True)
    assert body.count(b"1.0,NaN,Infinity,-Infinity") == count
    assert encode_line(response, literal=True) == body + b"\n"
    data = [output["data"] for output in json.loads(body)["outputs"]]
    assert np.array_equal(data[1], array, equal_nan=True)
    assert [data[0], data[2]] == [[1.5, -2], ["null"]]


def test_a_name_with_null_in_it_is_a_name(respond, written):
    """The look for null is not fooled by text."""
    header, _ = written(
        respond(("null", "FP32", F4), ("t", "BYTES", np.array([b"null"], object)), model="null"), reply()
    )
    assert header["outputs"][0]["data"] == [1.5, -2]


def test_the_fields_come_in_the_protocols_order(respond):
    """Id if there is one, model, version, outputs."""
    with_id, _ = encode(respond(("Y", "FP32", F4), request_id="7"), reply())
    without, _ = encode(respond(("Y", "FP32", F4)), reply())
    assert list(json.loads(with_id[0])) == ["id", "model_name", "model_version", "outputs"]
    assert list(json.loads(without[0])) == ["model_name", "model_version", "outputs"]
    assert json.loads(with_id[0])["id"] == "7"


def test_json_and_binary_outputs_mix(respond, written):
    """Each output takes the form it was asked in; binary data follow in the order of the outputs."""
    response = respond(
        ("A", "FP32", F4),
        ("J", "INT64", np.array([7])),
        ("S", "BYTES", np.array([b"ab"], dtype=np.object_)),
        ("B", "BOOL", np.array([True])),
    )
    header, data = written(response, reply({"J": False}, binary=True))
    assert [item.get("data") for item in header["outputs"]] == [None, [7], None, None]
    sizes = [item["parameters"]["binary_data_size"] for item in header["outputs"] if "parameters" in item]
    assert sizes == [8, 6, 1]
    assert data == F4.tobytes() + struct.pack("<I", 2) + b"ab" + b"\x01"


@pytest.mark.parametrize(
    ("own", "default", "expected"),
    [
        (True, None, True),
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
def test_what_an_output_says_itself_comes_before_the_default(own, default, expected, respond, written):
    """binary_data of the output, then binary_data_output of the request, then JSON."""
    _, data = written(respond(("Y", "FP32", F4)), reply({} if own is None else {"Y": own}, binary=default))
    assert (data is not None) is expected


def test_accept_decides_where_the_request_says_nothing(respond, written):
    """A client that accepts binary data gets them, unless request or output say otherwise."""
    response = respond(("Y", "FP32", F4), ("Z", "FP32", F4))
    assert written(response, reply().accepting_binary())[1] == F4.tobytes() * 2
    assert written(response, reply({"Y": False}).accepting_binary())[1] == F4.tobytes()
    assert written(response, reply(binary=False).accepting_binary())[1] is None
    once = reply()
    assert once.accepting_binary() is once.accepting_binary()
    assert written(response, once)[1] is None


@pytest.mark.parametrize("datatype", BY_NAME)
def test_an_output_without_elements_is_written(datatype, respond, written):
    """Zero-size outputs in both forms."""
    array = np.empty((0, 3), dtype=BY_NAME[datatype].dtype)
    header, data = written(respond(("Y", datatype, array)), reply(binary=True))
    assert data == b""
    assert header["outputs"][0]["shape"] == [0, 3]
    if BY_NAME[datatype].json:
        assert written(respond(("Y", datatype, array)), reply())[0]["outputs"][0]["data"] == []


@pytest.mark.parametrize("size", [1, (1 << 14) - 1, 1 << 14, 1 << 15])
def test_large_outputs_are_sent_from_where_they_lie(size, respond):
    """Beyond a size nothing is copied; small, strided and converted outputs are, with the same bytes."""
    array = np.arange(size, dtype="<f4")
    strided = np.arange(2 * size, dtype="<f4")[::2]
    wide = np.arange(size, dtype="<f8")
    for given, same in ((array, array), (strided, strided), (wide, array)):
        parts, length = encode(respond(("Y", "FP32", given)), reply(binary=True))
        assert b"".join(parts)[length:] == np.ascontiguousarray(same, dtype="<f4").tobytes()
    parts, _ = encode(respond(("Y", "FP32", array)), reply(binary=True))
    assert np.shares_memory(np.frombuffer(parts[-1], np.uint8), array) is (array.nbytes >= 1 << 16)


def test_a_kept_head_is_the_head_of_its_own_response(respond, written):
    """Model, version, shape, size of strings, and after a reload names and types: what differs differs in the head."""
    once = reply(binary=True)
    text = lambda *elements: np.array(elements, dtype=np.object_)  # noqa: E731
    responses = [
        respond(("Y", "FP32", F4)),
        respond(("Y", "INT32", F4.astype("<i4"))),
        respond(("Z", "FP32", F4)),
        respond(("Y", "FP32", F4.reshape(2, 1))),
        respond(("Y", "FP32", F4), model="other"),
        respond(("Y", "FP32", F4), version="2"),
        respond(("Y", "FP32", F4), ("Z", "FP32", F4)),
        respond(("Y", "BYTES", text(b"ab", b"c"))),
        respond(("Y", "BYTES", text(b"a", b"bc"))),
        respond(("Y", "BYTES", text(b"ab", b"cd"))),
    ]
    for response in responses * 2:
        assert written(response, once) == written(response, reply(binary=True, remember=False))


def test_a_form_of_request_keeps_few_heads(respond, monkeypatch):
    """Answers of ever new sizes do not grow it, and a form that is not remembered keeps none."""
    monkeypatch.setattr(module, "_MAX_HEADS", 4)
    once, never = reply(binary=True), reply(binary=True, remember=False)
    for size in range(20):
        encode(respond(("Y", "FP32", np.zeros(size, "<f4"))), once)
        encode(respond(("Y", "FP32", np.zeros(size, "<f4"))), never)
        assert len(once.heads) <= 4
    assert never.heads is None


def test_a_kept_head_is_told_apart_from_the_id_that_goes_with_it(respond, written):
    """Requests of one form share a head; each answer carries its own id, or none."""
    once = reply(binary=True)
    for request_id in ("1", "", 'two"', "1", "drei\u00df"):
        parts, length = encode(respond(("Y", "FP32", F4), request_id=request_id), once)
        head = json.loads(b"".join(parts)[:length])

        assert head.get("id", "") == request_id
        assert list(head)[-3:] == ["model_name", "model_version", "outputs"]
    assert len(once.heads) == 1


# -- parameters ------------------------------------------------------------------------------------------------------

PARAMETERS = {"text": "x", "count": 3, "share": 0.5, "done": False}


@pytest.mark.parametrize("binary", [False, True])
def test_a_responses_parameters_are_in_its_head(binary, respond, written):
    """Text, numbers and booleans are written before the outputs, in JSON answers and in binary ones."""
    header, data = written(respond(("Y", "FP32", F4), request_id="7", parameters=PARAMETERS), reply(binary=binary))
    assert header["parameters"] == PARAMETERS
    assert list(header) == ["id", "model_name", "model_version", "parameters", "outputs"]
    assert data == (F4.tobytes() if binary else None)


@pytest.mark.parametrize("parameters", [None, {}])
@pytest.mark.parametrize("binary", [False, True])
def test_a_response_without_parameters_does_not_speak_of_them(binary, parameters, respond, written):
    """No parameters, or none in a dict, leave no field."""
    assert "parameters" not in written(respond(("Y", "FP32", F4), parameters=parameters), reply(binary=binary))[0]


def test_a_head_with_parameters_is_not_kept(respond, written):
    """Responses of one form say each what is theirs, or nothing, and only a head without parameters stays."""
    once = reply(binary=True)
    for parameters in ({"step": 1}, None, {"step": 2}, None, {"other": True}):
        header, data = written(respond(("Y", "FP32", F4), parameters=parameters), once)
        assert header.get("parameters") == parameters
        assert data == F4.tobytes()
    assert len(once.heads) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1 << 64, -(1 << 63) - 1, "\ud800", None, [1], {}, b"x"])
@pytest.mark.parametrize("binary", [False, True])
def test_a_parameter_that_the_protocol_does_not_have_is_refused(binary, value, respond, refusal):
    """By name and value, whatever the form of the outputs: nothing is sent as null or left out."""
    response = respond(("Y", "FP32", F4), parameters={"fine": 1, "mine": value})
    sentence = refusal(encode, response, reply(binary=binary), kind=Kind.UNSUPPORTED)
    assert sentence.startswith(f"response parameter 'mine' of model 'm' is {value!r};")


def test_a_parameters_name_is_text(respond, refusal):
    """A key that JSON does not have is refused."""
    sentence = refusal(encode, respond(parameters={1: "x"}), reply(), kind=Kind.UNSUPPORTED)
    assert sentence.startswith("response parameter 1 of model 'm' is 'x'")


def test_the_largest_integers_are_parameters(respond, written):
    """Integers of 64 bits, signed or not, are written exactly."""
    parameters = {"max": (1 << 64) - 1, "min": -(1 << 63)}
    assert written(respond(parameters=parameters), reply())[0]["parameters"] == parameters


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_line_is_the_json_of_an_answer_and_its_end(respond):
    """A streamed answer's line holds what an answer of its own would, id and parameters too, and no other line feed."""
    strings = np.array([b"two\nlines"], dtype=np.object_)
    response = respond(("Y", "FP32", F4), ("S", "BYTES", strings), request_id="7", parameters={"n\n": "a\nb"})
    (body,), _ = encode(response, reply())
    assert encode_line(response) == body + b"\n"
    assert encode_line(response).count(b"\n") == 1


def test_a_line_without_outputs_is_a_line(respond):
    """A response may have none."""
    assert json.loads(encode_line(respond())) == {"model_name": "m", "model_version": "1", "outputs": []}


def test_a_line_refuses_what_json_cannot_carry(respond, refusal):
    """Bytes that are no text are refused, and the next line is written."""
    broken, fine = (respond(("Y", "BYTES", np.array([value], object))) for value in (b"\xff", b"1"))
    assert "not UTF-8" in refusal(encode_line, broken, kind=Kind.UNSUPPORTED)
    assert json.loads(encode_line(fine))["outputs"][0]["data"] == ["1"]


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP32", np.arange(100_000, dtype=np.float32)),
        ("FP32", np.arange(65_536, dtype=np.float32).reshape(256, 256).T),
        ("BOOL", np.arange(70_000) % 3 == 0),
        ("BYTES", np.array([f"é{i}".encode() for i in range(40_000)], dtype=np.object_)),
    ],
)
def test_a_large_output_is_the_same_json(datatype, array, respond, written):
    """It is written in pieces, between which others have their turn."""
    header, _ = written(respond(("Y", datatype, array)), reply())
    flat = array.ravel().tolist()
    assert header["outputs"][0]["data"] == ([each.decode() for each in flat] if datatype == "BYTES" else flat)


def test_what_json_cannot_carry_is_refused_wherever_it_lies(respond, refusal):
    """In the last piece of a large output too."""
    array = np.full(70_000, b"a", np.object_)
    array[-1] = b"\xff"
    refusal(encode, respond(("Y", "BYTES", array)), reply(), kind=Kind.UNSUPPORTED)
