"""Requests to arrays and back, for one model version: batches, ragged batches, controls and states of sequences.

PURE but for sequences: a *control* tells a model of each row whether its sequence begins or ends, whether the row is a
request's, and whose. A *state* is an output that is the next request's input; it stays with its sequence and clients do
not see it, unless the configuration names it as an output as well. A sequence has one request in execution at a time,
so its states need no lock.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from model_handlers.config.model_config import BatchInputKind, ControlKind
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import (
    FLAG_SEQUENCE_END,
    FLAG_SEQUENCE_START,
    FLAGS_TOLD,
    PUT_BACK,
    ModelRequest,
    ModelResponse,
)
from model_handlers.tensor import BY_DTYPE, BYTES, element_count, refitted
from serve.model.replies import DecoupledRequest
from serve.request import InferenceRequest, InferenceResponse, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from model_handlers.config.model_config import ModelConfig, SequenceBatching, SequenceControl
    from model_handlers.tensor import Array, DataType, TensorSpec
    from serve.model.batch_proof import BatchProof
    from serve.model.replies import Post
    from serve.model.sequence_batcher import LiveSequence, SequenceBatch

    Shapes = Sequence[tuple[int, ...]]
    Steps = SequenceBatch[InferenceRequest]


def flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def batch_input(kind: BatchInputKind, shapes: Shapes, dtype: np.dtype[Any], *, batches: bool) -> Array:
    """What a model is told of the batch, from the full shape of each request's source."""
    counts = [element_count(shape) for shape in shapes]
    if kind is BatchInputKind.ELEMENT_COUNT:
        return np.array(counts, dtype)
    if kind is BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
        return np.array(list(itertools.accumulate(counts)), dtype)
    if kind is BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        return np.array(list(itertools.accumulate(counts, initial=0)), dtype)
    if kind is BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
        return np.zeros(max(counts), dtype)
    items = [item for shape in shapes for item in ([shape[1:]] * shape[0] if batches else [shape])]
    table = np.array(items, dtype)
    return table.reshape(-1) if kind is BatchInputKind.ITEM_SHAPE_FLATTEN else table


def split(array: Array, shapes: Shapes) -> list[Array] | None:
    """The elements of each request, in its shape; None where there are more or fewer than that takes."""
    ends = list(itertools.accumulate((element_count(shape) for shape in shapes), initial=0))
    if array.size != ends[-1]:
        return None
    elements = array.reshape(-1)
    return [
        elements[start:end].reshape(shape) for (start, end), shape in zip(itertools.pairwise(ends), shapes, strict=True)
    ]


Batch: TypeAlias = list[InferenceRequest]


