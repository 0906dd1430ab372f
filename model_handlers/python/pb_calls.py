"""What the code of a model reaches: which model it is of, its event loop, and calls of other models.

The host says which model runs around every call into one. A thread that a model started itself carries no such mark: it
is taken for one of the model that ran last, the only one where models have processes of their own. A call (`exec`,
`async_exec`, `load_model`) leaves through the model's `Outside`, and what comes back is taken on another thread. Errors
of a call are responses that carry them, as those of the model's own clients are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.model_calls import Caller, ModelCall, Outside
from model_handlers.python.pb_responses import InferenceResponse, ReceivedTensor, TritonError, TritonModelException
from model_handlers.tensor import BY_DTYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
    from contextvars import Token
    from pathlib import Path

    from model_handlers.model_calls import Done
    from model_handlers.python.pb_requests import InferenceRequest
    from model_handlers.requests import ModelResponse, Responder


class ModelContext:
    """A model as its own code may ask about it."""

    def __init__(self, name: str, directory: Path, callers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.directory = directory
        # what it may ask of the server; None before `initialize` begins and from `finalize` on
        self.outside: Outside | None = None
        self.initialized = False  # whether `initialize` has ended, so that it may also call other models
        self.callers = callers  # the models that wait for what it executes, itself the last
        self.waiting: tuple[Responder, ...] = ()  # see `ModelCall`


_current: ContextVar[ModelContext] = ContextVar("hosted model")
_last: list[ModelContext] = []


class Running:
    """Everything inside belongs to this model."""

    def __init__(self, model: ModelContext) -> None:
        self._model = model
        self._token: Token[ModelContext] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._model)
        _last[:] = [self._model]

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


def current_model() -> ModelContext | None:
    """The model whose code is running, None where no model was ever loaded."""
    return _current.get(_last[0] if _last else None)


_log = logging.getLogger("mme.model")


class LoopThread:
    """The event loop of a model whose `execute` is a coroutine; between batches it turns for what the model keeps."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._aside: set[Future[None]] = set()  # asyncio itself would forget a task that nothing else holds
        self._thread = threading.Thread(target=self._turn, name=f"{name} asyncio", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns, or raises. Called on another thread, which waits."""
        result, error = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop).result()
        if error is not None:
            raise error
        return result

    def start(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run the coroutine aside; `ended` is told on the loop's thread what it returned or raised."""

        async def run() -> None:
            ended(*await _outcome(coroutine))

        task = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    def close(self) -> None:
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_wound_up())
        self._loop.close()

    def _turn(self) -> None:
        while not self._closing:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that the model started: asyncio lets them out
                _log.error("a task of the model raised %s, which ends nothing but the task", type(error).__name__)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001 - see `author_code`; asyncio would let some of them out of the loop
        return None, error


async def _wound_up() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


_CODES = {
    Kind.UNKNOWN_MODEL: TritonError.NOT_FOUND,
    Kind.UNKNOWN_VERSION: TritonError.NOT_FOUND,
    Kind.INVALID_ARGUMENT: TritonError.INVALID_ARG,
    Kind.INVALID_MODEL: TritonError.INVALID_ARG,
    Kind.TOO_LARGE: TritonError.INVALID_ARG,
    Kind.UNSUPPORTED: TritonError.UNSUPPORTED,
    Kind.ALREADY_EXISTS: TritonError.ALREADY_EXISTS,
    Kind.NOT_FOUND: TritonError.NOT_FOUND,
    Kind.CONFLICT: TritonError.ALREADY_EXISTS,
    Kind.UNKNOWN: TritonError.UNKNOWN,
    Kind.CANCELLED: TritonError.CANCELLED,
    Kind.UNAVAILABLE: TritonError.UNAVAILABLE,
    Kind.QUEUE_FULL: TritonError.UNAVAILABLE,
    Kind.QUEUE_TIMEOUT: TritonError.UNAVAILABLE,
}


class _One(Caller):
    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self.future: Future[InferenceResponse] = Future()

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:  # noqa: ARG002 - it is
        self._ended()
        with contextlib.suppress(InvalidStateError):  # it was cancelled this moment
            response = response or MmeError(Kind.EXECUTION_FAILED, "there was no response")
            self.future.set_result(_received(response, self._model))


