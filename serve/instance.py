"""One execution lane of a model: take a batch, collate, execute, scatter, report.

`execute_batch` is the whole of an execution and touches nothing but its arguments; it runs on the lane's own thread,
or on the event loop for models so quick that a thread hand-off would cost more than the work.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.base import FLAGS_TOLD, ModelRequest, ModelResponse
from model_handlers.errors import Kind, MmeError, out_of_memory
from serve import ragged
from serve.open_request import OpenRequest
from serve.request import InferenceRequest, InferenceResponse, Timings
from serve.threads import STARTER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from model_handlers.base import Handler, Watch
    from model_handlers.config import ModelConfig
    from model_handlers.tensor import Array, TensorSpec
    from serve.open_request import Post

    Batch = list[InferenceRequest]

_log = logging.getLogger("mme.instance")
_now = time.perf_counter_ns
_POLL_SECONDS = 0.005
_NOTHING: tuple[Batch, int, int] = ([], 0, 0)  # a batch that was sent, when it began, and when it was sent
_BRIEF_NS = 50_000  # below it nobody asks who used the time: the system call costs half a microsecond


class Signature:
    """What every execution of a model version has to know, worked out once from its configuration.

    Attributes:
        name, version: who answers, as the response says it.
        inputs, outputs: the model's specs.
        output_names: the names of all outputs.
        told: inputs that are worked out of each batch, and the index of the input that they are about.
        split: outputs that are split by the shapes of an input, and its index.
    """

    def __init__(self, name: str, version: int, config: ModelConfig) -> None:
        self.name = name
        self.version = str(version)
        self.batches = config.max_batch_size > 0
        self.inputs = config.inputs
        self.outputs = {spec.name: spec for spec in config.outputs}
        self.output_names = tuple(self.outputs)
        places = {spec.name: index for index, spec in enumerate(config.inputs)}
        self.told = [(given, places[given.sources[0]]) for given in config.batch_inputs]
        self.split = {target: places[given.sources[0]] for given in config.batch_outputs for target in given.targets}

    def rows(self, batch: Batch) -> int:
        """How many rows a batch is executed with: the sum of its requests' batch dimensions."""
        size = 0
        for request in batch:
            size += request.batch_size
        return size

    def whole(self, batch: Batch) -> bool:  # noqa: ARG002 - its interface
        """Whether every row is a request's."""
        return True

    def gather(self, batch: Batch) -> tuple[dict[str, Array], tuple[str, ...]]:
        """What a handler is given for a batch: an array an input, and the names of the outputs."""
        return collate(self, batch), wanted(self, batch)

    def hand_out(self, batch: Batch, names: tuple[str, ...], arrays: list[Array], rows: int) -> list[InferenceResponse]:
        """Each request's share of what it returned. See `scatter`."""
        return scatter(self, batch, names, arrays, rows)

    def present(self, batch: Batch, post: Post | None) -> list[ModelRequest]:
        """What a handler that sees requests is given for a batch."""
        return present(self, batch, post)

    def collect(
        self, batch: Batch, answers: list[ModelResponse | MmeError | None]
    ) -> list[InferenceResponse | MmeError | None]:
        """What it answered to each request."""
        return collect(self, batch, answers)

    def put_back(self, batch: Batch) -> Collection[InferenceRequest]:  # noqa: ARG002 - its interface
        """The requests of a batch that are queued once more, and so are owed an answer by nobody now."""
        return ()

    def response(self, request: InferenceRequest, answer: ModelResponse) -> InferenceResponse:
        """What a handler that sees requests answered to one of them."""
        outputs = [
            (name, spec.data_type, answer.outputs[name])
            for name, spec in self.outputs.items()
            if name in answer.outputs
        ]
        return InferenceResponse(self.name, self.version, outputs, request.id, parameters=answer.parameters or None)