class TensorMap:
    """What every execution of a model version has to know, worked out once from its configuration.

    Attributes:
        split_source: outputs that are split by the shapes of an input, and its index.
        pads: whether a batch may have rows that are no request's.
    """

    def __init__(self, name: str, version: int, config: ModelConfig, *, pads: bool = False) -> None:
        self.name = name
        self.pads = pads
        self.version = str(version)
        self.batches = config.max_batch_size > 0
        self.one_by_one = config.one_by_one  # whether the requests of a batch are executed one by one
        self.inputs = config.inputs
        self.outputs = {spec.name: spec for spec in config.outputs}
        self.output_names = tuple(self.outputs)
        places = {spec.name: index for index, spec in enumerate(config.inputs)}
        # inputs that are worked out of each batch, and the index of the input that they are about
        self.derived_inputs = [(given, places[given.source_input[0]]) for given in config.batch_input]
        self.split_source = {
            target: places[given.source_input[0]] for given in config.batch_output for target in given.target_name
        }
        # of a model whose batch dimension is guessed, what is known of it; None for any other
        self.proof: BatchProof | None = None

    def rows(self, batch: Batch) -> int:
        """How many rows a batch is executed with: the sum of its requests' batch dimensions."""
        size = 0
        for request in batch:
            size += request.batch_size
        return size

    def is_dense(self, batch: Batch) -> bool:  # noqa: ARG002 - its interface
        """Whether every row is a request's."""
        return True

    def collate(self, batch: Batch) -> tuple[dict[str, Array], tuple[str, ...]]:
        """What a handler is given for a batch: an array an input, and the outputs that any request asked for.

        Batch dimensions lie behind one another, in the order of the requests.
        """
        first = batch[0]
        inputs: dict[str, Array] = {}
        for index, spec in enumerate(self.inputs):
            position = first.order[index]
            if position < 0:
                continue
            if spec.allow_ragged_batch:
                inputs[spec.name] = flat([request.inputs[request.order[index]] for request in batch])
                continue
            if len(batch) == 1:
                array = first.inputs[position]
                if not array.flags.aligned:  # a view into a body starts where the JSON header happened to end
                    array = array.copy()
            else:
                array = np.concatenate([request.inputs[request.order[index]] for request in batch])
            if spec.reshape is not None:
                array = refitted(array, spec.dims, spec.reshape, batches=self.batches)
            inputs[spec.name] = array
        for given, index in self.derived_inputs:
            told = batch_input(given.kind, _shapes(batch, index), given.data_type.dtype, batches=self.batches)
            inputs |= dict.fromkeys(given.target_name, told)
        return inputs, self._wanted(batch) if first.layout.outputs else self.output_names

    def _wanted(self, batch: Batch) -> tuple[str, ...]:
        wanted: set[str] = set()
        for request in batch:
            if not request.layout.outputs:
                return self.output_names
            wanted.update(request.layout.outputs)
        return tuple(name for name in self.output_names if name in wanted)

    def scatter(self, batch: Batch, names: tuple[str, ...], arrays: list[Array], rows: int) -> list[InferenceResponse]:
        """Give each request its own rows of each output it asked for.

        Raises:
            MmeError: EXECUTION_FAILED when the model returned another number of rows than it was given, or an output
                that can't be reshaped as its configuration says.
        """
        checked = self.batches and (self.proof is None or len(batch) > 1)  # else it may be no batch
        columns: list[tuple[TensorSpec, Array | list[Array]]] = []
        for name, array in zip(names, arrays, strict=True):
            spec = self.outputs[name]
            if name in self.split_source:
                columns.append((spec, self._pieces(batch, name, array)))
                continue
            if checked:
                self._check_rows(name, array, rows)
            columns.append((spec, array if spec.reshape is None else self._as_declared(spec, spec.reshape, array)))
        responses = []
        offset = 0
        for number, request in enumerate(batch):
            end = offset + request.batch_size
            outputs = [
                (
                    spec.name,
                    spec.data_type,
                    column[number] if isinstance(column, list) else column if len(batch) == 1 else column[offset:end],
                )
                for spec, column in columns
                if not request.layout.outputs or spec.name in request.layout.outputs
            ]
            responses.append(InferenceResponse(self.name, self.version, outputs, request.id))
            offset = end
        return responses

    def _check_rows(self, name: str, array: Array, rows: int) -> None:
        if not array.shape or array.shape[0] != rows:
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{self.name}' returned output '{name}' with shape {list(array.shape)} for a batch of {rows}: "
                "its first dimension must be the batch",
            )

    def _pieces(self, batch: Batch, name: str, array: Array) -> list[Array]:
        shapes = _shapes(batch, self.split_source[name])
        pieces = split(array, shapes)
        if pieces is None:
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{self.name}' returned output '{name}' with {array.size} elements for requests of the shapes "
                f"{', '.join(str(list(shape)) for shape in shapes)}, which it is to be split into",
            )
        return pieces

    def _as_declared(self, spec: TensorSpec, inner: tuple[int, ...], array: Array) -> Array:
        try:
            return refitted(array, inner, spec.dims, batches=self.batches)
        except ValueError:
            expected = [-1, *inner] if self.batches else list(inner)
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{self.name}' returned output '{spec.name}' with shape {list(array.shape)}, not {expected}",
            ) from None

    def to_model_requests(self, batch: Batch, post: Post | None) -> list[ModelRequest]:
        """The batch as requests, for a handler that wants to see them; what it answers unasked is posted."""
        return [
            ModelRequest(
                {
                    spec.name: request.inputs[position]
                    for spec, position in zip(self.inputs, request.order, strict=True)
                    if position >= 0
                },
                tuple(name for name in self.output_names if name in request.layout.outputs)
                if request.layout.outputs
                else self.output_names,
                request.id,
                request.parameters or {},
                request.timeout_us,
                request.correlation_id,
                request.flags & FLAGS_TOLD,
                request.callers,
                None if post is None else DecoupledRequest(request, post),
                request.trace,
            )
            for request in batch
        ]

    def from_model_responses(
        self, batch: Batch, answers: list[ModelResponse | MmeError | None]
    ) -> list[InferenceResponse | MmeError | None]:
        """Each request's own response, its own error, or None for one that is answered unasked."""
        return [
            self.response(request, answer) if isinstance(answer, ModelResponse) else answer
            for request, answer in zip(batch, answers, strict=True)
        ]

    def rescheduled(self, batch: Batch) -> Collection[InferenceRequest]:  # noqa: ARG002 - its interface
        return ()

    def response(self, request: InferenceRequest, answer: ModelResponse) -> InferenceResponse:
        """What a handler that sees requests answered to one of them."""
        outputs = [
            (name, *_as_client_type(self.outputs[name], array, request))
            for name, array in answer.outputs.items()
            if name in self.outputs
        ]
        return InferenceResponse(self.name, self.version, outputs, request.id, parameters=answer.parameters or None)


