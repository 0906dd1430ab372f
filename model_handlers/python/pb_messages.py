"""What `execute` is given, as `pb_utils` names it, and what it answers with. Runs on the model's threads."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from model_handlers.python import pb_calls
from model_handlers.python.pb_errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from model_handlers.python.pb_responses import InferenceResponse
    from model_handlers.python.pb_tensor import Tensor

MEMORY_CPU, MEMORY_GPU = 0, 2  # as TRITONSERVER_MemoryType numbers them
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


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

    def release(self, *, again: bool) -> None:
        """What becomes of the request after `execute`."""


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

    def parameter_values(self) -> dict[str, Any]:
        """The same as values."""
        values = json.loads(self.parameters())
        if not isinstance(values, dict):
            raise TritonModelException(f"parameters of an InferenceRequest must be an object, got {type(values)}")
        return values

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
        """Say what becomes of the request after `execute`: it is done with, or executed once more.

        Raises:
            TritonModelException: for other flags, or where requests can't be executed once more.
        """
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags of {flags!r}: use one of TRITONSERVER_REQUEST_RELEASE_*")
        if self._responses is not None:
            self._responses.release(again=flags == RELEASE_RESCHEDULE)
        elif flags == RELEASE_RESCHEDULE:
            raise TritonModelException("rescheduling a request is for those that execute was given")

    def get_response_sender(self) -> InferenceResponseSender:
        """What sends its responses: the same sender each time."""
        if self._responses is None:
            raise TritonModelException("only requests that execute was given have a response sender")
        if self._sender is None:
            self._sender = self._responses.sender()
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | pb_calls.ResponseIterator:  # noqa: FBT001, FBT002 - its interface
        """Have the model `model_name` answer this request, and wait for it.

        Returns:
            its response, which carries the error if there was one; with `decoupled` an iterator of its responses.

        Raises:
            TritonModelException: outside of `execute`, or without a model's name.
        """
        return pb_calls.call(self, decoupled=decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse] | pb_calls.ResponseIterator:  # noqa: FBT001, FBT002 - its interface
        """As `exec`, to be awaited; with `decoupled` to be iterated by `async for`."""
        return pb_calls.call_decoupled(self) if decoupled else pb_calls.call_async(self)
