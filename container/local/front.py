"""The SageMaker Runtime API over an endpoint, as a Flask application: what boto3 calls.

InvokeEndpoint, InvokeEndpointWithResponseStream, InvokeEndpointAsync; `GET /` tells which models are loaded. Headers
that SageMaker strips are stripped, limits that it has are kept. Views run on a thread for each connection.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from container.codec.event_stream import exception, payload_part
from container.inference.errors import error_body, header_pairs
from container.inference.headers import TARGET_MODEL, name_of
from container.local.faults import RuntimeApiError, no_operation, throttled
from container.local.upstream import SilentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from werkzeug.datastructures import Headers

    from container.local.background import Background
    from container.local.endpoint import Endpoint
    from container.local.throttle import Throttle
    from container.steps.access import Access

_MAX_BODY = 25_000_000  # bytes of a request in real time
_MAX_ATTRIBUTES = 1024
_PREFIX = "X-Amzn-SageMaker-"
_REQUEST_HEADERS = ("Content-Type", "Accept", f"{_PREFIX}Custom-Attributes", f"{_PREFIX}Inference-Id",
                    f"{_PREFIX}Session-Id")  # fmt: skip
_RESPONSE_HEADERS = (f"{_PREFIX}Custom-Attributes", f"{_PREFIX}New-Session-Id", f"{_PREFIX}Closed-Session-Id",
                     "Server-Timing")  # fmt: skip
_EVENT_STREAM = "application/vnd.amazon.eventstream"


def make_front(
    endpoint: Endpoint, throttle: Throttle, background: Background | None, access: Access | None = None
) -> Flask:
    """The application.

    Args:
        endpoint: that it answers for.
        throttle: asked before anything else.
        background: for asynchronous invocations; None refuses them.
        access: who is let in; None for any client.
    """
    app = Flask(__name__, static_folder=None)
    if access is not None:
        _keep_out(app, access)

    def entered(name: str) -> tuple[str, bytes]:
        """The target model and the body of a request that SageMaker lets in."""
        body = request.get_data()
        if not throttle.admits(time.monotonic()):
            raise throttled()
        target = name_of(request.headers.get(TARGET_MODEL, ""))
        endpoint.check(name, target)
        _check_sizes(body, request.headers.get(f"{_PREFIX}Custom-Attributes", ""))
        return target, body

    def invoke(name: str) -> Response:
        target, body = entered(name)
        answer = endpoint.invoke(target, body, _request_headers(request.headers))
        return Response(answer.body, 200, _response_headers(answer.headers, "Content-Type"))

    def stream(name: str) -> Response:
        _, body = entered(name)
        if endpoint.platform:
            raise RuntimeApiError("ValidationError", f"Endpoint {name} is a multi-model one, and those do not stream.")
        headers = _request_headers(request.headers)
        if accept := request.headers.get(f"{_PREFIX}Accept"):
            headers["Accept"] = accept
        answering = endpoint.stream(body, headers)
        answer, pieces = answering.__enter__()
        response = Response(_frames(pieces), 200, _response_headers(answer.headers, f"{_PREFIX}Content-Type"))
        response.content_type = _EVENT_STREAM
        response.call_on_close(lambda: answering.__exit__(None, None, None))
        return response

    def invoke_async(name: str) -> Response:
        target, _ = entered(name)
        if background is None:
            raise RuntimeApiError(
                "ValidationError", f"Endpoint {name} is not an asynchronous one: start it with --async-output"
            )
        accepted = background.accept(target, request.headers)
        headers = {f"{_PREFIX}OutputLocation": accepted.output, f"{_PREFIX}FailureLocation": accepted.failure}
        return _json({"InferenceId": accepted.inference_id}, 202, headers)

    def show() -> Response:
        models = endpoint.platform.resident() if endpoint.platform else None
        return _json({"endpoint": endpoint.name, "container": endpoint.container.url, "loaded": models}, 200, {})

    app.add_url_rule("/endpoints/<name>/invocations", "invoke", invoke, methods=["POST"])
    app.add_url_rule("/endpoints/<name>/invocations-response-stream", "stream", stream, methods=["POST"])
    app.add_url_rule("/endpoints/<name>/async-invocations", "async", invoke_async, methods=["POST"])
    app.add_url_rule("/", "show", show)
    app.register_error_handler(Exception, _explained)
    return app


def _explained(error: Exception) -> Response:
    """Any error as boto3 reads it."""
    if isinstance(error, HTTPException):
        error = no_operation(request.method, request.path, request.headers.get("X-Amz-Target", ""))
    if isinstance(error, SilentError):
        error = RuntimeApiError("ServiceUnavailable", str(error))
    if not isinstance(error, RuntimeApiError):
        raise error
    return Response(error.body(), error.status, error.headers())


def _check_sizes(body: bytes, attributes: str) -> None:
    if len(body) > _MAX_BODY:
        raise RuntimeApiError(
            "ValidationError", f"the request has {len(body)} bytes; SageMaker takes {_MAX_BODY} at most"
        )
    if len(attributes) > _MAX_ATTRIBUTES:
        raise RuntimeApiError(
            "ValidationError", f"CustomAttributes has {len(attributes)} characters, {_MAX_ATTRIBUTES} at most"
        )


def _request_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in _REQUEST_HEADERS if name in headers}


def _response_headers(headers: Mapping[str, str], content_type: str) -> dict[str, str]:
    """What SageMaker hands on of the container's, and what it says itself."""
    return {
        **{name: headers[name.lower()] for name in _RESPONSE_HEADERS if name.lower() in headers},
        content_type: headers.get("content-type", "application/octet-stream"),
        "x-Amzn-Invoked-Production-Variant": request.headers.get(f"{_PREFIX}Target-Variant", "AllTraffic"),
        "x-amzn-RequestId": str(uuid.uuid4()),
    }


def _frames(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """An event stream of the pieces, whose last frame says so if they break off."""
    try:
        for piece in pieces:
            yield payload_part(piece)
    except SilentError as error:
        yield exception(f"the container's answer broke off: {error}")


def _json(document: Any, status: int, headers: Mapping[str, str]) -> Response:
    return Response(json.dumps(document), status, dict(headers), content_type="application/json")


def _keep_out(app: Flask, access: Access) -> None:
    """Have every route refuse requests of pages and hosts that the server would not let in."""

    def check() -> Response | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        raw: str | None = request.environ.get("RAW_URI")
        target = quote_from_bytes(request.environ["PATH_INFO"].encode("latin-1")) if raw is None else raw
        refusal = access.refusal(request.method, target.encode("latin-1"), headers, headers.get("host"))
        if refusal is None:
            return None
        response = Response(error_body(str(refusal)), refusal.status, content_type="application/json")
        response.headers.extend(header_pairs(refusal.headers))
        return response

    app.before_request(check)
