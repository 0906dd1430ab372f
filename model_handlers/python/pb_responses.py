"""`pb_utils.InferenceResponse` and `TritonError`: what models answer, to clients and to one another. PURE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from model_handlers.errors import Kind
from model_handlers.python.pb_errors import TritonModelException
from model_handlers.python.pb_tensor import Tensor
from model_handlers.python.pb_text import text

if TYPE_CHECKING:
    from collections.abc import Iterable


class ErrorCode(IntEnum):
    """As TRITONSERVER_Error_Code names and numbers them; their texts, which models log, are Triton's."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __str__(self) -> str:
        return f"__ErrorCode.{self.name}"

    def __format__(self, form: str) -> str:
        return format(int(self), form) if form else str(self)


class TritonError:
    """What went wrong with one request: `InferenceResponse(error=TritonError(message, code))`."""

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in KINDS:
            raise TritonModelException(f"TritonError has no code {code!r}; use one of its constants")
        self._message = text("message of a TritonError", message) if isinstance(message, bytes) else str(message)
        self._code = ErrorCode(code)

    def __str__(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        """One of the constants, with its name and its number."""
        return self._code

    def message(self) -> str:
        """The sentence."""
        return self._message


# What a model did not find, or found twice, is its own: kinds that speak of models would tell SageMaker that this one
# is not loaded, or is loaded already.
KINDS: dict[int, Kind] = {
    TritonError.UNKNOWN: Kind.UNKNOWN,
    TritonError.INTERNAL: Kind.EXECUTION_FAILED,
    TritonError.NOT_FOUND: Kind.NOT_FOUND,
    TritonError.INVALID_ARG: Kind.INVALID_ARGUMENT,
    TritonError.UNAVAILABLE: Kind.UNAVAILABLE,
    TritonError.UNSUPPORTED: Kind.UNSUPPORTED,
    TritonError.ALREADY_EXISTS: Kind.CONFLICT,
    TritonError.CANCELLED: Kind.CANCELLED,
}


class InferenceResponse:
    """The answer to one request: its outputs, or what went wrong with it.

    Raises:
        TypeError: for outputs that are no tensors, and for an error that is no TritonError.
        TritonModelException: for None among the outputs, and for parameters that can't be sent.
    """

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, got {type(error)}")
        self._output_tensors = list(output_tensors)
        for tensor in self._output_tensors:
            if not isinstance(tensor, Tensor):
                raise _no_output(tensor)
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        """Its outputs, in a list of the caller's own."""
        return list(self._output_tensors)

    def has_error(self) -> bool:
        """Whether something went wrong."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """What went wrong, or None."""
        return self._error

    def parameters(self) -> str:
        """What goes with the outputs, as a JSON object."""
        return json.dumps(self._parameters)

    def sent_parameters(self) -> dict[str, Any]:
        """The same as values."""
        return self._parameters


def checked_parameters(parameters: Any) -> dict[str, Any]:
    """The parameters that a model gives to a request or a response, if they can go with it.

    Raises:
        TritonModelException: they are no dict, or hold other things than strings, numbers and booleans.
    """
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, str | int | float):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)} for '{name}'"
            )
    return dict(parameters)


def _no_output(tensor: object) -> Exception:
    if tensor is None:
        return TritonModelException("Output tensor for inference response should not be empty.")
    return TypeError(f"output_tensors of an InferenceResponse must be Tensors, got {type(tensor)}")
