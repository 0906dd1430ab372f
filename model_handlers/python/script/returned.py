"""What a script answers, as the bytes of a body and what they are. PURE.

It may be the body alone, a pair of body and content type, or a response object as Flask and Amazon's containers have
it. A body is text or bytes, or a generator of those; anything else is written as JSON, as Amazon's servers do.
"""

from __future__ import annotations

from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.python.script.accept import presumed
from model_handlers.python.script.failures import with_status
from model_handlers.python.script.formats import JSON, encode

if TYPE_CHECKING:
    from model_handlers.python.script.context import Context
    from model_handlers.tensor import Array


class Answer(NamedTuple):
    """One answer: its body as one-dimensional UINT8, and its content type."""

    body: Array
    content_type: str


def answer_of(returned: Any, accept: str, default_accept: str, context: Context, model: str) -> Answer:
    """What a script returned for one request.

    Raises:
        MmeError: the status that the script gave it; EXECUTION_FAILED for an answer that is none.
        TypeError, ValueError: it can't be written as JSON.
    """
    content_type = context.get_response_content_type(0)
    status, phrase = context.get_response_status(0)
    if isinstance(returned, tuple) and len(returned) == 2:
        returned, said = returned
        content_type = said if isinstance(said, str) and said else content_type
    elif callable(getattr(returned, "get_data", None)):
        status = getattr(returned, "status_code", status)
        content_type = getattr(returned, "content_type", None) or content_type
        returned = returned.get_data()
    if returned is None:
        raise MmeError(Kind.EXECUTION_FAILED, f"model '{model}' returned None for an answer: return a body")
    body = _as_bytes(returned)
    if status >= 400:
        raise with_status(status, f"model '{model}': {bytes(body).decode(errors='replace') or phrase}")
    return Answer(np.frombuffer(body, np.uint8), content_type or presumed(accept, default_accept))


def _as_bytes(body: Any) -> bytes | bytearray | memoryview:
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray):
        return body
    if isinstance(body, memoryview):
        return body.cast("B") if body.contiguous else bytes(body)
    if isinstance(body, GeneratorType):
        return b"".join(_as_bytes(part) for part in body)
    return _as_bytes(encode(body, JSON))