def _as_client_type(spec: TensorSpec, array: Array, request: InferenceRequest) -> tuple[DataType, Array]:
    """An output and its type: the declared one, but that a client is told of whole numbers where floats were declared.

    A model that asks gets what was declared: it may be an ensemble, whose next step takes nothing else.
    """
    declared = spec.data_type
    if array.dtype == declared.dtype or array.dtype.kind not in "biu" or declared.dtype.kind != "f":
        return declared, array
    return (declared, array.astype(declared.dtype)) if request.callers else (BY_DTYPE[array.dtype], array)


def _shapes(batch: Batch, index: int) -> list[tuple[int, ...]]:
    positions = ((request, request.order[index]) for request in batch)
    return [request.layout.inputs[position][2] if position >= 0 else (0,) for request, position in positions]


_UINT64_MASK = (1 << 64) - 1
_EMPTY = Layout((), ())


def _drop(_request: InferenceRequest, _result: InferenceResponse | MmeError | None) -> None: ...


def _drop_response(_opened: DecoupledRequest, _response: ModelResponse | MmeError | None, _final: bool) -> None: ...  # noqa: FBT001 - see Post


class _Control:
    def __init__(
        self, name: str, data_type: DataType, empty: object, value: Callable[[InferenceRequest], object]
    ) -> None:
        self.name = name
        self.data_type = data_type
        self.empty = empty
        self.value = value


