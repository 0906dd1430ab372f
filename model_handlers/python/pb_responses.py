"""`pb_utils.InferenceResponse` and `TritonError`: what models answer, to clients and to one another. PURE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from model_handlers.errors import Kind
from model_handlers.python.pb_errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.python.pb_tensor import Tensor


class TritonError:
    """What went wrong with one request: `InferenceResponse(error=TritonError(message, code))`."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in KINDS:
            raise TritonModelException(f"TritonError has no code {code!r}; use one of its constants")
        self._message = str(message)
        self._code = code

    def __str__(self) -> str:
        return self._message

    def code(self) -> int:
        """One of the constants."""
        return self._code

    def message(self) -> str:
        """The sentence."""
        return self._message


# What a model did not find, or found twice, is its own: kinds that speak of models would tell SageMaker that this one
# is not loaded, or is loaded already.
KINDS = {
    TritonError.UNKNOWN: Kind.EXECUTION_FAILED,
    TritonError.INTERNAL: Kind.EXECUTION_FAILED,
    TritonError.NOT_FOUND: Kind.INVALID_ARGUMENT,
    TritonError.INVALID_ARG: Kind.INVALID_ARGUMENT,
    TritonError.UNAVAILABLE: Kind.UNAVAILABLE,
    TritonError.UNSUPPORTED: Kind.UNSUPPORTED,
    TritonError.ALREADY_EXISTS: Kind.INVALID_ARGUMENT,
    TritonError.CANCELLED: Kind.CANCELLED,
}


class InferenceResponse:
    """The answer to one request: its outputs, or what went wrong with it.

    Raises:
        TritonModelException: for an error that is no TritonError, and for parameters that are no dict.
        TypeError: for parameters that JSON does not have.
    """

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error of an InferenceResponse must be a TritonError, got {type(error)}")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise TritonModelException(f"parameters of an InferenceResponse must be a dict, got {type(parameters)}")
        self._output_tensors = list(output_tensors)
        self._error = error
        self._parameters = dict(parameters) if parameters else {}
        if self._parameters:
            json.dumps(self._parameters)

    def output_tensors(self) -> list[Tensor]:
        """Its outputs."""
        return self._output_tensors

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
