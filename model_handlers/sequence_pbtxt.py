"""Sequence batching of the published message into frozen values, and back. PURE; see `pbtxt` for the whole."""

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
from model_handlers.tensor import BY_NUMBER, DataType

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
        max_sequence_idle_us=batching.max_sequence_idle_microseconds,
        control_inputs=tuple(
            ControlInput(tensor.name, tuple(_control(control) for control in tensor.control))
            for tensor in batching.control_input
        ),
        states=tuple(_state(state, model) for state in batching.state),
        iterative=batching.iterative_sequence,
    )


def sequence_message(batching: SequenceBatching) -> _Message:
    """The message that says the same."""
    message = _Message(
        max_sequence_idle_microseconds=batching.max_sequence_idle_us,
        control_input=[
            _Message.ControlInput(name=tensor.name, control=[_control_message(control) for control in tensor.controls])
            for tensor in batching.control_inputs
        ],
        state=[_state_message(state) for state in batching.states],
        iterative_sequence=batching.iterative,
    )
    strategy = batching.strategy
    if isinstance(strategy, DirectStrategy):
        message.direct.CopyFrom(
            _Message.StrategyDirect(
                max_queue_delay_microseconds=strategy.max_queue_delay_us,
                minimum_slot_utilization=strategy.minimum_slot_utilization,
            )
        )
    else:
        message.oldest.CopyFrom(
            _Message.StrategyOldest(
                max_candidate_sequences=strategy.max_candidate_sequences,
                preferred_batch_size=strategy.preferred_batch_sizes,
                max_queue_delay_microseconds=strategy.max_queue_delay_us,
                preserve_ordering=strategy.preserve_ordering,
            )
        )
    return message


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


def _control_message(control: Control) -> _Message.Control:
    return _Message.Control(
        kind=_Message.Control.Kind.Value(control.kind.name),
        int32_false_true=control.int32_false_true,
        fp32_false_true=control.fp32_false_true,
        bool_false_true=control.bool_false_true,
        data_type=_number(control.data_type),
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


def _state_message(state: SequenceState) -> _Message.State:
    return _Message.State(
        input_name=state.input_name,
        output_name=state.output_name,
        data_type=_number(state.data_type),
        dims=state.dims,
        initial_state=[_initial_message(initial) for initial in state.initial_state],
        use_same_buffer_for_input_output=state.use_same_buffer,
        use_growable_memory=state.use_growable_memory,
    )


def _initial_message(initial: InitialState) -> _Message.InitialState:
    message = _Message.InitialState(name=initial.name, data_type=_number(initial.data_type), dims=initial.dims)
    if initial.zero_data:
        message.zero_data = True
    else:
        message.data_file = initial.data_file
    return message


def _number(data_type: DataType | None) -> pb.DataType.ValueType:
    return pb.DataType.ValueType(0 if data_type is None else data_type.number)
