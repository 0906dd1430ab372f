"""The rules of sequence batching, and its defaults. Pure; sentences are Triton's where it has one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.sequence_config import DEFAULT_IDLE_US, ControlKind, OldestStrategy
from model_handlers.tensor import BYTES, INT32, INT64, UINT32, UINT64, check_elements, check_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from model_handlers.config import ModelConfig
    from model_handlers.sequence_config import (
        Control,
        ControlInput,
        DirectStrategy,
        InitialState,
        SequenceBatching,
        SequenceState,
    )

    Check = tuple[str, Callable[[], object]]

_CORRID_TYPES = (UINT64, INT64, UINT32, INT32, BYTES)


def normalise_sequences(config: ModelConfig) -> SequenceBatching | None:
    """A configuration's sequence batching with its defaults filled in; None where it has none. It was checked."""
    batching = config.sequence_batching
    if batching is None:
        return None
    strategy = batching.strategy
    if isinstance(strategy, OldestStrategy):
        strategy = _oldest(strategy, config)
    return replace(
        batching,
        strategy=strategy,
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
    )


def sequence_checks(config: ModelConfig) -> Iterator[Check]:
    """Every rule by itself: the field that it is about, and a function that raises where it is broken."""
    batching = config.sequence_batching
    if batching is None:
        return
    field = "sequence_batching"
    yield field, partial(_check_company, config)
    for index, tensor in enumerate(batching.control_input):
        before = batching.control_input[:index]
        yield f"{field}.control_input[{index}]", partial(_check_control, tensor, before, config.name)
    for index, state in enumerate(batching.state):
        yield f"{field}.state[{index}]", partial(_check_state, state, config.name)
        for initial in state.initial_state:
            yield f"{field}.state[{index}].initial_state", partial(_check_initial, state, initial, config.name)
    yield field, partial(_check_names, batching, config)
    if isinstance(batching.strategy, OldestStrategy):
        yield f"{field}.oldest", partial(_oldest, batching.strategy, config)
    else:
        yield f"{field}.direct", partial(_check_direct, batching.strategy, config)


def _check_company(config: ModelConfig) -> None:
    """What can't be together with sequences."""
    if config.dynamic_batching is not None:
        raise invalid_model(
            f"model '{config.name}' asks for dynamic_batching and for sequence_batching: choose one (the strategy "
            "'oldest' batches sequences dynamically)"
        )
    if config.response_cache:
        raise invalid_model(
            f"Response Cache does not currently support model {config.name} with sequence batching scheduler. Please "
            "disable the response cache."
        )
    ragged = [spec.name for spec in config.inputs if spec.allow_ragged_batch]
    if ragged or config.batch_input or config.batch_output:
        name = ragged[0] if ragged else "batch_input and batch_output"
        raise invalid_model(
            f"{name} of {config.name} can't be ragged with sequence batching: rows of a batch have one shape"
        )


def _check_direct(strategy: DirectStrategy, config: ModelConfig) -> None:
    if not 0 <= strategy.minimum_slot_utilization <= 1:
        raise invalid_model(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}")


def _oldest(strategy: OldestStrategy, config: ModelConfig) -> OldestStrategy:
    sizes = sorted(set(strategy.preferred_batch_size))
    if sizes and sizes[0] < 1:
        raise invalid_model(f"sequence batching preferred batch size must be positive for {config.name}")
    if config.max_batch_size > 0:
        sizes = sizes or [config.max_batch_size]
        if sizes[-1] > config.max_batch_size:
            raise invalid_model(f"sequence batching preferred batch size must be <= max batch size for {config.name}")
    if strategy.max_candidate_sequences < 0:
        raise invalid_model(f"sequence batching max_candidate_sequences must be positive for {config.name}")
    return replace(strategy, preferred_batch_size=tuple(sizes))


def _check_control(tensor: ControlInput, before: Sequence[ControlInput], model: str) -> None:
    if not tensor.name:
        raise invalid_model(f"sequence batching control tensor must have a name for {model}")
    if len(tensor.control) > 1 or any(other.name == tensor.name for other in before):
        raise invalid_model(
            f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {model}"
        )
    if not tensor.control:
        raise invalid_model(f"sequence batching control tensor '{tensor.name}' must specify 'control' for {model}")
    control = tensor.control[0]
    if any(control.kind is known.kind for other in before for known in other.control):
        raise invalid_model(f"sequence batching specifies multiple {control.kind.name} tensors for {model}")
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        _check_corrid(control, model)
    else:
        _check_boolean(tensor.name, control, model)


