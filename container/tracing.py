"""Traces of requests, for whoever collects them by OpenTelemetry's protocol. Off unless MME_TRACE_URL says where to.

A traced request is one span, with those below it that its way had; their times are those of the statistics.

    infer          from its last byte read to its answer's last byte written
      load           until its model was in memory, where it had to wait for that
      queue          until an instance took it
      batch          its batch is put together
      compute        the model executes
      scatter        outputs are given to the requests of the batch

Of an ensemble's request each step is a span, called as its model, with the last four of these below it. So is each call
that a model makes of another one, below its `compute`; where a batch of several requests was executed nobody knows for
which of them it was made, and each has it.

Where nothing is traced this is not even imported: the server makes calls of other classes. Spans are made when a
request has been answered, on the event loop, and sent by a thread of the library's. No other module imports that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from container.call import INFERENCE_ID, TARGET_MODEL, Call
from container.trace_context import Origin, origin
from container.trace_settings import TraceControl, TraceSettings
from model_handlers.errors import Kind, MmeError
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from container.exchange import Exchange
    from container.targets import Flavor, InferenceType
    from serve.request import Called, InferenceRequest, LoadReport, Timings

    Attributes = dict[str, AttributeValue]

_SECONDS = 3.0  # for a collector to take spans, and so for the last of them at the end
_now = time.perf_counter_ns


class Phase(NamedTuple):
    """One span below another: name, begin and end in nanoseconds, attributes, and what is below it."""

    name: str
    begin: int
    end: int
    attributes: Attributes
    below: Sequence[Phase] = ()


class Trace:
    """What is remembered of a request until it has been answered.

    Attributes:
        origin: what the client said of its trace, or None.
        began: `perf_counter_ns()` when it was read.
        last: its last response so far.
        report: what its load cost, if it had to wait for one.
        responses: how many there were.
        decided: whether it is traced for certain; else its model decides, once it is known.
    """

    __slots__ = ("began", "decided", "last", "origin", "report", "responses")

    def __init__(self, origin: Origin | None, *, decided: bool) -> None:
        self.origin = origin
        self.decided = decided
        self.began = _now()
        self.last: InferenceResponse | None = None
        self.report: LoadReport | None = None
        self.responses = 0


class Traced(Call):
    """A call that tells its tracer how it went, once; mixed into the classes of calls by `Tracer.calls`."""

    tracer: ClassVar[Tracer]

    def __init__(self, exchange: Exchange, flavor: Flavor) -> None:
        super().__init__(exchange, flavor)
        self.trace: Trace | None = self.tracer.begin(exchange.headers)

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """One response of several, or the only one, where that is written as if there were several."""
        if self.trace is not None and response is not self.trace.last:
            self.trace.responses += 1
            self.trace.last = response
        super().respond(request, response)

    def complete(self, request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """The one response, the error, or the end of several responses."""
        if self.trace is not None and isinstance(result, InferenceResponse):
            self.trace.responses = 1
            self.trace.last = result
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

    def _tell(self, request: InferenceRequest | None, error: MmeError | None) -> None:
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.report = self.report
            self.tracer.end(trace, dict(_origin_attributes(self.exchange)), request, error)


class _Ids(RandomIdGenerator):  # type: ignore[misc]  # where the library is not installed it has no type
    """Random ones, or the trace's that a client named without a span of it.

    Attributes:
        trace_id: of the trace that begins next, 0 for a random one.
    """

    trace_id = 0

    def generate_trace_id(self) -> int:
        """The id of a trace that begins here."""
        return self.trace_id or int(super().generate_trace_id())


class Tracer:
    """Makes spans of calls and has them sent.

    Args:
        url: where spans go: OTLP over HTTP.
        rate: one request of so many is traced, of those whose client does not say; see `begin`.
        service_name: what they are said to come from.

    Attributes:
        control: what is traced at the moment.
    """

    def __init__(self, url: str, rate: int, service_name: str) -> None:
        self.control = TraceControl(TraceSettings(on=True, rate=rate), sends=True)
        self._ids = _Ids()
        resource = Resource.create({"service.name": service_name})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_SECONDS)))
        self._spans = self._provider.get_tracer("mme")

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

    def _is_traced(self, trace: Trace) -> bool:
        model = "" if trace.last is None else trace.last.model_name
        return trace.decided or self.control.traces(model, None if trace.origin is None else trace.origin.sampled)

    def end(self, trace: Trace, came: Attributes, request: InferenceRequest | None, error: MmeError | None) -> None:
        """Make the spans of a request that is over; `came` tells by which way it came."""
        if not self._is_traced(trace):
            return
        done = _now()
        epoch = time.time_ns() - done
        span = self._root(trace, came | dict(_attributes(trace, request)), epoch)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error.message))
            span.set_attribute("error.type", error.kind.name)
        if request is not None:
            self._children(set_span_in_context(span), _phases(trace, request, done), epoch)
        span.end(epoch + done)

    def _root(self, trace: Trace, attributes: Attributes, epoch: int) -> Span:
        context, found = None, trace.origin
        if found is not None and found.span_id:
            flags = TraceFlags(TraceFlags.SAMPLED)
            parent = SpanContext(found.trace_id, found.span_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(parent))
        self._ids.trace_id = found.trace_id if found is not None else 0
        began = epoch + trace.began
        return self._spans.start_span("infer", context, SpanKind.SERVER, attributes=attributes, start_time=began)

    def _children(self, context: Context, phases: Iterable[Phase], epoch: int) -> None:
        for phase in phases:
            began = epoch + phase.begin
            span = self._spans.start_span(phase.name, context, attributes=phase.attributes, start_time=began)
            self._children(set_span_in_context(span), phase.below, epoch)
            span.end(epoch + phase.end)

    def close(self) -> None:
        """Send what is left. Blocks for some seconds where nobody takes it: not for the loop."""
        self._provider.shutdown()


def _origin_attributes(exchange: Exchange) -> Iterator[tuple[str, AttributeValue]]:
    """By which way a request came over HTTP, under OpenTelemetry's names and SageMaker's."""
    headers = exchange.headers
    yield "http.request.method", exchange.method
    yield "url.path", exchange.target.partition(b"?")[0].decode("latin-1")
    if TARGET_MODEL in headers:
        yield "aws.sagemaker.target_model", headers[TARGET_MODEL]
    if INFERENCE_ID in headers:
        yield "aws.sagemaker.inference_id", headers[INFERENCE_ID]


def _attributes(trace: Trace, request: InferenceRequest | None) -> Iterator[tuple[str, AttributeValue]]:
    """What is known of a request, under Triton's names."""
    if trace.last is not None:
        yield "triton.model_name", trace.last.model_name
        yield "triton.model_version", trace.last.model_version
        yield "mme.responses", trace.responses
    if request is not None and request.id:
        yield "triton.request_id", request.id


