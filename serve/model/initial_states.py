"""What sequences of a model begin with, from its configuration and the files beside it. Runs on load threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.devices import host_memory
from model_handlers.system.disk import disk_errors
from model_handlers.tensor import BYTES, decode_bytes_elements, element_count

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config.model_config import InitialState, ModelConfig, SequenceState
    from model_handlers.tensor import Array

FOLDER = "initial_state"  # in the model's directory, beside its versions


def initial_states(config: ModelConfig, directory: Path) -> dict[str, Array]:
    """State input → its first value, batch dimension included; {} for a model without states.

    Raises:
        MmeError: INVALID_MODEL for a file that is not there or too short.
    """
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    return {state.input_name: _first(state, config, directory / FOLDER) for state in states}


def _first(state: SequenceState, config: ModelConfig, folder: Path) -> Array:
    initial = state.initial_state[0] if state.initial_state else None
    dims = initial.dims if initial is not None else tuple(max(dim, 1) for dim in state.dims)
    shape = (1, *dims) if config.max_batch_size > 0 else dims
    if initial is not None and initial.data_file:
        array = _recorded(state, initial, config.name, folder).reshape(shape)
    else:
        _check_room(state, dims, config.name)
        array = np.zeros(shape, state.data_type.dtype)
        if state.data_type is BYTES:
            array.fill(b"")
    array.flags.writeable = False  # every sequence begins with it
    return array


def _check_room(state: SequenceState, dims: tuple[int, ...], model: str) -> None:
    need = element_count(dims) * state.data_type.dtype.itemsize
    if need > host_memory():
        raise invalid_model(
            f"state input '{state.input_name}' of model '{model}' takes {need} bytes, more than this machine has: "
            "make it smaller"
        )


def _recorded(state: SequenceState, initial: InitialState, model: str, folder: Path) -> Array:
    """The elements in a file, which may hold more."""
    file, count = folder / initial.data_file, element_count(initial.dims)
    path = f"{FOLDER}/{initial.data_file}"
    with disk_errors(f"initial_state '{initial.name}' of model '{model}' can't be read from {path}"):
        if not file.is_file():
            raise invalid_model(f"model '{model}' has no file {path}, which initial_state '{initial.name}' names")
        data = file.read_bytes()
    if state.data_type is BYTES:
        try:
            return decode_bytes_elements(data, count, state.input_name, model)
        except MmeError as error:
            raise invalid_model(f"initial_state '{initial.name}' in {path}: {error}") from error
    size = count * state.data_type.itemsize
    if len(data) < size:
        raise invalid_model(
            f"initial_state setting expects {size} bytes, but the data provided from {path} only has {len(data)} bytes "
            f"(model {model})"
        )
    return np.frombuffer(data, state.data_type.dtype, count)
