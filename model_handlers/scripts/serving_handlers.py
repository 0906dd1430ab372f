"""Scripts of SageMaker's TensorFlow container: `input_handler` and `output_handler` around what a SavedModel does.

The first makes a client's body into TensorFlow Serving's JSON, the second makes an answer of what that says. They know
a request by a context of their own, and TensorFlow Serving's answer as an HTTP response. A `handler` does both, and
asks in between at an address: there is a server for it on a thread of its own.
"""

from __future__ import annotations

import http.server
import io
import json
import re
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.scripts.context import CUSTOM_ATTRIBUTES
from model_handlers.scripts.formats import JSON
from model_handlers.scripts.saved_models import METHOD, NAME, PREDICT, VERSION, request, said_by, written

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType

    from model_handlers.scripts.context import Context
    from model_handlers.scripts.saved_models import SavedModels

HANDLERS = ("handler", "input_handler", "output_handler")
_PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?:([a-z]+)")
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


class ServingHandlers:
    """A script's handlers as one function from a body to an answer.

    Args:
        module: the script.
        path: its file, for messages.
        model: the name that it is served under.
        models: what TensorFlow Serving would have loaded.
        context: tells of the request.

    Raises:
        MmeError: INVALID_MODEL for a script that has one of two handlers alone.
    """

    def __init__(self, module: ModuleType, path: Path, model: str, models: SavedModels, context: Context) -> None:
        functions: list[Any] = [getattr(module, name, None) for name in HANDLERS]
        self._whole, self._reads, self._writes = functions
        if not callable(self._whole) and not (callable(self._reads) and callable(self._writes)):
            raise invalid_model(f"model '{model}': {path} needs both {HANDLERS[1]} and {HANDLERS[2]}")
        self._model = model
        self._models = models
        self._context = context
        self._address = ServingAddress(models) if callable(self._whole) else None

    def __call__(self, models: SavedModels, body: bytes | str, content_type: str, accept: str) -> Any:
        """What the script answers: a `transform_fn`."""
        data = body.encode() if isinstance(body, str) else body
        told = self._told(content_type, accept, len(data))
        if callable(self._whole):  # which comes before the others, as in Amazon's container
            return self._whole(io.BytesIO(data), told)
        return self._writes(asked(models, self._reads(io.BytesIO(data), told), said_by(self._context)), told)

    def close(self) -> None:
        """Listen no more."""
        if self._address is not None:
            self._address.close()

    def _told(self, content_type: str, accept: str, length: int) -> ServingContext:
        said = said_by(self._context)
        version, method = said.get(VERSION), said.get(METHOD, PREDICT)
        return ServingContext(
            model_name=said.get(NAME, self._model),
            model_version=version,
            method=method,
            rest_uri="" if self._address is None else self._address.uri(said.get(NAME), version, method),
            grpc_port="",
            channel=None,
            custom_attributes=self._context.get_request_header(0, CUSTOM_ATTRIBUTES),
            request_content_type=content_type,
            accept_header=accept,
            content_length=length,
        )


def handlers_of(
    module: ModuleType, path: Path, model: str, models: SavedModels, context: Context
) -> ServingHandlers | None:
    """A script's handlers, None for a script that has none. See `ServingHandlers`."""
    if not any(callable(getattr(module, name, None)) for name in HANDLERS):
        return None
    return ServingHandlers(module, path, model, models, context)


class ServingAddress:
    """TensorFlow Serving's REST address, for a script that asks there itself: on this machine's loopback alone."""

    def __init__(self, models: SavedModels) -> None:
        self._default = models.default
        self._server = _server(models)
        self._thread = threading.Thread(target=self._server.serve_forever, name="saved-models", daemon=True)
        self._thread.start()

    def uri(self, name: str | None, version: str | None, method: str) -> str:
        """Where a model is asked, the one that is meant where a client names none."""
        asked = quote(name or self._default) + (f"/versions/{version}" if version else "")
        return f"http://127.0.0.1:{self._server.server_port}/v1/models/{asked}:{method}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _server(models: SavedModels) -> http.server.ThreadingHTTPServer:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = _PATH.fullmatch(self.path)
            if path is None:
                response = ServingResponse(
                    HTTPStatus.NOT_FOUND, b'{"error": "there is POST /v1/models/NAME:predict alone"}'
                )
            else:
                said = {NAME: unquote(path[1]), METHOD: path[3], **({VERSION: path[2]} if path[2] else {})}
                response = asked(models, body, said)
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: Any) -> None:
            """Say nothing: the server logs requests."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)


def asked(models: SavedModels, document: Any, said: Mapping[str, str]) -> ServingResponse:
    """What TensorFlow Serving would say to a request's document: text, or what can be written as JSON."""
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    try:
        return ServingResponse(HTTPStatus.OK, written(models.predict(request(text, JSON), said)))
    except (MmeError, ValueError) as error:
        kind = error.kind if isinstance(error, MmeError) else Kind.INVALID_ARGUMENT
        status = _STATUSES.get(kind, HTTPStatus.INTERNAL_SERVER_ERROR)
        return ServingResponse(status, json.dumps({"error": str(error)}).encode())
