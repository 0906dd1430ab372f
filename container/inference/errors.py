"""What a kind of error is called by each protocol, errors as bytes and in the log; SageMaker's headers.

One table: KServe's and gRPC's columns follow Triton's maps, which clients know. 507 stands for memory and nothing else:
SageMaker unloads other models when it sees one.
"""

from __future__ import annotations

import logging
import uuid
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from container.control.routes import shown
from container.http1 import Refusal
from container.http1.rules import JSON_TYPE, text_of
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from container.http1 import HttpRequest
    from serve.request import LoadReport, Timings

# SageMaker's headers of a request, by their names in lower case.
TARGET_MODEL = "x-amzn-sagemaker-target-model"
TARGET_VARIANT = "x-amzn-sagemaker-target-variant"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"

_KSERVE = b"/v2/"
_MAX_MESSAGE = 2048  # what SageMaker keeps of an error body
_log = logging.getLogger("mme.infer")


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


class Statuses(NamedTuple):
    """What a kind of error is called by each protocol."""

    sagemaker: int  # HTTP's, in SageMaker's container contract
    kserve: int  # HTTP's, in KServe v2
    grpc: Status
    runtime: str = "ModelError"  # the error that the SageMaker Runtime API reports, which is what boto3 raises


STATUSES: dict[Kind, Statuses] = {
    Kind.INVALID_ARGUMENT: Statuses(400, 400, Status.INVALID_ARGUMENT),
    Kind.UNSUPPORTED_MEDIA_TYPE: Statuses(415, 415, Status.INVALID_ARGUMENT),
    Kind.NOT_ACCEPTABLE: Statuses(406, 406, Status.INVALID_ARGUMENT),
    Kind.TOO_LARGE: Statuses(413, 400, Status.RESOURCE_EXHAUSTED),  # as gRPC says of a message beyond its limit
    Kind.INVALID_MODEL: Statuses(400, 400, Status.INVALID_ARGUMENT),
    Kind.UNKNOWN_MODEL: Statuses(404, 404, Status.NOT_FOUND, "ValidationError"),
    Kind.UNKNOWN_VERSION: Statuses(404, 404, Status.NOT_FOUND),
    Kind.ALREADY_EXISTS: Statuses(409, 400, Status.ALREADY_EXISTS),
    Kind.UNSUPPORTED: Statuses(400, 501, Status.UNIMPLEMENTED),
    Kind.RESTRICTED: Statuses(403, 403, Status.UNAVAILABLE, "ValidationError"),
    # not UNAVAILABLE as above, at which clients try again
    Kind.FORBIDDEN: Statuses(403, 403, Status.PERMISSION_DENIED, "ValidationError"),
    Kind.QUEUE_FULL: Statuses(503, 503, Status.UNAVAILABLE),
    Kind.QUEUE_TIMEOUT: Statuses(503, 503, Status.UNAVAILABLE),
    Kind.TIMED_OUT: Statuses(504, 504, Status.DEADLINE_EXCEEDED),
    Kind.UNAVAILABLE: Statuses(503, 503, Status.UNAVAILABLE, "ServiceUnavailable"),
    Kind.OUT_OF_MEMORY: Statuses(507, 507, Status.RESOURCE_EXHAUSTED),
    Kind.CANCELLED: Statuses(400, 400, Status.CANCELLED),
    Kind.EXECUTION_FAILED: Statuses(500, 500, Status.INTERNAL),
    Kind.NOT_FOUND: Statuses(400, 404, Status.NOT_FOUND),
    Kind.CONFLICT: Statuses(400, 400, Status.ALREADY_EXISTS),
    Kind.UNKNOWN: Statuses(500, 400, Status.UNKNOWN),
    Kind.INTERNAL: Statuses(500, 500, Status.INTERNAL),
}

# The SageMaker Runtime API's errors and their statuses.
RUNTIME_STATUSES: dict[str, int] = {
    "ModelError": 424,
    "ModelNotReadyException": 429,
    "ValidationError": 400,
    "InternalFailure": 500,
    "ServiceUnavailable": 503,
}
_OURS = frozenset({Kind.INTERNAL, Kind.EXECUTION_FAILED, Kind.OUT_OF_MEMORY, Kind.TIMED_OUT})


def log_failure(problem: MmeError, exchange: HttpRequest) -> None:
    """Log our failures as errors; a client's, and what the log has, as details."""
    level = logging.ERROR if problem.kind in _OURS and not problem.logged else logging.DEBUG
    if _log.isEnabledFor(level):
        headers = exchange.headers
        context = {
            "path": shown(exchange.target),
            "target_model": name_of(headers.get(TARGET_MODEL, "")),
            "inference_id": headers.get(INFERENCE_ID, ""),
        }
        _log.log(level, "%s", problem, extra={key: value for key, value in context.items() if value})


