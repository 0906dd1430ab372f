"""One model of a server, as its callers see it: from threads, from coroutines, one response or many."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from mme.requests import OneResponse, Stream, request_of
from mme.runner import own
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from mme.requests import Result
    from mme.runner import Runner
    from model_handlers.tensor import Array
    from serve.request import InferenceResponse


class Outputs(dict[str, "Array"]):
    """The outputs of one response: name → array of the full shape; strings are `bytes` in arrays of objects.

    Attributes:
        model, version: that answered.
        id: the request's.
        parameters: what the model sent beside tensors.
    """

    def __init__(self, response: InferenceResponse) -> None:
        for name, _, array in response.outputs:
            self[name] = array.copy() if _is_shared(array) else array
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
        request = request_of(OneResponse(answer.put), inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request, waits=True)
        try:
            result = answer.get()
        except BaseException:  # an interrupt
            self._runner.cancel(request)
            raise
        return _outputs(result)

    def submit(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Future[Outputs]:
        """Return the response's future at once; its `cancel` cancels the request. From any thread."""
        future: Future[Outputs] = Future()
        request = request_of(OneResponse(functools.partial(_settle, future)), inputs, outputs, **options)
        future.add_done_callback(lambda done: self._runner.cancel(request) if done.cancelled() else None)
        self._runner.submit(self.name, self.version, request)
        return future

    async def infer_async(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Outputs:
        """Return the response. On any event loop; on the server's own there is no other thread between."""
        loop = asyncio.get_running_loop()
        if loop is not self._runner.loop:
            return await asyncio.wrap_future(self.submit(inputs, outputs, **options))
        results: list[Result] = []
        one = OneResponse(results.append)
        request = request_of(one, inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request, task=True)
        if not results:
            future: asyncio.Future[Result] = loop.create_future()
            one.take = lambda result: None if future.done() else future.set_result(result)
            try:
                results.append(await future)
            except asyncio.CancelledError:
                self._runner.cancel(request)
                raise
        return _outputs(results[0])

    def stream(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Iterator[Outputs]:
        """Yield each response of a decoupled model, or the one of any other. From any thread but the event loop's."""
        queue: SimpleQueue[tuple[Result, bool]] = SimpleQueue()
        stream = Stream(queue.put)
        request = request_of(stream, inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request, waits=True)
        try:
            while not stream.is_read:
                if (result := stream.read(queue.get())) is not None:
                    yield _outputs(result)
        finally:
            if not stream.is_read:
                self._runner.cancel(request)

    async def stream_async(
        self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any
    ) -> AsyncIterator[Outputs]:
        """Yield each response of a decoupled model, or the one of any other. On any event loop."""
        queue: asyncio.Queue[tuple[Result, bool]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(result: tuple[Result, bool]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the caller gone
                loop.call_soon_threadsafe(queue.put_nowait, result)

        stream = Stream(put)
        request = request_of(stream, inputs, outputs, **options)
        self._runner.submit(self.name, self.version, request)
        try:
            while not stream.is_read:
                if (result := stream.read(await queue.get())) is not None:
                    yield _outputs(result)
        finally:
            if not stream.is_read:
                self._runner.cancel(request)


def _is_shared(array: Array) -> bool:
    """Whether it lies in the response cache, for others too; what a process sent is read-only, but for one alone."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bool(array.flags.owndata and not array.flags.writeable)


def _outputs(result: Result) -> Outputs:
    if isinstance(result, MmeError):
        raise own(result)
    assert result is not None  # noqa: S101 - what waits for one response is told where there is none
    return Outputs(result)


def _settle(future: Future[Outputs], result: Result) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(_outputs(result))
    except MmeError as error:
        future.set_exception(error)
