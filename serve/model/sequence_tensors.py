"""What a model of sequences is given beside its clients' tensors: signals, and what it keeps between two requests.

A *control* tells it of each row whether its sequence begins or ends, whether it is anybody's, and whose. A *state* is
an output that is the next request's input; it stays with its sequence and is no client's to see, unless the
configuration names it as an output as well. Rows that are nobody's are copies of somebody's, with signals that say so.

Runs on whatever thread executes a batch. A sequence has one request in execution at a time, so what it keeps needs no
lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from model_handlers.config.model_config import ControlKind
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START, PUT_BACK, ModelRequest, ModelResponse
from model_handlers.tensor import BYTES
from serve.model.signature import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from model_handlers.config.model_config import Control, ModelConfig, SequenceBatching
    from model_handlers.tensor import Array, DataType
    from serve.model.open_request import Post
    from serve.model.sequence import Sequence, SequenceBatch
    from serve.model.signature import Batch
    from serve.request import InferenceRequest, InferenceResponse

    Steps = SequenceBatch[InferenceRequest]

_WORD = (1 << 64) - 1


class _Signal:
    """A control tensor.

    Attributes:
        name, data_type: its own.
        nobody: its value for a row that is nobody's.
        value: what it says of a request.
    """

    def __init__(
        self, name: str, data_type: DataType, nobody: object, value: Callable[[InferenceRequest], object]
    ) -> None:
        self.name = name
        self.data_type = data_type
        self.nobody = nobody
        self.value = value


class SequenceSignature(Signature):
    """The signature of a model of sequences. See `Signature`.

    Args:
        name, version, config: as there.
        initial: state input → what a sequence begins with, its batch dimension included.
    """

    def __init__(self, name: str, version: int, config: ModelConfig, initial: Mapping[str, Array]) -> None:
        super().__init__(name, version, config)
        assert config.sequence_batching is not None  # noqa: S101 - whoever makes it has looked
        batching: SequenceBatching = config.sequence_batching
        self._signals = [_signal(control_name, control) for control_name, control in batching.controls()]
        self._states = {state.output_name: state.input_name for state in batching.state}
        self._growing = [state.input_name for state in batching.state if -1 in state.dims]
        self._initial = initial
        kinds = {control.kind for _, control in batching.controls()}
        self._knows_nobody = ControlKind.CONTROL_SEQUENCE_READY in kinds

    def rows(self, batch: Batch) -> int:
        """Those that are nobody's are executed like all others."""
        return cast("Steps", batch).height

    def whole(self, batch: Batch) -> bool:
        """Whether every row is a request's."""
        return len(batch) == cast("Steps", batch).height

    # -- handlers that take arrays -------------------------------------------------------------------------------

    def gather(self, batch: Batch) -> tuple[dict[str, Array], tuple[str, ...]]:
        """Arrays of all rows, signals and states among them; the states' outputs are asked for too."""
        steps = cast("Steps", batch)
        inputs, names = super().gather(batch)
        if not self.whole(batch):
            inputs = {name: _spread(array, steps) for name, array in inputs.items()}
        for signal in self._signals:
            inputs[signal.name] = self._shown(signal, steps)
        for name in self._states.values():
            inputs[name] = self._gathered(name, steps)
        return inputs, (*names, *[name for name in self._states if name not in names])

    def hand_out(self, batch: Batch, names: tuple[str, ...], arrays: list[Array], rows: int) -> list[InferenceResponse]:
        """Each request's row; what the states have become stays with the sequences."""
        steps = cast("Steps", batch)
        outputs = dict(zip(names, arrays, strict=True))
        for name, array in outputs.items():
            self._check_rows(name, array, rows)
        for name, kept_as in self._states.items():
            for sequence, request, row in zip(steps.sequences, steps, steps.rows, strict=True):
                self._keep(sequence, request, kept_as, self._row(outputs[name], row, rows))
        self._note_forms(steps)
        seen = tuple(name for name in names if name in self.outputs)
        if self.whole(batch):
            return super().hand_out(batch, seen, [outputs[name] for name in seen], rows)
        return super().hand_out(batch, seen, [outputs[name][steps.rows] for name in seen], len(batch))

    def _shown(self, signal: _Signal, steps: Steps) -> Array:
        """A signal for all rows."""
        values = [signal.nobody] * steps.height
        for request, row in zip(steps, steps.rows, strict=True):
            values[row] = signal.value(request)
        array = np.array(values, signal.data_type.dtype)
        return array.reshape(steps.height, 1) if self.batches else array

    def _gathered(self, name: str, steps: Steps) -> Array:
        """A state of all rows."""
        kept = [self._state(name, *step) for step in zip(steps.sequences, steps, strict=True)]
        if len(kept) == steps.height:
            return kept[0] if len(kept) == 1 else np.concatenate(kept)
        rows = [_nothing_like(kept[0])] * steps.height
        for array, row in zip(kept, steps.rows, strict=True):
            rows[row] = array
        return np.concatenate(rows)

    def _row(self, array: Array, row: int, rows: int) -> Array:
        """One row's share of a state, which is kept, and so must not keep the others, nor a process's memory."""
        if not self.batches:
            return array if array.flags.writeable else array.copy()
        share = array[row : row + 1]
        return share if rows == 1 and array.flags.writeable else share.copy()

    def _check_rows(self, name: str, array: Array, rows: int) -> None:
        if self.batches and (not array.shape or array.shape[0] != rows):
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{self.name}' returned output '{name}' with shape {list(array.shape)} for a batch of {rows}: "
                "its first dimension must be the batch",
            )

    # -- states --------------------------------------------------------------------------------------------------

    def _state(self, name: str, sequence: Sequence[InferenceRequest], request: InferenceRequest) -> Array:
        """What a request is given: a sequence that begins knows nothing of an earlier one of its name."""
        if request.flags & FLAG_SEQUENCE_START or name not in sequence.memory:
            return self._initial[name]
        kept: Array = sequence.memory[name]
        return kept

    def _keep(self, sequence: Sequence[InferenceRequest], request: InferenceRequest, name: str, array: Array) -> None:
        if request.flags & FLAG_SEQUENCE_END:
            sequence.memory.pop(name, None)
        else:
            sequence.memory[name] = array

    def _note_forms(self, steps: Steps) -> None:
        """Whose state has changed its shape can't share a batch with all others any more."""
        for sequence in steps.sequences if self._growing else ():
            shapes = tuple(sequence.memory.get(name, self._initial[name]).shape for name in self._growing)
            began = tuple(self._initial[name].shape for name in self._growing)
            sequence.form = None if shapes == began else shapes

    # -- handlers that see requests ------------------------------------------------------------------------------

    def present(self, batch: Batch, post: Post | None) -> list[ModelRequest]:
        """A request a row, with signals and states among its inputs.

        Rows that are nobody's are left out where the model is not told that they are: it sees no rows, but requests.
        """
        steps = cast("Steps", batch)
        requests = super().present(batch, post)
        for sequence, request, shown in zip(steps.sequences, steps, requests, strict=True):
            shown.inputs |= {signal.name: self._told(signal, signal.value(request)) for signal in self._signals}
            shown.inputs |= {name: self._state(name, sequence, request) for name in self._states.values()}
        if self.whole(batch) or not self._knows_nobody:
            return requests
        rows = [self._nobody(requests[0])] * steps.height
        for shown, row in zip(requests, steps.rows, strict=True):
            rows[row] = shown
        return rows

    def collect(
        self, batch: Batch, answers: list[ModelResponse | MmeError | None]
    ) -> list[InferenceResponse | MmeError | None]:
        """The answers of the rows that are somebody's; states are taken out of them."""
        steps = cast("Steps", batch)
        own = answers if len(answers) == len(steps) else [answers[row] for row in steps.rows]
        for place, answer in enumerate(own):
            if answer is PUT_BACK:
                steps.again.add(place)
                own[place] = None
            elif isinstance(answer, ModelResponse) and self._states:
                self._take_states(steps, place, answer)
        self._note_forms(steps)
        return super().collect(batch, own)

    def put_back(self, batch: Batch) -> Collection[InferenceRequest]:
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

    def _told(self, signal: _Signal, value: object) -> Array:
        return np.array([[value]] if self.batches else [value], signal.data_type.dtype)

    def _nobody(self, like: ModelRequest) -> ModelRequest:
        """A row's request that is nobody's: what it is answered nobody hears."""
        signals = {signal.name: self._told(signal, signal.nobody) for signal in self._signals}
        states = {name: _nothing_like(self._initial[name]) for name in self._states.values()}
        responder = None if like.responder is None else _Unheard()
        return ModelRequest({**like.inputs, **signals, **states}, like.outputs, responder=responder)


