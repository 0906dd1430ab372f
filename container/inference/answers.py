"""Errors and informational headers as bytes, in the forms of the three protocols. Pure functions."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import orjson

from container.http1 import Refusal
from container.inference.status import RUNTIME_STATUSES, STATUSES

if TYPE_CHECKING:
    from model_handlers.errors import MmeError
    from serve.request import LoadReport, Timings

_KSERVE = b"/v2/"
_JSON = b"Content-Type: application/json\r\n"
_MAX_MESSAGE = 2048  # what SageMaker keeps of an error body


def too_large(target: bytes, size: int, limit: int) -> Refusal:
    """What is answered to a body over the limit, before any route sees it: by KServe's routes as Triton does."""
    exceeds = f"size of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
    if target.startswith(_KSERVE):
        return Refusal(400, f"request JSON {exceeds} Use --http-max-input-size to increase the limit, or MME_MAX_BODY.")
    return Refusal(413, f"The body's {exceeds} Raise MME_MAX_BODY.")


def error_body(message: str) -> bytes:
    """The JSON body of an error."""
    return orjson.dumps({"error": message})


def error(problem: MmeError, flavor: str) -> tuple[int, bytes, bytes]:
    """Status, header lines and body of an error in a protocol: `sagemaker`, `kserve` or `runtime`."""
    statuses = STATUSES[problem.kind]
    if flavor == "kserve":
        return statuses.kserve, _JSON, error_body(problem.message)
    status = problem.said or statuses.sagemaker
    if flavor == "sagemaker":
        return status, _JSON, error_body(problem.message[:_MAX_MESSAGE])
    return runtime_error("ModelError" if problem.said else statuses.runtime, problem.message, status)


def runtime_error(name: str, message: str, original_status: int = 0) -> tuple[int, bytes, bytes]:
    """An error of the SageMaker Runtime API; boto3 takes its class from the header and the rest from the body."""
    body: dict[str, str | int] = {"Message": message[:_MAX_MESSAGE]}
    if name == "ModelError":
        original = error_body(message[:_MAX_MESSAGE]).decode()
        body = {
            "ErrorCode": "INTERNAL_FAILURE_FROM_MODEL" if original_status >= 500 else "CLIENT_ERROR_FROM_MODEL",
            "Message": f"Received {'server' if original_status >= 500 else 'client'} error ({original_status}) "
            f'from model with message "{original}".'[:_MAX_MESSAGE],
            "OriginalMessage": original,
            "OriginalStatusCode": original_status,
            "LogStreamArn": "",
        }
    headers = b"%sx-amzn-errortype: %s\r\nx-amzn-RequestId: %s\r\n" % (_JSON, name.encode(), _request_id())
    return RUNTIME_STATUSES[name], headers, orjson.dumps(body)


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
