"""What a load reads and runs beside the model itself: labels, initial states, and warm-ups. On load threads.

The default warm-up executes once with zeros, so that the first request finds buffers allocated. Samples that the
configuration asks for are executed as batches of clients are, once on every instance; their answers are dropped and not
counted, and one that fails fails the load.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.config.model_config import ControlKind, all_inputs, hidden_inputs
from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory
from model_handlers.system.disk import disk_errors
from model_handlers.system.memory import free_memory, host_memory
from model_handlers.tensor import BYTES, decode_bytes_elements, element_count
from serve.model.execution import execute_batch
from serve.model.layout_check import check_layout
from serve.model.tensors import TensorMap, batch_input, flat
from serve.request import InferenceRequest, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import LoadedModel
    from model_handlers.config.model_config import InitialState, ModelConfig, SequenceState, WarmupInput, WarmupSample
    from model_handlers.requests import ModelResponse
    from model_handlers.tensor import Array, DataType, TensorSpec
    from serve.model.replies import DecoupledRequest

    Labels = Mapping[str, tuple[str, ...]]


_MOST_BYTES = 256 << 20  # of zeros: a configuration may declare more than there is memory for


def warm_up(handler: LoadedModel) -> bool:
    """Execute once with zeros; whether the model took them.

    It may refuse them; that is no reason to refuse the model. One that fails in any other way is closed.
    """
    if not (handler.inline or handler.warms):  # code of the model's author: it is not ours to call with made-up data
        return True
    config = handler.config
    size = sum(_bytes(spec) for spec in all_inputs(config))
    if size > _MOST_BYTES:
        _log.debug("no warm-up: zeros for it would take %d bytes", size, extra={"target_model": config.name})
        return False
    try:
        handler.execute(zeros(config), [spec.name for spec in config.outputs])
    except MmeError as error:
        _log.debug("warm-up with zeros failed: %s", error, extra={"target_model": config.name})
        return False
    except BaseException:
        handler.close()
        raise
    return True


def _bytes(spec: TensorSpec) -> int:
    return element_count(max(dim, 1) for dim in spec.dims) * spec.data_type.dtype.itemsize


def zeros(config: ModelConfig) -> dict[str, Array]:
    """One element of every input, variable dimensions at 1."""
    made = {}
    shapes = {}
    for spec in all_inputs(config):
        shape = [max(dim, 1) for dim in spec.model_dims]
        array = _zeros([1, *shape] if config.max_batch_size > 0 else shape, spec.data_type)
        shapes[spec.name] = array.shape
        array = flat([array]) if spec.allow_ragged_batch else array
        made[spec.name] = array
    for given in config.batch_input:
        told = batch_input(
            given.kind, [shapes[given.source_input[0]]], given.data_type.dtype, batches=config.max_batch_size > 0
        )
        made |= dict.fromkeys(given.target_name, told)
    return made


FOLDER = "warmup"  # in the model's directory, beside its versions
_log = logging.getLogger("mme.load")
_REQUEST_BYTES = 1 << 10  # that a request takes beside its data
_PATIENCE_SECONDS = 300.0  # for a decoupled model, which answers when it likes; a load may take 350
# What says that the sample or the model is wrong, and not that something is missing just now.
_FAULTS = {Kind.INVALID_ARGUMENT, Kind.EXECUTION_FAILED, Kind.TIMED_OUT, Kind.INTERNAL}


class Warmup:
    """The samples of a model, read and checked, ready to be executed on any of its instances.

    Raises:
        MmeError: INVALID_MODEL for a file that is not there or too short, or a sample that does not fit the model.
    """

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        # What a model of sequences is given beside clients' tensors a sample may hold as well.
        inputs = (*config.inputs, *hidden_inputs(config.sequence_batching))
        self._config = config = replace(config, inputs=inputs)
        self._signature = TensorMap(config.name, 0, config)
        self._samples = [_Sample(sample, config, directory) for sample in config.model_warmup if sample.batch_size]

    def run(self, handler: LoadedModel, instance: str, must_go_on: Callable[[], None] = lambda: None) -> None:
        """Execute all samples on an instance, unless `must_go_on` raises: it is called before each execution."""
        handler.warm(begins=True)
        try:
            self._run(handler, instance, must_go_on)
        finally:
            handler.warm(begins=False)

    def _run(self, handler: LoadedModel, instance: str, must_go_on: Callable[[], None]) -> None:
        for sample in self._samples:
            _log.info("model '%s' instance %s is running warmup sample '%s'", self._config.name, instance, sample.name)
            for iteration in range(sample.count):
                _log.debug("warmup sample '%s' for iteration %d", sample.name, iteration)
                for batch in sample.batches():
                    try:
                        must_go_on()
                        self._execute(handler, batch)
                    except MmeError as error:
                        raise _failed(sample.name, f"model '{self._config.name}' instance {instance}", error) from error

    def _execute(self, handler: LoadedModel, batch: list[InferenceRequest]) -> None:
        endings = _Endings()
        execution = execute_batch(handler, self._signature, batch, endings.post)
        for request, result in zip(batch, execution.results, strict=True):
            error = endings.wait_for(request) if result is None else result
            if isinstance(error, MmeError):
                raise error


class _Sample:
    def __init__(self, sample: WarmupSample, config: ModelConfig, directory: Path) -> None:
        self.name = sample.name
        self.count = sample.count
        self._together, self._batches = (sample.batch_size, 1) if config.max_batch_size > 0 else (1, sample.batch_size)
        try:
            _check_room(sample, self._together)
            tensors = [
                (name, given.data_type, _tensor(given, name, config, directory / FOLDER))
                for name, given in sample.inputs.items()
            ]
            tensors += [tensor for tensor in _of_sequences(config, directory) if tensor[0] not in sample.inputs]
            self._layout = Layout(tuple((name, kind, array.shape) for name, kind, array in tensors), ())
            self._arrays = [array for _, _, array in tensors]
            self._checked = check_layout(self._layout, config)
        except MmeError as error:
            raise _failed(sample.name, f"model '{config.name}'", error) from error

    def batches(self) -> Iterator[list[InferenceRequest]]:
        """Its requests, of one element each: all together, or one by one for a model that does not batch."""
        for _ in range(self._batches):
            yield [self._request() for _ in range(self._together)]

    def _request(self) -> InferenceRequest:
        request = InferenceRequest(self._layout, self._arrays, lambda _request, _result: None)
        request.batch_size, request.order = self._checked.batch_size, self._checked.order
        return request


def _of_sequences(config: ModelConfig, directory: Path) -> Iterator[tuple[str, DataType, Array]]:
    """What a sequence's first request comes with, where a sample does not say otherwise."""
    batching = config.sequence_batching
    if batching is None:
        return
    for name, control in batching.controls():
        kind = control.tensor_type
        told = control.false_true[control.kind is not ControlKind.CONTROL_SEQUENCE_END] if control.false_true else 1
        value = told if kind is not BYTES else b"1"
        yield name, kind, np.full((1, 1) if config.max_batch_size > 0 else (1,), value, kind.dtype)
    first = initial_states(config, directory)
    for state in batching.state:
        yield state.input_name, state.data_type, first[state.input_name]


