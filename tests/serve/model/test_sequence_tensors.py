"""What a model of sequences is given for a batch, and what becomes of what it returns."""

from pathlib import Path

import numpy as np
import pytest

from model_handlers.config.model_config import (
    ControlInput,
    ControlKind,
    InitialState,
    ModelConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END as END
from model_handlers.requests import FLAG_SEQUENCE_KEPT as KEPT
from model_handlers.requests import FLAG_SEQUENCE_START as START
from model_handlers.requests import PUT_BACK, ModelResponse
from model_handlers.tensor import BYTES, FP32, INT32, INT64, UINT32, UINT64, TensorSpec, encode_bytes_elements
from serve.model.sequence_batcher import LiveSequence, SequenceBatch
from serve.model.tensors import tensor_map_for
from serve.model.warmup import initial_states
from serve.request import InferenceRequest, Layout

READY = ControlInput("READY", (SequenceControl(ControlKind.CONTROL_SEQUENCE_READY, bool_false_true=(False, True)),))
CONTROLS = (
    ControlInput("START", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(-1, 1)),)),
    ControlInput("END", (SequenceControl(ControlKind.CONTROL_SEQUENCE_END, int32_false_true=(0, 7)),)),
    READY,
)
SUM = SequenceState("IN", "OUT", FP32, (1,))
TEXT = SequenceState("TEXT_IN", "TEXT_OUT", BYTES, (1,))


def config_of(*, states=(), controls=(), max_batch_size=4, outputs=("Y",)):
    """A model X → Y with such sequences."""
    return normalise(
        ModelConfig(
            "m",
            max_batch_size=max_batch_size,
            inputs=(TensorSpec("X", FP32, (1,)),),
            outputs=tuple(TensorSpec(name, FP32, (1,)) for name in outputs),
            sequence_batching=SequenceBatching(state=states, control_input=controls),
        )
    )


def corrid(kind):
    """The control that tells ids in a type."""
    return (ControlInput("ID", (SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=kind),)),)


class Bench:
    """A signature, and sequences by their ids."""

    def __init__(self, **fields):
        self.config = config_of(**fields)
        self.signature = tensor_map_for("m", 1, self.config, initial_states(self.config, Path()))
        self.sequences = {}

    def batch(self, *steps, rows=None):
        """A batch of (id, value, flags, wanted outputs)."""
        sequences = []
        for correlation_id, value, flags, *wanted in steps:
            shape = (1, 1) if self.config.max_batch_size else (1,)
            layout = Layout((("X", FP32, shape),), tuple(wanted))
            request = InferenceRequest(layout, [np.full(shape, value, np.float32)], lambda *_: None)
            request.correlation_id, request.flags, request.order = correlation_id, flags, (0,)
            sequence = self.sequences.setdefault(correlation_id, LiveSequence(correlation_id))
            sequence.waiting.append(request)
            sequences.append(sequence)
        return SequenceBatch(sequences, rows or range(len(sequences)))

    def given(self, *steps, rows=None):
        """What a handler is given."""
        return self.signature.collate(self.batch(*steps, rows=rows))[0]

    def execute(self, function, *steps, rows=None):
        """The responses of a handler that is a function."""
        batch = self.batch(*steps, rows=rows)
        inputs, names = self.signature.collate(batch)
        outputs = function(inputs)
        return self.signature.scatter(batch, names, [outputs[name] for name in names], self.signature.rows(batch))


def flat(array):
    """The elements of a column."""
    return array.ravel().tolist()


def test_each_row_is_told_what_it_is():
    """In the control's own values; rows that are nobody's copy somebody's tensors, and say so."""
    given = Bench(controls=CONTROLS).given((1, 10, START), (2, 20, 0), (3, 30, END | KEPT), rows=[0, 2, 3])

    assert given["X"].tolist() == [[10], [10], [20], [30]]
    assert flat(given["START"]) == [1, -1, -1, -1]
    assert flat(given["END"]) == [0, 0, 0, 7]
    assert flat(given["READY"]) == [True, False, True, True]
    assert {name: array.dtype for name, array in given.items()} == {
        "X": np.float32,
        "START": np.float32,
        "END": np.int32,
        "READY": np.bool_,
    }
    assert {array.shape for array in given.values()} == {(4, 1)}


@pytest.mark.parametrize(
    ("kind", "told"),
    [(UINT64, 2**64 - 1), (INT64, -1), (UINT32, 2**32 - 1), (INT32, -1), (BYTES, b"18446744073709551615")],
)
def test_an_id_is_told_in_the_models_type(kind, told):
    """A narrow type has the lower part of it; nobody is 0, or no text."""
    given = Bench(controls=corrid(kind)).given((2**64 - 1, 1, START), rows=[1])

    assert given["ID"].dtype == kind.dtype
    assert flat(given["ID"]) == [b"" if kind is BYTES else 0, told]


