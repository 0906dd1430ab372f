"""Inference over gRPC, from bytes to bytes: ModelInfer and ModelStreamInfer. On the event loop.

ModelInfer takes one request and gives one response. On a stream requests come one after the other, and their responses:

    requests are submitted in their order, each once its model is in memory
    a model that answers once    its responses keep the order of the requests
    a decoupled model            each response is written when it comes; `triton_final_response` marks the last

What goes wrong with one request of a stream is a message that says so, and the stream goes on; so do a decoupled
model's responses behind an error of which it did not say that it is the last. With `triton_grpc_error: true` in the
metadata an error is the stream's status instead, and its end.

A client that leaves cancels what it has asked for. One that asks on without reading is not listened to for a while; one
that does not read what a decoupled model sends is cut off.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from container.codec import NeedsThread
from container.codec.encode import classified, takes_long
from container.control.routes import parse_version
from container.grpc import grpc_service_pb2 as pb
from container.grpc.codec import (
    PLAIN,
    Encoder,
    GrpcDecoder,
    error_in_stream,
    final_response,
    holds_many_strings,
    in_stream,
    parsed,
)
from container.grpc.rpc import refuse
from container.inference.call import LAST, PART, Body, Call, Reply
from container.inference.limits import by_thread as on_thread
from container.observe.tracing import follow_rpc
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from container.grpc.rpc import Rpc
    from container.inference.limits import RequestLimit
    from container.observe.tracing import Tracing
    from container.steps.access import Forwarding
    from container.steps.shared_memory import Regions
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.model.warmup import Labels
    from serve.request import InferenceRequest, InferenceResponse

    Rest = Coroutine[Any, Any, None]

_log = logging.getLogger("mme.grpc")

_ERRORS_AS_STATUS = "triton_grpc_error"
_PAUSE = 1 << 20  # bytes not yet taken by the client at which its next request has to wait
MAX_UNSENT = 64 << 20  # and at which it reads a decoupled model's responses too slowly


class Inference:
    """Both methods over an engine, and the streams that are open."""

    def __init__(
        self,
        engine: Engine,
        limit: RequestLimit,
        regions: Regions,
        tracer: Tracing | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        self.engine = engine
        self.forwarding = forwarding
        self.regions = regions
        self.decoder = GrpcDecoder(regions)
        self.encoder = Encoder()
        self._limit = limit
        self._tracer = tracer
        self._open: set[InferStream] = set()
        self._draining = False

    def infer(self, data: bytes, rpc: Rpc) -> Rest | None:
        """Begin the one request of a call; return what is left to be awaited for its answer."""
        return self.start(UnaryReply(self, rpc), data, "ModelInfer")[1]

    async def stream_infer(self, rpc: Rpc) -> None:
        """Serve one stream, to its end.

        Raises:
            MmeError: the status that ends it, where that is not a good one.
        """
        if self._draining:  # its client has not heard of the end yet
            raise _going()
        stream = InferStream(rpc, self)
        self._open.add(stream)
        try:
            await stream.serve()
        finally:
            self._open.discard(stream)
            stream.close()

    def start(self, reply: GrpcReply, data: bytes, method: str) -> tuple[Call, Rest | None]:
        """Begin one request; return its call, and what is left to be awaited for its answer."""
        body = MessageBody(self, data, reply)
        call = Call(self.engine, self._limit, body, reply)
        if self._tracer is not None:
            following = follow_rpc(self._tracer, reply.rpc.headers(), method)
            if following is not None:
                call.steps = (following,)
        reply.begin(call)
        try:
            body.open(call)
        except Exception as error:  # noqa: BLE001 - every error is told, or its client reads nothing of it
            call.refuse(error)
            return call, None
        return call, call.start()

    def drain(self) -> None:
        """Have no stream take another request; each ends when it has answered those that it has."""
        self._draining = True
        for stream in list(self._open):
            stream.drain()


class GrpcReply(Reply):
    """Where the responses of one request go."""

    takes_several = False  # whether any number of responses may be sent

    def __init__(self, inference: Inference, rpc: Rpc) -> None:
        self.wanted = PLAIN  # how the client wants them, once the request is decoded
        self.said = ("", "")  # the model's name and version as the request has them,
        self.id = ""  # and its own; "" until they are read
        self.rpc = rpc
        self._inference = inference

    def begin(self, call: Call) -> None:
        """The request has come."""
        raise NotImplementedError

    def accept(self, config: ModelConfig) -> None:
        """A model of this configuration is about to answer.

        Raises:
            MmeError: UNSUPPORTED where that may take several responses, and only one can be sent.
        """
        raise NotImplementedError

    def final(self, response: InferenceResponse, event: int) -> bool | None:  # noqa: ARG002
        """Return whether the response says that it is the last, or that it is not; None for neither."""
        return None

    def is_expensive(self, response: InferenceResponse, event: int) -> bool:  # noqa: ARG002
        return takes_long(response, self.wanted)

    def encode(self, response: InferenceResponse, event: int) -> bytes:
        if self.wanted is PLAIN:
            return self._inference.encoder.encode(response, self.final(response, event))
        return self.encoder(response, event)()

    def encoder(self, response: InferenceResponse, event: int) -> Callable[[], bytes]:
        names = None
        if self.wanted.classes:
            names = self._inference.engine.index.class_names(response.model_name, response.model_version)
        return functools.partial(self._encode, response, names, self.final(response, event))

    def _encode(self, response: InferenceResponse, names: tuple[bool, Labels] | None, final: bool | None) -> bytes:  # noqa: FBT001
        if names is not None:
            response = classified(response, self.wanted.classes, names[1], batches=names[0])
        return self._inference.encoder.encode(response, final, self.wanted)

    def close(self, call: Call) -> None:  # noqa: ARG002
        self.wanted.places.clear()


class MessageBody(Body):
    """A ModelInferRequest, whose responses go to the reply."""

    def __init__(self, inference: Inference, data: bytes, reply: GrpcReply) -> None:
        self._inference = inference
        self._data = data
        self._reply = reply
        self._message: pb.ModelInferRequest | None = None  # of what is not remembered
        self._decoded: InferenceRequest | None = None

    def open(self, call: Call) -> None:
        """Read which model the request is for, and all of it where its like was remembered.

        Raises:
            MmeError: INVALID_ARGUMENT when it can't be read.
        """
        reply = self._reply
        found = self._inference.decoder.remembered(self._data, call.complete)
        if found is not None:
            plan, self._decoded = found
            reply.wanted, reply.id, reply.said = plan.options, self._decoded.id, plan.target
        else:
            self._message = message = parsed(pb.ModelInferRequest, self._data)
            reply.id, reply.said = message.id, (message.model_name, message.model_version)
        call.name = self._inference.engine.registry.canonical(reply.said[0])
        call.version = parse_version(reply.said[1])

    def decode(self, call: Call, config: ModelConfig) -> InferenceRequest:
        request, self._decoded = self._decoded, None
        if request is None:
            request = self._read(call)
        self._reply.accept(config)
        if self._reply.takes_several:
            request.on_response, request.on_error = call.respond, call.respond_error
        if self._inference.forwarding is not None:
            self._inference.forwarding.add(request, self._reply.rpc.headers())
        return request

    def _read(self, call: Call) -> InferenceRequest:
        message, decoder = self._opened(), self._inference.decoder
        if holds_many_strings(message, len(self._data)):
            raise NeedsThread
        request, self._reply.wanted = decoder.decode(message, call.complete, data=self._data)
        return request

    def _opened(self) -> pb.ModelInferRequest:
        assert self._message is not None  # noqa: S101 - see `open`
        return self._message

    async def prepare(self, call: Call, *, by_thread: bool) -> None:
        if self._decoded is not None:
            return
        if not by_thread:
            try:
                self._decoded = self._read(call)
            except NeedsThread:
                by_thread = True
        if by_thread:
            decode, regions = self._inference.decoder.decode, self._inference.regions.held()
            self._decoded, self._reply.wanted = await on_thread(decode, self._opened(), call.complete, regions)


# -- ModelInfer ------------------------------------------------------------------------------------------------------


class UnaryReply(GrpcReply):
    """The one message of a call, or its status."""

    def begin(self, call: Call) -> None:
        self.rpc.on_cancel = call.abandon

    def accept(self, config: ModelConfig) -> None:
        if config.decoupled:
            raise MmeError(Kind.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy")

    def send(self, call: Call, response: InferenceResponse, encoded: bytes, event: int) -> None:  # noqa: ARG002
        self.rpc.answer(encoded)

    def end(self, call: Call) -> None:  # noqa: ARG002
        raise MmeError(Kind.EXECUTION_FAILED, "the model sent no response")

    def send_error(self, call: Call, error: MmeError) -> bool:  # noqa: ARG002
        return False

    def fail(self, call: Call, error: MmeError, *, final: bool) -> None:  # noqa: ARG002
        self.rpc.on_cancel = None
        refuse(self.rpc, error)

    def close(self, call: Call) -> None:
        self.rpc.on_cancel = None
        super().close(call)


# -- ModelStreamInfer ------------------------------------------------------------------------------------------------


class StreamReply(GrpcReply):
    """Messages of a stream."""

    takes_several = True

    def __init__(self, inference: Inference, rpc: Rpc, stream: InferStream, size: int) -> None:
        super().__init__(inference, rpc)
        self.ordered = True  # there is one, in its turn; False for a decoupled model
        self.answer: bytes | None = None  # the one message, once it is there
        self.size = size  # of the request, in bytes
        self._stream = stream
        self._model = ("", "")  # name and version, once the model has the request
        self._last = False

    def begin(self, call: Call) -> None:
        self._stream.begin(call, self)

    def accept(self, config: ModelConfig) -> None:
        self._model = self.said
        if config.decoupled:
            self.ordered = False
            self._stream.overtake(self)

    def final(self, response: InferenceResponse, event: int) -> bool | None:
        return response.final if event == PART else True

    def send(self, call: Call, response: InferenceResponse, encoded: bytes, event: int) -> None:  # noqa: ARG002
        if event == PART:
            self._last = response.final
            if self._stream.cut_off():
                return
        self._put(in_stream(encoded), in_order=event == LAST)

    def _put(self, part: bytes, *, in_order: bool) -> None:
        if in_order and self.ordered:
            self.answer = part
            self._stream.write_in_order()
        else:
            self._stream.write(part)

    def end(self, call: Call) -> None:  # noqa: ARG002
        if self.wanted.empty_final and not self._last:
            self._put(in_stream(final_response(*self._model, self.id)), in_order=True)
        elif self.ordered:
            self._stream.overtake(self)

    def send_error(self, call: Call, error: MmeError) -> bool:  # noqa: ARG002
        if self._stream.errors_as_status:
            return False
        self._put(error_in_stream(error.message, self.id, self._model, final=False), in_order=True)
        return True

    def fail(self, call: Call, error: MmeError, *, final: bool) -> None:  # noqa: ARG002
        if self._stream.errors_as_status:
            self._stream.end(error)
        else:
            self._put(error_in_stream(error.message, self.id, self._model, final or None), in_order=True)

    def close(self, call: Call) -> None:
        super().close(call)
        self._stream.over(call, self.size)


class InferStream:
    """One stream: what its client may have under way, and in which order it is answered."""

    def __init__(self, rpc: Rpc, inference: Inference) -> None:
        self.errors_as_status = rpc.headers().get(_ERRORS_AS_STATUS) == "true"  # the first error ends it
        self._rpc = rpc
        self._inference = inference
        self._calls: set[Call] = set()
        self._order: deque[StreamReply] = deque()  # of what is answered once, what is not written yet
        self._parts: deque[bytes] = deque()
        self._unsent = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._reads = True
        self._drained = False  # before its client had ended it
        self._end: MmeError | None = None  # the status of the stream, where it is not a good one

    # -- to the client ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Answer requests until there are no more of them.

        Raises:
            MmeError: the status that ends the stream.
        """
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._read_all)  # though it was cancelled before it began
        while True:
            while self._parts:
                part = self._parts.popleft()
                await self._rpc.write(part)
                self._unsent = max(self._unsent - len(part), 0)
                del part  # which may be large, and the next one may be long in coming
                self._taken.set()
            if self._end is not None:
                raise self._end
            if not self._reads and not self._calls:
                if self._drained:  # requests may be on their way, whose client would wait for ever
                    raise _going()
                return
            self._changed.clear()
            await self._changed.wait()

    def write(self, part: bytes) -> None:
        if self._parts or self._end is not None or not self._rpc.write_now(part):
            self._parts.append(part)
            self._unsent += len(part)
            self._changed.set()

    def cut_off(self) -> bool:
        """Return whether the client has left too much unread; then all that is given up."""
        if self._unsent <= MAX_UNSENT:
            return False
        _log.warning("a stream is cut off: its client has left more than %d bytes unread", MAX_UNSENT)
        self.close()
        self._parts.clear()
        self._unsent = 0
        self.end(MmeError(Kind.TOO_LARGE, "the client reads the responses of its stream too slowly"))
        return True

    def write_in_order(self) -> None:
        """Have those messages sent before which none is missing."""
        while self._order and self._order[0].answer is not None:
            self.write(self._order.popleft().answer or b"")

    def overtake(self, reply: StreamReply) -> None:
        """Have nothing wait for this one's messages any more."""
        self._order.remove(reply)
        self.write_in_order()

    def end(self, error: MmeError) -> None:
        """End the stream with a status, behind what is to be sent already."""
        self._end = self._end or error
        self._changed.set()

    # -- from the client -------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (data := await self._rpc.read()) is not None:
            reply = StreamReply(self._inference, self._rpc, self, len(data))
            call, rest = self._inference.start(reply, data, "ModelStreamInfer")
            try:
                if rest is not None:
                    await rest
            except asyncio.CancelledError:
                call.refuse(_going())
                raise
            del data, reply, call, rest  # as above
            while self._unsent > _PAUSE:
                self._taken.clear()
                await self._taken.wait()

    def begin(self, call: Call, reply: StreamReply) -> None:
        self._calls.add(call)
        self._order.append(reply)

    def over(self, call: Call, size: int) -> None:
        """A request of so many bytes has got its last response."""
        self._calls.discard(call)
        self._rpc.free(size)
        if not self._reads and not self._calls:
            self._changed.set()

    def _read_all(self, reader: asyncio.Task[None]) -> None:
        """There are no more requests, or they can't be read any more."""
        self._reads = False
        self._drained = reader.cancelled()
        self._changed.set()
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            _log.error("a stream can't be read any further", exc_info=error)

    def drain(self) -> None:
        """Take no more requests; when all are answered it ends, and says why to a client that had not ended it."""
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        """The stream is over, or its client has left: what is not answered is not waited for."""
        self.drain()
        for call in list(self._calls):
            call.abandon()
        self._order.clear()


def _going() -> MmeError:
    return MmeError(Kind.UNAVAILABLE, "the server is going; ask again, on another connection")
