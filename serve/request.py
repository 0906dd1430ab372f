"""One inference request and its answer, as the engine sees them: tensors, never bytes on a wire."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from model_handlers.tensor import Array, DataType

    Completion = Callable[["InferenceRequest", "InferenceResponse | MmeError | None"], None]
    PartialResponse = Callable[["InferenceRequest", "InferenceResponse"], None]
    PartialError = Callable[["InferenceRequest", MmeError], None]

_log = logging.getLogger("mme.request")
MOST_STEPS = 100  # whose timings are kept: those of decoupled models answer without end


_ENTRY_BYTES = 200  # of a tensor in a layout, beside its name and shape


class Layout:
    """The shape of a request without its data: what it sends and what it asks for. Never changed after it was made.

    Layouts are interned by the codec: requests that look alike share one object, so that a model checks a layout once
    and then knows it by identity.
    """

    def __init__(self, inputs: tuple[tuple[str, DataType, tuple[int, ...]], ...], outputs: tuple[str, ...]) -> None:
        self.inputs = inputs  # (name, data type, full shape) of each tensor, in the order of the request
        self.outputs = outputs  # names of the requested outputs, () for all of them
        # bytes of the arrays of the inputs, which of strings hold references alone
        self.nbytes = sum([element_count(shape) * data_type.dtype.itemsize for _, data_type, shape in inputs])

    def weight(self) -> int:
        """Bytes that it takes, about. Clients choose names and their number: what remembers layouts has to count."""
        sent = sum(_ENTRY_BYTES + len(name) + 8 * len(shape) for name, _, shape in self.inputs)
        return sent + sum(_ENTRY_BYTES + len(name) for name in self.outputs)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}:{data_type.name}{list(shape)}" for name, data_type, shape in self.inputs)
        return f"<Layout {tensors} -> {', '.join(self.outputs) or 'all'}>"


@functools.lru_cache(maxsize=4096)
def layout_of(inputs: tuple[tuple[str, DataType, tuple[int, ...]], ...], outputs: tuple[str, ...]) -> Layout:
    """The one layout of requests that are made here, by models and ensembles, and look alike."""
    return Layout(inputs, outputs)


class Lease(Protocol):
    """The promise that a model stays in memory until it is released."""

    def release(self) -> None:
        """End the promise. Called once, on the event loop."""


class Asked(Protocol):
    """The model that a request is for: its registered name, and which version of it."""

    name: str
    version: int


class InferenceRequest:
    """A request on its way through the engine."""

    def __init__(
        self,
        layout: Layout,
        inputs: list[Array],
        on_complete: Completion,
        id: str = "",  # noqa: A002 - the protocol's name for it
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int = 0,
    ) -> None:
        self.layout = layout
        # one array an input of the layout, in its order, with the full shape. May be views into the body.
        self.inputs = inputs
        # called exactly once, on the event loop, with the response or the error; with None where a decoupled model has
        # sent its responses before, or none
        self.on_complete = on_complete
        self.id = id
        # what the client sent beside tensors (never the reserved keys, which have fields of their own)
        self.parameters = parameters
        self.timeout_us = timeout_us  # the client's own queue timeout in microseconds, 0 for none
        self.priority = 0  # the level that the client asks for, 1 being served first; 0 for the model's default
        # correlation_id, flags: the sequence that it belongs to, 0 for none, and where in it: see `ModelRequest`
        self.correlation_id: int | str = 0
        self.flags = 0
        self.callers: tuple[str, ...] = ()  # the models that wait for its answer, the outermost first
        self.trace = ""
        # of an ensemble's that failed, where the time went of those steps that had answered
        self.came_to: Timings | None = None
        # called on the event loop with each response of a decoupled model; None for a client that can take only one
        self.on_response: PartialResponse | None = None
        # called there with each error of a decoupled model that others may follow; where it is None, the first error
        # ends the request
        self.on_error: PartialError | None = None
        self.on_cancel: Callable[[], None] | None = None  # called when the client leaves
        self.cancelled = False
        self.answered = False
        # keeps the model in memory until the answer was handed over. Set by the engine, as is `asked`.
        self.lease: Lease | None = None
        self.asked: Asked | None = None
        # of an ensemble's: the models of its steps by the names that they are served under, kept in memory by the lease
        self.steps: Mapping[str, Any] | None = None
        # batch_size, order, signature: what the model's check of the layout found (`serve/model/layout_check.py`)
        self.batch_size = 1
        self.order: tuple[int, ...] = ()
        self.signature: Hashable = None
        # arrival_ns, deadline_ns: `time.perf_counter_ns()` when the model accepted it and when its time in the queue is
        # over (0: never)
        self.arrival_ns = 0
        self.deadline_ns = 0
        self.put_back_ns = 0  # when its last execution ended, of a request that its model puts back; 0 before
        self.responses = 0  # how many it has had, from a decoupled model

    def cancel(self) -> None:
        """The client left: a queued request is dropped instead of run."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def respond(self, response: InferenceResponse | MmeError) -> None:
        """Hand over one response of several, or an error that others may follow."""
        try:
            if isinstance(response, MmeError):
                if self.on_error is not None:
                    self.on_error(self, response)
            elif self.on_response is not None:
                self.on_response(self, response)
        except Exception:  # noqa: BLE001 - as in `resolve`
            _log.exception("a response to request '%s' could not be handed over", self.id)

    def resolve(self, result: InferenceResponse | MmeError | None) -> None:
        """Hand over the answer and end the lease, in this order: the answer may look into the model's memory."""
        self.answered = True
        self.on_cancel = None
        try:
            self.on_complete(self, result)
        except Exception:  # noqa: BLE001 - an answer that can't be taken must not cost the others in its batch theirs
            _log.exception("the answer of request '%s' could not be handed over", self.id)
        finally:
            lease, self.lease = self.lease, None
            if lease is not None:
                lease.release()

    def __repr__(self) -> str:
        return f"<InferenceRequest {self.id or '-'} {self.layout!r}>"


