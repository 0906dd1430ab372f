"""Whether a request's layout fits a model, and what the scheduler learns from one that does."""

import pytest

from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BYTES, FP32, INT32, INT64, TensorSpec
from serve.model.layout_check import KNOWN_LAYOUTS, ValidatedLayouts, check_layout
from serve.request import Layout
from serve.statistics import ModelStats

A = TensorSpec("A", FP32, (16,))
B = TensorSpec("B", INT64, (-1,))
C = TensorSpec("C", BYTES, (2, -1), optional=True)
Y = TensorSpec("Y", FP32, (4,))
Z = TensorSpec("Z", FP32, (1,))
NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def model(*inputs, batch=8):
    """A configuration with these inputs and the outputs Y and Z."""
    return ModelConfig("X", max_batch_size=batch, inputs=inputs, outputs=(Y, Z))


def layout(*inputs, outputs=()):
    """A layout of (name, type, shape)."""
    return Layout(tuple((name, data_type, tuple(shape)) for name, data_type, shape in inputs), tuple(outputs))


def signature(config, *inputs):
    """What has to be equal for requests to share a batch."""
    return check_layout(layout(*inputs), config).signature


# -- what fits -------------------------------------------------------------------------------------------------------


def test_the_batch_size_is_the_first_dimension():
    """A batching model's request counts as many elements as its first dimension says, up to max_batch_size."""
    for size in (1, 5, 8):
        assert check_layout(layout(("A", FP32, [size, 16])), model(A)).batch_size == size


def test_a_model_without_a_batch_dimension_counts_one():
    """With max_batch_size 0 the shape is the whole shape, and a request is one element."""
    assert check_layout(layout(("A", FP32, [16])), model(A, batch=0)).batch_size == 1


def test_inputs_may_come_in_any_order():
    """`order` says for each input of the model where the request has it, -1 for an optional one left out."""
    b, a, c = ("B", INT64, [1, 3]), ("A", FP32, [1, 16]), ("C", BYTES, [1, 2, 0])

    assert check_layout(layout(b, a), model(A, B)).order == (1, 0)
    assert check_layout(layout(b, a), model(A, C, B)).order == (1, -1, 0)
    assert check_layout(layout(c, b, a), model(A, C, B)).order == (2, 0, 1)


def test_a_model_without_inputs_takes_none():
    """No inputs are a batch of one."""
    assert check_layout(layout(), model()).batch_size == 1


@pytest.mark.parametrize(
    ("config", "shape"),
    [(model(B, batch=0), [0]), (model(B), [1, 0]), (model(TensorSpec("B", INT64, (-1, 3))), [2, 0, 3])],
    ids=["not batched", "batched", "batched, two dimensions"],
)
def test_a_tensor_may_have_no_elements(config, shape):
    """A variable dimension may be 0; the batch dimension is another matter."""
    assert check_layout(layout(("B", INT64, shape)), config)


def test_outputs_may_be_asked_for_in_any_order():
    """Any of the model's outputs may be requested, more than once too, or none for all of them."""
    for outputs in ((), ("Y",), ("Z", "Y"), ("Y", "Y")):
        assert check_layout(layout(("A", FP32, [1, 16]), outputs=outputs), model(A))


# -- who may share a batch -------------------------------------------------------------------------------------------


def test_equal_shapes_share_a_batch_whatever_their_batch_dimension():
    """The first dimension, the order of the inputs and the requested outputs do not matter."""
    config = model(A, B)
    one = check_layout(layout(("A", FP32, [1, 16]), ("B", INT64, [1, 5])), config)
    two = check_layout(layout(("B", INT64, [4, 5]), ("A", FP32, [4, 16]), outputs=("Y",)), config)

    assert one.signature == two.signature
    assert hash(one.signature) == hash(two.signature)


def test_a_variable_dimension_must_be_equal():
    """Requests whose variable dimensions differ do not share a batch."""
    assert signature(model(B), ("B", INT64, [1, 5])) != signature(model(B), ("B", INT64, [1, 6]))


def test_optional_inputs_must_be_there_in_both():
    """Requests share a batch only with those that leave out the same inputs, fixed in shape or not."""
    for optional in (C, TensorSpec("C", BYTES, (2, 3), optional=True)):
        config = model(A, optional)
        with_c = signature(config, ("A", FP32, [1, 16]), ("C", BYTES, [1, 2, 3]))
        assert with_c != signature(config, ("A", FP32, [1, 16]))
        assert with_c == signature(config, ("A", FP32, [2, 16]), ("C", BYTES, [2, 2, 3]))


def test_which_of_two_optional_inputs_is_there_matters():
    """One left out is not the other left out, though the shapes be the same."""
    optional = [TensorSpec(name, FP32, (-1,), optional=True) for name in "AB"]

    assert signature(model(*optional), ("A", FP32, [1, 3])) != signature(model(*optional), ("B", FP32, [1, 3]))


# -- what does not fit -----------------------------------------------------------------------------------------------


def count_message(expected, got, missing):
    """The sentence about too few or too many inputs."""
    number = got.count("'") // 2
    return (
        f"expected {expected} but got {number} inputs for model 'X'. Got input(s) {got}, but missing required input(s) "
        f"{missing}. Please provide all required input(s)."
    )


A_OK, B_OK = ("A", FP32, [1, 16]), ("B", INT64, [1, 2])


