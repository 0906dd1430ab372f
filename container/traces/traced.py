"""Which requests are traced, and what is remembered of them until they are answered. On the event loop.

What becomes of a trace is for whom it is told: `traces.spans` sends spans, `traces.file` writes Triton's own format. It
ends when the answer was handed to the connection, whoever wrote that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from container.control.routes import shown
from container.inference.headers import INFERENCE_ID, TARGET_MODEL, name_of
from container.steps.step import Step
from container.traces.context import Origin, origin
from container.traces.settings import TraceControl, TraceSettings
from container.traces.spans import request_span
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from container.inference.call import Call
    from container.inference.exchange import Exchange
    from container.traces.spans import Phase
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError
    from serve.request import InferenceRequest, LoadReport, Timings

_now = time.perf_counter_ns


class Trace:
    """What is remembered of a request until it has been answered.

    Attributes:
        origin: what the client said of its trace, or None.
        began: `perf_counter_ns()` when it was read.
        model: name and version of the one that was asked, ("", 0) where none was found; known once it is over.
        last: its last response so far.
        report: what its load cost, if it had to wait for one.
        timings: of that, or of an ensemble's steps until it failed; known once it is over.
        responses: how many there were.
        decided: whether it is traced for certain; else its model decides, once it is known.
        ids: of the trace and of the request's span in it, where models were told of them; else zeros.
    """

    def __init__(self, origin: Origin | None, *, decided: bool) -> None:
        self.origin = origin
        self.decided = decided
        self.began = _now()
        self.model = ("", 0)
        self.last: InferenceResponse | None = None
        self.timings: Timings | None = None
        self.report: LoadReport | None = None
        self.responses = 0
        self.ids = (0, 0)


class Following(Step):
    """Follows one traced request, and tells its tracer how it went, once.

    Args:
        tracer: whom to tell.
        trace: what it began.
        came: by which way the request came.
    """

    def __init__(self, tracer: Tracing, trace: Trace, came: dict[str, Any]) -> None:
        self._tracer = tracer
        self._trace: Trace | None = trace
        self._came = came
        self._request: InferenceRequest | None = None

    def made(self, call: Call, request: InferenceRequest, config: ModelConfig) -> None:  # noqa: ARG002
        """See `Step`. The request's model may hand the trace on."""
        if self._trace is not None:
            self._request = request
            request.trace = self._tracer.handed_on(self._trace)

    def responded(self, call: Call, response: InferenceResponse) -> None:  # noqa: ARG002
        """See `Step`."""
        if self._trace is not None:
            self._trace.responses += 1
            self._trace.last = response

    def completed(self, call: Call, result: InferenceResponse | MmeError | None) -> None:
        """See `Step`."""
        if isinstance(result, InferenceResponse):
            self.responded(call, result)

    def over(self, call: Call, error: MmeError | None) -> None:
        """See `Step`. There is nothing more to hear of it."""
        trace, self._trace = self._trace, None
        request, self._request = self._request, None  # which knows us
        if trace is None:
            return
        if call.report is not None and call.report.load:
            trace.report = call.report
        if request is not None and request.asked is not None:
            trace.model = request.asked.name, request.asked.version
            trace.timings = request.came_to if trace.last is None else trace.last.timings
        self._tracer.end(trace, self._came, request, error)


def follow(tracer: Tracing, exchange: Exchange) -> Following | None:
    """Follow a request over HTTP, None if it is not traced."""
    trace = tracer.begin(exchange.headers)
    return None if trace is None else Following(tracer, trace, dict(_origin_attributes(exchange)))


class Tracing(ABC):
    """Decides which requests are traced, and hears how they went.

    Args:
        first: what is traced at first.

    Attributes:
        control: what is traced at the moment.
    """

    def __init__(self, first: TraceSettings) -> None:
        self.control = TraceControl(first, sends=True)

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
        sampled = None if trace.origin is None else trace.origin.sampled
        return trace.decided or self.control.traces(trace.model[0], sampled)

    def handed_on(self, trace: Trace) -> str:  # noqa: ARG002 - for those who send spans
        """What models are told of it, see `ModelRequest`."""
        return ""

    def end(self, trace: Trace, came: dict[str, Any], request: InferenceRequest | None, error: MmeError | None) -> None:
        """A request is over; `came` tells by which way it came."""
        if self.is_traced(trace):
            done = _now()
            self.write(trace, request_span(trace, came, request, done), time.time_ns() - done, error)

    def write(self, trace: Trace, root: Phase, epoch: int, error: MmeError | None) -> None:  # noqa: B027 - `end` may do it
        """Tell of a request by its span; `epoch` is what its times lack to those of `time.time_ns()`."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes. May block: not for the loop."""


def _origin_attributes(exchange: Exchange) -> Iterator[tuple[str, Any]]:
    """By which way a request came over HTTP, under OpenTelemetry's names and SageMaker's."""
    headers = exchange.headers
    yield "http.request.method", exchange.method
    yield "url.path", shown(exchange.target)
    if TARGET_MODEL in headers:
        yield "aws.sagemaker.target_model", name_of(headers[TARGET_MODEL])
    if INFERENCE_ID in headers:
        yield "aws.sagemaker.inference_id", headers[INFERENCE_ID]
