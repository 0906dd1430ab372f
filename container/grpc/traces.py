"""The trace of one request over gRPC, from its message to its last response or its error. On the event loop.

Metadata are what headers are to HTTP: `traceparent` names the client's trace. Knows no library; the tracer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.request import InferenceResponse

if TYPE_CHECKING:
    from container.traced import Trace, Tracing
    from model_handlers.errors import MmeError
    from serve.request import InferenceRequest, LoadReport


class Following:
    """Follows one request, and tells its tracer how it went, once.

    Args:
        tracer: whom to tell, if anything is traced.
        headers: the metadata of its call.
        method: that it came by.
    """

    __slots__ = ("_came", "_request", "_trace", "_tracer")

    def __init__(self, tracer: Tracing | None, headers: dict[str, str], method: str) -> None:
        self._tracer = tracer
        self._trace: Trace | None = None if tracer is None else tracer.begin(headers)
        self._came = {"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "rpc.method": method}
        self._request: InferenceRequest | None = None

    def follow(self, request: InferenceRequest) -> None:
        """Hear of its responses before whoever waits for them does."""
        trace = self._trace
        if trace is None:
            return
        self._request = request
        if self._tracer is not None:
            request.trace = self._tracer.handed_on(trace)
        complete, respond = request.on_complete, request.on_response

        def completed(request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
            if isinstance(result, InferenceResponse):
                trace.responses = 1
                self._responded(trace, result)
            complete(request, result)
            self.over(None if result is None or isinstance(result, InferenceResponse) else result)

        def responded(request: InferenceRequest, response: InferenceResponse) -> None:
            trace.responses += 1
            self._responded(trace, response)
            if respond is not None:
                respond(request, response)

        request.on_complete = completed
        if respond is not None:
            request.on_response = responded

    def _responded(self, trace: Trace, response: InferenceResponse) -> None:
        trace.last = response
        if self._tracer is not None:
            self._tracer.responded(trace, response)

    def loaded(self, report: LoadReport) -> None:
        """It has waited for its model."""
        if self._trace is not None and report.load:
            self._trace.report = report

    def over(self, error: MmeError | None) -> None:
        """There is nothing more to hear of it."""
        trace, self._trace = self._trace, None
        if trace is not None and self._tracer is not None:
            self._tracer.end(trace, dict(self._came), self._request, error)


def headers_of(context: Any) -> dict[str, str]:
    """The metadata of a call that are text, by name."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
