"""One inference call under every protocol: from what came to the last of its responses. On the event loop.

    start         decode and submit in the turn of the loop in which the bytes came, without a task
    finish_start  what has to wait: a thread that reads a large body, the load of the model
    respond, respond_error, complete   what the model sends, to the client in its order

A response that takes long to encode is encoded by a thread; what the model sends meanwhile waits for it. A client that
leaves cancels its request.

How requests are read and responses are written is for the protocol's `Body` and `Reply`. `Body.decode` makes the
request once the model's configuration is known; where that takes long it raises `NeedsThread`, `Body.prepare` reads the
body by a thread, and `decode` is called again. `Reply.send` is given a response of several (PART) or the only one
(LAST); `send_error` says whether others may follow the error, else `fail` ends the call with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from container.codec import NeedsThread
from container.inference.limits import by_thread
from model_handlers.errors import Kind, MmeError, known
from serve.request import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from container.inference.limits import RequestLimit
    from container.steps import CallStep
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest, LoadReport

PART, PART_ERROR, LAST = 0, 1, 2  # what a model sends: one response of several, an error amid them, or the end


class Body:
    """What a client has sent."""

    async def prepare(self, call: Call, *, by_thread: bool) -> None:
        """Read as much as can be read before the model is known; of what takes long, all, by a thread.

        Raises:
            MmeError: it can't be read, whatever the model is.
        """
        raise NotImplementedError

    def decode(self, call: Call, config: ModelConfig) -> InferenceRequest:
        """Return the request for a model of this configuration.

        Raises:
            MmeError: it is none.
            NeedsThread: it has to be prepared first.
        """
        raise NotImplementedError


_GONE = Body()  # of a call that is over


class Reply:
    """Where the responses go. What is raised while one is encoded ends the call."""

    def is_expensive(self, response: InferenceResponse, event: int) -> bool:
        """Return whether encoding the response would keep the event loop from others."""
        raise NotImplementedError

    def encoder(self, response: InferenceResponse, event: int) -> Callable[[], Any]:
        """Return what encodes the response, to be called on any thread."""
        raise NotImplementedError

    def encode(self, response: InferenceResponse, event: int) -> Any:
        """Return the response as `send` takes it."""
        return self.encoder(response, event)()

    def send(self, call: Call, response: InferenceResponse, encoded: Any, event: int) -> None:
        """Send a response: one of several (PART), or the only one (LAST)."""
        raise NotImplementedError

    def end(self, call: Call) -> None:
        """Send the end of several responses."""
        raise NotImplementedError

    def send_error(self, call: Call, error: MmeError) -> bool:
        """Send an error that responses may follow; False where nothing may, and `fail` is to send it."""
        raise NotImplementedError

    def fail(self, call: Call, error: MmeError, *, final: bool) -> None:
        """Send an error as the end; `final` where a model was given the request."""
        raise NotImplementedError

    def timeout_error(self, call: Call) -> MmeError:
        """Return what is told where the model has not been loaded in time."""
        return MmeError(Kind.UNAVAILABLE, f"model '{call.name}' still loads")

    def close(self, call: Call) -> None:
        """Forget everything that knows the call: it is over."""


class Call:
    """One request of a client."""

    def __init__(self, engine: Engine, limit: RequestLimit | None, body: Body, reply: Reply) -> None:
        self.engine = engine
        self.body = body
        self.reply = reply
        self.name = ""  # of the model that it is for; set before it starts
        self.version: int | None = None
        self.patience: float | None = None  # seconds that its model may take to load
        self.steps: tuple[CallStep, ...] = ()  # what else is done around it
        self.request: InferenceRequest | None = None  # what was submitted, None once it is over
        self.report: LoadReport | None = None  # of a load that it had to wait for
        self.over = False  # no answer is waited for any more
        self._limit = limit
        self._behind: deque[tuple[int, Any]] | None = None  # what waits while a thread encodes
        self._writer: asyncio.Task[None] | None = None  # for as long
        if limit is not None:
            limit.begin(self)

    @property
    def is_resident(self) -> bool:
        return self.engine.index.is_resident(self.name)

    # -- to the engine -----------------------------------------------------------------------------------------------

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Submit the request, or fail; returns what is left to be awaited for that, None where nothing is."""
        needs_thread = False
        try:
            if self.engine.submit_now(self.name, self.version, self.make):
                return None
        except NeedsThread:
            needs_thread = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self.refuse(error)
            return None
        return self.finish_start(needs_thread=needs_thread)

    async def finish_start(self, *, needs_thread: bool) -> None:
        """Submit the request once its body is read and its model is in memory, or fail."""
        try:
            async with asyncio.timeout(self.patience):
                if not self.over:
                    await self.body.prepare(self, by_thread=needs_thread)
                if self.over:
                    self._refused()
                    return
                report = await self._submit()
        except TimeoutError:
            self.refuse(self.reply.timeout_error(self))
        except Exception as error:  # noqa: BLE001 - as above
            self.refuse(error)
        else:
            if report.load:
                self.report = report

    async def _submit(self) -> LoadReport:
        while True:
            try:
                return await self.engine.submit_made(self.name, self.version, self.make)
            except NeedsThread:
                await self.body.prepare(self, by_thread=True)

    def make(self, config: ModelConfig) -> InferenceRequest:
        """Return what is submitted.

        Raises:
            MmeError: CANCELLED where nothing waits any more: the body is gone.
        """
        if self.over:
            raise MmeError(Kind.CANCELLED, "the client left")
        request = self.body.decode(self, config)
        if self.steps:
            for step in self.steps:
                step.made(self, request, config)
        self.request = request
        return request

    def refuse(self, error: Exception) -> None:
        """Fail, since the request was not accepted."""
        self._refused()
        self.fail(known(error))

    def _refused(self) -> None:
        for step in self.steps:
            step.refused(self)

    # -- from the engine ---------------------------------------------------------------------------------------------

    def respond(self, _request: InferenceRequest, response: InferenceResponse) -> None:
        """One response of several."""
        if self.steps:
            for step in self.steps:
                step.responded(self, response)
        if self.over:
            return
        if self._limit is not None:
            self._limit.renew(self)
        self._take(PART, response)

    def respond_error(self, _request: InferenceRequest, error: MmeError) -> None:
        """An error of the model that others may follow."""
        if not self.over:
            self._take(PART_ERROR, error)

    def complete(self, _request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """The one response, the error, or the end of several responses."""
        if self.steps:
            for step in self.steps:
                step.completed(self, result)
        if not self.over:
            self._take(LAST, result)

    def _take(self, event: int, value: Any) -> None:
        """Hand over what the model sends, now or behind what a thread encodes."""
        if self._behind is not None:
            self._behind.append((event, value))
            return
        try:
            if isinstance(value, InferenceResponse):
                if self.reply.is_expensive(value, event):
                    self._behind = behind = deque(((event, value),))
                    self._writer = asyncio.get_running_loop().create_task(self._encode_in_order(behind))
                    return
                self.reply.send(self, value, self.reply.encode(value, event), event)
                if event == LAST:
                    self.finish(None)
            else:
                self._tell(event, value)
        except Exception as error:  # noqa: BLE001 - a response that can't be written ends this call and no other
            self._break_off(error, event)

    async def _encode_in_order(self, behind: deque[tuple[int, Any]]) -> None:
        """Hand over what the model has sent, by a thread what takes long to encode, until nothing is left."""
        while behind and not self.over:
            event, value = behind.popleft()
            try:
                if not isinstance(value, InferenceResponse):
                    self._tell(event, value)
                elif self.reply.is_expensive(value, event):
                    encoded = await by_thread(self.reply.encoder(value, event))
                    if not self.over:
                        self._send(event, value, encoded)
                else:
                    self._send(event, value, self.reply.encode(value, event))
            except Exception as error:  # noqa: BLE001 - as above
                self._break_off(error, event)
        self._behind = self._writer = None

    def _send(self, event: int, response: InferenceResponse, encoded: Any) -> None:
        self.reply.send(self, response, encoded, event)
        if event == LAST:
            self.finish(None)

    def _tell(self, event: int, error: MmeError | None) -> None:
        """Hand over what is no response: an error, or the end of several responses."""
        if error is None:
            self.reply.end(self)
            self.finish(None)
        elif event == LAST:
            self.fail(error, final=True)
        elif not self.reply.send_error(self, error):
            self._break_off(error, event)

    def _break_off(self, error: Exception, event: int) -> None:
        """Fail; amid responses, the model need not send more."""
        request = self.request
        self.fail(known(error))
        if event != LAST and request is not None:
            request.cancel()

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, error: MmeError, *, final: bool = False) -> None:
        """Send an error as the end; `final` where it is the model's last response."""
        if not self.over:
            self.reply.fail(self, error, final=final)
            self.finish(error)

    def expire(self, error: MmeError) -> None:
        """Fail, since it takes too long; a queued request need not run."""
        request = self.request
        self.fail(error, final=True)
        if request is not None:
            request.cancel()

    def abandon(self) -> None:
        """The client has left: a queued request need not run."""
        if self.over:
            return
        if self.request is not None:
            self.request.cancel()
        self.finish(MmeError(Kind.CANCELLED, "the client left"))

    def finish(self, error: MmeError | None) -> None:
        """No answer is waited for any more: all is said, or the client has left.

        What knew each other until now would stay until garbage is collected, and with it bodies of any size.
        """
        self.over = True
        if self._limit is not None:
            self._limit.under_way.pop(self, None)
        self.request = None
        self.body = _GONE
        self.reply.close(self)
        if self.steps:
            for step in self.steps:
                step.over(self, error)
