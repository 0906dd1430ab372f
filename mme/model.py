"""One model of a server, as its callers see it: from threads, from coroutines, one response or many."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from mme.runner import own
from mme.tensors import tensors_of
from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from model_handlers.tensor import size_of
from serve.request import InferenceRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from mme.runner import Runner
    from model_handlers.tensor import Array
    from serve.request import Completion, InferenceResponse

    Result = InferenceResponse | MmeError | None

_LONGEST = 100 * 365 * 86400.0  # seconds in a queue
_MOST_UNREAD = 64 << 20  # bytes of responses that a stream keeps for a caller that is slower than the model


class Outputs(dict[str, "Array"]):
    """The outputs of one response: name → array of the full shape; strings are `bytes` in arrays of objects.

    Attributes:
        model, version: that answered.
        id: the request's.
        parameters: what the model sent beside tensors.
    """

    def __init__(self, response: InferenceResponse) -> None:
        super().__init__((name, array) for name, _, array in response.outputs)
        self.model = response.model_name
        self.version = int(response.model_version)
        self.id = response.id
        self.parameters: Mapping[str, Any] = response.parameters or {}


class Model:
    """A model by its name, loaded when it is asked for and perhaps not before; `Server.model` makes it.

    Each inference takes the same arguments:

        inputs: name → array of the full shape, batch dimension included. Arrays are not copied: leave them as they are
            until the response is there. Tensors of other libraries on the host come by DLPack; strings as `str` or
            `bytes`.
        outputs: names of the wanted outputs, or the one; all of them by default.
        id: a name for the request, which its response carries.
        parameters: strings, numbers and booleans for the model.
        priority: the level in the model's queue, 1 being served first; 0 for the model's default.
        queue_timeout: seconds in the queue after which the request is refused; 0 for the model's default.
        sequence: the sequence that the request belongs to, a number or a string; 0 for none.
        sequence_start, sequence_end: whether it is the first, the last of its sequence.

    All raise `mme.Error`, whose `kind` says what is wrong.
    """

    def __init__(self, runner: Runner, name: str, version: int | None) -> None:
        self.name = name
        self.version = version
        self._runner = runner

    def __repr__(self) -> str:
        return f"<mme.Model {self.name!r}{'' if self.version is None else f' version {self.version}'}>"

    def infer(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Outputs:
        """Return the response. From any thread but the one of the server's event loop."""
        answer: SimpleQueue[Result] = SimpleQueue()
        request = _OneResponse(answer.put).request(inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request)
        try:
            result = answer.get()
        except BaseException:  # an interrupt
            self._runner.cancel(request)
            raise
        return _outputs(result)

    def submit(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Future[Outputs]:
        """Return the response's future at once; its `cancel` cancels the request. From any thread."""
        future: Future[Outputs] = Future()
        request = _OneResponse(functools.partial(_settle, future)).request(inputs, outputs, **options)
        future.add_done_callback(lambda done: self._runner.cancel(request) if done.cancelled() else None)
        self._runner.submit(self.name, self.version, request, waits=False)
        return future

    async def infer_async(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Outputs:
        """Return the response. On any event loop; on the server's own there is no other thread between."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        take = functools.partial(self._hand, loop, _set, future)
        request = _OneResponse(take).request(inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request, waits=False)
        try:
            return _outputs(await future)
        except asyncio.CancelledError:
            self._runner.cancel(request)
            raise

    def stream(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Iterator[Outputs]:
        """Yield each response of a decoupled model, or the one of any other. From any thread but the event loop's."""
        queue: SimpleQueue[tuple[Result, bool]] = SimpleQueue()
        stream = _Stream(lambda result, last: queue.put((result, last)))
        request = stream.request(inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request)
        try:
            last = False
            while not last:
                result, last = queue.get()
                if result is not None:
                    yield stream.taken(result)
        finally:
            if not last:
                self._runner.cancel(request)

    async def stream_async(
        self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any
    ) -> AsyncIterator[Outputs]:
        """Yield each response of a decoupled model, or the one of any other. On any event loop."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[Result, bool]] = asyncio.Queue()
        stream = _Stream(lambda result, last: self._hand(loop, queue.put_nowait, (result, last)))
        request = stream.request(inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request, waits=False)
        try:
            last = False
            while not last:
                result, last = await queue.get()
                if result is not None:
                    yield stream.taken(result)
        finally:
            if not last:
                self._runner.cancel(request)

    def _hand(self, loop: asyncio.AbstractEventLoop, take: Callable[..., object], *result: Any) -> None:
        """Have a result taken on the caller's loop, which may be closed by now, and the caller gone."""
        if loop is self._runner.loop:
            take(*result)
        else:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(take, *result)


class _OneResponse:
    """The one response of a request; a decoupled model may send it as well, if it sends no second one.

    Args:
        take: takes it, or what is wrong; on the server's loop.
    """

    def __init__(self, take: Callable[[Result], object]) -> None:
        self._take = take
        self._first: Result = None
        self._over = False

    def request(self, inputs: Mapping[str, Any], outputs: Sequence[str], **options: Any) -> InferenceRequest:
        """The request, for a call of the model."""
        request = _request(self._complete, inputs, outputs, **options)
        request.on_response = self._respond
        return request

    def _complete(self, _request: InferenceRequest, result: Result) -> None:
        if not self._over:
            self._over = True
            self._take(result or self._first or _not_one("none"))

    def _respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        if self._first is None:
            self._first = response
        elif not self._over:
            self._over = True
            request.cancel()
            self._take(_not_one("several"))


class _Stream:
    """The responses of one request on their way to the caller, which may be slower than the model."""

    def __init__(self, put: Callable[[Result, bool], None]) -> None:
        self._put = put
        self._unread = 0
        self._lock = threading.Lock()
        self._ended = False

    def request(self, inputs: Mapping[str, Any], outputs: Sequence[str], **options: Any) -> InferenceRequest:
        request = _request(self._complete, inputs, outputs, **options)
        request.on_response = self._respond
        request.on_error = self._complete
        return request

    def taken(self, result: InferenceResponse | MmeError) -> Outputs:
        """What the caller reads."""
        if not isinstance(result, MmeError):
            with self._lock:
                self._unread -= _bytes_of(result)
        return _outputs(result)

    def _respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        with self._lock:
            self._unread += _bytes_of(response)
            too_many = self._unread > _MOST_UNREAD
        if not too_many:
            self._put(response, False)
        elif not self._ended:
            unread = f"{_MOST_UNREAD >> 20} MiB of responses are unread: read them as fast as the model sends them"
            self._complete(request, MmeError(Kind.UNAVAILABLE, unread))

    def _complete(self, request: InferenceRequest, result: Result) -> None:
        if self._ended:
            return
        self._ended = True
        if isinstance(result, MmeError) and not request.answered:
            request.cancel()
        if result is not None and not isinstance(result, MmeError):
            with self._lock:
                self._unread += _bytes_of(result)
        self._put(result, True)


def _request(
    on_complete: Completion,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    id: str = "",  # noqa: A002 - the protocol's word
    parameters: Mapping[str, Any] | None = None,
    priority: int = 0,
    queue_timeout: float = 0,
    sequence: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> InferenceRequest:
    """See `Model`."""
    if not 0 <= queue_timeout < _LONGEST or priority < 0:
        raise invalid_argument("priority and queue_timeout can't be negative, nor queue_timeout a century")
    layout, arrays = tensors_of(inputs, (outputs,) if isinstance(outputs, str) else tuple(outputs))
    request = InferenceRequest(layout, arrays, on_complete, id, parameters, int(queue_timeout * 1e6))
    request.priority = priority
    if sequence:
        request.correlation_id = sequence
        request.flags = FLAG_SEQUENCE_START * sequence_start | FLAG_SEQUENCE_END * sequence_end
    return request


def _outputs(result: Result) -> Outputs:
    if isinstance(result, MmeError):
        raise own(result)
    assert result is not None  # noqa: S101 - what waits for one response is told where there is none
    return Outputs(result)


def _not_one(many: str) -> MmeError:
    return MmeError(Kind.UNSUPPORTED, f"the model sent {many}, not one response: call `stream` or `stream_async`")


def _settle(future: Future[Outputs], result: Result) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(_outputs(result))
    except MmeError as error:
        future.set_exception(error)


def _set(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _bytes_of(response: InferenceResponse) -> int:
    return sum([size_of(array) for _, _, array in response.outputs])