def _check_boolean(name: str, control: Control, model: str) -> None:
    fields = ("int32_false_true", "fp32_false_true", "bool_false_true")
    given = [field for field in fields if getattr(control, field)]
    if not given:
        raise invalid_model(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name} for {model}"
        )
    if len(given) > 1:
        raise invalid_model(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {control.kind.name} for {model}"
        )
    if len(control.false_true) != 2:
        raise invalid_model(
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {control.kind.name} for {model}"
        )
    if control.data_type is not None:
        raise invalid_model(
            f"sequence batching control tensor '{name}' must not specify 'data_type' for {control.kind.name} "
            f"for {model}"
        )


def _check_corrid(control: Control, model: str) -> None:
    if control.false_true:
        raise invalid_model(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name} for {model}"
        )
    if control.data_type not in _CORRID_TYPES:
        raise invalid_model(
            f"unexpected data type for control {control.kind.name} for {model}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )


def _check_names(batching: SequenceBatching, config: ModelConfig) -> None:
    """A tensor has one meaning: what a client sends, a signal, or a state."""
    inputs = {spec.name: "a model input" for spec in config.inputs}
    names = [(tensor.name, "control tensor") for tensor in batching.control_input]
    names += [(state.input_name, "state input") for state in batching.state]
    for name, what in names:
        if name in inputs:
            raise invalid_model(
                f"sequence batching {what} '{name}' is {inputs[name]} as well for {config.name}: give it one meaning"
            )
        inputs[name] = f"a {what}"
    outputs = set()
    for state in batching.state:
        if state.output_name in outputs:
            raise invalid_model(
                f"sequence batching state output '{state.output_name}' is specified more than once for {config.name}"
            )
        outputs.add(state.output_name)
        declared = config.output(state.output_name)
        if declared is not None and declared.data_type is not state.data_type:
            raise invalid_model(
                f"sequence batching state output '{state.output_name}' is {state.data_type.config_name}, but as a "
                f"model output {declared.data_type.config_name} for {config.name}"
            )


def _check_state(state: SequenceState, model: str) -> None:
    subject = f"state input '{state.input_name}'"
    for field, name in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not name:
            raise invalid_model(f"sequence batching state must specify '{field}' for {model}")
    if not state.dims or any(dim < 1 and dim != -1 for dim in state.dims):
        raise invalid_model(
            f"{subject} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    check_rank(subject, state.dims, model)
    check_elements(subject, state.dims, model)
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        raise invalid_model(
            f"{subject} has 'use_growable_memory', which needs 'use_same_buffer_for_input_output', for {model}"
        )
    if len(state.initial_state) > 1:
        raise invalid_model(
            f"initial_state field for {subject} must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements. (model {model})"
        )


def _check_initial(state: SequenceState, initial: InitialState, model: str) -> None:
    where = f"for state input '{state.input_name}'"
    if not initial.name:
        raise invalid_model(f"Field 'name' must be set when using initial_state {where}. (model {model})")
    if initial.data_type is not state.data_type:
        raise invalid_model(
            f"The data type used for 'initial_state' field of state '{state.input_name}' does not match the state data "
            f"type. (model {model})"
        )
    if len(initial.dims) != len(state.dims):
        raise invalid_model(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions {where}. "
            f"{len(initial.dims)} != {len(state.dims)} (model {model})"
        )
    if any(dim < 1 for dim in initial.dims):
        raise invalid_model(
            f"'initial_state' field for state input name '{state.input_name}' contains variable dimensions. "
            f"(model {model})"
        )
    for dim, declared in zip(initial.dims, state.dims, strict=True):
        if declared not in (-1, dim):
            raise invalid_model(
                f"'initial_state' dim for input name '{state.input_name}' doesn't match 'state' dim description. "
                f"{dim} != {declared} (model {model})"
            )
    path = PurePosixPath(initial.data_file)
    if initial.zero_data == bool(initial.data_file):
        raise invalid_model(f"'initial_state' {where} must be 'zero_data: true' or name a 'data_file'. (model {model})")
    if path.is_absolute() or ".." in path.parts or "\0" in initial.data_file:
        raise invalid_model(
            f"'data_file' of 'initial_state' {where} is '{initial.data_file}'; it must name a file inside the folder "
            f"initial_state of {model}"
        )
