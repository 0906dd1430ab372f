"""Ragged batches: what is joined is split again, and the model is told where everything is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.config.model_config import BatchInput, BatchInputKind, BatchOutput, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, INT32, TensorSpec, element_count
from serve.model.execution import execute_batch
from serve.model.layout_check import check_layout
from serve.model.tensors import TensorMap, batch_input, flat, split
from serve.request import InferenceRequest, Layout

SHAPES = [(2, 1, 3), (1, 2, 2)]  # two items of [1, 3], and one of [2, 2]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchInputKind.ELEMENT_COUNT, [6, 4]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT, [6, 10]),
        (BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, [0, 6, 10]),
        (BatchInputKind.ITEM_SHAPE, [[1, 3], [1, 3], [2, 2]]),
        (BatchInputKind.ITEM_SHAPE_FLATTEN, [1, 3, 1, 3, 2, 2]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("data_type", [INT32, FP32], ids=str)
def test_each_kind_tells_something_else_of_a_batch(kind, data_type, expected):
    """Counts are of requests, shapes are of items; both in the type that the configuration names."""
    told = batch_input(kind, SHAPES, data_type.dtype, batches=True)

    assert (told.tolist(), told.dtype) == (expected, data_type.dtype)


def test_the_largest_count_is_told_as_a_shape():
    """Whatever the values are."""
    assert batch_input(BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE, SHAPES, FP32.dtype, batches=True).shape == (6,)


def test_without_a_batch_dimension_a_request_is_an_item():
    """Its whole shape is the item's."""
    assert batch_input(BatchInputKind.ITEM_SHAPE, [(2, 3)], INT32.dtype, batches=False).tolist() == [[2, 3]]


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6))
def test_what_was_joined_is_split_as_it_was(shapes):
    """Whatever the shapes, every request gets its own elements in its own shape."""
    total = sum(map(element_count, shapes))
    pieces = split(np.arange(total), shapes)

    assert [piece.shape for piece in pieces] == shapes
    assert flat(pieces).tolist() == list(range(total))
    assert split(np.arange(total + 1), shapes) is None


X, Z, Y = (
    TensorSpec("x", FP32, (-1,), allow_ragged_batch=True),
    TensorSpec("z", FP32, (-1,)),
    TensorSpec("y", FP32, (-1,)),
)


class Handing:
    """A handler that answers with what it was given."""

    sees_requests = False

    def __init__(self, answer):
        self.answer = answer

    def execute(self, inputs, names):
        """What the test says."""
        self.inputs = inputs
        return [self.answer(inputs) for _ in names]


def config(*inputs, **fields):
    """A model of these inputs and the output y, split by x."""
    outputs = {"batch_output": (BatchOutput(("y",), ("x",)),)}
    return ModelConfig("m", max_batch_size=8, inputs=inputs, outputs=(Y,), **{**outputs, **fields})


def request(config, **arrays):
    """A request of these inputs."""
    layout = Layout(tuple((name, FP32, array.shape) for name, array in arrays.items()), ())
    made = InferenceRequest(layout, list(arrays.values()), None)
    checked = check_layout(layout, config)
    made.batch_size, made.order, made.signature = checked.batch_size, checked.order, checked.signature
    return made


def rows(*shape):
    """An array of this shape."""
    return np.arange(element_count(shape), dtype=np.float32).reshape(shape)


def test_a_ragged_input_is_no_reason_to_keep_requests_apart():
    """Inputs that are not ragged are one, and so is a request that leaves one out."""
    optional = TensorSpec("o", FP32, (1,), optional=True)
    model = config(X, Z, optional)
    one = request(model, x=rows(1, 3), z=rows(1, 2))

    assert one.signature == request(model, x=rows(1, 5), z=rows(1, 2)).signature
    assert one.signature != request(model, x=rows(1, 3), z=rows(1, 4)).signature
    assert one.signature != request(model, x=rows(1, 3), z=rows(1, 2), o=rows(1, 1)).signature


def test_a_ragged_batch_is_one_row_beside_inputs_that_are_joined_as_ever():
    """A single request is a row as well; the others keep their batch dimension."""
    given = BatchInput(BatchInputKind.ELEMENT_COUNT, ("count", "again"), INT32, ("x",))
    model = config(X, Z, batch_input=(given,))
    handler = Handing(lambda inputs: inputs["x"] * 2)
    batch = [request(model, x=rows(2, 3), z=rows(2, 2)), request(model, x=rows(1, 1), z=rows(1, 2))]
    together = execute_batch(handler, TensorMap("m", 1, model), batch)

    assert handler.inputs["x"].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert handler.inputs["z"].shape == (3, 2)
    assert handler.inputs["count"].tolist() == handler.inputs["again"].tolist() == [6, 1]
    assert [result.outputs[0][2].tolist() for result in together.results] == [[[0, 2, 4], [6, 8, 10]], [[0]]]
    alone = execute_batch(handler, TensorMap("m", 1, model), batch[:1])
    assert handler.inputs["x"].shape == (6,)
    assert alone.results[0].outputs[0][2].shape == (2, 3)


def test_an_output_of_another_size_fails_the_batch():
    """With the shapes that it was to be split into."""
    model = config(X)
    execution = execute_batch(Handing(lambda _: rows(3)), TensorMap("m", 1, model), [request(model, x=rows(1, 2))])

    (error,) = execution.results
    assert isinstance(error, MmeError)
    assert error.kind is Kind.EXECUTION_FAILED
    assert "returned output 'y' with 3 elements for requests of the shapes [1, 2]" in error.message
