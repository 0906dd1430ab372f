"""Sequence batching in a configuration: read, checked by its rules, and written."""

from dataclasses import replace

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.config.convert import config_json
from model_handlers.config.model_config import (
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    InitialState,
    ModelConfig,
    OldestStrategy,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    hidden_inputs,
    hidden_outputs,
)
from model_handlers.config.pbtxt import config_message, config_text, parse_config
from model_handlers.config.validate import broken_rules, normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BOOL, BYTES, FP32, INT32, INT64, UINT32, UINT64, TensorSpec

START, READY, END, CORRID = ControlKind

FULL = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 7
           preserve_ordering: true }
  max_sequence_idle_microseconds: 5000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 0.1 ] } ] },
    { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } },
    { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } },
    { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  ]
  state { input_name: "IN" output_name: "OUT" data_type: TYPE_INT64 dims: [ -1, 2 ]
          initial_state { name: "zero" data_type: TYPE_INT64 dims: [ 1, 2 ] zero_data: true }
          use_same_buffer_for_input_output: true }
  state { input_name: "IN2" output_name: "OUT2" data_type: TYPE_STRING dims: [ 1 ]
          initial_state { name: "file" data_type: TYPE_STRING dims: [ 1 ] data_file: "a/b" } }
  iterative_sequence: true
}
"""

BATCHING = SequenceBatching(
    OldestStrategy(9, (2, 4), 7, preserve_ordering=True),
    5_000_000,
    (
        ControlInput(
            "START",
            (
                SequenceControl(
                    START,
                    fp32_false_true=(0.0, pytest.approx(0.1)),
                ),
            ),
        ),
        ControlInput("READY", (SequenceControl(READY, bool_false_true=(False, True)),)),
        ControlInput("END", (SequenceControl(END, int32_false_true=(0, 1)),)),
        ControlInput("ID", (SequenceControl(CORRID, data_type=BYTES),)),
    ),
    (
        SequenceState("IN", "OUT", INT64, (-1, 2), (InitialState(INT64, (1, 2), zero_data=True, name="zero"),), True),
        SequenceState("IN2", "OUT2", BYTES, (1,), (InitialState(BYTES, (1,), data_file="a/b", name="file"),)),
    ),
    iterative_sequence=True,
)


def test_every_field_arrives():
    """All that a configuration says of sequences is in the result."""
    assert parse_config(FULL, model="bert").sequence_batching == BATCHING


def test_what_is_not_said_has_triton_defaults():
    """A sequence may idle for a second; the direct strategy waits for nobody; the oldest prefers full batches."""
    direct = parse_config("sequence_batching { }", model="bert").sequence_batching
    oldest = parse_config("max_batch_size: 8 sequence_batching { oldest { } }", model="bert").sequence_batching

    assert direct == SequenceBatching(DirectStrategy(0, 0.0), max_sequence_idle_microseconds=1_000_000)
    assert oldest.strategy == OldestStrategy(0, (8,))


def test_controls_and_states_are_inputs_that_no_client_sends():
    """A handler is told their names, types and shapes."""
    assert hidden_inputs(BATCHING) == (
        TensorSpec("START", FP32, (1,)),
        TensorSpec("READY", BOOL, (1,)),
        TensorSpec("END", INT32, (1,)),
        TensorSpec("ID", BYTES, (1,)),
        TensorSpec("IN", INT64, (-1, 2)),
        TensorSpec("IN2", BYTES, (1,)),
    )
    assert hidden_outputs(BATCHING) == (TensorSpec("OUT", INT64, (-1, 2)), TensorSpec("OUT2", BYTES, (1,)))
    assert hidden_inputs(None) == hidden_outputs(None) == ()


def state(**changes):
    """A state that obeys every rule, but for the changes."""
    return replace(SequenceState("I", "O", FP32, (-1, 2)), **changes)


def initial(**changes):
    """A state whose initial state obeys every rule, but for the changes."""
    return state(initial_state=(replace(InitialState(FP32, (1, 2), zero_data=True, name="z"), **changes),))


def control(name="T", kind=START, **values):
    """A control tensor."""
    return ControlInput(name, (SequenceControl(kind, **values),))


INT = {"int32_false_true": (0, 1)}
EITHER = "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for"
SEVERAL = (
    "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for"
)

BROKEN = [
    ("sequence batching control tensor must have a name for bert", [control("", **INT)]),
    (
        "sequence batching control tensor 'T' is specified for multiple control kinds for bert",
        [ControlInput("T", (SequenceControl(START, (0, 1)), SequenceControl(END, (0, 1))))],
    ),
    (
        "sequence batching control tensor 'T' is specified for multiple control kinds for bert",
        [control("T", **INT), control("T", kind=END, **INT)],
    ),
    ("sequence batching control tensor 'T' must specify 'control' for bert", [ControlInput("T", ())]),
    (
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for bert",
        [control("T", **INT), control("U", **INT)],
    ),
    (f"{EITHER} CONTROL_SEQUENCE_READY for bert", [control(kind=READY)]),
    (
        f"{SEVERAL} CONTROL_SEQUENCE_START for bert",
        [control(fp32_false_true=(0, 1), **INT)],
    ),
    (
        "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END for bert",
        [control(kind=END, int32_false_true=(0,))],
    ),
    ("must not specify 'data_type' for CONTROL_SEQUENCE_START for bert", [control(data_type=INT32, **INT)]),
    (
        EITHER.replace("must", "must not") + " CONTROL_SEQUENCE_CORRID for bert",
        [control(kind=CORRID, data_type=INT32, **INT)],
    ),
    ("unexpected data type for control CONTROL_SEQUENCE_CORRID for bert", [control(kind=CORRID)]),
    ("unexpected data type for control CONTROL_SEQUENCE_CORRID for bert", [control(kind=CORRID, data_type=FP32)]),
    ("sequence batching control tensor 'X' is a model input as well for bert", [control("X", **INT)]),
    ("sequence batching state input 'X' is a model input as well for bert", [state(input_name="X")]),
    ("sequence batching state input 'I' is a state input as well for bert", [state(), state(output_name="P")]),
    (
        "sequence batching state output 'O' is specified more than once for bert",
        [state(), state(input_name="J")],
    ),
    (
        "sequence batching state output 'Y' is TYPE_INT64, but as a model output TYPE_FP32 for bert",
        [state(output_name="Y", data_type=INT64)],
    ),
    ("sequence batching state must specify 'input_name' for bert", [state(input_name="")]),
    ("sequence batching state must specify 'output_name' for bert", [state(output_name="")]),
    ("state input 'I' dimension must be integer >= 1, or -1", [state(dims=(0,))]),
    ("state input 'I' dimension must be integer >= 1, or -1", [state(dims=())]),
    ("state input 'I' has 33 dimensions, must be at most 32 for bert", [state(dims=(1,) * 33)]),
    ("which needs 'use_same_buffer_for_input_output'", [state(use_growable_memory=True)]),
    (
        "initial_state field for state input 'I' must contain exactly one or zero element. Found '2' elements.",
        [state(initial_state=initial().initial_state * 2)],
    ),
    ("Field 'name' must be set when using initial_state for state input 'I'.", [initial(name="")]),
    (
        "The data type used for 'initial_state' field of state 'I' does not match the state data type.",
        [initial(data_type=INT64)],
    ),
    (
        "doesn't match the size of 'state' dimensions for state input 'I'. 1 != 2",
        [initial(dims=(1,))],
    ),
    ("'initial_state' field for state input name 'I' contains variable dimensions.", [initial(dims=(-1, 2))]),
    (
        "'initial_state' dim for input name 'I' doesn't match 'state' dim description. 3 != 2",
        [initial(dims=(1, 3))],
    ),
    ("must be 'zero_data: true' or name a 'data_file'", [initial(zero_data=False)]),
    ("it must name a file inside the folder initial_state", [initial(zero_data=False, data_file="../x")]),
    (
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for bert",
        DirectStrategy(minimum_slot_utilization=1.5),
    ),
    ("sequence batching preferred batch size must be positive for bert", OldestStrategy(preferred_batch_size=(0,))),
    (
        "sequence batching preferred batch size must be <= max batch size for bert",
        OldestStrategy(preferred_batch_size=(9,)),
    ),
    ("max_candidate_sequences must be positive for bert", OldestStrategy(-1)),
]


@pytest.mark.parametrize(("sentence", "parts"), BROKEN, ids=[str(index) for index in range(len(BROKEN))])
def test_a_broken_rule_is_told_in_one_sentence(sentence, parts):
    """Each rule has its own sentence, Triton's where it has one."""
    if isinstance(parts, list):
        controls = tuple(part for part in parts if isinstance(part, ControlInput))
        states = tuple(part for part in parts if isinstance(part, SequenceState))
        batching = SequenceBatching(control_input=controls, state=states)
    else:
        batching = SequenceBatching(parts)
    config = ModelConfig(
        "bert",
        max_batch_size=8,
        inputs=(TensorSpec("X", FP32, (1,)),),
        outputs=(TensorSpec("Y", FP32, (1,)),),
        sequence_batching=batching,
    )

    with pytest.raises(MmeError) as caught:
        normalise(config)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert sentence in caught.value.message