class _Endings:
    """What a model answers unasked: only its end is of interest, and whether it is an error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[InferenceRequest, MmeError | None] = {}

    def post(self, opened: DecoupledRequest, response: ModelResponse | MmeError | None, final: bool) -> None:  # noqa: FBT001 - see Post
        error = response if isinstance(response, MmeError) else None
        if final or error is not None:
            with self._changed:
                self._ends.setdefault(opened.request, error)
                self._changed.notify_all()

    def wait_for(self, request: InferenceRequest) -> MmeError | None:
        with self._changed:
            if not self._changed.wait_for(lambda: request in self._ends, _PATIENCE_SECONDS):
                return MmeError(Kind.EXECUTION_FAILED, f"no last response came within {_PATIENCE_SECONDS:.0f} s")
            return self._ends[request]


def _check_room(sample: WarmupSample, together: int) -> None:
    """Refuse data that do not fit into memory before any of them are made: Linux kills what touches too many."""
    made = sum(element_count(given.dims) * given.data_type.dtype.itemsize for given in sample.inputs.values())
    need = made + together * (made + _REQUEST_BYTES)  # once by itself, and once for each request of a batch
    if need > host_memory():
        raise invalid_model(f"its requests take {need} bytes, more than this machine has: make it smaller")
    free = free_memory()
    if need > free:
        raise out_of_memory(f"its requests take {need} bytes, and {free} are free")


def _failed(sample: str, whose: str, error: MmeError) -> MmeError:
    kind = Kind.INVALID_MODEL if error.kind in _FAULTS else error.kind
    return MmeError(kind, f"{whose}: failed to run warmup sample '{sample}': {error.message}")


def _tensor(given: WarmupInput, name: str, config: ModelConfig, folder: Path) -> Array:
    shape = (1, *given.dims) if config.max_batch_size > 0 else given.dims
    if given.input_data_file is not None:
        return _recorded(given, name, config.name, folder / given.input_data_file).reshape(shape)
    if given.data_type is BYTES or given.random_data is None:
        return _zeros(shape, given.data_type)
    random = np.random.default_rng(0)
    if given.data_type.dtype.kind == "f":
        made = np.float64 if given.data_type.dtype == np.float64 else np.float32
        return random.random(shape, made).astype(given.data_type.dtype, copy=False)
    # Small enough to be an index into any table: what is looked up in a vocabulary must be found there.
    return random.integers(0, 2, shape, np.int8).astype(given.data_type.dtype)


def _recorded(given: WarmupInput, name: str, model: str, file: Path) -> Array:
    path = f"{FOLDER}/{given.input_data_file}"
    data = _contents(
        file,
        f"its data of input '{name}' can't be read from {path}",
        f"there is no file {path}, which its input '{name}' is to be read from",
    )
    if given.data_type is BYTES:
        return decode_bytes_elements(data, element_count(given.dims), name, model)
    return _numbers(data, given.data_type, given.dims, "warmup", path)


def _contents(file: Path, unreadable: str, absent: str) -> bytes:
    with disk_errors(unreadable):
        if not file.is_file():
            raise invalid_model(absent)
        return file.read_bytes()


def _numbers(
    data: bytes, data_type: DataType, dims: tuple[int, ...], setting: str, path: str, behind: str = ""
) -> Array:
    # The file may hold more.
    count = element_count(dims)
    size = count * data_type.itemsize
    if len(data) < size:
        raise invalid_model(
            f"{setting} setting expects {size} bytes, but the data provided from {path} only has {len(data)} bytes"
            f"{behind}"
        )
    return np.frombuffer(data, data_type.dtype, count)


def _zeros(shape: Sequence[int], data_type: DataType) -> Array:
    array = np.zeros(shape, data_type.dtype)
    if data_type is BYTES:
        array.fill(b"")
    return array


def read_labels(config: ModelConfig, directory: Path) -> dict[str, tuple[str, ...]]:
    """Output → the names of its classes, of those outputs that have a file of them in the model's directory.

    Raises:
        MmeError: INVALID_MODEL for a file that is not there, or no text.
    """
    labels = {}
    for spec in config.outputs:
        if not spec.label_filename:
            continue
        file = directory / spec.label_filename
        whose = f"label_filename '{spec.label_filename}' of output '{spec.name}' of model '{config.name}'"
        if not file.is_file():
            raise invalid_model(f"{whose}: there is no such file in the model's directory")
        try:
            with disk_errors(whose):
                labels[spec.name] = tuple(line.strip() for line in file.read_text("utf-8").splitlines())
        except UnicodeDecodeError as error:
            raise invalid_model(f"{whose} is not UTF-8 text: {error}") from error
    return labels


def ensemble_labels(config: ModelConfig, own: Labels, members: Mapping[str, Labels]) -> Labels:
    """Those of an ensemble: its own, else those of the models that write its outputs."""
    labels = dict(own)
    for step in config.ensemble:
        for output, tensor in step.output_map.items():
            if config.output(tensor) is not None and output in members[step.model_name]:
                labels.setdefault(tensor, members[step.model_name][output])
    return labels


STATES_FOLDER = "initial_state"  # in the model's directory, beside its versions


def initial_states(config: ModelConfig, directory: Path) -> dict[str, Array]:
    """State input → its first value, batch dimension included; {} for a model without states.

    Raises:
        MmeError: INVALID_MODEL for a file that is not there or too short.
    """
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    return {state.input_name: _first(state, config, directory / STATES_FOLDER) for state in states}


def _first(state: SequenceState, config: ModelConfig, folder: Path) -> Array:
    initial = state.initial_state[0] if state.initial_state else None
    dims = initial.dims if initial is not None else tuple(max(dim, 1) for dim in state.dims)
    shape = (1, *dims) if config.max_batch_size > 0 else dims
    if initial is not None and initial.data_file:
        array = _recorded_state(state, initial, config.name, folder).reshape(shape)
    else:
        _check_state_room(state, dims, config.name)
        array = _zeros(shape, state.data_type)
    array.flags.writeable = False  # every sequence begins with it
    return array


def _check_state_room(state: SequenceState, dims: tuple[int, ...], model: str) -> None:
    need = element_count(dims) * state.data_type.dtype.itemsize
    if need > host_memory():
        raise invalid_model(
            f"state input '{state.input_name}' of model '{model}' takes {need} bytes, more than this machine has: "
            "make it smaller"
        )


def _recorded_state(state: SequenceState, initial: InitialState, model: str, folder: Path) -> Array:
    path = f"{STATES_FOLDER}/{initial.data_file}"
    data = _contents(
        folder / initial.data_file,
        f"initial_state '{initial.name}' of model '{model}' can't be read from {path}",
        f"model '{model}' has no file {path}, which initial_state '{initial.name}' names",
    )
    if state.data_type is not BYTES:
        return _numbers(data, state.data_type, initial.dims, "initial_state", path, f" (model {model})")
    try:
        return decode_bytes_elements(data, element_count(initial.dims), state.input_name, model)
    except MmeError as error:
        raise invalid_model(f"initial_state '{initial.name}' in {path}: {error}") from error