class Execution:
    """One batch and what became of each request in it.

    Attributes:
        batch: the requests.
        results: a response or an error for each, in the batch's order; None for one that is answered unasked.
        size: the rows that were executed: the sum of their batch dimensions, and rows that are nobody's.
        timings: where the time went.
        processor_ns: processor time of the executing thread, which no other thread's turn makes longer; the time on
            the wall where that was brief anyhow.
        uniform: whether every result is a response, and every row somebody's.
    """

    __slots__ = ("batch", "processor_ns", "results", "size", "timings", "uniform")

    def __init__(
        self,
        batch: Batch,
        results: Sequence[InferenceResponse | MmeError | None],
        size: int,
        timings: Timings,
        processor_ns: int,
        *,
        uniform: bool,
    ) -> None:
        self.batch = batch
        self.results = results
        self.size = size
        self.timings = timings
        self.processor_ns = processor_ns
        self.uniform = uniform


def execute_batch(handler: Handler, signature: Signature, batch: Batch, post: Post | None = None) -> Execution:
    """Run one batch. Never raises: what goes wrong becomes the error of every request in the batch."""
    start = collated = executed = _now()
    processor = time.thread_time_ns()
    size = signature.rows(batch)
    uniform = False
    try:
        results: Sequence[InferenceResponse | MmeError | None]
        if handler.sees_requests:
            requests = signature.present(batch, post)
            collated = executed = _now()
            answers = handler.execute_requests(requests)
            executed = _now()
            results = signature.collect(batch, answers)
            uniform = signature.whole(batch) and _all_responses(results)
        else:
            inputs, names = signature.gather(batch)
            collated = executed = _now()
            arrays = handler.execute(inputs, names)
            executed = _now()
            results = signature.hand_out(batch, names, arrays, size)
            uniform = signature.whole(batch)
    except Exception as error:  # noqa: BLE001 - a lane must survive whatever a framework throws, or its model stands still
        results = [_failure(signature, error)] * len(batch)
    done = _now()
    timings = Timings(start, collated - start, executed - collated, done - executed, size)
    _time(results, timings)
    took = done - start
    if took > _BRIEF_NS:
        took = time.thread_time_ns() - processor
    return Execution(batch, results, size, timings, took, uniform=uniform)


class BegunBatch:
    """A batch that a handler has begun.

    Attributes:
        batch: the requests.
        names: the outputs that are to come.
        start, collated: when it was begun (ns), and when its arrays were made.
        begun: what the handler gave for it, or what went wrong.
    """

    __slots__ = ("batch", "begun", "collated", "names", "start")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.names: tuple[str, ...] = ()
        self.start = self.collated = _now()
        self.begun: object = None


def begin_batch(handler: Handler, signature: Signature, batch: Batch) -> BegunBatch:
    """Have a batch begun by a handler that works ahead. Never raises: `finish_batch` tells what goes wrong."""
    begun = BegunBatch(batch)
    try:
        inputs, begun.names = signature.gather(batch)
        begun.collated = _now()
        begun.begun = handler.begin(inputs, begun.names)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        begun.begun = error
    return begun


def finish_batch(handler: Handler, signature: Signature, begun: BegunBatch, ended: int) -> Execution:
    """The execution of a batch that was begun; the one before it had `ended` then (ns). Never raises."""
    batch = begun.batch
    gathered = begun.collated - begun.start
    start = max(begun.start, ended - gathered)
    executed = start + gathered
    size = signature.rows(batch)
    uniform = False
    results: Sequence[InferenceResponse | MmeError | None]
    try:
        arrays = _finished(handler, begun)
        executed = _now()
        results = signature.hand_out(batch, begun.names, arrays, size)
        uniform = signature.whole(batch)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        results = [_failure(signature, error)] * len(batch)
    timings = Timings(start, gathered, executed - start - gathered, _now() - executed, size)
    _time(results, timings)
    return Execution(batch, results, size, timings, 0, uniform=uniform)


