"""One inference request and its answer, as the engine sees them: tensors, never bytes on a wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model_handlers.errors import MmeError
    from model_handlers.tensor import Array, DataType


class Layout:
    """The shape of a request without its data: what it sends and what it asks for.

    Layouts are interned by the codec: requests that look alike share one object, so that a model checks a layout once
    and then knows it by identity. Never changed after it was made.

    Attributes:
        inputs: (name, data type, full shape) of each tensor, in the order of the request.
        outputs: names of the requested outputs, () for all of them.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: tuple[tuple[str, DataType, tuple[int, ...]], ...], outputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}:{data_type.name}{list(shape)}" for name, data_type, shape in self.inputs)
        return f"<Layout {tensors} -> {', '.join(self.outputs) or 'all'}>"


class InferenceRequest:
    """A request on its way through the engine.

    Attributes:
        layout: names, types and shapes.
        inputs: one array an input of the layout, in its order, with the full shape. May be views into the body.
        id: the client's request id, or "".
        parameters: what the client sent beside tensors (never the reserved keys, which have fields of their own).
        priority: 0 for the model's default.
        timeout_us: the client's own queue timeout in microseconds, 0 for none.
        on_complete: called exactly once, on the event loop, with the response or the error.
        cancelled: set when the client left; a queued request is then dropped instead of run.
        batch_size: elements of the batch dimension, 1 for models without one. Set by the model.
        arrival_ns: `time.perf_counter_ns()` when the model accepted it. Set by the model.
    """

    __slots__ = (
        "arrival_ns",
        "batch_size",
        "cancelled",
        "id",
        "inputs",
        "layout",
        "on_complete",
        "parameters",
        "priority",
        "timeout_us",
    )

    def __init__(
        self,
        layout: Layout,
        inputs: list[Array],
        *,
        id: str = "",  # noqa: A002 - the protocol's name for it
        parameters: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout_us: int = 0,
    ) -> None:
        self.layout = layout
        self.inputs = inputs
        self.id = id
        self.parameters = parameters or {}
        self.priority = priority
        self.timeout_us = timeout_us
        self.on_complete: Callable[[InferenceRequest, InferenceResponse | MmeError], None] = _nobody_waits
        self.cancelled = False
        self.batch_size = 1
        self.arrival_ns = 0


def _nobody_waits(_request: InferenceRequest, _result: InferenceResponse | MmeError) -> None:
    """The completion of a request that nobody waits for."""


class InferenceResponse:
    """The answer to one request.

    Attributes:
        model_name, model_version: who answered; the version is the resolved one, as a string.
        outputs: (name, data type, array) of each requested output, full shapes.
        id: the request's id.
        timings: where the time went.
    """

    __slots__ = ("id", "model_name", "model_version", "outputs", "timings")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        outputs: list[tuple[str, DataType, Array]],
        id: str = "",  # noqa: A002
        timings: Timings | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.outputs = outputs
        self.id = id
        self.timings = timings


@dataclass(slots=True)
class Timings:
    """Where one request's time went, in nanoseconds; the first four for every member of a batch alike."""

    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one cold load cost: nanoseconds for each part, and who had to go for it."""

    download: int = 0
    load: int = 0
    evicted: tuple[str, ...] = field(default=())
