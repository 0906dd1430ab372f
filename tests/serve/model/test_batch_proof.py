"""A batch proves that requests may share one only if it agrees with all of them, and would have shown that it does not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from model_handlers.config.model_config import Guess, ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BF16, BY_DTYPE, BYTES, FP32, TensorSpec
from serve.model.batch_proof import ENOUGH, Batching, BatchProof, compare
from serve.request import InferenceRequest, InferenceResponse, Layout

CONFIG = ModelConfig(
    "m", max_batch_size=4, inputs=(TensorSpec("x", FP32, (2,)),), outputs=(TensorSpec("y", FP32, (2,)),)
)


def response(*outputs):
    """An answer of these outputs y0, y1, …; a pair says the type too."""
    named = []
    for place, output in enumerate(outputs):
        data_type, array = output if isinstance(output, tuple) else (BY_DTYPE[np.asarray(output).dtype], output)
        named.append((f"y{place}", data_type, np.asarray(array)))
    return InferenceResponse("m", "1", named)


def batch(*values):
    """Requests of one row each."""
    rows = [np.full((1, 2), value, np.float32) for value in values]
    return [InferenceRequest(Layout((("x", FP32, (1, 2)),), ()), [row], lambda *_: None) for row in rows]


def answers(*values):
    """One row of float32 for each."""
    return [response(np.full((1, 2), value, np.float32)) for value in values]


def proof(guess=Guess.UNKNOWN, verdict=None, **more):
    """The proof of a model, and the states that it told."""
    made, told = BatchProof(replace(CONFIG, guess=guess), verdict, **more), []
    made.listen(told.append)
    return made, told


def agree(made, *values):
    """Have it judge a batch that agrees in both orders."""
    contents = made.wants(batch(*values))
    assert contents is not None
    made.judge(contents, answers(*values), [answers(*values)] * 2)


# -- comparing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "together", "differs", "telling"),
    [
        ([[0.1, 0.9]], [[0.1, 0.9]], False, True),
        ([[0.1, 0.9]], [[0.104, 0.896]], False, True),
        ([[0.1, 0.9]], [[0.106, 0.894]], True, False),
        ([[100.0, -900.0]], [[100.0, -896.0]], False, True),
        ([[100.0, -900.0]], [[100.0, -890.0]], True, False),
        ([[0.5, 0.5]], [[0.5, 0.5]], False, False),
        ([[0.500, 0.501]], [[0.5005, 0.5005]], False, False),
        ([[np.nan, 1.0]], [[np.nan, 1.0]], False, True),
        ([[np.nan, 1.0]], [[1.0, 1.0]], True, False),
        ([[np.inf, 1.0]], [[-np.inf, 1.0]], True, False),
        ([[0.0, 0.0]], [[0.0, 0.0]], False, False),
        ([[3e-5, 8e-5]], [[2e-5, 9e-5]], False, False),
    ],
)
def test_floats_are_compared_by_their_size(alone, together, differs, telling):
    """Half a hundredth of the largest, of 1 for probabilities; answers that hardly differ from one another tell nothing."""
    singles, joined = ([response(np.array([[each]], np.float32)) for each in row[0]] for row in (alone, together))
    found = compare(singles, joined)
    assert (bool(found.differs), found.telling) == (differs, telling)


@pytest.mark.parametrize("dtype", ["i8", "u1", "?"])
def test_whole_numbers_are_equal_or_differ(dtype):
    """By one is another number."""
    singles = [response(np.array([[value]], dtype)) for value in (0, 1)]
    assert compare(singles, singles) == ("", True)
    assert compare(singles, singles[::-1]).differs == "output 'y0' holds other values than alone"
    assert compare(singles[:1] * 2, singles[:1] * 2) == ("", False)


def test_texts_are_equal_or_differ():
    """As whole numbers are."""
    one, other = (response((BYTES, np.array([[text]], object))) for text in (b"a", b"b"))
    assert compare([one, other], [one, other]) == ("", True)
    assert compare([one, other], [one, one]).differs


def test_another_shape_is_a_difference():
    """Rows that were left out, say."""
    one, other = response(np.zeros((2, 3), "f4")), response(np.zeros((1, 3), "f4"))
    assert compare([one, one], [one, other]).differs == "output 'y0' has shape [1, 3], and [2, 3] alone"


def test_bits_of_bf16_are_numbers():
    """They lie in the protocol's UINT16, and are compared as what they are."""
    bits = (np.array([[1.0], [2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    singles = [response((BF16, bits[:1])), response((BF16, bits[1:]))]
    nearly = [response((BF16, bits[:1] + np.uint16(1))), response((BF16, bits[1:]))]
    assert compare(singles, nearly) == ("", True)
    assert compare(singles, singles[::-1]).differs


def test_one_output_that_differs_is_enough():
    """Whatever the others do."""
    singles = [response(np.array([[1.0]]), np.array([[value]])) for value in (1, 2)]
    joined = [response(np.array([[1.0]]), np.array([[value]])) for value in (1, 3)]
    assert compare(singles, joined).differs == "output 'y1' holds other values than alone"


FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = st.integers(2, 5).flatmap(lambda count: arrays(np.float32, (count, 3), elements=FLOATS))


@given(ROWS)
def test_a_batch_that_is_its_requests_agrees(rows):
    """What was answered alone never differs from itself, and tells something if there are two answers."""
    singles = [response(row[None]) for row in rows]
    found = compare(singles, singles)
    assert found == ("", bool(np.any(rows != rows[0])))


@given(ROWS)
def test_a_sum_over_the_first_dimension_is_never_proven(rows):
    """Whatever is sent: a batch of a cumulative sum differs in one of two orders, or proves nothing."""
    singles = [response(row[None].astype(np.float64)) for row in rows]
    forward = [response(row[None]) for row in np.cumsum(rows.astype(np.float64), axis=0)]
    backward = [response(row[None]) for row in np.cumsum(rows[::-1].astype(np.float64), axis=0)][::-1]
    found = [compare(singles, joined) for joined in (forward, backward)]
    assert any(each.differs for each in found) or not all(each.telling for each in found) or not np.any(rows)


# -- deciding ------------------------------------------------------------------------------------------------------------


def test_three_batches_of_different_contents_prove_it():
    """Not two, and not three times the same; the proof is told once."""
    made, told = proof()
    for values in ((1, 2), (1, 3), (2, 3, 4)):
        assert not made.joins
        agree(made, *values)
    assert (made.joins, told) == (True, [Batching.PROVEN])
    assert made.wants(batch(7, 8)) is None


@pytest.mark.parametrize("values", [(1, 1), (1, 2), (2, 1), (2, 1, 2)])
def test_contents_that_prove_nothing_are_not_tried(values):
    """Requests that are all alike, or those of a batch that was tried, in whatever order."""
    made, _ = proof()
    agree(made, 1, 2)
    assert made.wants(batch(*values)) is None


def test_what_proves_nothing_is_tried_ever_more_rarely():
    """After each such batch twice as many and one more are let go by; one that tells something is tried anew at once."""
    made, _ = proof()
    tried = []
    for number in range(30):
        contents = made.wants(batch(number, number + 1))
        if contents is not None:
            tried.append(number)
            made.judge(contents, answers(5, 5), [answers(5, 5)] * 2)
    assert tried == [0, 2, 6, 14]
    while made.wants(batch(1, 2)) is None:
        pass
    for value in range(ENOUGH):
        agree(made, value, value + 1)
    assert made.joins


def test_answers_that_are_all_alike_prove_nothing():
    """A model that says the same to everything might mix anything."""
    made, told = proof()
    contents = made.wants(batch(1, 2))
    made.judge(contents, answers(5, 5), [answers(5, 5)] * 2)
    assert (made.state, told) == (Batching.UNPROVEN, [])
    assert made.wants(batch(3, 4)) is None


@pytest.mark.parametrize("order", [0, 1])
def test_one_difference_refutes_it(order, caplog):
    """In either order, and for good: one warning says what to write."""
    made, told = proof()
    joined = [answers(1, 2), answers(1, 2)]
    joined[order] = answers(1, 3)
    made.judge(made.wants(batch(1, 2)), answers(1, 2), joined)
    made.judge(frozenset(), answers(1, 2), joined)
    assert (made.state, made.joins, made.alone, told) == (Batching.REFUTED, False, True, [Batching.REFUTED])
    assert made.wants(batch(5, 6)) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "model 'm' does not batch, which its file left open: in a batch of 2 requests output 'y0' differs by 1 from what "
        "it is alone. Its requests are executed one by one. Write into config.pbtxt max_batch_size: 0 and whole shapes "
        "(of input 'x' dims: [ -1, 2 ]), or max_batch_size: 4 to have it batch all the same"
    )


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Kind.EXECUTION_FAILED, Batching.REFUTED),
        (Kind.INTERNAL, Batching.REFUTED),
        (Kind.OUT_OF_MEMORY, Batching.UNPROVEN),
        (Kind.UNAVAILABLE, Batching.UNPROVEN),
    ],
)
def test_a_batch_that_fails_alone_refutes_it(kind, state):
    """But for what says nothing of the model."""
    made, _ = proof()
    made.failed(2, MmeError(kind, "no"))
    assert made.state is state


