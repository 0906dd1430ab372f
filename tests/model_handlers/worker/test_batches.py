"""Batches cross: what a client sent reaches the model, and what it answered the client, joined or one by one."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import PUT_BACK, ModelRequest, ModelResponse
from model_handlers.worker.wire import (
    MessageSplitter,
    Packing,
    ProtocolError,
    check_tensors,
    encode_message,
    pack_answers,
    pack_requests,
    unpack_answers,
    unpack_requests,
)

ROWS = st.integers(0, 3)
COLUMN = st.tuples(st.sampled_from(["<f4", "<i8", "u1", "?", "<f2", "O"]), hnp.array_shapes(min_dims=0, max_dims=2))


def crossed(fields):
    """What a message's fields are on the other side."""
    reader = MessageSplitter()
    reader.feed(encode_message(fields))
    return reader.next()


def written(packing):
    """The bytes that both sides see."""
    memory = bytearray(packing.end)
    packing.write(memoryview(memory))
    return np.frombuffer(bytes(memory), np.uint8)


def through(requests):
    """A batch as the model's process gets it, and the fields that it crossed by."""
    packing = Packing()
    fields = pack_requests(requests, packing)
    return unpack_requests(crossed(fields), written(packing), "m"), fields


def back(answers, shared=None):
    """Answers as the serving process gets them, and the fields that they crossed by."""
    packing = Packing(0 if shared is None else shared.nbytes, shared)
    fields = pack_answers(answers, packing, "m")
    memory = bytearray(packing.end)
    if shared is not None:
        memory[: shared.nbytes] = shared.tobytes()
    packing.write(memoryview(memory))
    return unpack_answers(crossed(fields), np.frombuffer(bytes(memory), np.uint8), len(answers), "m"), fields


def filled(dtype, shape):
    """An array of this type in which elements differ."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if dtype == "O":
        return np.array([b"%d" % number for number in numbers.ravel()], object).reshape(shape)
    return numbers.astype(dtype)


def assert_same(got, sent):
    """Same names, types, shapes and elements."""
    assert got.keys() == sent.keys()
    for name, array in sent.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got[name], array)


def batch_of(kinds, rows):
    """Requests of some rows each, with an input of each kind."""
    columns = {f"IN{index}": filled(dtype, (sum(rows), *shape)) for index, (dtype, shape) in enumerate(kinds)}
    ends = np.cumsum(rows)
    return [
        ModelRequest({name: array[end - count : end] for name, array in columns.items()}, ("OUT",))
        for count, end in zip(rows, ends, strict=True)
    ]


@settings(deadline=None)
@given(st.lists(COLUMN, min_size=1, max_size=3), st.lists(ROWS, min_size=2, max_size=4))
def test_requests_that_are_alike_cross_as_columns(kinds, rows):
    """One tensor an input, whatever the types and the requests' rows, and each gets its own."""
    sent = batch_of(kinds, rows)
    got, fields = through(sent)

    assert len(fields["columns"]) == len(kinds)
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert_same(one.inputs, other.inputs)
        assert one.outputs == ("OUT",)


@settings(deadline=None)
@given(st.lists(COLUMN, min_size=1, max_size=3), st.lists(ROWS, min_size=2, max_size=4))
def test_answers_that_are_alike_cross_as_columns(kinds, rows):
    """Likewise."""
    sent = [ModelResponse(request.inputs) for request in batch_of(kinds, rows)]
    got, fields = back(sent)

    assert len(fields["columns"]) == len(kinds)
    for one, other in zip(got, sent, strict=True):
        assert_same(one.outputs, other.outputs)