def test_every_broken_rule_is_found_with_its_field():
    """Whoever has a configuration checked is told of all of them."""
    batching = SequenceBatching(
        OldestStrategy(preferred_batch_size=(9,)),
        control_input=(control(**INT), control("U", READY), control("V", kind=CORRID)),
        state=(initial(name=""), state(input_name="J", output_name="P", dims=())),
    )
    broken = broken_rules(ModelConfig("bert", max_batch_size=8, sequence_batching=batching))

    assert [field.removeprefix("sequence_batching.") for field, _ in broken] == [
        "control_input[1]",
        "control_input[2]",
        "state[0].initial_state",
        "state[1]",
        "oldest",
    ]


def test_there_is_one_scheduler():
    """Whatever completed a configuration, it has dynamic batching or sequence batching."""
    config = ModelConfig("bert", dynamic_batching=DynamicBatching(()), sequence_batching=SequenceBatching())

    with pytest.raises(MmeError, match="choose one"):
        normalise(config)


def test_answers_of_sequences_are_not_cached():
    """What came before counts, and no key of a cache knows of it."""
    with pytest.raises(MmeError, match="Response Cache does not currently support model bert with sequence batching"):
        normalise(ModelConfig("bert", response_cache=True, sequence_batching=SequenceBatching()))


