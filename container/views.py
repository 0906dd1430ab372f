"""What the blueprints share: reading a JSON body, writing a JSON answer, or one that its status says all of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from flask import Response, request

from model_handlers.errors import invalid_argument

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