ERROR = MmeError(Kind.EXECUTION_FAILED, "no")


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (ModelResponse({"OUT": filled("<f4", (1,)), "MORE": filled("<f4", (1,))}), False),
        (ERROR, False),
        (ModelResponse({"MORE": filled("<f4", (1,))}), True),
        (PUT_BACK, True),
        (None, True),
    ],
    ids=["all", "error", "other outputs", "put back", "nothing"],
)
def test_a_batch_of_tensors_is_answered_by_all_outputs_or_an_error(answer, wrong):
    """Nothing else can be made of such a batch: a process that sends it is ended."""
    with pytest.raises(ProtocolError, match="without all of OUT") if wrong else nullcontext():
        check_tensors([answer], [ModelRequest({}, ("OUT",))])


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_request_alone_has_its_tensors_whole(shape):
    """Of any shape: it need not have rows."""
    [got], fields = through([ModelRequest({"IN": filled("<f4", shape)}, ())])
    [answer], answered = back([ModelResponse({"OUT": filled("<f4", shape)})])

    assert_same(got.inputs, {"IN": filled("<f4", shape)})
    assert_same(answer.outputs, {"OUT": filled("<f4", shape)})
    assert "columns" in fields
    assert "columns" in answered


ONE = {"IN": filled("<f4", (1, 4))}


@pytest.mark.parametrize(
    "other",
    [
        ModelRequest({"IN": filled("<f8", (1, 4))}, ("OUT",)),
        ModelRequest({"IN": filled("<f4", (1, 5))}, ("OUT",)),
        ModelRequest({"IN": filled("<f4", ())}, ("OUT",)),
        ModelRequest({"IN2": filled("<f4", (1, 4))}, ("OUT",)),
        ModelRequest({}, ("OUT",)),
        ModelRequest({**ONE, "MORE": filled("<f4", (1, 4))}, ("OUT",)),
        ModelRequest(ONE, ("ANOTHER",)),
    ],
    ids=["type", "shape", "scalar", "name", "none", "more", "outputs"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_requests_that_differ_cross_one_by_one(other, turned):
    """And arrive as they were sent."""
    sent = [ModelRequest(ONE, ("OUT",)), other]
    sent = sent[::-1] if turned else sent
    got, fields = through(sent)

    assert "columns" not in fields
    for one, each in zip(got, sent, strict=True):
        assert_same(one.inputs, each.inputs)
        assert one.outputs == each.outputs


def test_inputs_of_different_rows_cross_one_by_one():
    """A column has as many rows of a request as all the others."""
    inputs = {"A": filled("<f4", (1, 2)), "B": filled("<f4", (2, 2))}
    got, fields = through([ModelRequest(inputs, ()), ModelRequest(inputs, ())])

    assert "columns" not in fields
    assert_same(got[1].inputs, inputs)


@pytest.mark.parametrize("alike", [True, False])
def test_what_a_request_has_beside_tensors(alike):
    """Is its own, in whichever way it crosses."""
    told = ModelRequest(ONE, ("OUT",), "an id", {"key": 1, "on": True}, 500, "sequence", 3)
    other = ModelRequest(ONE if alike else {}, ("OUT",))
    got, fields = through([other, told, other])

    assert ("columns" in fields) is alike
    one = got[1]
    assert (one.id, one.parameters, one.timeout_us, one.correlation_id, one.flags) == (
        "an id",
        {"key": 1, "on": True},
        500,
        "sequence",
        3,
    )
    assert (got[0].id, got[2].parameters, got[2].flags) == ("", {}, 0)


@pytest.mark.parametrize(
    "other",
    [
        None,
        MmeError(Kind.EXECUTION_FAILED, "no"),
        ModelResponse(ONE, {"key": "value"}),
        ModelResponse({"IN": filled("<i8", (1, 4))}),
        ModelResponse({}),
    ],
    ids=["unasked", "error", "parameters", "type", "nothing"],
)
def test_answers_that_differ_cross_one_by_one(other):
    """The one says nothing of the other."""
    got, fields = back([ModelResponse(ONE), other, ModelResponse(ONE)])

    assert "columns" not in fields
    assert_same(got[0].outputs, ONE)
    assert_same(got[2].outputs, ONE)
    if isinstance(other, ModelResponse):
        assert got[1].parameters == other.parameters
        assert_same(got[1].outputs, other.outputs)
    else:
        assert str(got[1]) == str(other)


@pytest.mark.parametrize("count", [1, 2])
def test_an_output_that_can_not_cross_is_the_error_of_its_request(count):
    """Of each that has one; the others' answers come."""
    strange = ModelResponse({"OUT": np.zeros((1, 2), np.complex64)})
    got, _ = back([strange] * count + [ModelResponse(ONE)])

    assert [answer.kind for answer in got[:count]] == [Kind.EXECUTION_FAILED] * count
    assert "complex64" in got[0].message
    assert_same(got[count].outputs, ONE)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n": float("nan")}, "'n' of a response of model 'm' is nan"),
        ({"n": np.float64("-inf")}, "is -inf"),
        ({"n": 2**64}, "more than 64 bits"),
        ({"n": -(2**63) - 1}, "more than 64 bits"),
        ({"n": "half \ud800"}, "surrogates not allowed"),
        ({"\ud800": 1}, "surrogates not allowed"),
        ({7: 1}, "a name of <class 'int'>"),
        ({"n": [1]}, "is <class 'list'>, expected a string, number or boolean"),
        ({"n": None}, "expected a string, number or boolean"),
    ],
    ids=ascii,
)
def test_a_parameter_that_can_not_cross_is_the_error_of_its_request(parameters, words):
    """What JSON has no form for; the others' answers come."""
    got, _ = back([ModelResponse(ONE, parameters), ModelResponse(ONE, {"fine": 1})])

    assert got[0].kind is Kind.EXECUTION_FAILED
    assert words in got[0].message
    assert_same(got[1].outputs, ONE)