def _finished(handler: Handler, begun: BegunBatch) -> list[Array]:
    if isinstance(begun.begun, Exception):
        raise begun.begun
    return handler.finish(begun.begun)


def _all_responses(results: Sequence[InferenceResponse | MmeError | None]) -> bool:
    return all(isinstance(result, InferenceResponse) for result in results)


def _time(results: Sequence[InferenceResponse | MmeError | None], timings: Timings) -> None:
    for result in results:
        if isinstance(result, InferenceResponse):
            result.timings = timings


def _failure(signature: Signature, error: Exception) -> MmeError:
    """What the requests of a batch are told of an exception."""
    if isinstance(error, MmeError):
        return error
    if isinstance(error, MemoryError):  # numpy's too, when a batch is joined
        return out_of_memory(f"model '{signature.name}' ran out of memory: {error}")
    _log.error("model '%s' failed in a way its handler does not know", signature.name, exc_info=error)
    return MmeError(Kind.INTERNAL, f"model '{signature.name}' failed: {type(error).__name__}: {error}")


def wanted(signature: Signature, batch: Batch) -> tuple[str, ...]:
    """The outputs that anybody in the batch asked for, in the model's order."""
    first = batch[0].layout.outputs
    if not first:
        return signature.output_names
    wanted = set(first)
    for request in batch[1:]:
        if not request.layout.outputs:
            return signature.output_names
        wanted.update(request.layout.outputs)
    return tuple(name for name in signature.output_names if name in wanted)


def collate(signature: Signature, batch: Batch) -> dict[str, Array]:
    """One array an input, the requests' batch dimensions behind one another."""
    first = batch[0]
    inputs: dict[str, Array] = {}
    for index, spec in enumerate(signature.inputs):
        position = first.order[index]
        if position < 0:
            continue
        if spec.ragged:
            inputs[spec.name] = ragged.flat([request.inputs[request.order[index]] for request in batch])
            continue
        if len(batch) == 1:
            array = first.inputs[position]
            if not array.flags.aligned:  # a view into a body starts where the JSON header happened to end
                array = array.copy()
        else:
            array = np.concatenate([request.inputs[request.order[index]] for request in batch])
        inputs[spec.name] = array if spec.reshape is None else _reshaped(signature, array, spec.dims, spec.reshape)
    for given, index in signature.told:
        shapes = _shapes(batch, index)
        told = ragged.batch_input(given.kind, shapes, given.data_type.dtype, batches=signature.batches)
        inputs |= dict.fromkeys(given.targets, told)
    return inputs


def _shapes(batch: Batch, index: int) -> list[tuple[int, ...]]:
    """The shape that each request sent for an input; one without elements where it was left out."""
    positions = ((request, request.order[index]) for request in batch)
    return [request.layout.inputs[position][2] if position >= 0 else (0,) for request, position in positions]


def _reshaped(signature: Signature, array: Array, source: tuple[int, ...], target: tuple[int, ...]) -> Array:
    """The array in the shape `target`; the variable dimensions of `source` and `target` are the same, in order."""
    batch = array.shape[:1] if signature.batches else ()
    sizes = zip(array.shape[len(batch) :], source, strict=True)
    variable = iter([size for size, dim in sizes if dim == -1])
    return array.reshape((*batch, *[next(variable) if dim == -1 else dim for dim in target]))


def _as_declared(signature: Signature, spec: TensorSpec, array: Array) -> Array:
    """An output in the shape that clients see."""
    if spec.reshape is None:
        return array
    try:
        return _reshaped(signature, array, spec.reshape, spec.dims)
    except ValueError:
        inner = [-1, *spec.reshape] if signature.batches else list(spec.reshape)
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{signature.name}' returned output '{spec.name}' with shape {list(array.shape)}, not {inner}",
        ) from None