class SequenceTensorMap(TensorMap):
    """The tensors of a model of sequences.

    Args:
        initial: state input → what a sequence begins with, its batch dimension included.
    """

    def __init__(self, name: str, version: int, config: ModelConfig, initial: Mapping[str, Array]) -> None:
        super().__init__(name, version, config, pads=True)
        assert config.sequence_batching is not None  # noqa: S101 - see `tensor_map_for`
        batching: SequenceBatching = config.sequence_batching
        self._controls = [_control(control_name, control) for control_name, control in batching.controls()]
        self._states = {state.output_name: state.input_name for state in batching.state}
        self._growing = [state.input_name for state in batching.state if -1 in state.dims]
        self._initial = initial
        kinds = {control.kind for _, control in batching.controls()}
        self._knows_empty_rows = ControlKind.CONTROL_SEQUENCE_READY in kinds

    def rows(self, batch: Batch) -> int:
        """Rows without a request are executed like all others."""
        return cast("Steps", batch).height

    def is_dense(self, batch: Batch) -> bool:
        return len(batch) == cast("Steps", batch).height

    # -- handlers that take arrays -------------------------------------------------------------------------------

    def collate(self, batch: Batch) -> tuple[dict[str, Array], tuple[str, ...]]:
        """Arrays of all rows, controls and states among them; the states' outputs are asked for too."""
        steps = cast("Steps", batch)
        inputs, names = super().collate(batch)
        if not self.is_dense(batch):
            inputs = {name: _spread(array, steps) for name, array in inputs.items()}
        for control in self._controls:
            inputs[control.name] = self._control_rows(control, steps)
        for name in self._states.values():
            inputs[name] = self._state_rows(name, steps)
        return inputs, (*names, *[name for name in self._states if name not in names])

    def scatter(self, batch: Batch, names: tuple[str, ...], arrays: list[Array], rows: int) -> list[InferenceResponse]:
        """Each request's row; what the states have become stays with the sequences."""
        steps = cast("Steps", batch)
        outputs = dict(zip(names, arrays, strict=True))
        if self.batches:
            for name, array in outputs.items():
                self._check_rows(name, array, rows)
        for name, kept_as in self._states.items():
            for sequence, request, row in zip(steps.sequences, steps, steps.rows, strict=True):
                self._keep(sequence, request, kept_as, self._row(outputs[name], row, rows))
        self._note_state_shapes(steps)
        seen = tuple(name for name in names if name in self.outputs)
        if self.is_dense(batch):
            return super().scatter(batch, seen, [outputs[name] for name in seen], rows)
        return super().scatter(batch, seen, [outputs[name][steps.rows] for name in seen], len(batch))

    def _control_rows(self, control: _Control, steps: Steps) -> Array:
        values = [control.empty] * steps.height
        for request, row in zip(steps, steps.rows, strict=True):
            values[row] = control.value(request)
        array = np.array(values, control.data_type.dtype)
        return array.reshape(steps.height, 1) if self.batches else array

    def _state_rows(self, name: str, steps: Steps) -> Array:
        kept = [self._state(name, *step) for step in zip(steps.sequences, steps, strict=True)]
        if len(kept) == steps.height:
            return kept[0] if len(kept) == 1 else np.concatenate(kept)
        rows = [_zeros_like(kept[0])] * steps.height
        for array, row in zip(kept, steps.rows, strict=True):
            rows[row] = array
        return np.concatenate(rows)

    def _row(self, array: Array, row: int, rows: int) -> Array:
        """One row's share of a state: it must keep neither the other rows nor a process's memory."""
        if not self.batches:
            return array if array.flags.writeable else array.copy()
        share = array[row : row + 1]
        return share if rows == 1 and array.flags.writeable else share.copy()

    # -- states --------------------------------------------------------------------------------------------------

    def _state(self, name: str, sequence: LiveSequence[InferenceRequest], request: InferenceRequest) -> Array:
        if request.flags & FLAG_SEQUENCE_START or name not in sequence.memory:
            return self._initial[name]
        kept: Array = sequence.memory[name]
        return kept

    def _keep(
        self, sequence: LiveSequence[InferenceRequest], request: InferenceRequest, name: str, array: Array
    ) -> None:
        if request.flags & FLAG_SEQUENCE_END:
            sequence.memory.pop(name, None)
        else:
            sequence.memory[name] = array

    def _note_state_shapes(self, steps: Steps) -> None:
        """A state of another shape can't share a batch with all others any more."""
        for sequence in steps.sequences if self._growing else ():
            shapes = tuple(sequence.memory.get(name, self._initial[name]).shape for name in self._growing)
            began = tuple(self._initial[name].shape for name in self._growing)
            sequence.state_shapes = None if shapes == began else shapes

    # -- handlers that see requests ------------------------------------------------------------------------------

    def to_model_requests(self, batch: Batch, post: Post | None) -> list[ModelRequest]:
        """A request a row, with controls and states among its inputs.

        Rows without a request are left out where the model is not told which they are: it sees no rows, but requests.
        """
        steps = cast("Steps", batch)
        requests = super().to_model_requests(batch, post)
        for sequence, request, shown in zip(steps.sequences, steps, requests, strict=True):
            shown.inputs |= {
                control.name: self._control_array(control, control.value(request)) for control in self._controls
            }
            shown.inputs |= {name: self._state(name, sequence, request) for name in self._states.values()}
        if self.is_dense(batch) or not self._knows_empty_rows:
            return requests
        rows = [self._empty_row(requests[0])] * steps.height
        for shown, row in zip(requests, steps.rows, strict=True):
            rows[row] = shown
        return rows

    def from_model_responses(
        self, batch: Batch, answers: list[ModelResponse | MmeError | None]
    ) -> list[InferenceResponse | MmeError | None]:
        """The answers of the rows that are a request's; states are taken out of them."""
        steps = cast("Steps", batch)
        own = answers if len(answers) == len(steps) else [answers[row] for row in steps.rows]
        for place, answer in enumerate(own):
            if answer is PUT_BACK:
                steps.again.add(place)
                own[place] = None
            elif isinstance(answer, ModelResponse) and self._states:
                self._take_states(steps, place, answer)
        self._note_state_shapes(steps)
        return super().from_model_responses(batch, own)

    def rescheduled(self, batch: Batch) -> Collection[InferenceRequest]:
        """The requests that are executed once more."""
        return [batch[place] for place in cast("Steps", batch).again]

    def _take_states(self, steps: Steps, place: int, answer: ModelResponse) -> None:
        request = steps[place]
        for name, kept_as in self._states.items():
            array = answer.outputs.get(name)
            if array is not None:
                kept = array if array.flags.writeable else array.copy()
                self._keep(steps.sequences[place], request, kept_as, kept)
                if request.layout.outputs and name not in request.layout.outputs:
                    del answer.outputs[name]

    def _control_array(self, control: _Control, value: object) -> Array:
        return np.array([[value]] if self.batches else [value], control.data_type.dtype)

    def _empty_row(self, like: ModelRequest) -> ModelRequest:
        controls = {control.name: self._control_array(control, control.empty) for control in self._controls}
        states = {name: _zeros_like(self._initial[name]) for name in self._states.values()}
        responder = (
            None if like.responder is None else DecoupledRequest(InferenceRequest(_EMPTY, [], _drop), _drop_response)
        )
        return ModelRequest({**like.inputs, **controls, **states}, like.outputs, responder=responder)