def test_parameters_cross():
    """All that JSON has a form for, to its bounds, numpy's numbers too."""
    parameters = {"a": True, "b": -(2**63), "c": 2**64 - 1, "d": 1.5, "e": "ü", "f": np.float64(0.1)}
    [got], _ = back([ModelResponse(ONE, parameters)])

    assert got.parameters == parameters
    assert got.parameters["a"] is True


def test_a_model_may_be_called_anything():
    """Its name is no pattern of a sentence."""
    packing = Packing()
    fields = pack_answers([ModelResponse({"OUT": np.zeros(1, "c8")})] * 2, packing, "{a}")

    assert "output 'OUT' of model '{a}'" in fields["answers"][0]["error"]["message"]


def test_what_lies_in_shared_memory_already_is_not_written_again():
    """An input that comes back as an output stays where it is, in a batch of several too."""
    shared = np.frombuffer(np.arange(8, dtype="<f4").tobytes(), np.uint8)
    rows = [shared[:16].view("<f4").reshape(1, 4), shared[16:].view("<f4").reshape(1, 4)]
    got, fields = back([ModelResponse({"OUT": row}) for row in rows], shared)

    assert [answer["outputs"]["OUT"][1] for answer in fields["answers"]] == [0, 16]
    assert_same(got[1].outputs, {"OUT": rows[1]})


@pytest.mark.parametrize(
    "fields",
    [
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": [1, 2]},
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": [-1, 5]},
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": [1.0, 3]},
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": [True, 3]},
        {"columns": {"OUT": ["FP32", 0, 4, []]}, "rows": [1, 1]},
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": [4]},
        {"columns": {"OUT": ["FP32", 0, 16, [4]]}, "rows": None},
        {"columns": {"OUT": ["FP32", 0, 1600, [400]]}, "rows": [200, 200]},
        {"columns": [], "rows": [2, 2]},
        {"columns": {}},
        {"answers": [None]},
        {"answers": [None, {"outputs": {}}]},
        {"answers": [None, {"outputs": {}, "parameters": 1}]},
        {"answers": 7},
        {},
    ],
)
def test_nonsense_is_refused(fields):
    """What no process of ours sends is never taken for an answer."""
    with pytest.raises((ProtocolError, LookupError, TypeError, ValueError, AttributeError)):
        unpack_answers(fields, np.zeros(64, np.uint8), 2, "m")
