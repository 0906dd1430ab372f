"""What every method does with its messages: read one, and read the values of parameters. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from container.inference.headers import text_of
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

    from container.grpc.grpc_service_pb2 import InferParameter, ModelRepositoryParameter

M = TypeVar("M", bound="Message")


def parsed(kind: type[M], data: bytes) -> M:
    """The message that a client sent.

    Raises:
        MmeError: INVALID_ARGUMENT when the bytes are none.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid_argument(f"the request is no {kind.__name__} message: {error}") from None


def values(parameters: Mapping[str, InferParameter] | Mapping[str, ModelRepositoryParameter]) -> dict[str, Any]:
    """Name → value of parameters.

    Raises:
        MmeError: INVALID_ARGUMENT naming one that holds nothing.
    """
    found = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise invalid_argument(f"parameter '{key}' holds no value")
        found[key] = getattr(parameter, choice)
    return found


def headers_of(call: Any) -> dict[str, str]:
    """The metadata of a call, by name; of keys that end in -bin the text that their bytes are."""
    return {key: value if isinstance(value, str) else text_of(value) for key, value in call.metadata()}
