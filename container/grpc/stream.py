"""ModelStreamInfer: requests one after the other on a stream, and their responses as they come. On the event loop.

    requests are submitted in their order, each once its model is in memory
    a model that answers once    its responses keep the order of the requests
    a decoupled model            each response is written when it comes; `triton_final_response` marks the last

What goes wrong with one request is a message that says so, and the stream goes on; so do a decoupled model's responses
behind an error of which it did not say that it is the last. With `triton_grpc_error: true` in the metadata an error is
the stream's status instead, and its end.

A client that leaves cancels what it has asked for. One that asks on without reading is not listened to for a while; one
that does not read what a decoupled model sends is cut off.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING

from container.codec.effort import takes_long
from container.grpc import grpc_service_pb2 as pb
from container.grpc.decode import PLAIN
from container.grpc.encode import error_in_stream, final_response, in_stream
from container.grpc.messages import parsed
from container.grpc.traces import follow, headers_of
from container.inference.errors import known
from container.inference.in_turn import InTurn
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from container.grpc.infer import Codec
    from container.grpc.rpc import Rpc
    from container.inference.request_limit import RequestLimit
    from container.traces.traced import Following, Tracing
    from model_handlers.config.model_config import ModelConfig
    from serve.engine import Engine
    from serve.request import InferenceRequest, InferenceResponse

_log = logging.getLogger("mme.grpc")

_ERRORS_AS_STATUS = "triton_grpc_error"
_PAUSE = 1 << 20  # bytes not yet taken by the client at which its next request has to wait
_LIMIT = 64 << 20  # and at which it reads a decoupled model's responses too slowly


def _never(_part: bytes) -> bool:
    """For a stream that is not served yet."""
    return False


def _nothing(_size: int) -> None:
    """For a stream whose messages do not count."""


class Streams:
    """The method over an engine, and the streams that are open.

    Args:
        engine: who answers.
        codec: who reads and writes messages.
        tracer: what traces requests, None where traces go nowhere.
        limit: of the time that a request may take.
    """

    def __init__(self, engine: Engine, codec: Codec, tracer: Tracing | None, limit: RequestLimit) -> None:
        self._limit = limit
        self._engine = engine
        self._codec = codec
        self._tracer = tracer
        self._open: set[Stream] = set()
        self._draining = False

    async def serve(self, context: Rpc) -> None:
        """One stream, to its end.

        Raises:
            MmeError: the status that ends it, where that is not a good one.
        """
        if self._draining:  # its client has not heard of the end yet
            raise _going()
        stream = Stream(self._engine, self._codec, self._tracer, self._limit, headers_of(context))
        self._open.add(stream)
        try:
            await stream.serve(context.read, context.write, context.write_now, context.free)
        finally:
            self._open.discard(stream)
            stream.close()

    def drain(self) -> None:
        """Have no stream take another request; each ends when it has answered those that it has."""
        self._draining = True
        for stream in list(self._open):
            stream.drain()


class Stream:
    """One stream.

    Args:
        engine: who answers.
        codec: who reads and writes messages.
        tracer: what traces requests, None where traces go nowhere.
        headers: the metadata of the stream.

    Attributes:
        limit: of the time that a request may take.
        errors_as_status: whether the first error ends it.
        closed: whether nobody waits for responses any more.
    """

    def __init__(
        self, engine: Engine, codec: Codec, tracer: Tracing | None, limit: RequestLimit, headers: dict[str, str]
    ) -> None:
        self.limit = limit
        self._engine = engine
        self.codec = codec
        self._tracer = tracer
        self._headers = headers
        self.errors_as_status = headers.get(_ERRORS_AS_STATUS) == "true"
        self._calls: set[Call] = set()
        self._order: deque[Call] = deque()  # of calls that are answered once, those whose responses are not out yet
        self._parts: deque[bytes] = deque()
        self._unsent = 0
        self._write_now: Callable[[bytes], bool] = _never
        self._free: Callable[[int], None] = _nothing
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._reads = True
        self._drained = False  # before its client had ended it
        self.closed = False
        self._end: MmeError | None = None  # the status of the stream, where it is not a good one

    # -- to the client ---------------------------------------------------------------------------------------------

    async def serve(
        self,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Awaitable[None]],
        write_now: Callable[[bytes], bool] = _never,
        free: Callable[[int], None] = _nothing,
    ) -> None:
        """Answer requests until there are no more of them.

        Args:
            read: the next message, None behind the last one.
            write: takes one to the client, and its time with a client that does not read.
            write_now: takes one if that takes no time; else False.
            free: told the size of each message that is answered.

        Raises:
            MmeError: the status that ends the stream.
        """
        self._write_now = write_now
        self._free = free
        self._reader = asyncio.create_task(self._read(read))
        self._reader.add_done_callback(self._read_all)  # though it was cancelled before it began
        while True:
            while self._parts:
                part = self._parts.popleft()
                await write(part)
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
        """Have one response sent."""
        if not self._parts and self._end is None and self._write_now(part):
            return
        self._parts.append(part)
        self._unsent += len(part)
        self._changed.set()

    def write_in_order(self) -> None:
        """Have those responses sent before which none is missing."""
        while self._order and self._order[0].answer is not None:
            self.write(self._order.popleft().answer or b"")

    @property
    def overflows(self) -> bool:
        """Whether the client has left too much unread."""
        return self._unsent > _LIMIT

    def tell(self, call: Call, error: MmeError, *, final: bool | None) -> None:
        """Have an error sent, as the client wants it."""
        part = error_in_stream(error.message, call.id, call.model, final)
        if self.errors_as_status:
            self.end(error)
        elif call.ordered:
            call.answer = part
            self.write_in_order()
        else:
            self.write(part)

    def end(self, error: MmeError) -> None:
        """End the stream with a status, behind what is to be sent already."""
        self._end = self._end or error
        self._changed.set()

    def cut(self, error: MmeError) -> None:
        """Give up a client that does not read: what it has not read is forgotten, and what it has asked for as well."""
        self.close()
        self._parts.clear()
        self._unsent = 0
        self.end(error)

    def over(self, call: Call) -> None:
        """A call has got its last response."""
        self._calls.discard(call)
        self.limit.over(call)
        self._free(call.size)
        if not self._reads and not self._calls:
            self._changed.set()

    # -- from the client -------------------------------------------------------------------------------------------

    async def _read(self, read: Callable[[], Awaitable[bytes | None]]) -> None:
        while (data := await read()) is not None:
            await self._take(data)
            del data  # as above
            while self._unsent > _PAUSE:
                self._taken.clear()
                await self._taken.wait()

    def _read_all(self, reader: asyncio.Task[None]) -> None:
        """There are no more requests, or they can't be read any more."""
        self._reads = False
        self._drained = reader.cancelled()
        self._changed.set()
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            _log.error("a stream can't be read any further", exc_info=error)

    async def _take(self, data: bytes) -> None:
        """Submit one request."""
        following = None if self._tracer is None else follow(self._tracer, self._headers, "ModelStreamInfer")
        call = Call(self, following, len(data))
        self._calls.add(call)
        self._order.append(call)
        self.limit.begin(call)
        try:
            await self._submit(call, data)
        except asyncio.CancelledError:
            call.fail(_going())
            raise
        except Exception as error:  # noqa: BLE001 - what goes wrong with one request is told, and the stream goes on
            call.fail(known(error))

    async def _submit(self, call: Call, data: bytes) -> None:
        found = self.codec.remembered(data, call.complete, self._metadata)
        if found is not None:
            head, request = found
            call.id, call.wanted, said = request.id, head.wanted, (head.model, head.version)
            target = self.codec.target(*said)
        else:
            message = parsed(pb.ModelInferRequest, data)
            call.id, said = message.id, (message.model_name, message.model_version)
            target = self.codec.target(*said)
            decoded = self.codec.decode(data, message, call.complete, self._metadata)
            request, call.wanted = decoded if isinstance(decoded, tuple) else await decoded()
        request.on_response, request.on_error = call.respond, call.respond_error
        if call.following is not None:
            call.following.follow(request)
        call.request = request

        def make(config: ModelConfig) -> InferenceRequest:
            call.model = said
            if config.decoupled:
                call.ordered = False
                self._order.remove(call)
                self.write_in_order()
            return request

        report = await self._engine.submit_made(*target, make)
        if call.following is not None:
            call.following.loaded(report)

    def _metadata(self) -> dict[str, str]:
        return self._headers

    def drain(self) -> None:
        """Take no more requests; when all are answered it ends, and says why to a client that had not ended it."""
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        """The stream is over, or its client has left: nobody waits for what is not answered."""
        self.closed = True
        self.drain()
        for call in list(self._calls):
            self.limit.over(call)
            if call.request is not None:
                call.request.cancel()
                call.request = None
            if call.following is not None:
                call.following.over(MmeError(Kind.CANCELLED, "the client left"))
        self._calls.clear()
        self._order.clear()