def _phases(trace: Trace, request: InferenceRequest, done: int) -> Iterator[Phase]:
    """What a request went through: name, begin and end, attributes."""
    if trace.report is not None:
        yield _load(trace.report, trace.began, request.arrival_ns or done)
    timings = trace.last.timings if trace.last is not None else None
    if timings is not None:
        yield from _execution(request.arrival_ns, timings)
    elif request.arrival_ns:  # it never got further, or was answered from the cache of responses
        yield Phase("queue", request.arrival_ns, done, {})


def _load(report: LoadReport, began: int, ended: int) -> Phase:
    cost: Attributes = {
        "mme.download_ms": report.download / 1e6,
        "mme.load_ms": report.load / 1e6,
        "mme.evicted": list(report.evicted),
    }
    return Phase("load", began, ended, cost)


def _execution(arrival: int, timings: Timings) -> Iterator[Phase]:
    """Queue, batch, compute and scatter; of an ensemble each step, and those of it."""
    for model, arrived, took in timings.steps or ():
        below = tuple(_execution(arrived, took))
        yield Phase(
            model, arrived, max((phase.end for phase in below), default=arrived), {"triton.model_name": model}, below
        )
    if timings.steps is not None:
        return
    yield Phase("queue", arrival, timings.start, {})
    at = timings.start
    batch: Attributes = {"mme.batch_size": timings.size} if timings.size else {}
    for name, took_ns in (
        ("batch", timings.compute_input),
        ("compute", timings.compute_infer),
        ("scatter", timings.compute_output),
    ):
        below = tuple(map(_call, timings.calls or ())) if name == "compute" else ()
        yield Phase(name, at, at + took_ns, batch, below)
        at += took_ns


def _call(called: Called) -> Phase:
    """A call of another model, with the load that it waited for, and what became of it then."""
    attributes: Attributes = {"triton.model_name": called.model}
    if called.error:
        attributes["error.type"] = called.error
    arrived = called.arrival or called.ended
    below = [_load(called.report, called.began, arrived)] if called.report is not None else []
    if called.timings is not None:
        below += _execution(arrived, called.timings)
    return Phase(called.model, called.began, called.ended, attributes, below)
