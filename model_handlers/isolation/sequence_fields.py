"""Sequence batching out of the plain JSON values that `config_fields` makes. PURE."""

from __future__ import annotations

from typing import Any

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
from model_handlers.tensor import BY_NAME


def sequences_from(plain: dict[str, Any] | None) -> SequenceBatching | None:
    """The settings that were taken apart.

    Raises:
        KeyError, TypeError, ValueError: these are none.
    """
    if plain is None:
        return None
    strategy = tuples(plain["strategy"])
    made = OldestStrategy(**strategy) if "max_candidate_sequences" in strategy else DirectStrategy(**strategy)
    return SequenceBatching(
        **{
            **plain,
            "strategy": made,
            "control_inputs": tuple(
                ControlInput(tensor["name"], tuple(_control(control) for control in tensor["controls"]))
                for tensor in plain["control_inputs"]
            ),
            "states": tuple(_state(state) for state in plain["states"]),
        }
    )


def _control(plain: dict[str, Any]) -> Control:
    return Control(**{**_typed(plain), "kind": ControlKind[plain["kind"]]})


def _state(plain: dict[str, Any]) -> SequenceState:
    initial = tuple(InitialState(**_typed(each)) for each in plain["initial_state"])
    return SequenceState(**{**_typed(plain), "initial_state": initial})


def _typed(plain: dict[str, Any]) -> dict[str, Any]:
    data_type = plain["data_type"]
    return {**tuples(plain), "data_type": None if data_type is None else BY_NAME[data_type]}


def tuples(plain: dict[str, Any]) -> dict[str, Any]:
    """Fields whose lists are tuples again."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
