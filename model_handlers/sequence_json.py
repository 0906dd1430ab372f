"""Sequence batching as the JSON of the published message; see `config_json`. PURE, and without protobuf."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from model_handlers.sequence_config import DirectStrategy

if TYPE_CHECKING:
    from model_handlers.sequence_config import Control, InitialState, SequenceBatching, SequenceState
    from model_handlers.tensor import DataType

    Json = dict[str, Any]


def sequence_json(batching: SequenceBatching | None) -> Json:
    """The field `sequence_batching`, {} for none."""
    if batching is None:
        return {}
    return {
        "sequence_batching": {
            **_strategy(batching),
            "max_sequence_idle_microseconds": batching.max_sequence_idle_microseconds,
            "control_input": [
                {"name": tensor.name, "control": [_control(control) for control in tensor.control]}
                for tensor in batching.control_input
            ],
            "state": [_state(state) for state in batching.state],
            "iterative_sequence": batching.iterative_sequence,
        }
    }


def _strategy(batching: SequenceBatching) -> Json:
    strategy = batching.strategy
    if isinstance(strategy, DirectStrategy):
        return {
            "direct": {
                "max_queue_delay_microseconds": strategy.max_queue_delay_microseconds,
                "minimum_slot_utilization": _single(strategy.minimum_slot_utilization),
            }
        }
    return {
        "oldest": {
            "max_candidate_sequences": strategy.max_candidate_sequences,
            "preferred_batch_size": list(strategy.preferred_batch_size),
            "max_queue_delay_microseconds": strategy.max_queue_delay_microseconds,
            "preserve_ordering": strategy.preserve_ordering,
        }
    }


def _control(control: Control) -> Json:
    return {
        "kind": control.kind.name,
        "int32_false_true": list(control.int32_false_true),
        "fp32_false_true": [_single(value) for value in control.fp32_false_true],
        "bool_false_true": list(control.bool_false_true),
        "data_type": _type(control.data_type),
    }


def _state(state: SequenceState) -> Json:
    return {
        "input_name": state.input_name,
        "output_name": state.output_name,
        "data_type": _type(state.data_type),
        "dims": list(state.dims),
        "initial_state": [_initial(initial) for initial in state.initial_state],
        "use_same_buffer_for_input_output": state.use_same_buffer_for_input_output,
        "use_growable_memory": state.use_growable_memory,
    }


def _initial(initial: InitialState) -> Json:
    data = {"zero_data": True} if initial.zero_data else {"data_file": initial.data_file}
    return {
        "data_type": _type(initial.data_type),
        "dims": list(initial.dims),
        **data,
        "name": initial.name,
    }


def _type(data_type: DataType | None) -> str:
    return "TYPE_INVALID" if data_type is None else data_type.config_name


def _single(value: float) -> float:
    """The shortest number that single precision can't tell from this one, as protobuf writes them."""
    packed = struct.pack("f", value)
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((float(text) for text in texts if struct.pack("f", float(text)) == packed), value)
