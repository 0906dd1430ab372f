"""Scripts of SageMaker's TensorFlow container: `input_handler` and `output_handler` around what a SavedModel does.

The first makes a client's body into TensorFlow Serving's JSON, the second makes an answer of what that says. They know
a request by a context of their own, and TensorFlow Serving's answer as an HTTP response. PURE, but for what they do.
"""

from __future__ import annotations

import io
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.python.script.context import CUSTOM_ATTRIBUTES
from model_handlers.python.script.formats import JSON
from model_handlers.python.script.saved_models import METHOD, NAME, PREDICT, VERSION, request, said_by, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from model_handlers.python.script.context import Context
    from model_handlers.python.script.saved_models import SavedModels

_READS, _WRITES, _BOTH = "input_handler", "output_handler", "handler"
_STATUSES = {Kind.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST, Kind.OUT_OF_MEMORY: HTTPStatus.SERVICE_UNAVAILABLE}


class ServingContext(NamedTuple):
    """What a handler is told of a request."""

    model_name: str
    model_version: str | None
    method: str
    rest_uri: str
    grpc_port: str
    channel: Any
    custom_attributes: str | None
    request_content_type: str
    accept_header: str
    content_length: int


class ServingResponse:
    """TensorFlow Serving's answer, as `requests` would have brought it.

    Attributes:
        status_code: 200, or why it failed.
        content: the body, JSON.
    """

    encoding = "utf-8"

    def __init__(self, status_code: int, content: bytes) -> None:
        self.status_code = status_code
        self.content = content
        self.headers = {"Content-Type": JSON, "Content-Length": str(len(content))}

    @property
    def ok(self) -> bool:
        """Whether it is an answer."""
        return self.status_code < HTTPStatus.BAD_REQUEST

    @property
    def reason(self) -> str:
        """The status in words."""
        return HTTPStatus(self.status_code).phrase

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode()

    def json(self, **options: Any) -> Any:
        """The document in the body."""
        return json.loads(self.content, **options)

    def raise_for_status(self) -> None:
        """Raise where it is an error."""
        if not self.ok:
            raise RuntimeError(f"{self.status_code} {self.reason}: {self.text}")


def transform_by(module: ModuleType, path: Path, model: str, context: Context) -> Callable[..., Any] | None:
    """A `transform_fn` made of a script's two handlers; None for a script that has none.

    Args:
        module: the script.
        path: its file, for messages.
        model: the name that it is served under.
        context: tells of the request.

    Raises:
        MmeError: INVALID_MODEL for a script that asks TensorFlow Serving itself, or has one of the two alone.
    """
    reads, writes = (getattr(module, name, None) for name in (_READS, _WRITES))
    if callable(reads) and callable(writes):

        def transform(models: SavedModels, body: bytes | str, content_type: str, accept: str) -> Any:
            data = body.encode() if isinstance(body, str) else body
            told = _told(context, model, content_type, accept, len(data))
            return writes(_asked(models, reads(io.BytesIO(data), told), context), told)

        return transform
    if callable(getattr(module, _BOTH, None)):
        raise invalid_model(
            f"model '{model}': {_BOTH} in {path} asks TensorFlow Serving at its address, and there is none: write "
            f"{_READS}(data, context), which returns the request's JSON, and {_WRITES}(response, context)"
        )
    if callable(reads) or callable(writes):
        raise invalid_model(f"model '{model}': {path} needs both {_READS} and {_WRITES}")
    return None


def _told(context: Context, model: str, content_type: str, accept: str, length: int) -> ServingContext:
    said = said_by(context)
    return ServingContext(
        said.get(NAME, model),
        said.get(VERSION),
        said.get(METHOD, PREDICT),
        "",
        "",
        None,
        context.get_request_header(0, CUSTOM_ATTRIBUTES),
        content_type,
        accept,
        length,
    )


def _asked(models: SavedModels, document: Any, context: Context) -> ServingResponse:
    """What TensorFlow Serving would say to what `input_handler` returned: text, or what can be written as JSON."""
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    try:
        return ServingResponse(HTTPStatus.OK, written(models.predict(request(text, JSON), said_by(context))))
    except (MmeError, ValueError) as error:
        kind = error.kind if isinstance(error, MmeError) else Kind.INVALID_ARGUMENT
        status = _STATUSES.get(kind, HTTPStatus.INTERNAL_SERVER_ERROR)
        return ServingResponse(status, json.dumps({"error": str(error)}).encode())