def test_rows_of_sequences_are_of_one_shape():
    """A ragged input has no rows."""
    config = ModelConfig("bert", inputs=(TensorSpec("X", FP32, (-1,), allow_ragged_batch=True),))

    with pytest.raises(MmeError, match="X of bert can't be ragged with sequence batching"):
        normalise(replace(config, sequence_batching=SequenceBatching()))


def test_a_state_without_a_data_type_is_refused():
    """Nobody knows how many bytes it has."""
    with pytest.raises(MmeError, match="state input 'I' must specify 'data_type' for bert"):
        parse_config('sequence_batching { state { input_name: "I" output_name: "O" dims: 1 } }', model="bert")


CONTROLS = st.lists(
    st.sampled_from(
        [
            ControlInput("START", (SequenceControl(START, fp32_false_true=(0.0, 0.5)),)),
            ControlInput("READY", (SequenceControl(READY, bool_false_true=(False, True)),)),
            ControlInput("END", (SequenceControl(END, int32_false_true=(-1, 1)),)),
        ]
    ),
    unique=True,
).map(tuple)
BATCHINGS = st.builds(
    SequenceBatching,
    strategy=st.builds(DirectStrategy, st.integers(0, 2**40), st.sampled_from([0.0, 0.25, 1.0]))
    | st.builds(OldestStrategy, st.integers(1, 99), st.sampled_from([(), (2,), (1, 4)]), st.integers(0, 9)),
    max_sequence_idle_microseconds=st.integers(1, 2**40),
    control_input=st.builds(
        lambda controls, kind: (*controls, ControlInput("ID", (SequenceControl(CORRID, data_type=kind),))),
        CONTROLS,
        st.sampled_from([UINT64, UINT32, BYTES]),
    ),
    state=st.sampled_from([BATCHING.state, BATCHING.state[:1], ()]),
    iterative_sequence=st.booleans(),
)
CONFIGS = st.builds(
    lambda batching, size: normalise(ModelConfig("bert", max_batch_size=size, sequence_batching=batching)),
    BATCHINGS,
    st.sampled_from([0, 4, 8]),
)
QUICK = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(CONFIGS)
def test_sequence_batching_survives_the_round_trip_through_text(config):
    """What is written is read back into an equal configuration."""
    assert parse_config(config_text(config), model="bert") == config


@QUICK
@given(CONFIGS)
def test_the_json_form_is_protobufs_own_with_numbers(config):
    """Every default is in it, and integers of 64 bits are numbers."""
    protobufs = json_format.MessageToDict(
        config_message(config), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )

    assert config_json(config)["sequence_batching"] == numbers(protobufs["sequence_batching"])


def test_single_precision_is_written_as_protobuf_writes_it():
    """0.1 is 0.1, though single precision has no such number."""
    config = parse_config(FULL, model="bert")
    written = config_json(config)["sequence_batching"]["control_input"][0]["control"][0]

    assert written["fp32_false_true"] == [0, 0.1]


def numbers(value):
    """Protobuf's JSON with its strings of digits as the numbers they stand for."""
    if isinstance(value, dict):
        return {key: numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [numbers(member) for member in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