class InferenceResponse:
    """The answer to one request."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        outputs: list[tuple[str, DataType, Array]],
        id: str = "",  # noqa: A002
        timings: Timings | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version  # the resolved one, as a string
        self.outputs = outputs  # (name, data type, array) of each requested output, full shapes
        self.id = id
        self.timings = timings
        self.parameters = parameters  # what the model sends beside tensors, None for nothing
        self.final = False  # whether a decoupled model said with it that it is the last of several


class Timings:
    """Where the time of one execution went, in nanoseconds; `start` is a reading of `time.perf_counter_ns()`.

    `size` is how many batch elements took part in it, 0 where there was no one batch. Those of an ensemble's request
    are sums over its steps, and `start` is when the first of them began, 0 if none has answered; `steps` tells of some
    of them, `calls` of the models that the model called meanwhile.
    """

    def __init__(
        self,
        start: int,
        compute_input: int,
        compute_infer: int,
        compute_output: int,
        size: int = 0,
        steps: list[Step] | None = None,
        calls: Sequence[Called] | None = None,
    ) -> None:
        self.start = start
        self.compute_input = compute_input
        self.compute_infer = compute_infer
        self.compute_output = compute_output
        self.size = size
        self.steps = steps
        self.calls = calls

    @classmethod
    def of_steps(cls) -> Timings:
        return cls(0, 0, 0, 0, steps=[])

    def calling(self, calls: Sequence[Called]) -> Timings:
        """The same for a request on whose behalf these calls were made."""
        return Timings(
            self.start, self.compute_input, self.compute_infer, self.compute_output, self.size, self.steps, calls
        )

    def waited_since(self, arrival: int) -> int:
        """How long a request waited until the first step of its ensemble began."""
        return max(self.start - arrival, 0)

    def add(self, step: Step) -> None:
        """Add the times of an ensemble's step, and keep the step itself if there is room."""
        timings = step.timings
        if timings.start and not 0 < self.start <= timings.start:
            self.start = timings.start
        self.compute_input += timings.compute_input
        self.compute_infer += timings.compute_infer
        self.compute_output += timings.compute_output
        if self.steps is not None and len(self.steps) < MOST_STEPS:
            self.steps.append(step)


class Step(NamedTuple):
    """One answer of a model to a request of an ensemble's."""

    model: str  # what the ensemble calls it; version: of the one that has answered
    version: str
    arrival: int  # `time.perf_counter_ns()` when it accepted the request
    timings: Timings


class Called(NamedTuple):
    """One call that a model made of another one; readings of `time.perf_counter_ns()`."""

    model: str
    began: int
    ended: int
    version: str = ""  # of the one that has answered, "" where none has
    id: str = ""
    arrival: int = 0  # when it accepted the request, 0 if it never did
    timings: Timings | None = None  # of its last response, None where there was none
    error: str = ""  # the kind of the error that it answered with, "" for none
    report: LoadReport | None = None  # what its load cost, if the call had to wait for one


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load cost: nanoseconds for each part, and which models were evicted for it."""

    download: int = 0
    load: int = 0
    evicted: tuple[str, ...] = field(default=())

    def then(self, other: LoadReport) -> LoadReport:
        """What this and another load cost, one after the other."""
        return LoadReport(self.download + other.download, self.load + other.load, self.evicted + other.evicted)


class DecoupledError(MmeError):
    """A client that takes one response asks a model that sends any number of them."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            Kind.INVALID_ARGUMENT,
            f"{subject} sends any number of responses to a request (decoupled transaction policy), which this route "
            "can't carry; use generate_stream, or /invocations",
        )


class Bounded(dict[Any, Any]):
    """A dict that forgets everything rather than grow beyond its bounds: what is asked for again comes back.

    Clients choose how many names they send, and how long: a number of entries alone would bound nothing.

    Args:
        most: entries.
        most_bytes: what all of them may weigh.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        super().__init__()
        self._most = most
        self._most_bytes = most_bytes
        self._weight = 0

    def keep(self, key: Any, value: Any, weight: int) -> None:
        """Remember it, unless it alone is too heavy."""
        if weight > self._most_bytes:
            return
        if len(self) >= self._most or self._weight + weight > self._most_bytes:
            self.clear()
            self._weight = 0
        self[key] = value
        self._weight += weight