@pytest.mark.parametrize(
    ("config", "request_layout", "message"),
    [
        (
            model(A, B),
            layout(A_OK),
            count_message("2 inputs", "['A']", "['B']"),
        ),
        (
            model(A, B),
            layout(),
            count_message("2 inputs", "[]", "['A','B']"),
        ),
        (
            model(A),
            layout(A_OK, B_OK),
            count_message("1 inputs", "['A','B']", "[]") + " Allowed inputs are: A.",
        ),
        (
            model(A, B, C),
            layout(A_OK),
            count_message("number of inputs between 2 and 3", "['A']", "['B']"),
        ),
        (
            model(A, C),
            layout(("C", BYTES, [1, 2, 2])),
            count_message("number of inputs between 1 and 2", "['C']", "['A']"),
        ),
        (
            model(A, B),
            layout(A_OK, ("D", FP32, [1])),
            "unexpected inference input 'D' for model 'X', allowed inputs are: A, B",
        ),
        (
            model(A, C),
            layout(A_OK, ("D", FP32, [1])),
            "unexpected inference input 'D' for model 'X', allowed inputs are: A, C",
        ),
        (model(A, B), layout(A_OK, A_OK), "input 'A' already exists in request for model 'X'"),
        (
            model(A),
            layout(("A", INT32, [1, 16])),
            "inference input 'A' data-type is 'INT32', but model 'X' expects 'FP32'",
        ),
        (
            model(A, B),
            layout(A_OK, ("B", INT64, [2, 2])),
            "input 'B' batch size does not match other inputs for 'X'",
        ),
        (model(A), layout(("A", FP32, [9, 16])), "inference request batch-size must be <= 8 for 'X'"),
        (model(A), layout(("A", FP32, [0, 16])), "inference request batch-size must be >= 1 for 'X'"),
        (
            model(A),
            layout(("A", FP32, [1, 8])),
            "unexpected shape for input 'A' for model 'X'. Expected [-1,16], got [1,8]." + NOTE,
        ),
        (
            model(A),
            layout(("A", FP32, [8])),
            "unexpected shape for input 'A' for model 'X'. Expected [-1,16], got [8]." + NOTE,
        ),
        (
            model(A),
            layout(("A", FP32, [])),
            "unexpected shape for input 'A' for model 'X'. Expected [-1,16], got []." + NOTE,
        ),
        (
            model(A, B),
            layout(A_OK, ("B", INT64, [])),
            "input 'B' batch size does not match other inputs for 'X'",
        ),
        (
            model(A, batch=0),
            layout(("A", FP32, [1, 16])),
            "unexpected shape for input 'A' for model 'X'. Expected [16], got [1,16].",
        ),
        (
            model(A, batch=0),
            layout(("A", FP32, [0])),
            "unexpected shape for input 'A' for model 'X'. Expected [16], got [0].",
        ),
        (
            model(A),
            layout(A_OK, outputs=("Y", "W")),
            "unexpected inference output 'W' for model 'X', allowed outputs are: Y, Z",
        ),
    ],
    ids=[
        "one missing",
        "all missing",
        "one too many",
        "too few with optional ones",
        "an optional one instead",
        "unknown name",
        "unknown name beside optional ones",
        "twice",
        "data type",
        "different batch sizes",
        "batch too large",
        "batch of none",
        "dimension",
        "rank",
        "scalar",
        "scalar beside others",
        "batch dimension too many",
        "empty where fixed",
        "unknown output",
    ],
)
def test_what_does_not_fit_is_refused_by_name(config, request_layout, message):
    """Each way not to fit is INVALID_ARGUMENT in Triton's words, with the model and the tensor."""
    with pytest.raises(MmeError) as caught:
        check_layout(request_layout, config)

    assert caught.value.kind is Kind.INVALID_ARGUMENT
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("request_layout", "words"),
    [
        (layout(("D", INT32, [99, 1])), "expected 2 inputs"),
        (layout(("D", INT32, [99, 1]), ("B", INT32, [1])), "unexpected inference input 'D'"),
        (layout(("A", INT32, [99, 1]), ("B", INT64, [1])), "data-type"),
        (layout(("A", FP32, [99, 1]), ("B", INT64, [1, 1])), "batch size does not match"),
        (layout(("A", FP32, [99, 1]), ("B", INT64, [99, 1])), "batch-size must be <= 8"),
        (layout(("A", FP32, [1, 1]), ("B", INT64, [1, 1]), outputs=("W",)), "unexpected shape"),
    ],
    ids=["count", "name", "data type", "batch sizes", "batch size", "shape"],
)
def test_what_is_wrong_first_is_said_first(request_layout, words):
    """Of several faults the first in Triton's order is named: count, name, data type, batch size, shape."""
    with pytest.raises(MmeError) as caught:
        check_layout(request_layout, model(A, B))

    assert words in caught.value.message


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_what_fits_is_checked_once():
    """A layout yields the same each time, however many there are; no more than so many are remembered."""
    layouts = [layout(A_OK) for _ in range(KNOWN_LAYOUTS + 1)]
    known = ValidatedLayouts(model(A), ModelStats())
    checked = known[layouts[0]]
    assert checked == check_layout(layouts[0], model(A))
    assert known[layouts[0]] is checked
    for each in layouts:
        assert known[each] == checked
    assert len(known) == 1


def test_what_asks_for_an_output_very_often_is_not_remembered():
    """It fits, and its client could send it in as many lengths as there are places."""
    known = ValidatedLayouts(model(A), ModelStats())
    often = layout(A_OK, outputs=("Y",) * 10_000)
    assert known[often] == check_layout(often, model(A))
    assert len(known) == 0


def test_what_does_not_fit_is_counted_each_time():
    """It is refused and counted as a failure whenever it comes, and not remembered."""
    stats = ModelStats()
    known, odd = ValidatedLayouts(model(A), stats), layout(("B", FP32, [1, 16]))
    for _ in range(3):
        with pytest.raises(MmeError, match="unexpected inference input 'B'"):
            known[odd]
    assert (len(known), stats.fail.count) == (0, 3)
