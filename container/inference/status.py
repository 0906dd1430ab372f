"""What a kind of error is called on each protocol: the one table from `Kind` to statuses.

KServe's column follows Triton's map, which clients know. 507 stands for memory and nothing else: SageMaker unloads
other models when it sees one.
"""

from __future__ import annotations

from typing import NamedTuple

from model_handlers.errors import Kind


class Statuses(NamedTuple):
    """One row.

    Attributes:
        sagemaker: HTTP status in SageMaker's container contract.
        kserve: HTTP status in KServe v2.
        runtime: the error that the SageMaker Runtime API reports, which is what boto3 raises.
    """

    sagemaker: int
    kserve: int
    runtime: str = "ModelError"


STATUSES: dict[Kind, Statuses] = {
    Kind.INVALID_ARGUMENT: Statuses(400, 400),
    Kind.UNSUPPORTED_MEDIA_TYPE: Statuses(415, 415),
    Kind.NOT_ACCEPTABLE: Statuses(406, 406),
    Kind.TOO_LARGE: Statuses(413, 400),
    Kind.INVALID_MODEL: Statuses(400, 400),
    Kind.UNKNOWN_MODEL: Statuses(404, 404, "ValidationError"),
    Kind.UNKNOWN_VERSION: Statuses(404, 404),
    Kind.ALREADY_EXISTS: Statuses(409, 400),
    Kind.UNSUPPORTED: Statuses(400, 501),
    Kind.RESTRICTED: Statuses(403, 403, "ValidationError"),
    Kind.FORBIDDEN: Statuses(403, 403, "ValidationError"),
    Kind.QUEUE_FULL: Statuses(503, 503),
    Kind.QUEUE_TIMEOUT: Statuses(503, 503),
    Kind.TIMED_OUT: Statuses(504, 504),
    Kind.UNAVAILABLE: Statuses(503, 503, "ServiceUnavailable"),
    Kind.OUT_OF_MEMORY: Statuses(507, 507),
    Kind.CANCELLED: Statuses(400, 400),
    Kind.EXECUTION_FAILED: Statuses(500, 500),
    Kind.NOT_FOUND: Statuses(400, 404),
    Kind.CONFLICT: Statuses(400, 400),
    Kind.UNKNOWN: Statuses(500, 400),
    Kind.INTERNAL: Statuses(500, 500),
}

# The SageMaker Runtime API's errors and their statuses.
RUNTIME_STATUSES: dict[str, int] = {
    "ModelError": 424,
    "ModelNotReadyException": 429,
    "ValidationError": 400,
    "InternalFailure": 500,
    "ServiceUnavailable": 503,
}
