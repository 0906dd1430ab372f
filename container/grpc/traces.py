"""The trace of one request over gRPC. Metadata are what headers are to HTTP: `traceparent` names the client's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from container.inference.headers import text_of
from container.traces.traced import Following

if TYPE_CHECKING:
    from container.traces.traced import Tracing


def follow(tracer: Tracing, headers: dict[str, str], method: str) -> Following | None:
    """Follow a request, None if it is not traced.

    Args:
        tracer: what traces requests.
        headers: the metadata of its call.
        method: that it came by.
    """
    trace = tracer.begin(headers)
    if trace is None:
        return None
    came = {"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService", "rpc.method": method}
    return Following(tracer, trace, came)


def headers_of(context: Any) -> dict[str, str]:
    """The metadata of a call, by name; of keys that end in -bin the text that their bytes are."""
    return {key: value if isinstance(value, str) else text_of(value) for key, value in context.metadata()}
