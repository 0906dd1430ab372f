"""What applications and blueprints share: reading a JSON body, writing an answer, and who is let in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes

import orjson
from flask import Response, request

from container.inference.errors import error_body, header_pairs
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

    from flask import Flask

    from container.http1 import Refusal
    from container.steps.access import Access

View = Callable[..., Response]


def json_answer(document: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(document), status, content_type="application/json")


def empty_answer() -> Response:
    """A 200 without a body, of the type that Triton gives it."""
    return Response(content_type="text/plain")


def json_body(*, required: bool = False) -> dict[str, Any]:
    """The request's JSON object; {} for an empty body unless one is required.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    data = request.get_data(cache=False)
    if not data and not required:
        return {}
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid_argument(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(document, dict):
        raise invalid_argument("the body must be a JSON object")
    return document


def request_target(environ: WSGIEnvironment) -> bytes:
    """The request target: as sent where the server tells, else quoted anew from what it decoded."""
    raw: str | None = environ.get("RAW_URI")
    if raw is None:
        raw = quote_from_bytes(environ["PATH_INFO"].encode("latin-1"))
    return raw.encode("latin-1")


def keep_out(app: Flask, access: Access) -> None:
    """Have every route refuse whom our own server would not have let in."""

    def check() -> Response | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        refusal = access.refusal(request.method, request_target(request.environ), headers, headers.get("host"))
        return None if refusal is None else refusal_answer(refusal)

    app.before_request(check)


def refusal_answer(refusal: Refusal) -> Response:
    """What our own server would have sent."""
    response = Response(error_body(str(refusal)), refusal.status, content_type="application/json")
    response.headers.extend(header_pairs(refusal.headers))
    return response
