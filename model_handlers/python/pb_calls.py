"""Calls of other models from a model's code: `exec`, `async_exec`, `load_model` and their like.

A call leaves through the model's `Outside`, and what comes back is taken on another thread; whoever called waits on
its own. Errors of a call are responses that carry them, as those of the model's own clients are.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.outside import ModelCall
from model_handlers.python.hosted import hosted
from model_handlers.python.pb_errors import TritonModelException
from model_handlers.python.pb_responses import InferenceResponse, TritonError
from model_handlers.python.pb_tensor import ReceivedTensor, Tensor
from model_handlers.tensor import BY_DTYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator

    from model_handlers.base import ModelResponse
    from model_handlers.outside import Done, Outside
    from model_handlers.python.pb_messages import InferenceRequest
    from model_handlers.tensor import Array, DataType

_CODES = {
    Kind.UNKNOWN_MODEL: TritonError.NOT_FOUND,
    Kind.UNKNOWN_VERSION: TritonError.NOT_FOUND,
    Kind.INVALID_ARGUMENT: TritonError.INVALID_ARG,
    Kind.INVALID_MODEL: TritonError.INVALID_ARG,
    Kind.TOO_LARGE: TritonError.INVALID_ARG,
    Kind.UNSUPPORTED: TritonError.UNSUPPORTED,
    Kind.ALREADY_EXISTS: TritonError.ALREADY_EXISTS,
    Kind.CANCELLED: TritonError.CANCELLED,
    Kind.UNAVAILABLE: TritonError.UNAVAILABLE,
    Kind.QUEUE_FULL: TritonError.UNAVAILABLE,
    Kind.QUEUE_TIMEOUT: TritonError.UNAVAILABLE,
}


class _Inbox:
    """A `Responder` for whoever waits for responses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._tell: list[Callable[[], None]] = []

    def is_cancelled(self) -> bool:
        return self._cancelled

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        with self._lock:
            self._tell.append(tell)
        if self._cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Wait for nothing more."""
        with self._lock:
            self._cancelled = True
            tell, self._tell = self._tell, []
        for each in tell:
            each()


class _One(_Inbox):
    """Waits for one response."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[InferenceResponse] = Future()

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:  # noqa: ARG002 - it is
        if not self.future.done():
            self.future.set_result(_received(response or MmeError(Kind.EXECUTION_FAILED, "there was no response")))


class ResponseIterator(_Inbox):
    """The responses of a decoupled model, as they come. Ends with the last one; an error is the last."""

    def __init__(self) -> None:
        super().__init__()
        self._responses: SimpleQueue[InferenceResponse | None] = SimpleQueue()
        self._ended = False

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """One came."""
        if response is not None:
            self._responses.put(_received(response))
        if final:
            self._responses.put(None)

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        response = None if self._ended else self._responses.get()
        if response is None:
            self._ended = True
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = await asyncio.to_thread(next, self, None)
        if response is None:
            raise StopAsyncIteration
        return response

    def __await__(self) -> Generator[Any, None, ResponseIterator]:
        """`async_exec(decoupled=True)` may be awaited first, or iterated at once."""
        return self
        yield  # makes it a generator

    def __del__(self) -> None:
        if not self._ended:
            self.cancel()


def call(request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """`InferenceRequest.exec`: one response, or the iterator of any number of them."""
    if decoupled:
        return call_decoupled(request)
    one = _One()
    _outside().infer(_model_call(request, decoupled=False), one)
    return one.future.result()


def call_async(request: InferenceRequest) -> asyncio.Future[InferenceResponse]:
    """`InferenceRequest.async_exec`: begins at once, whenever it is awaited."""
    one = _One()
    response = asyncio.wrap_future(one.future)
    response.add_done_callback(lambda done: one.cancel() if done.cancelled() else None)
    _outside().infer(_model_call(request, decoupled=False), one)
    return response


def call_decoupled(request: InferenceRequest) -> ResponseIterator:
    """Both of them, for a decoupled model."""
    responses = ResponseIterator()
    _outside().infer(_model_call(request, decoupled=True), responses)
    return responses


def ask(put: Callable[[Outside, Done], None]) -> bool:
    """The answer to a question that `put` asks of the server.

    Raises:
        TritonModelException: it is an error.
    """
    answered: Future[bool | MmeError] = Future()
    put(_outside(), answered.set_result)
    answer = answered.result()
    if isinstance(answer, MmeError):
        raise TritonModelException(answer.message)
    return answer


def _outside() -> Outside:
    model = hosted()
    if model is None or model.outside is None:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return model.outside


def _model_call(request: InferenceRequest, *, decoupled: bool) -> ModelCall:
    if not request.model_name:
        raise TritonModelException("an InferenceRequest needs a model_name to be executed")
    strange = next((tensor for tensor in request.inputs() if not isinstance(tensor, Tensor)), None)
    if strange is not None:
        raise TritonModelException(f"inputs of an InferenceRequest must be Tensors, got {type(strange)}")
    model = hosted()
    return ModelCall(
        request.model_name,
        None if request.model_version < 0 else request.model_version,
        tuple((tensor.name(), *tensor.carried()) for tensor in request.inputs()),
        tuple(request.requested_output_names()),
        decoupled,
        model.callers if model else (),
        request.request_id(),
        request.parameter_values(),
        request.timeout(),
        request.correlation_id(),
        request.flags(),
    )


def _received(response: ModelResponse | MmeError) -> InferenceResponse:
    if isinstance(response, MmeError):
        code = _CODES.get(response.kind, TritonError.INTERNAL)
        return InferenceResponse(error=TritonError(response.message, code))
    tensors = [
        ReceivedTensor(name, array, response.data_types.get(name) or _type_of(array))
        for name, array in response.outputs.items()
    ]
    return InferenceResponse(tensors, parameters=response.parameters)


def _type_of(array: Array) -> DataType:
    return BY_DTYPE[array.dtype]
