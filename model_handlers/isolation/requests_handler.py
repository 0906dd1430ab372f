"""A handler that sees requests, in a process of its own: batches as for any other, and what its model says unasked.

A request is *open* from the moment its batch is sent until it got its last response: with the batch's answer, or by
frames of the channel, before that or long after it. Frames are taken on the listening thread, batches on the lane's.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import ModelResponse
from model_handlers.errors import Kind, MmeError
from model_handlers.isolation.channel import Frame
from model_handlers.isolation.framing import Packing, ProtocolError, error_from, request_number
from model_handlers.isolation.handler import NONSENSE, IsolatedHandler
from model_handlers.isolation.listener import Channel
from model_handlers.isolation.outside import Questions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.base import ModelRequest
    from model_handlers.config import ModelConfig
    from model_handlers.isolation.framing import Message
    from model_handlers.isolation.process import Child
    from model_handlers.isolation.program import Program
    from model_handlers.tensor import Array

_RESPONDING = "while it had requests to answer"


class IsolatedRequestsHandler(IsolatedHandler):
    """One model in one process, for one lane, whose handler sees requests."""

    sees_requests: ClassVar[bool] = True

    def __init__(
        self, load: Message, config: ModelConfig, lane: str, *, uses_gpu: bool, program: Program | None = None
    ) -> None:
        self._open: dict[int, ModelRequest] = {}  # single operations of a dict need no lock
        self._questions = Questions(config.name)
        self._channel: Channel | None = None
        super().__init__(load, config, lane, uses_gpu=uses_gpu, program=program)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        """Run one batch of requests in the process. Arrays and errors are as for `execute`."""
        packing = Packing()
        fields = [
            {
                "inputs": self._add(packing, request.inputs),
                "outputs": list(request.outputs),
                "id": request.id,
                "parameters": dict(request.parameters),
                "timeout_us": request.timeout_us,
                "correlation_id": request.correlation_id,
                "flags": request.flags,
            }
            for request in requests
        ]
        with self._lock:
            self._revive()
            numbers = range(request_number(self._batch + 1, 0), request_number(self._batch + 1, len(requests)))
            self._begin_requests(numbers, requests)
            try:
                reply, shared = self._run({"requests": fields}, packing)
                answers = [self._answer(shared, answer) for answer in reply["answers"]]
                for number, answer in zip(numbers, answers, strict=True):
                    if answer is not None:
                        self._open.pop(number, None)
            except NONSENSE as error:
                self._broke(error)
            except BaseException:
                for number in numbers:
                    self._open.pop(number, None)
                raise
            return answers

    def _begin_requests(self, numbers: range, requests: Sequence[ModelRequest]) -> None:
        for number, request in zip(numbers, requests, strict=True):
            if request.responder is not None:
                self._open[number] = request
                request.responder.when_cancelled(functools.partial(self._tell_cancelled, number))

    def _answer(self, shared: Array, answer: Message | None) -> ModelResponse | MmeError | None:
        if answer is None:
            return None
        if "error" in answer:
            return error_from(answer["error"])
        return self._response(shared, answer)

    def _response(self, shared: Array, fields: Message) -> ModelResponse:
        outputs = {name: self._unpack(shared, place, name) for name, place in fields["outputs"].items()}
        return ModelResponse(outputs, fields["parameters"])

    # -- the channel ---------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Child, ModelConfig]:
        child, config = super()._begin()
        try:
            self._channel = Channel(child.take_events(), self._take, functools.partial(self._lost, child))
        except OSError as error:
            child.close(0)
            raise MmeError(Kind.UNAVAILABLE, f"model '{config.name}': its process can't be heard: {error}") from error
        return child, config

    def _buried(self, why: MmeError) -> None:
        if self._channel is not None:
            self._channel.drain()
        while self._open:
            _respond(self._open.popitem()[1], why, final=True)
        self._questions.drop_all()

    def _take(self, message: Message, shared: Array) -> None:
        """A frame came. What it raises ends the channel."""
        if "respond" not in message:
            self._asked(message, shared)
            return
        number, final = message["respond"], bool(message["final"]) or "error" in message
        error = error_from(message["error"]) if "error" in message else None
        response = self._response(shared, message) if "outputs" in message else None
        request = self._open.pop(number, None) if final else self._open.get(number)
        if request is not None:
            _respond(request, error or response, final=final)

    def _asked(self, message: Message, shared: Array) -> None:
        if not {"call", "ask", "drop"} & message.keys() or self._channel is None:
            raise ProtocolError(f"a frame about nothing: {str(message)[:200]}")
        callers = dict.fromkeys(caller for request in list(self._open.values()) for caller in request.callers)
        self._questions.take(message, shared, self.outside, (*callers, self.config.name), self._channel)

    def _tell_cancelled(self, number: int) -> None:
        if number in self._open and self._channel is not None:
            self._channel.post(Frame({"cancelled": number}))

    def _lost(self, child: Child, error: Exception | None) -> None:
        """The channel has ended. On the listening thread, which can't wait for what became of the process."""
        if error is not None or self._open:
            threading.Thread(target=self._mourn, args=(child, error), name="model death", daemon=True).start()

    def _mourn(self, child: Child, error: Exception | None) -> None:
        with self._lock:  # whoever executes a batch meanwhile notices the death and buries it
            if child is self._child and child.alive:
                self._bury(child.death(_RESPONDING) if error is None else child.broke(error, _RESPONDING))


def _respond(request: ModelRequest, response: ModelResponse | MmeError | None, *, final: bool) -> None:
    if request.responder is not None:
        request.responder.send(response, final=final)