def too_large(target: bytes, size: int, limit: int) -> Refusal:
    """What is answered to a body over the limit, before any route sees it: by KServe's routes as Triton does."""
    exceeds = f"size of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
    if target.startswith(_KSERVE):
        return Refusal(400, f"request JSON {exceeds} Use --http-max-input-size to increase the limit, or MME_MAX_BODY.")
    return Refusal(413, f"The body's {exceeds} Raise MME_MAX_BODY.")


def error_body(message: str) -> bytes:
    return orjson.dumps({"error": message})


def error(problem: MmeError, flavor: str) -> tuple[int, bytes, bytes]:
    """Status, header lines and body of an error in a protocol: `sagemaker`, `kserve` or `runtime`."""
    statuses = STATUSES[problem.kind]
    if flavor == "kserve":
        return statuses.kserve, JSON_TYPE, error_body(problem.message)
    status = problem.said or statuses.sagemaker
    if flavor == "sagemaker":
        return status, JSON_TYPE, error_body(problem.message[:_MAX_MESSAGE])
    return runtime_error("ModelError" if problem.said else statuses.runtime, problem.message, status)


def runtime_error(name: str, message: str, original_status: int = 0) -> tuple[int, bytes, bytes]:
    body: dict[str, Any] = {"Message": message[:_MAX_MESSAGE]}
    if name == "ModelError":
        body = model_error_body(original_status, error_body(message[:_MAX_MESSAGE]).decode())
    return runtime_answer(name, body)


def model_error_body(status: int, original: str, advice: str = "", logs: str = "") -> dict[str, Any]:
    """A container's error as SageMaker wraps it: its status, its body, what to read, the ARN of its log."""
    side = "client" if 400 <= status < 500 else "server"
    original = original[:_MAX_MESSAGE]
    sentence = f'Received {side} error ({status}) from model with message "{original}". {advice}'.rstrip()
    return {
        "ErrorCode": "CLIENT_ERROR_FROM_MODEL" if side == "client" else "INTERNAL_FAILURE_FROM_MODEL",
        "Message": sentence[:_MAX_MESSAGE],
        "OriginalMessage": original,
        "OriginalStatusCode": status,
        "LogStreamArn": logs,
    }


def runtime_answer(name: str, body: dict[str, Any]) -> tuple[int, bytes, bytes]:
    """Status, header lines and body of an error; boto3 takes its class from the header and the rest from the body."""
    headers = b"%sx-amzn-errortype: %s\r\nx-amzn-RequestId: %s\r\n" % (JSON_TYPE, name.encode(), _request_id())
    status = RUNTIME_STATUSES.get(
        name, 400
    )  # ThrottlingException, of every service of AWS, is no error of this one's model
    return status, headers, orjson.dumps(body)


def name_of(value: str) -> str:
    """The name of a model that a header holds, which HTTP reads as Latin-1 and boto3 writes as UTF-8."""
    return value if value.isascii() else text_of(value.encode("latin-1"))


def runtime_headers(variant: str) -> bytes:
    """What the SageMaker Runtime API says of a successful invocation, by the variant that was asked for, if any."""
    told = (variant or "AllTraffic").encode("latin-1")
    return b"x-Amzn-Invoked-Production-Variant: %s\r\nx-amzn-RequestId: %s\r\n" % (told, _request_id())


def _request_id() -> bytes:
    return str(uuid.uuid4()).encode()


def custom_attributes(value: str) -> bytes:
    """The header line that hands a client's custom attributes back."""
    return b"X-Amzn-SageMaker-Custom-Attributes: %s\r\n" % value.encode("latin-1")


def server_timing(timings: Timings | None, report: LoadReport | None) -> bytes:
    """Where the time went, as the standard Server-Timing header; durations in milliseconds."""
    entries = [f"cache;desc={'hit' if report is None else 'miss'}"]
    if report is not None:
        entries.append(f"download;dur={report.download / 1e6:.2f}, load;dur={report.load / 1e6:.2f}")
        entries += [f'evict;desc="{_quoted(name)}"' for name in report.evicted]
    if timings is not None:
        entries.append(f"infer;dur={timings.compute_infer / 1e6:.3f}")
    return f"Server-Timing: {', '.join(entries)}\r\n".encode("latin-1", "replace")


def _quoted(text: str) -> str:
    return "".join(char for char in text if char.isprintable() and char not in '"\\')


def header_pairs(lines: bytes) -> list[tuple[str, str]]:
    """Header lines as WSGI wants them."""
    # Not splitlines, to which some characters of a header's value are line ends.
    pairs = (line.partition(": ") for line in lines.decode("latin-1").split("\r\n") if line)
    return [(name, value) for name, _, value in pairs]