def test_a_model_without_a_batch_dimension_is_told_without_one():
    """Shape [1], and a state as its configuration has it."""
    bench = Bench(controls=CONTROLS, states=(SUM,), max_batch_size=0)
    given = bench.given((1, 10, START))

    assert {name: array.shape for name, array in given.items()} == {
        "X": (1,),
        "START": (1,),
        "END": (1,),
        "READY": (1,),
        "IN": (1,),
    }
    (answer,) = bench.execute(lambda inputs: {"Y": inputs["X"], "OUT": inputs["IN"] + 5}, (2, 1, START))
    assert answer.outputs[0][2].tolist() == [1]
    assert bench.given((2, 1, 0))["IN"].tolist() == [5]


def test_a_state_comes_back_with_the_next_step_of_its_sequence():
    """Each has its own, whichever rows they have; START forgets it, and nobody's row has none."""
    bench = Bench(states=(SUM,))

    def add(inputs):
        total = inputs["X"] + inputs["IN"]
        return {"Y": total, "OUT": total}

    first = bench.execute(add, (1, 10, START), (2, 20, START))
    second = bench.execute(add, (2, 2, 0), (1, 1, 0), rows=[1, 3])
    assert [[flat(array) for _, _, array in each.outputs] for each in (*first, *second)] == [
        [[10]],
        [[20]],
        [[22]],
        [[11]],
    ]
    assert bench.given((1, 0, 0), (2, 0, START), rows=[1, 2])["IN"].tolist() == [[0], [11], [0]]
    bench.execute(add, (1, 1, END))
    assert bench.sequences[1].memory == {}


def test_a_state_is_not_the_client_s_unless_it_is_an_output():
    """Then it is sent to who asks for it, and to who asks for nothing in particular."""
    bench = Bench(states=(SUM,), outputs=("Y", "OUT"))
    answers = bench.execute(
        lambda inputs: {"Y": inputs["X"], "OUT": inputs["X"] * 2},
        (1, 1, START),
        (2, 2, START, "OUT"),
        (3, 3, START, "Y"),
    )

    assert [[(name, flat(array)) for name, _, array in each.outputs] for each in answers] == [
        [("Y", [1]), ("OUT", [2])],
        [("OUT", [4])],
        [("Y", [3])],
    ]
    assert bench.given((3, 0, 0))["IN"].tolist() == [[6]]


def test_what_is_kept_is_the_sequences_own():
    """Neither the rows of others nor memory that is somebody else's is kept along with it."""
    bench = Bench(states=(SUM,))
    whole = np.arange(3, dtype=np.float32).reshape(3, 1)
    bench.execute(lambda inputs: {"Y": inputs["X"], "OUT": whole}, *[(number, 0, START) for number in (1, 2, 3)])
    lent = np.ones((1, 1), np.float32)
    lent.flags.writeable = False
    bench.execute(lambda inputs: {"Y": inputs["X"], "OUT": lent}, (4, 0, START))

    for sequence in bench.sequences.values():
        assert not np.shares_memory(sequence.memory["IN"], whole)
        assert not np.shares_memory(sequence.memory["IN"], lent)
        assert sequence.memory["IN"].base is None


def test_texts_are_states_too():
    """They begin empty; a row that is nobody's has an empty one."""
    bench = Bench(states=(TEXT,))
    assert flat(bench.given((1, 0, START), rows=[1])["TEXT_IN"]) == [b"", b""]
    text = np.array([[b"kept"]], np.object_)
    bench.execute(lambda inputs: {"Y": inputs["X"], "TEXT_OUT": text}, (2, 0, START))

    assert flat(bench.given((2, 0, 0), rows=[1])["TEXT_IN"]) == [b"", b"kept"]


def test_a_state_that_grew_is_told_apart():
    """So that a batch has states of one shape; back at the first shape it is like all others."""
    bench = Bench(states=(SequenceState("IN", "OUT", FP32, (-1,)),))
    wide = np.ones((1, 5), np.float32)
    bench.execute(lambda inputs: {"Y": inputs["X"], "OUT": wide}, (1, 0, START))
    assert bench.sequences[1].state_shapes == ((1, 5),)
    bench.execute(lambda inputs: {"Y": inputs["X"], "OUT": wide[:, :1]}, (1, 0, 0))
    assert bench.sequences[1].state_shapes is None


@pytest.mark.parametrize("wrong", ["Y", "OUT"])
def test_too_few_rows_are_the_models_fault(wrong):
    """Whether of an output or of a state; nothing is kept of it."""
    bench = Bench(states=(SUM,))
    rows = {name: np.ones((1 if name == wrong else 3, 1), np.float32) for name in ("Y", "OUT")}
    with pytest.raises(MmeError, match=f"returned output '{wrong}' with shape \\[1, 1\\] for a batch of 3") as caught:
        bench.execute(lambda _inputs: rows, (1, 0, START), (2, 0, START), rows=[0, 2])
    assert caught.value.kind is Kind.EXECUTION_FAILED
    assert [sequence.memory for sequence in bench.sequences.values()] == [{}, {}]


# -- what a sequence begins with ---------------------------------------------------------------------------------------


