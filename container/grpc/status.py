"""What a kind of error is called in gRPC: the one table, beside `inference/status.py`, and how an error is answered.

The table follows Triton's map, which clients know; memory that does not suffice has a code of its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from container.inference.failures import known
from model_handlers.errors import Kind

if TYPE_CHECKING:
    from container.grpc.rpc import Rpc


class Status(IntEnum):
    """How a call ends, in gRPC's words and numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


CODES: dict[Kind, Status] = {
    Kind.INVALID_ARGUMENT: Status.INVALID_ARGUMENT,
    Kind.UNSUPPORTED_MEDIA_TYPE: Status.INVALID_ARGUMENT,
    Kind.NOT_ACCEPTABLE: Status.INVALID_ARGUMENT,
    Kind.TOO_LARGE: Status.RESOURCE_EXHAUSTED,  # as gRPC says itself of a message beyond its limit
    Kind.INVALID_MODEL: Status.INVALID_ARGUMENT,
    Kind.UNKNOWN_MODEL: Status.NOT_FOUND,
    Kind.UNKNOWN_VERSION: Status.NOT_FOUND,
    Kind.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Kind.UNSUPPORTED: Status.UNIMPLEMENTED,
    Kind.RESTRICTED: Status.UNAVAILABLE,
    Kind.FORBIDDEN: Status.PERMISSION_DENIED,  # not UNAVAILABLE as above, at which clients try again
    Kind.QUEUE_FULL: Status.UNAVAILABLE,
    Kind.QUEUE_TIMEOUT: Status.UNAVAILABLE,
    Kind.TIMED_OUT: Status.DEADLINE_EXCEEDED,
    Kind.UNAVAILABLE: Status.UNAVAILABLE,
    Kind.OUT_OF_MEMORY: Status.RESOURCE_EXHAUSTED,
    Kind.CANCELLED: Status.CANCELLED,
    Kind.EXECUTION_FAILED: Status.INTERNAL,
    Kind.NOT_FOUND: Status.NOT_FOUND,
    Kind.CONFLICT: Status.ALREADY_EXISTS,
    Kind.UNKNOWN: Status.UNKNOWN,
    Kind.INTERNAL: Status.INTERNAL,
}

# A status travels in the trailers, of which clients accept 8 KiB; what is not ASCII takes up to nine bytes a character.
_MAX_MESSAGE = 2048
_MAX_FOREIGN = 512


def refuse(call: Rpc, error: Exception) -> None:
    """End a call with an error."""
    problem = known(error)
    message = problem.message
    call.fail(CODES[problem.kind], message[: _MAX_MESSAGE if message.isascii() else _MAX_FOREIGN])