def scatter(
    signature: Signature, batch: Batch, names: tuple[str, ...], arrays: list[Array], size: int
) -> list[InferenceResponse]:
    """Give each request its own rows of each output it asked for.

    Raises:
        MmeError: EXECUTION_FAILED when the model returned another number of rows than it was given, or an output that
            can't be reshaped as its configuration says.
    """
    columns: list[tuple[TensorSpec, Array | list[Array]]] = []
    for name, array in zip(names, arrays, strict=True):
        spec = signature.outputs[name]
        if name in signature.split:
            columns.append((spec, _pieces(signature, batch, name, array)))
            continue
        if signature.batches and (not array.shape or array.shape[0] != size):
            raise MmeError(
                Kind.EXECUTION_FAILED,
                f"model '{signature.name}' returned output '{name}' with shape {list(array.shape)} "
                f"for a batch of {size}: its first dimension must be the batch",
            )
        columns.append((spec, array if spec.reshape is None else _as_declared(signature, spec, array)))
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
        responses.append(InferenceResponse(signature.name, signature.version, outputs, request.id))
        offset = end
    return responses


def _pieces(signature: Signature, batch: Batch, name: str, array: Array) -> list[Array]:
    """An output of a ragged batch, in the shapes that the requests have."""
    shapes = _shapes(batch, signature.split[name])
    pieces = ragged.split(array, shapes)
    if pieces is None:
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{signature.name}' returned output '{name}' with {array.size} elements for requests of the shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}, which it is to be split into",
        )
    return pieces


def present(signature: Signature, batch: Batch, post: Post | None) -> list[ModelRequest]:
    """The batch as requests, for a handler that wants to see them; what it answers unasked is posted."""
    return [
        ModelRequest(
            {
                spec.name: request.inputs[position]
                for spec, position in zip(signature.inputs, request.order, strict=True)
                if position >= 0
            },
            tuple(name for name in signature.output_names if name in request.layout.outputs)
            if request.layout.outputs
            else signature.output_names,
            request.id,
            request.parameters or {},
            request.timeout_us,
            request.correlation_id,
            request.flags & FLAGS_TOLD,
            request.callers,
            None if post is None else OpenRequest(request, post),
        )
        for request in batch
    ]


def collect(
    signature: Signature, batch: Batch, answers: list[ModelResponse | MmeError | None]
) -> list[InferenceResponse | MmeError | None]:
    """The responses of such a batch: each request's own, its own error, or None for one that is answered unasked."""
    return [
        signature.response(request, answer) if isinstance(answer, ModelResponse) else answer
        for request, answer in zip(batch, answers, strict=True)
    ]