def tensor_map_for(name: str, version: int, config: ModelConfig, initial: Mapping[str, Array]) -> TensorMap:
    if config.sequence_batching is None:
        return TensorMap(name, version, config)
    return SequenceTensorMap(name, version, config, initial)


def _control(name: str, control: SequenceControl) -> _Control:
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        data_type = control.tensor_type
        if data_type is BYTES:
            return _Control(name, data_type, b"", lambda request: str(request.correlation_id).encode())
        kind = data_type.dtype.type
        return _Control(name, data_type, kind(0), lambda request: _number(request.correlation_id).astype(kind))
    no, yes = control.false_true
    if control.kind is ControlKind.CONTROL_SEQUENCE_READY:
        return _Control(name, control.tensor_type, no, lambda _request: yes)
    flag = FLAG_SEQUENCE_START if control.kind is ControlKind.CONTROL_SEQUENCE_START else FLAG_SEQUENCE_END
    return _Control(name, control.tensor_type, no, lambda request: yes if request.flags & flag else no)


def _number(correlation_id: int | str) -> np.uint64:
    return np.uint64(int(correlation_id) & _UINT64_MASK)


def _spread(array: Array, steps: Steps) -> Array:
    """Return an array a request as one a row; rows without a request repeat the first one."""
    places = np.zeros(steps.height, np.intp)
    places[steps.rows] = np.arange(len(steps))
    spread: Array = array[places]
    return spread


def _zeros_like(array: Array) -> Array:
    if array.dtype.kind != "O":
        return np.zeros_like(array)
    texts = np.empty_like(array)
    texts.fill(b"")
    return texts