class _Unheard:
    """Takes the responses to a request that is nobody's. See `model_handlers.requests.Responder`."""

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """Nobody waits for it."""

    def is_cancelled(self) -> bool:
        """There is no client."""
        return False

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """And so none that leaves."""


def signature_for(name: str, version: int, config: ModelConfig, initial: Mapping[str, Array]) -> Signature:
    """The signature of a model, of sequences or of requests that have nothing to do with one another."""
    if config.sequence_batching is None:
        return Signature(name, version, config)
    return SequenceSignature(name, version, config, initial)


def _signal(name: str, control: Control) -> _Signal:
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        data_type = control.tensor_type
        if data_type is BYTES:
            return _Signal(name, data_type, b"", lambda request: str(request.correlation_id).encode())
        kind = data_type.dtype.type
        return _Signal(name, data_type, kind(0), lambda request: _number(request.correlation_id).astype(kind))
    no, yes = control.false_true
    if control.kind is ControlKind.CONTROL_SEQUENCE_READY:
        return _Signal(name, control.tensor_type, no, lambda _request: yes)
    flag = FLAG_SEQUENCE_START if control.kind is ControlKind.CONTROL_SEQUENCE_START else FLAG_SEQUENCE_END
    return _Signal(name, control.tensor_type, no, lambda request: yes if request.flags & flag else no)


def _number(correlation_id: int | str) -> np.uint64:
    """An id as a word, of which a narrower type has the lower part, as Triton's clients know it."""
    return np.uint64(int(correlation_id) & _WORD)


def _spread(array: Array, steps: Steps) -> Array:
    """The requests' rows at their places, and copies of the first one everywhere else."""
    places = np.zeros(steps.height, np.intp)
    places[steps.rows] = np.arange(len(steps))
    spread: Array = array[places]
    return spread


def _nothing_like(array: Array) -> Array:
    """Zeros of that shape and type; empty texts, where it holds texts."""
    if array.dtype.kind != "O":
        return np.zeros_like(array)
    texts = np.empty_like(array)
    texts.fill(b"")
    return texts