def test_a_failure_after_the_proof_has_it_proven_anew():
    """Three batches more; nothing that was proven before counts."""
    made, told = proof()
    for value in range(ENOUGH):
        agree(made, value, value + 1)
    made.doubt()
    made.doubt()
    assert not made.joins
    for value in range(ENOUGH):
        assert not made.joins
        agree(made, value, value + 1)
    assert told == [Batching.PROVEN, Batching.UNPROVEN, Batching.PROVEN]


@pytest.mark.parametrize(
    ("guess", "verdict", "state", "joins", "alone"),
    [
        (Guess.BATCH, None, Batching.NAMED, True, False),
        (Guess.OTHER, None, Batching.OTHER, False, True),
        (Guess.UNKNOWN, None, Batching.UNPROVEN, False, False),
        (Guess.UNKNOWN, Batching.PROVEN, Batching.PROVEN, True, False),
        (Guess.UNKNOWN, Batching.REFUTED, Batching.REFUTED, False, True),
        (Guess.OTHER, Batching.PROVEN, Batching.OTHER, False, True),
    ],
)
def test_it_begins_with_what_is_known(guess, verdict, state, joins, alone):
    """By names, or by a verdict on the same file; where nothing is to be guessed, one by one."""
    made, _ = proof(guess, verdict)
    assert (made.state, made.joins, made.alone) == (state, joins, alone)
    off, _ = proof(guess, verdict, guesses=False)
    assert (off.state, off.joins, off.alone) == (Batching.OFF, False, True)
