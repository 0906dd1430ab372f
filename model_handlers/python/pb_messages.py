"""What `execute` is given and what it returns, errors included, as `pb_utils` names them. Runs on the model's threads.

Nothing here reaches outside of the process: calls to other models are refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from model_handlers.errors import Kind
from model_handlers.python.pb_errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.python.pb_tensor import Tensor

MEMORY_CPU, MEMORY_GPU = 0, 2  # as TRITONSERVER_MemoryType numbers them
RELEASE_ALL = 1


def refuse(what: str) -> NoReturn:
    """Say that `what` is not served."""
    raise TritonModelException(f"{what} is not served yet: execute must return one response for each request")


def refuse_call(what: str) -> NoReturn:
    """Say that `what`, which reaches for other models, is not served."""
    raise TritonModelException(f"{what} is not served yet: a model cannot call, load or ask for other models")


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


class PreferredMemory:
    """Where a caller would like to have outputs."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to. Requests are not traced, so it has no context."""

    def get_context(self) -> str | None:
        """The propagated context, of which there is none."""
        return None


class Answering(Protocol):
    """Where a request's responses go."""

    def sender(self) -> InferenceResponseSender:
        """A new sender."""

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response, the flag of the last one, or both."""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""

    def let_go(self) -> None:
        """The model can't send any more."""


class InferenceResponseSender:
    """Sends responses to one request while `execute` runs or after it, on any thread."""

    __slots__ = ("_responses",)

    def __init__(self, responses: Answering) -> None:
        self._responses = responses

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; TRITONSERVER_RESPONSE_COMPLETE_FINAL says that it is the last, or that there was none.

        Raises:
            TritonModelException: the last one was sent, or the model may not send another.
        """
        self._responses.send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._responses.is_cancelled()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # in an interpreter that ends nothing is sure to work
            self._responses.let_go()


class InferenceRequest:
    """A request: one that `execute` is given, or one that a model makes in order to call another."""

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_parameters",
        "_preferred_memory",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_responses",
        "_sender",
        "_timeout",
        "_trace",
        "model_name",
        "model_version",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | str | None = None,
        *,
        responses: Answering | None = None,
    ) -> None:
        self._responses = responses
        self._sender: InferenceResponseSender | None = None
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested_output_names = list(requested_output_names)
        self.model_name = model_name
        self.model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = parameters or {}
        self._release_flags = RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """Its tensors; optional inputs that the client left out are not among them."""
        return self._inputs

    def request_id(self) -> str:
        """The client's name for it, or ""."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence that it belongs to, 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_* together."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set what `flags` gives."""
        self._flags = flags

    def timeout(self) -> int:
        """The client's own timeout in microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """What the client sent beside tensors, as a JSON object."""
        return self._parameters if isinstance(self._parameters, str) else json.dumps(dict(self._parameters))

    def trace(self) -> InferenceTrace:
        """Its trace."""
        return self._trace or InferenceTrace()

    def requested_output_names(self) -> list[str]:
        """The outputs that the client wants; others are computed in vain."""
        return self._requested_output_names

    def preferred_memory(self) -> PreferredMemory:
        """Where the caller would like to have outputs."""
        return self._preferred_memory or PreferredMemory(MEMORY_CPU, 0)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._responses is not None and self._responses.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request after `execute`; only that it is done with is served."""
        if flags != RELEASE_ALL:
            refuse("rescheduling a request")

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends its responses: the same sender each time."""
        if self._responses is None:
            raise TritonModelException("only requests that execute was given have a response sender")
        if self._sender is None:
            self._sender = self._responses.sender()
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse:  # noqa: ARG002, FBT001, FBT002 - its interface
        """Refused."""
        refuse_call("InferenceRequest.exec")

    def async_exec(self, decoupled: bool = False) -> InferenceResponse:  # noqa: ARG002, FBT001, FBT002 - its interface
        """Refused."""
        refuse_call("InferenceRequest.async_exec")


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
