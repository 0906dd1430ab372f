"""Sequence batching of the published message into frozen values. PURE; see `pbtxt` for the whole."""

from __future__ import annotations

from model_handlers.errors import invalid_model
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.sequence_config import (
    Control,
    ControlInput,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    SequenceState,
)
from model_handlers.tensor import BY_NUMBER

_Message = pb.ModelSequenceBatching


def sequence_batching(message: pb.ModelConfig, model: str) -> SequenceBatching | None:
    """What the message says, None where it says nothing.

    Raises:
        MmeError: INVALID_MODEL for a state without a data type.
    """
    if not message.HasField("sequence_batching"):
        return None
    batching = message.sequence_batching
    return SequenceBatching(
        strategy=_strategy(batching),
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds,
        control_input=tuple(
            ControlInput(tensor.name, tuple(_control(control) for control in tensor.control))
            for tensor in batching.control_input
        ),
        state=tuple(_state(state, model) for state in batching.state),
        iterative_sequence=batching.iterative_sequence,
    )


def _strategy(batching: _Message) -> DirectStrategy | OldestStrategy:
    if batching.WhichOneof("strategy_choice") == "oldest":
        oldest = batching.oldest
        return OldestStrategy(
            oldest.max_candidate_sequences,
            tuple(oldest.preferred_batch_size),
            oldest.max_queue_delay_microseconds,
            oldest.preserve_ordering,
        )
    return DirectStrategy(batching.direct.max_queue_delay_microseconds, batching.direct.minimum_slot_utilization)


def _control(control: _Message.Control) -> Control:
    return Control(
        ControlKind(control.kind),
        tuple(control.int32_false_true),
        tuple(control.fp32_false_true),
        tuple(control.bool_false_true),
        BY_NUMBER.get(control.data_type),
    )


def _state(state: _Message.State, model: str) -> SequenceState:
    if state.data_type not in BY_NUMBER:
        raise invalid_model(f"state input '{state.input_name}' must specify 'data_type' for {model}")
    return SequenceState(
        state.input_name,
        state.output_name,
        BY_NUMBER[state.data_type],
        tuple(state.dims),
        tuple(_initial(initial) for initial in state.initial_state),
        state.use_same_buffer_for_input_output,
        state.use_growable_memory,
    )


def _initial(initial: _Message.InitialState) -> InitialState:
    data_type = BY_NUMBER.get(initial.data_type)
    return InitialState(initial.name, data_type, tuple(initial.dims), initial.zero_data, initial.data_file)