class Instance:
    """A lane with a thread of its own, from the first batch on that needs one.

    Where the handler can send batches to another process, they are sent and received on the event loop (`send`,
    `receive`), and the thread has what would take long.

    Args:
        name: `<model>_<group>_<index>`, the thread's name too.
        handler: what executes; may be shared with other lanes on the same device.
        signature: the model's.
        pull: asks for the next batch; marks the lane idle and returns [] when there is none.
        pull_ahead: asks for one behind the batch that is executed; [] where there is none to be had so early.
        report: takes a finished execution; called on the lane's thread.
        post: takes what the model answers unasked; called on any thread. None where nobody would take it.
        number: which of its model's lanes it is.

    Attributes:
        handler: may be replaced at any time; an execution under way goes on with the one it began with.
        turn: counts the beginnings and ends of executions, so that it is odd during one.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        signature: Signature,
        pull: Callable[[Instance], Batch],
        pull_ahead: Callable[[Instance], Batch],
        report: Callable[[Execution], None],
        post: Post | None = None,
        number: int = 0,
    ) -> None:
        self.name = name
        self.number = number
        self.handler = handler
        self.turn = 0
        self._signature = signature
        self._pull = pull
        self._pull_ahead = pull_ahead
        self._report = report
        self._post = post
        self._inbox: SimpleQueue[Callable[[], Execution] | None] = SimpleQueue()
        self._sent = _NOTHING
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._has_thread = False
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<Instance {self.name}>"

    def run(self, batch: Batch) -> None:
        """Have the idle lane execute a batch, then whatever it can pull. On the event loop."""
        self._hand(functools.partial(self._work, batch))

    def _hand(self, work: Callable[[], Execution]) -> None:
        self._inbox.put(work)
        if not self._has_thread:  # many lanes never need one
            STARTER.start(self._thread)
            self._has_thread = True

    def execute(self, batch: Batch) -> Execution:
        """Execute a batch on the calling thread, while the lane is idle."""
        self.turn += 1  # before the handler is looked up: see Retired
        execution = execute_batch(self.handler, self._signature, batch, self._post)
        self.turn += 1
        return execution

    def _work(self, batch: Batch) -> Execution:
        """Execute a batch, and those behind it that may be begun before it has ended; returns the last one's."""
        if not self.handler.ahead:
            return self.execute(batch)
        self.turn += 1
        handler, ended = self.handler, 0
        begun = begin_batch(handler, self._signature, batch)
        while following := self._pull_ahead(self):
            behind = begin_batch(handler, self._signature, following)
            execution = finish_batch(handler, self._signature, begun, ended)
            ended = _now()
            self._report(execution)
            begun = behind
        execution = finish_batch(handler, self._signature, begun, ended)
        self.turn += 1
        return execution

    def send(self, batch: Batch, watch: Watch) -> bool:
        """Send a batch to the handler's process, whose answers `receive` takes; False where it is not sent so."""
        start = _now()
        if not self.handler.send_requests(self._signature.present(batch, self._post), watch):
            return False
        self._sent = batch, start, _now()
        return True

    def receive(self) -> Execution | None:
        """The execution of the batch that was sent; None where it is for the thread to wait for it: see `wait`."""
        began = _now()
        try:
            answers = self.handler.take_answers()
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return self._answered(error, began)
        return None if answers is None else self._answered(answers, began)

    def wait(self) -> None:
        """Have the thread wait for the batch that was sent, and report its execution."""
        self._hand(self._awaited)

    def _awaited(self) -> Execution:
        try:
            answers = self.handler.await_answers()
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return self._answered(error, _now())
        return self._answered(answers, _now())

    def _answered(self, answers: list[ModelResponse | MmeError | None] | Exception, executed: int) -> Execution:
        (batch, start, sent), self._sent = self._sent, _NOTHING
        results: Sequence[InferenceResponse | MmeError | None]
        if isinstance(answers, Exception):
            results = [_failure(self._signature, answers)] * len(batch)
        else:
            results = self._signature.collect(batch, answers)
        size = self._signature.rows(batch)
        timings = Timings(start, sent - start, executed - sent, _now() - executed, size)
        _time(results, timings)
        uniform = self._signature.whole(batch) and _all_responses(results)
        return Execution(batch, results, size, timings, 0, uniform=uniform)

    def stop(self) -> None:
        """End the thread after what it is doing, and wait for it. Never called on the event loop."""
        self._inbox.put(None)
        if self._has_thread:
            self._ended.wait()  # it may have yet to be started
            self._thread.join()

    def _main(self) -> None:
        while work := self._inbox.get():
            self._report(work())
            while batch := self._pull(self):
                self._report(self._work(batch))
        self._ended.set()


class Retired:
    """Handlers that lanes were given others for; the executions that had begun by then still use them."""

    def __init__(self, handlers: Sequence[Handler], lanes: Sequence[Instance]) -> None:
        self._handlers = handlers
        self._turns = [(lane, lane.turn) for lane in lanes]

    def close(self) -> None:
        """Close them when those executions have ended. On a thread that may wait."""
        for lane, turn in self._turns:
            while turn % 2 and lane.turn == turn:
                time.sleep(_POLL_SECONDS)
        for handler in self._handlers:
            handler.close()
