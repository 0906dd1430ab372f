"""What `execute` is given, as `pb_utils` names it, and what it answers with. Runs on the model's threads."""

from __future__ import annotations

import contextlib
import json
import operator
from typing import TYPE_CHECKING, Any

from model_handlers.python import pb_calls
from model_handlers.python.pb_responses import InferenceResponse, Tensor, TritonModelException, checked_parameters, text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping

    from model_handlers.python.outputs import ResponseState
    from model_handlers.requests import ModelRequest

MEMORY_CPU, MEMORY_GPU = 0, 2  # as TRITONSERVER_MemoryType numbers them
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class PreferredMemory:
    """Where a caller would like to have outputs."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to, if it belongs to one."""

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """The JSON object of headers by which OpenTelemetry hands a trace on, None for a request that is not traced."""
        return self._context or None


class InferenceResponseSender:
    """Sends responses to one request while `execute` runs or after it, on any thread."""

    __slots__ = ("_responses",)

    def __init__(self, responses: ResponseState) -> None:
        self._responses = responses

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; TRITONSERVER_RESPONSE_COMPLETE_FINAL says that it is the last, or that there was none."""
        self._responses.send(response, flags)

    def is_cancelled(self) -> bool:
        return self._responses.is_cancelled()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # in an interpreter that ends nothing is sure to work
            self._responses.sender_dropped()


class InferenceRequest:
    """A request: one that `execute` is given, or one that a model makes in order to call another."""

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_parameters",
        "_preferred_memory",
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
        inputs: Iterable[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | str | None = None,
    ) -> None:
        self._responses: ResponseState | None = None
        self._sender: InferenceResponseSender | None = None
        self._request_id = _text("request_id", request_id)
        self.model_name = _text("model_name", model_name)
        self._correlation_id = _correlation_id(correlation_id)
        self._inputs = list(inputs)
        self._requested_output_names = _texts("requested_output_names", requested_output_names)
        self._check_parts()
        self.model_version = _integer("model_version", model_version)
        self._flags = _integer("flags", flags)
        self._timeout = _integer("timeout", timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters: Mapping[str, Any] = _parameters(parameters)

    def _check_parts(self) -> None:
        whose = f"for request with id '{self._request_id}' and model name '{self.model_name}' should not be empty."
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {whose}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs of an InferenceRequest must be Tensors, got {type(tensor)}")
        if "" in self._requested_output_names:
            raise TritonModelException(f"Requested output name {whose}")

    def inputs(self) -> list[Tensor]:
        return list(self._inputs)

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = _integer("flags", flags)

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return json.dumps(dict(self._parameters))

    def parameter_values(self) -> dict[str, Any]:
        """The same as values."""
        return dict(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def requested_output_names(self) -> set[str]:
        return set(self._requested_output_names)

    def wanted_outputs(self) -> tuple[str, ...]:
        return self._requested_output_names

    def preferred_memory(self) -> PreferredMemory:
        return self._preferred_memory or PreferredMemory(MEMORY_CPU, 0)

    def is_cancelled(self) -> bool:
        return self._responses is not None and self._responses.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request after `execute`: it is done with, or executed once more."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags of {flags!r}: use one of TRITONSERVER_REQUEST_RELEASE_*")
        if self._responses is not None:
            self._responses.release(again=flags == RELEASE_RESCHEDULE)
        elif flags == RELEASE_RESCHEDULE:
            raise TritonModelException("rescheduling a request is for those that execute was given")

    def get_response_sender(self) -> InferenceResponseSender:
        if self._responses is None:
            raise TritonModelException("only requests that execute was given have a response sender")
        if self._sender is None:
            self._sender = self._responses.sender()
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | pb_calls.ResponseIterator:  # noqa: FBT001, FBT002 - its interface
        """Have the model `model_name` answer this request, and wait for its response, which may carry an error.

        With `decoupled` an iterator of its responses. Raises TritonModelException outside of `execute`.
        """
        return pb_calls.call(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse] | pb_calls.ResponseIterator:  # noqa: FBT001, FBT002 - its interface
        """As `exec`, to be awaited; with `decoupled` to be iterated by `async for`."""
        return pb_calls.call_decoupled(self) if decoupled else pb_calls.call_async(self)


class ReceivedRequest(InferenceRequest):
    """A request as the host hands it over: checked already."""

    __slots__ = ()

    def __init__(self, request: ModelRequest, inputs: list[Tensor], responses: ResponseState) -> None:
        self._responses = responses
        self._sender = None
        self._request_id = request.id
        self._correlation_id = request.correlation_id
        self._inputs = inputs
        self._requested_output_names = request.outputs
        self.model_name = ""
        self.model_version = -1
        self._flags = request.flags
        self._timeout = request.timeout_us
        self._preferred_memory = None
        self._trace = InferenceTrace(request.trace) if request.trace else None
        self._parameters = request.parameters

    def parameters(self) -> str:
        """What the client sent beside tensors, as a JSON object in Triton's very words: no space between them."""
        return json.dumps(dict(self._parameters), ensure_ascii=False, separators=(",", ":"))


def _text(what: str, value: Any) -> str:
    return text(f"{what} of an InferenceRequest", value)


def _texts(what: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str | bytes):  # whose letters are texts as well
        raise TypeError(f"{what} of an InferenceRequest must be a list, got {type(values)}")
    return tuple(_text(what, value) for value in values)


def _integer(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} of an InferenceRequest must be an integer, got {type(value)}") from None


def _correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TritonModelException("Correlation ID must be integer or string") from None


def _parameters(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if given is None:
        return {}
    return checked_parameters(json.loads(given) if isinstance(given, str) else given)