class Call:
    """One request of a stream.

    Attributes:
        following: who follows it for a trace, if anybody does.
        size: bytes of its message.
        request: what was submitted, None until it is decoded.
        wanted: how the client wants its responses.
        id: the client's, "" until it is read.
        model: name and version, as the request says them once its model is known.
        ordered: whether it is answered once, in its turn; False for a decoupled model.
        answer: the one answer, once it is there.
    """

    def __init__(self, stream: Stream, following: Following | None, size: int) -> None:
        self._stream = stream
        self.size = size
        self.following = following
        self._last = False
        self._turn: InTurn | None = None  # once a thread has had to write for it
        self._failed = False  # there is nothing more to tell, though its model may send more until it hears of that
        self.request: InferenceRequest | None = None
        self.wanted = PLAIN
        self.id = ""
        self.model = ("", "")
        self.ordered = True
        self.answer: bytes | None = None

    def respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """One response of several."""
        if self._stream.overflows:
            _log.warning("a stream is cut off: its client has left more than %d bytes unread", _LIMIT)
            self._stream.cut(MmeError(Kind.TOO_LARGE, "the client reads the responses of its stream too slowly"))
        if self._stream.closed or self._failed:
            return
        if self._turn is not None and self._turn.waits(functools.partial(self.respond, request, response)):
            return
        self._last = response.final
        self._stream.limit.renew(self)
        try:
            if takes_long(response, self.wanted.places, self.wanted.classes):
                work = self._stream.codec.encoding(response, self.wanted, response.final)
                self._in_turn().work_out(work, functools.partial(self._responded, request))
                return
            part = self._stream.codec.encode(response, self.wanted, response.final)
        except Exception as error:  # noqa: BLE001 - a response that can't be written ends this request and no other
            self.fail(known(error))
            request.cancel()
            return
        self._stream.write(in_stream(part))

    def _responded(self, request: InferenceRequest, written: asyncio.Future[bytes]) -> None:
        """A thread has written one response of several."""
        if self._stream.closed or self._failed:
            return
        try:
            part = written.result()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(known(error))
            request.cancel()
            return
        self._stream.write(in_stream(part))

    def _in_turn(self) -> InTurn:
        self.wanted = self.wanted.kept()  # for the responses behind it: by their turn the request may be over
        if self._turn is None:
            self._turn = InTurn()
        return self._turn

    def respond_error(self, request: InferenceRequest, error: MmeError) -> None:
        """An error of the model that others may follow, unless it ends the stream."""
        if self._stream.closed or self._failed:
            return
        if self._turn is not None and self._turn.waits(functools.partial(self.respond_error, request, error)):
            return
        if self._stream.errors_as_status:
            self.fail(error)
            request.cancel()
        else:
            self._stream.tell(self, error, final=False)

    def complete(self, _request: InferenceRequest, result: InferenceResponse | MmeError | None) -> None:
        """The one response, the error, or the end of several responses."""
        if self._turn is not None and self._turn.waits(functools.partial(self.complete, _request, result)):
            return
        try:
            self._complete(result)
        finally:
            self.wanted.places.clear()

    def _complete(self, result: InferenceResponse | MmeError | None) -> None:
        if self._stream.closed or self._failed:
            return
        if isinstance(result, MmeError):
            self.fail(result, final=True)
            return
        try:
            if result is not None and takes_long(result, self.wanted.places, self.wanted.classes):
                self._in_turn().work_out(self._stream.codec.encoding(result, self.wanted, final=True), self._completed)
                return
            if result is not None:
                self.answer = in_stream(self._stream.codec.encode(result, self.wanted, final=True))
                self._stream.write_in_order()
            elif self.wanted.empty_final and not self._last:
                self._stream.write(in_stream(final_response(*self.model, self.id)))
        except Exception as error:  # noqa: BLE001 - an answer that can't be written must not keep its batch from theirs
            self.fail(known(error))
            return
        self._over(None)

    def _completed(self, written: asyncio.Future[bytes]) -> None:
        """A thread has written the one answer."""
        if self._stream.closed or self._failed:
            return
        try:
            self.answer = in_stream(written.result())
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(known(error))
            return
        self._stream.write_in_order()
        self._over(None)

    def fail(self, error: MmeError, *, final: bool | None = None) -> None:
        """Tell what went wrong, and no more of it; `final` where it is the last response of the model."""
        if self._stream.closed or self._failed:
            return
        self._failed = True
        self.wanted.places.clear()
        self._stream.tell(self, error, final=final)
        self._over(error)

    def expire(self, error: MmeError) -> None:
        """It takes too long: its client is told, and a queued request need not run."""
        request = self.request
        self.fail(error, final=True)
        if request is not None:
            request.cancel()

    def _over(self, error: MmeError | None) -> None:
        self.request = None
        self._stream.over(self)
        if self.following is not None:
            self.following.over(error)


def _going() -> MmeError:
    return MmeError(Kind.UNAVAILABLE, "the server is going; ask again, on another connection")
