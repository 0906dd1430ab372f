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
from typing import TYPE_CHECKING, NamedTuple

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

from container.traces.traced import Tracing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from container.traces.settings import TraceSettings
    from container.traces.traced import Trace
    from model_handlers.errors import MmeError
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


class _Ids(RandomIdGenerator):  # type: ignore[misc]  # where the library is not installed it has no type
    """Random ones, the trace's that a client named without a span of it, or those that a model was told.

    Attributes:
        trace_id: of the trace that begins next, 0 for a random one.
        span_id: of the span that begins next, once; 0 for a random one.
    """

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        """The id of a trace that begins here."""
        return self.trace_id or int(super().generate_trace_id())

    def generate_span_id(self) -> int:
        """The id of a span."""
        given, self.span_id = self.span_id, 0
        return given or int(super().generate_span_id())


class Tracer(Tracing):
    """Makes spans of calls and has them sent.

    Args:
        url: where spans go: OTLP over HTTP.
        first: what is traced at first; see `begin`.
        service_name: what they are said to come from.
    """

    def __init__(self, url: str, first: TraceSettings, service_name: str) -> None:
        super().__init__(first)
        self._ids = _Ids()
        resource = Resource.create({"service.name": service_name})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_SECONDS)))
        self._spans = self._provider.get_tracer("mme")

    def handed_on(self, trace: Trace) -> str:
        """W3C's header, of the span that will be made of the request; a model's own spans may be below it."""
        if not trace.decided:
            return ""
        self._ids.trace_id = trace.origin.trace_id if trace.origin is not None else 0
        trace_id, span_id = trace.ids = self._ids.generate_trace_id(), self._ids.generate_span_id()
        return f'{{"traceparent":"00-{trace_id:032x}-{span_id:016x}-01"}}'

    def end(self, trace: Trace, came: Attributes, request: InferenceRequest | None, error: MmeError | None) -> None:
        """Make the spans of a request that is over; `came` tells by which way it came."""
        if not self.is_traced(trace):
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
        self._ids.trace_id = found.trace_id if found is not None else trace.ids[0]
        self._ids.span_id = trace.ids[1]
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


def _attributes(trace: Trace, request: InferenceRequest | None) -> Iterator[tuple[str, AttributeValue]]:
    """What is known of a request, under Triton's names."""
    name, version = trace.model
    if name:
        yield "triton.model_name", name
        yield "triton.model_version", str(version)
    if trace.last is not None:
        yield "mme.responses", trace.responses
    if request is not None and request.id:
        yield "triton.request_id", request.id


def _phases(trace: Trace, request: InferenceRequest, done: int) -> Iterator[Phase]:
    """What a request went through: name, begin and end, attributes."""
    if trace.report is not None:
        yield _load(trace.report, trace.began, request.arrival_ns or done)
    if trace.timings is not None:
        yield from _execution(request.arrival_ns, trace.timings)
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
    for step in timings.steps or ():
        below = tuple(_execution(step.arrival, step.timings))
        about: Attributes = {"triton.model_name": step.model, "triton.model_version": step.version}
        yield Phase(step.model, step.arrival, max((phase.end for phase in below), default=step.arrival), about, below)
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
