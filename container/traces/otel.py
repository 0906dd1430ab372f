"""Spans, sent by OpenTelemetry's protocol. Off unless MME_TRACE_URL says where to.

Where nothing is traced this is not even imported. Spans are made when a request has been answered, on the event loop,
and sent by a thread of the library's. No other module imports that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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

from container.traces.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from container.traces.settings import TraceSettings
    from container.traces.tracing import Phase, Trace
    from model_handlers.errors import MmeError


_SECONDS = 3.0  # for a collector to take spans, and so for the last of them at the end
_now = time.perf_counter_ns


class _Ids(RandomIdGenerator):  # type: ignore[misc]  # where the library is not installed it has no type
    """Random ones, the trace's that a client named without a span of it, or those that a model was told: 0 is none."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id or int(super().generate_trace_id())

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or int(super().generate_span_id())


class Tracer(Tracing):
    """Makes spans of calls and has them sent, by OTLP over HTTP."""

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

    def write(self, trace: Trace, root: Phase, epoch: int, error: MmeError | None) -> None:
        context, found = None, trace.origin
        if found is not None and found.span_id:
            flags = TraceFlags(TraceFlags.SAMPLED)
            parent = SpanContext(found.trace_id, found.span_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(parent))
        self._ids.trace_id = found.trace_id if found is not None else trace.ids[0]
        self._ids.span_id = trace.ids[1]
        self._make(root, context, epoch, SpanKind.SERVER, error)

    def _make(
        self,
        phase: Phase,
        context: Context | None,
        epoch: int,
        kind: SpanKind = SpanKind.INTERNAL,
        error: MmeError | None = None,
    ) -> None:
        began = epoch + phase.begin
        span = self._spans.start_span(phase.name, context, kind, attributes=phase.attributes, start_time=began)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error.message))
            span.set_attribute("error.type", error.kind.name)
        inside = set_span_in_context(span)
        for each in phase.below:
            self._make(each, inside, epoch)
        span.end(epoch + phase.end)

    def close(self) -> None:
        """Send what is left. Blocks for some seconds where it is not taken: not for the loop."""
        self._provider.shutdown()