class _Many(Caller):
    # A model that says by itself that its last response was the last has an empty one behind it, as in Triton.
    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._responses: SimpleQueue[InferenceResponse | None] = SimpleQueue()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        self._put(InferenceResponse() if response is None else _received(response, self._model))
        if final:
            self._ended()
            self._put(None)

    def cancel(self) -> None:
        super().cancel()
        self._put(None)

    def take(self) -> InferenceResponse | None:
        return self._responses.get()

    async def take_async(self) -> InferenceResponse | None:
        loop = asyncio.get_running_loop()
        while True:
            waiting = loop.create_future()
            self._waiting = loop, waiting
            with contextlib.suppress(Empty):
                return self._responses.get_nowait()
            await waiting

    def _put(self, response: InferenceResponse | None) -> None:
        self._responses.put(response)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            loop, future = waiting
            with contextlib.suppress(RuntimeError):  # the loop is closed, and what waited on it is gone
                loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ResponseIterator:
    """The responses of a decoupled model, as they come, errors too. Ends with the last one.

    Once it is let go of, no more of them are waited for, which the called model may learn. They are kept: once it has
    ended they may be iterated again.
    """

    def __init__(self, inbox: _Many) -> None:
        self._inbox = inbox
        self._over = False
        self._kept: list[InferenceResponse] = []
        self._again: Iterator[InferenceResponse] = iter(())

    def cancel(self) -> None:
        self._inbox.cancel()

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._again = iter(self._kept if self._over else ())
        return self

    def __next__(self) -> InferenceResponse:
        response = next(self._again, None) if self._over else self._took(self._inbox.take())
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        iter(self)
        return self

    async def __anext__(self) -> InferenceResponse:
        response = next(self._again, None) if self._over else self._took(await self._inbox.take_async())
        if response is None:
            raise StopAsyncIteration
        return response

    def _took(self, response: InferenceResponse | None) -> InferenceResponse | None:
        if response is None:
            self._over = True
        else:
            self._kept.append(response)
        return response

    def __await__(self) -> Generator[Any, None, ResponseIterator]:
        """`async_exec(decoupled=True)` may be awaited first, or iterated at once."""
        return self
        yield  # makes it a generator

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # in an interpreter that ends nothing is sure to work
            if not self._over:
                self._inbox.cancel()


def call(request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
    if decoupled:
        return call_decoupled(request)
    one = _One(request.model_name)
    _infer(request, one)
    return one.future.result()


def call_async(request: InferenceRequest) -> asyncio.Future[InferenceResponse]:
    one = _One(request.model_name)
    try:
        response = asyncio.wrap_future(one.future, loop=asyncio.get_running_loop())
    except RuntimeError:
        raise TritonModelException("async_exec is for coroutines: use exec, or make execute an async def") from None
    response.add_done_callback(lambda done: one.cancel() if done.cancelled() else None)
    _infer(request, one)
    return response


def call_decoupled(request: InferenceRequest) -> ResponseIterator:
    inbox = _Many(request.model_name)
    _infer(request, inbox, decoupled=True)
    return ResponseIterator(inbox)


def ask(put: Callable[[Outside, tuple[str, ...], Done], None]) -> bool:
    model = current_model()
    if model is None or model.outside is None:
        raise TritonModelException(
            "models can be loaded, unloaded and asked about from 'initialize' on, neither before it nor in 'finalize'"
        )
    answered: Future[bool | MmeError] = Future()
    put(model.outside, model.callers, answered.set_result)
    answer = answered.result()
    if isinstance(answer, MmeError):
        raise TritonModelException(answer.message)
    return answer


def _infer(request: InferenceRequest, responder: Responder, *, decoupled: bool = False) -> None:
    model = current_model()
    if model is None or model.outside is None or not model.initialized:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    if not request.model_name:
        raise TritonModelException("an InferenceRequest needs a model_name to be executed")
    asked = ModelCall(
        request.model_name,
        None if request.model_version < 0 else request.model_version,
        tuple((tensor.name(), *tensor.carried()) for tensor in request.inputs()),
        request.wanted_outputs(),
        decoupled,
        model.callers,
        request.request_id(),
        request.parameter_values(),
        request.timeout(),
        request.correlation_id(),
        request.flags(),
        model.waiting,
        request.trace().get_context() or "",
    )
    model.outside.infer(asked, responder)


def _received(response: ModelResponse | MmeError, model: str) -> InferenceResponse:
    if isinstance(response, MmeError):
        code = _CODES.get(response.kind, TritonError.INTERNAL)
        return InferenceResponse(error=TritonError(_words(response, model), code))
    tensors = [
        ReceivedTensor(name, array, response.data_types.get(name) or BY_DTYPE[array.dtype])
        for name, array in response.outputs.items()
    ]
    return InferenceResponse(tensors, parameters=response.parameters)


def _words(error: MmeError, model: str) -> str:
    if error.kind is Kind.UNKNOWN_MODEL:
        return f"Failed for execute the inference request. Model '{model}' is not ready. {error.message}"
    return error.message
