"""What a script answers, as the bytes of a body and what they are. PURE.

It may be the body alone, a pair of body and content type, or a response object as Flask and Amazon's containers have
it. A body is text or bytes, or a generator of those, which can be sent piece by piece; anything else is written as
JSON, as Amazon's servers do.
"""

from __future__ import annotations

from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.body import BODY, CONTENT_TYPE
from model_handlers.errors import Kind, MmeError
from model_handlers.python.script.accept import presumed
from model_handlers.python.script.failures import with_status
from model_handlers.python.script.formats import JSON, encode
from model_handlers.requests import ModelResponse

if TYPE_CHECKING:
    from collections.abc import Generator

    from model_handlers.python.script.context import Context


class Returned:
    """What a script returned for one request.

    Attributes:
        pieces: the pieces of a body that comes piece by piece, None for one that is whole.

    Args:
        returned: the object.
        accept: what the script was told that the client accepts, for an answer that does not say what it is.
        default_accept: for a client that says nothing of use.
        context: what the script may have said of its answer.
        model: the model's name, for messages.
    """

    def __init__(self, returned: Any, accept: str, default_accept: str, context: Context, model: str) -> None:
        self._content_type = ""
        self._status = 0
        if isinstance(returned, tuple) and len(returned) == 2:
            returned, said = returned
            self._content_type = said if isinstance(said, str) else ""
        elif callable(getattr(returned, "get_data", None)):
            self._status = getattr(returned, "status_code", 0)
            self._content_type = getattr(returned, "content_type", None) or ""
            returned = returned.get_data()
        self._body = returned
        self._presumed = presumed(accept, default_accept)
        self._context = context
        self._model = model
        self.pieces: Generator[Any, Any, Any] | None = returned if isinstance(returned, GeneratorType) else None

    def whole(self) -> ModelResponse:
        """The answer.

        Raises:
            MmeError: the status that the script gave it; EXECUTION_FAILED for an answer that is none.
            TypeError, ValueError: it can't be written as JSON.
        """
        if self._body is None:
            raise MmeError(Kind.EXECUTION_FAILED, f"model '{self._model}' returned None for an answer: return a body")
        body = self._as_bytes(self._body)
        status, phrase = self._context.get_response_status(0)
        status = self._status or status
        if status >= 400:
            raise with_status(status, f"model '{self._model}': {bytes(body).decode(errors='replace') or phrase}")
        return self._response(body)

    def piece(self, piece: Any) -> ModelResponse:
        """One of the pieces as an answer of several."""
        return self._response(self._as_bytes(piece))

    def _response(self, body: bytes | bytearray | memoryview) -> ModelResponse:
        # Asked for late: a generator says what it is when it begins to run.
        content_type = self._content_type or self._context.get_response_content_type(0) or self._presumed
        return ModelResponse({BODY: np.frombuffer(body, np.uint8)}, {CONTENT_TYPE: content_type})

    def _as_bytes(self, body: Any) -> bytes | bytearray | memoryview:
        if isinstance(body, str):
            return body.encode()
        if isinstance(body, bytes | bytearray):
            return body
        if isinstance(body, memoryview):
            return body.cast("B") if body.contiguous else bytes(body)
        if isinstance(body, GeneratorType):
            return b"".join(self._as_bytes(piece) for piece in body)
        return self._as_bytes(encode(body, JSON, literal=self._context.literal))
