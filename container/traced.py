"""Which requests are traced, and what is remembered of them until they are answered. On the event loop.

What becomes of a trace is for whom it is told: `tracing` sends spans, `trace_file` writes Triton's own format. Where
nothing is traced the server makes calls of other classes.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from container.call import INFERENCE_ID, TARGET_MODEL, Call
from container.trace_context import Origin, origin
from container.trace_settings import TraceControl, TraceSettings
from model_handlers.errors import Kind, MmeError
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.exchange import Exchange
    from container.targets import Flavor, InferenceType
    from serve.request import InferenceRequest, LoadReport

_log = logging.getLogger("mme.trace")
_now = time.perf_counter_ns


class Trace:
    """What is remembered of a request until it has been answered.

    Attributes:
        origin: what the client said of its trace, or None.
        began: `perf_counter_ns()` when it was read.
        last: its last response so far.
        report: what its load cost, if it had to wait for one.
        responses: how many there were.
        tensors: what is kept of its tensors.
        decided: whether it is traced for certain; else its model decides, once it is known.
        ids: of the trace and of the request's span in it, where models were told of them; else zeros.
    """

    __slots__ = ("began", "decided", "ids", "last", "origin", "report", "responses", "tensors")

    def __init__(self, origin: Origin | None, *, decided: bool) -> None:
        self.origin = origin
        self.decided = decided
        self.began = _now()
        self.last: InferenceResponse | None = None
        self.report: LoadReport | None = None
        self.responses = 0
        self.ids = (0, 0)
        self.tensors: list[Any] = []


class Traced(Call):
    """A call that tells its tracer how it went, once; mixed into the classes of calls by `Tracing.calls`."""

    tracer: ClassVar[Tracing]

    def __init__(self, exchange: Exchange, flavor: Flavor) -> None:
        super().__init__(exchange, flavor)
        self.trace: Trace | None = self.tracer.begin(exchange.headers)

    def take(self, request: InferenceRequest) -> InferenceRequest:
        """What is submitted for it, with the trace that its model may hand on."""
        if self.trace is not None:
            request.trace = self.tracer.handed_on(self.trace)
        return super().take(request)

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """One response of several, or the only one, where that is written as if there were several."""
        if self.trace is not None and response is not self.trace.last:
            self.trace.responses += 1
            self._note(self.trace, response)
        super().respond(request, response)

    def complete(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """The one response, the error, or the end of several responses."""
        if self.trace is not None and isinstance(result, InferenceResponse):
            self.trace.responses = 1
            if result is not self.trace.last:
                self._note(self.trace, result)
        super().complete(request, result)
        self._tell(request, result if isinstance(result, MmeError) else None)

    def fail(self, error: MmeError) -> None:
        """Answer with an error, or end what has begun with it."""
        super().fail(error)
        self._tell(self.request, error)

    def acknowledge(self, body: bytes) -> None:
        """It was not for the model."""
        super().acknowledge(body)
        self._tell(None, None)

    def not_ready(self, name: str) -> None:
        """The model still loads."""
        super().not_ready(name)
        self._tell(None, MmeError(Kind.UNAVAILABLE, f"model '{name}' still loads"))

    def abandon(self) -> None:
        """The client left."""
        super().abandon()
        self._tell(None, MmeError(Kind.CANCELLED, "the client left"))

    def _note(self, trace: Trace, response: InferenceResponse) -> None:
        trace.last = response
        try:
            self.tracer.responded(trace, response)
        except Exception as error:  # noqa: BLE001 - a model may answer anything; nobody goes without answer for a trace
            what = f"{type(error).__name__}: {error}"
            _log.error("a response of model '%s' can't be traced: %s", response.model_name, what)

    def _tell(self, request: InferenceRequest | None, error: MmeError | None) -> None:
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.report = self.report
            self.tracer.end(trace, dict(_origin_attributes(self.exchange)), request, error)


class Tracing(ABC):
    """Decides which requests are traced, and hears how they went.

    Args:
        first: what is traced at first.

    Attributes:
        control: what is traced at the moment.
    """

    def __init__(self, first: TraceSettings) -> None:
        self.control = TraceControl(first, sends=True)

    def calls(
        self, classes: Mapping[tuple[InferenceType, bool], type[Call]]
    ) -> dict[tuple[InferenceType, bool], type[Call]]:
        """Each class of calls, traced."""
        return {
            key: type(f"Traced{plain.__name__}", (Traced, plain), {"tracer": self}) for key, plain in classes.items()
        }

    def begin(self, headers: Mapping[str, str]) -> Trace | None:
        """A trace of the request, None where it is not traced: what its client says counts, else the rate."""
        control = self.control
        if not control.on:
            return None
        found = origin(headers)
        decided = not control.by_model
        if decided and not control.traces("", None if found is None else found.sampled):
            return None
        return Trace(found, decided=decided)

    def is_traced(self, trace: Trace) -> bool:
        """Whether it is, now that its model is known."""
        model = "" if trace.last is None else trace.last.model_name
        return trace.decided or self.control.traces(model, None if trace.origin is None else trace.origin.sampled)

    def handed_on(self, trace: Trace) -> str:  # noqa: ARG002 - for those who send spans
        """What models are told of it, see `ModelRequest`."""
        return ""

    def responded(self, trace: Trace, response: InferenceResponse) -> None:  # noqa: B027 - few look at tensors
        """There is a response, whose tensors may be gone when the request is over."""

    @abstractmethod
    def end(self, trace: Trace, came: dict[str, Any], request: InferenceRequest | None, error: MmeError | None) -> None:
        """A request is over; `came` tells by which way it came."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes. May block: not for the loop."""


def _origin_attributes(exchange: Exchange) -> Iterator[tuple[str, Any]]:
    """By which way a request came over HTTP, under OpenTelemetry's names and SageMaker's."""
    headers = exchange.headers
    yield "http.request.method", exchange.method
    yield "url.path", exchange.target.partition(b"?")[0].decode("latin-1")
    if TARGET_MODEL in headers:
        yield "aws.sagemaker.target_model", headers[TARGET_MODEL]
    if INFERENCE_ID in headers:
        yield "aws.sagemaker.inference_id", headers[INFERENCE_ID]
