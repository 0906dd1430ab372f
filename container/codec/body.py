"""Requests of models that take a body as it came, and answers that are one: no codec but what is said beside. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.scripts.default_script import ACCEPT, BODY, CONTENT_TYPE, CUSTOM_ATTRIBUTES, DEFAULT_TYPE
from model_handlers.tensor import UINT8
from serve.request import InferenceRequest, Layout

if TYPE_CHECKING:
    from serve.request import Completion, InferenceResponse

_LINE_ENDS = str.maketrans("\r\n", "  ")


def body_request(
    body: bytes, content_type: str, accept: str, custom_attributes: str, on_complete: Completion
) -> InferenceRequest:
    """The request of a body: a view into it, and what its headers say of it; "" for a header that did not come."""
    said = {CONTENT_TYPE: content_type, ACCEPT: accept, CUSTOM_ATTRIBUTES: custom_attributes}
    # Not interned: bodies have as many sizes as there are requests, and would drive all other layouts out.
    layout = Layout(((BODY, UINT8, (len(body),)),), ())
    parameters = {name: value for name, value in said.items() if value}
    return InferenceRequest(layout, [np.frombuffer(body, np.uint8)], on_complete, parameters=parameters)


def body_of(response: InferenceResponse) -> memoryview:
    """The body of an answer, where it lies.

    Raises:
        MmeError: INTERNAL, for a response that is none of such a model.
    """
    for name, _, array in response.outputs:
        if name == BODY and array.dtype == np.uint8 and array.flags.c_contiguous:
            return array.data.cast("B")
    raise MmeError(Kind.INTERNAL, f"model '{response.model_name}' was to answer with a body, and did not")


def content_type_of(response: InferenceResponse) -> bytes:
    """The content type that the model gave it, fit for a header."""
    said = (response.parameters or {}).get(CONTENT_TYPE) or DEFAULT_TYPE
    return str(said).translate(_LINE_ENDS).encode("latin-1", "replace")