def first_of(tmp_path, **fields):
    """The first value of a state."""
    state = SequenceState("IN", "OUT", fields.pop("kind", INT64), (2,), (InitialState(name="i", **fields),))
    return initial_states(config_of(states=(state,)), tmp_path)["IN"]


def write(tmp_path, data):
    """A file of initial data."""
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "data").write_bytes(data)


def test_a_sequence_begins_with_what_its_file_says(tmp_path):
    """More than it takes may be in it."""
    write(tmp_path, np.arange(5, dtype=np.int64).tobytes())
    assert first_of(tmp_path, data_type=INT64, dims=(2,), data_file="data").tolist() == [[0, 1]]


def test_texts_are_read_in_their_wire_form(tmp_path):
    """Each behind its length."""
    write(tmp_path, encode_bytes_elements(np.array([b"a", b"bc"], np.object_)))
    first = first_of(tmp_path, kind=BYTES, data_type=BYTES, dims=(2,), data_file="data")
    assert first.tolist() == [[b"a", b"bc"]]


def test_zeros_are_zeros(tmp_path):
    """With and without saying so; a dimension of any size is 1."""
    assert first_of(tmp_path, data_type=INT64, dims=(2,), zero_data=True).tolist() == [[0, 0]]
    state = SequenceState("IN", "OUT", FP32, (-1, 2))
    assert initial_states(config_of(states=(state,)), tmp_path)["IN"].shape == (1, 1, 2)
    assert initial_states(ModelConfig("m"), tmp_path) == {}


@pytest.mark.parametrize(
    ("data", "kind", "sentence"),
    [
        (None, INT64, "has no file initial_state/data, which initial_state 'i' names"),
        (
            bytes(9),
            INT64,
            "initial_state setting expects 16 bytes, but the data provided from initial_state/data only has 9",
        ),
        (b"\x01\x00", BYTES, "initial_state 'i' in initial_state/data: incomplete string"),
    ],
)
def test_a_file_that_does_not_do_is_named(tmp_path, data, kind, sentence):
    """At load, when its author looks."""
    if data is not None:
        write(tmp_path, data)
    with pytest.raises(MmeError) as caught:
        first_of(tmp_path, kind=kind, data_type=kind, dims=(2,), data_file="data")
    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


# -- handlers that see requests ----------------------------------------------------------------------------------------


def test_a_request_brings_its_signals_and_states():
    """A model that is told of READY sees nobody's rows as requests; flags are those that models know."""
    bench = Bench(controls=CONTROLS, states=(SUM,))
    batch = bench.batch((7, 10, START | KEPT), rows=[1])
    nobody, request = bench.signature.to_model_requests(batch, None)

    assert {name: flat(array) for name, array in request.inputs.items()} == {
        "X": [10],
        "START": [1],
        "END": [0],
        "READY": [True],
        "IN": [0],
    }
    assert (request.correlation_id, request.flags) == (7, START)
    assert {name: flat(array) for name, array in nobody.inputs.items()} == {
        "X": [10],
        "START": [-1],
        "END": [0],
        "READY": [False],
        "IN": [0],
    }
    assert (nobody.correlation_id, nobody.flags, nobody.id) == (0, 0, "")


def test_a_model_that_is_not_told_sees_no_rows_that_are_nobodys():
    """It could not know them from a client's."""
    bench = Bench()
    batch = bench.batch((1, 10, START), (2, 20, START), rows=[0, 3])

    assert [flat(request.inputs["X"]) for request in bench.signature.to_model_requests(batch, None)] == [[10], [20]]


def test_answers_of_rows_go_to_their_requests():
    """States stay; what was put back is owed no answer; nobody's answer is nobody's."""
    bench = Bench(controls=(READY,), states=(SUM,))
    batch = bench.batch((1, 1, START), (2, 2, START), (3, 3, START), rows=[0, 2, 3])
    failed = MmeError(Kind.EXECUTION_FAILED, "no")
    y, kept = np.ones((1, 1), np.float32), np.full((1, 1), 9, np.float32)
    one, two, three = bench.signature.from_model_responses(
        batch, [ModelResponse({"Y": y, "OUT": kept}), ModelResponse({"Y": y * 5}), PUT_BACK, failed]
    )

    assert [(name, flat(array)) for name, _, array in one.outputs] == [("Y", [1])]
    assert (two, three) == (None, failed)
    assert [request.correlation_id for request in bench.signature.rescheduled(batch)] == [2]
    assert flat(bench.sequences[1].memory["IN"]) == [9]
    assert bench.sequences[3].memory == {}


def test_a_state_that_nobody_asked_for_is_not_sent():
    """Though it is an output as well."""
    bench = Bench(states=(SUM,), outputs=("Y", "OUT"))
    batch = bench.batch((1, 1, START, "Y"))
    y = np.ones((1, 1), np.float32)
    (answer,) = bench.signature.from_model_responses(batch, [ModelResponse({"Y": y, "OUT": y})])

    assert [name for name, _, _ in answer.outputs] == ["Y"]
    assert flat(bench.sequences[1].memory["IN"]) == [1]
