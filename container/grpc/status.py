"""What a kind of error is called in gRPC: the one table, beside `container/status.py`, and how an error is answered.

The table follows Triton's map, which clients know; memory that does not suffice has a code of its own.
"""

from __future__ import annotations

from typing import Any

from grpc import StatusCode

from container.failures import known
from model_handlers.errors import Kind

CODES: dict[Kind, StatusCode] = {
    Kind.INVALID_ARGUMENT: StatusCode.INVALID_ARGUMENT,
    Kind.UNSUPPORTED_MEDIA_TYPE: StatusCode.INVALID_ARGUMENT,
    Kind.NOT_ACCEPTABLE: StatusCode.INVALID_ARGUMENT,
    Kind.TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,  # as gRPC says itself of a message beyond its limit
    Kind.INVALID_MODEL: StatusCode.INVALID_ARGUMENT,
    Kind.UNKNOWN_MODEL: StatusCode.NOT_FOUND,
    Kind.UNKNOWN_VERSION: StatusCode.NOT_FOUND,
    Kind.ALREADY_EXISTS: StatusCode.ALREADY_EXISTS,
    Kind.UNSUPPORTED: StatusCode.UNIMPLEMENTED,
    Kind.RESTRICTED: StatusCode.UNAVAILABLE,
    Kind.QUEUE_FULL: StatusCode.UNAVAILABLE,
    Kind.QUEUE_TIMEOUT: StatusCode.UNAVAILABLE,
    Kind.UNAVAILABLE: StatusCode.UNAVAILABLE,
    Kind.OUT_OF_MEMORY: StatusCode.RESOURCE_EXHAUSTED,
    Kind.CANCELLED: StatusCode.CANCELLED,
    Kind.EXECUTION_FAILED: StatusCode.INTERNAL,
    Kind.NOT_FOUND: StatusCode.NOT_FOUND,
    Kind.CONFLICT: StatusCode.ALREADY_EXISTS,
    Kind.UNKNOWN: StatusCode.UNKNOWN,
    Kind.INTERNAL: StatusCode.INTERNAL,
}

# A status travels in the trailers, of which clients accept 8 KiB; what is not ASCII takes up to nine bytes a character.
_MAX_MESSAGE = 2048
_MAX_FOREIGN = 512


def refuse(context: Any, error: Exception) -> bytes:
    """Have a call end with an error: what its handler is to return then, which nobody reads.

    `context.abort` would do the same by raising an error that gRPC keeps until the collector of garbage comes, and the
    request with it.
    """
    problem = known(error)
    message = problem.message
    context.set_code(CODES[problem.kind])
    context.set_details(message[: _MAX_MESSAGE if message.isascii() else _MAX_FOREIGN])
    return b""
