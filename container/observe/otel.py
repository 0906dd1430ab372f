"""Spans, sent by OpenTelemetry's protocol. Off unless MME_TRACE_URL says where to.

Where nothing is traced this is not even imported. Spans are made when a request has been answered, on the event loop,
and sent by a thread of the library's. No other module imports that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from container.observe.tracing import Tracing

if TYPE_CHECKING:
    from container.observe.trace_settings import TraceSettings
    from container.observe.tracing import Phase, Trace
    from model_handlers.errors import MmeError


_SECONDS = 3.0  # for a collector to take spans, and so for the last of them at the end


class Tracer(Tracing):
    """Makes spans of calls and has them sent, by OTLP over HTTP."""

    def __init__(self, url: str, first: TraceSettings, service_name: str) -> None:
        super().__init__(first)
        self._random = RandomIdGenerator()
        self._resource = Resource.create({"service.name": service_name})
        self._scope = InstrumentationScope("mme")
        self._sender = BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_SECONDS))

    def handed_on(self, trace: Trace) -> str:
        """W3C's header, of the span that will be made of the request; a model's own spans may be below it."""
        if not trace.decided:
            return ""
        trace_id, span_id = trace.ids = self._ids(trace)
        return f'{{"traceparent":"00-{trace_id:032x}-{span_id:016x}-01"}}'

    def _ids(self, trace: Trace) -> tuple[int, int]:
        """Of the trace, which a client may have named, and of a span in it."""
        found = trace.origin
        trace_id = self._random.generate_trace_id() if found is None else found.trace_id
        return trace_id, self._random.generate_span_id()

    def write(self, trace: Trace, root: Phase, epoch: int, error: MmeError | None) -> None:
        found = trace.origin
        parent = None if found is None or not found.span_id else _context(found.trace_id, found.span_id, remote=True)
        own = _context(*(trace.ids if trace.ids[1] else self._ids(trace)))
        self._send(root, own, parent, epoch, SpanKind.SERVER, error)

    def _send(
        self,
        phase: Phase,
        own: SpanContext,
        parent: SpanContext | None,
        epoch: int,
        kind: SpanKind = SpanKind.INTERNAL,
        error: MmeError | None = None,
    ) -> None:
        for each in phase.below:
            self._send(each, _context(own.trace_id, self._random.generate_span_id()), own, epoch)
        span = ReadableSpan(
            phase.name,
            own,
            parent,
            self._resource,
            phase.attributes if error is None else {**phase.attributes, "error.type": error.kind.name},
            kind=kind,
            status=Status() if error is None else Status(StatusCode.ERROR, error.message),
            start_time=epoch + phase.begin,
            end_time=epoch + phase.end,
            instrumentation_scope=self._scope,
        )
        self._sender.on_end(span)

    def close(self) -> None:
        """Send what is left. Blocks for some seconds where it is not taken: not for the loop."""
        self._sender.shutdown()


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))
