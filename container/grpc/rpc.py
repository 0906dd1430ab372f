"""One call of gRPC over a stream of HTTP/2: messages out of its data, the handler's answer and status back.

    request     HEADERS (path, metadata)   DATA: messages   END_STREAM
    response    HEADERS                    DATA: messages   HEADERS (grpc-status, grpc-message) END_STREAM

A message is one byte that tells whether it is compressed, four of its length, and itself; a frame holds as much of it
as it happens to. A call that fails before anything is sent is answered by one block of headers alone.

On the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import re
from collections import deque
from typing import TYPE_CHECKING, Any

from container.codec.bodies import ENCODINGS, compress, inflate, inflate_quickly
from container.http1.rules import text_of
from container.http2 import frames
from container.http2.frames import LARGEST, MOST_FIELDS
from container.inference.errors import STATUSES, Status
from container.inference.limits import Inflating, by_thread, out_of_request_memory
from model_handlers.errors import Kind, MmeError, known

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from container.http2.frames import Fields
    from container.http2.streams import Http2Stream
    from container.inference.limits import RequestMemory

    Rest = Coroutine[Any, Any, bytes | None]
    Unary = Callable[[bytes, "Rpc"], Rest | None]
    Streaming = Callable[["Rpc"], Coroutine[Any, Any, None]]

_PREFIX = 5  # bytes before a message
_LONG = 64 << 10  # bytes of a message from which threads inflate and deflate it
_UNREAD = 1 << 20  # bytes of unread messages at which the client has to wait
_MOST_HOSTS = 64  # that are remembered
_KEPT = 128  # bytes that a message takes beside its own
_MOST_CUT = 1024  # messages that wait to be read; further ones stay in one piece
_GRACE_SECONDS = 10.0  # of a message, after which it has to come at this rate on average,
_LEAST_RATE = 1024  # bytes a second
_LOOK_SECONDS = 1.0
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_INTERNAL = frozenset({b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"})
_TYPE = (b"content-type", b"application/grpc")
_TYPES = (b"application/grpc+", b"application/grpc;")
_NO_CALL = "this port speaks gRPC, whose calls are POSTs; ask for anything else at the port for HTTP"
_TOO_LARGE = f"the metadata are more than {LARGEST >> 10} KiB or {MOST_FIELDS} fields: send fewer or shorter ones"
_NO_TYPE = "the content-type of a call of gRPC is application/grpc or application/grpc+proto"
_FIELDS = ((b":status", b"200"), _TYPE, (b"grpc-accept-encoding", b"identity,deflate,gzip"))
_HEAD = frames.header_block(_FIELDS)
# A status travels in the trailers, of which clients accept 8 KiB; what is not ASCII takes up to nine bytes a character.
_MAX_MESSAGE = 2048
_MAX_FOREIGN = 512
_GOOD = frames.header_block([(b"grpc-status", b"0")])
_HEADS = {name: frames.header_block([*_FIELDS, (b"grpc-encoding", name.encode())]) for name in ENCODINGS}


class Method:
    """What answers calls of one name.

    Attributes:
        unary: answers one message by one: at once or later by `Rpc.answer`, where there is nothing to await or it gives
            None, else by what it gives. None where `streaming` answers any number by any number.
    """

    def __init__(self, unary: Unary | None = None, streaming: Streaming | None = None) -> None:
        self.unary = unary
        self.streaming = streaming


_NOT_THERE = Method()


class Calls:
    """Begins the call of each stream.

    Args:
        methods: path → what answers it.
        largest: bytes of a message that are taken.
        compression: what answers are compressed by, if the client reads that: `gzip`, `deflate` or "".
        memory: of requests on the way.
        unknown_host: why a host is not answered to, "" for one that is; None where all are.
        denied: how a call ends, by its path and headers, whose client may not make it; None where all may.
    """

    def __init__(
        self,
        methods: Mapping[bytes, Method],
        largest: int,
        compression: str,
        memory: RequestMemory,
        unknown_host: Callable[[str], str] | None = None,
        denied: Callable[[bytes, Fields], tuple[Status, str] | None] | None = None,
    ) -> None:
        self.largest = largest
        self.compression = compression
        self.memory = memory
        self._denied = denied
        self._methods = methods
        self._unknown_host = unknown_host
        self._known_hosts: set[bytes] = set()
        self.tasks: set[asyncio.Task[Any]] = set()  # of calls under way

    def begin(self, stream: Http2Stream, fields: Fields | None) -> Rpc | None:
        """The call that it is; None where it was refused, as are headers that are larger than is taken."""
        if fields is None:
            _refuse_stream(stream, 200, _TOO_LARGE, Status.RESOURCE_EXHAUSTED)
            return None
        path = kind = method = host = b""
        for name, value in fields:
            if name == b":path":
                path = value
            elif name == b":method":
                method = value
            elif name == b":authority":
                host = value
            elif name == b"content-type":
                kind = value
        if host not in self._known_hosts and (why := self._refused_host(host, fields)):
            _refuse_stream(stream, 403, why, Status.PERMISSION_DENIED)
            return None
        if method != b"POST":
            _refuse_stream(stream, 405, _NO_CALL)
            return None
        if kind != _TYPE[1] and not kind.startswith(_TYPES):
            _refuse_stream(stream, 415, _NO_TYPE)
            return None
        denial = None if self._denied is None else self._denied(path, fields)
        if denial is not None:
            _refuse_stream(stream, 200, denial[1], denial[0])
            return None
        found = self._methods.get(path)
        call = Rpc(stream, fields, found or _NOT_THERE, self)
        if found is None:
            call.fail(Status.UNIMPLEMENTED, "Method not found!")
        return call

    def _refused_host(self, host: bytes, fields: Fields) -> str:
        """Why a host that was not asked before is not answered to, "" where it is, or the client names none."""
        if self._unknown_host is None:
            return ""
        asked = host or next((value for name, value in fields if name == b"host"), b"")
        why = self._unknown_host(asked.decode("latin-1")) if asked else ""
        if host and not why and len(self._known_hosts) < _MOST_HOSTS:
            self._known_hosts.add(host)
        return why


class MessageReader:
    """The messages of a call out of its data. Knows no stream.

    What came counts as memory of requests until it is freed. A `single` call has one message.
    """

    def __init__(self, largest: int, memory: RequestMemory, *, single: bool) -> None:
        self.encoding = ""  # what messages are compressed by
        self.messages: deque[tuple[bool, bytes]] = deque()  # those that are whole, and whether they are compressed
        self.part = bytearray()  # what is no whole message yet; one piece, since frames may be of a byte each
        self.uncut = False  # whether whole messages are left in it
        self._largest = largest  # bytes of a message that are taken
        self._memory = memory
        self._single = single
        self._held = 0  # bytes of that
        self._unread = 0  # bytes of messages
        self._over = False

    @property
    def is_full(self) -> bool:
        """Whether so much is unread that the client has to wait."""
        return self.uncut or self._unread >= _UNREAD

    def push(self, payload: bytes) -> bool:
        """Take some data; tells whether a message became whole by it.

        Raises:
            MmeError: it is none, or more than is taken.
        """
        if not self._memory.take(len(payload)):
            raise MmeError(Kind.TOO_LARGE, self._memory.full)
        self._held += len(payload)
        size = len(payload) - _PREFIX
        if not self.part and size == int.from_bytes(payload[1:_PREFIX], "big") and 0 <= size <= self._largest:
            self._keep(payload[0], payload[_PREFIX:])
            return True
        self.part += payload
        return self._cut()

    def _cut(self) -> bool:
        data = self.part
        at, has = 0, len(data)
        self.uncut = False
        while has - at >= _PREFIX:
            if len(self.messages) >= _MOST_CUT:
                self.uncut = True
                break
            size = int.from_bytes(data[at + 1 : at + _PREFIX], "big")
            if size > self._largest:
                words = f"Received message larger than max ({size} vs. {self._largest})"
                raise MmeError(Kind.TOO_LARGE, words)
            end = at + _PREFIX + size
            if end > has:
                if not self._memory.fits(end - has):
                    raise MmeError(Kind.TOO_LARGE, self._memory.full)
                break
            self._keep(data[at], bytes(memoryview(data)[at + _PREFIX : end]))
            at = end
        del data[:at]
        return at > 0

    def _keep(self, compressed: int, message: bytes) -> None:
        if compressed > 1 or (compressed and self.encoding not in ENCODINGS):
            words = (
                f"a message is compressed by '{self.encoding[:32]}', which is not read: send gzip, deflate or identity"
            )
            raise MmeError(Kind.UNSUPPORTED if compressed == 1 else Kind.INTERNAL, words)
        if self._single and self.messages:
            raise MmeError(Kind.INTERNAL, "this method takes one message")
        self.messages.append((bool(compressed), message))
        self._unread += _KEPT + len(message)

    def pop(self) -> tuple[bool, bytes]:
        """The next message, and whether it is compressed."""
        found = self.messages.popleft()
        self._unread -= _KEPT + len(found[1])
        self._held -= _PREFIX
        self._memory.free(_PREFIX)
        return found

    async def inflate(self, message: bytes) -> bytes:
        """A message as it was before it was compressed, which counts in its place.

        Raises:
            MmeError: it can't be inflated, or is larger than is taken.
        """
        found = inflate_quickly(message, self.encoding, self._largest) if len(message) < _LONG else None
        if found is None:
            with Inflating(self._memory) as inflating:
                found = await by_thread(inflate, message, self.encoding, self._largest, inflating.take)
        if not self._over:
            self.free(len(message))
            if not self._memory.take(len(found)):
                raise out_of_request_memory(self._memory)
            self._held += len(found)
        return found

    def free(self, size: int) -> None:
        size = min(size, self._held)
        self._memory.free(size)
        self._held -= size

    def close(self) -> None:
        self._over = True
        self._memory.free(self._held)
        self._held = 0
        self.part.clear()
        self.messages.clear()


class Rpc:
    """One call. Its stream's receiver, and its handler's context."""

    def __init__(self, stream: Http2Stream, fields: Fields, method: Method, calls: Calls) -> None:
        self._stream = stream
        self.fields = fields  # its headers
        self.method = method
        self._headers: dict[str, str] | None = None  # once they are asked for
        self._tasks = calls.tasks
        self._reader = MessageReader(calls.largest, calls.memory, single=method.unary is not None)
        self._slow: asyncio.TimerHandle | None = None  # looks whether a message arrives too slowly
        self._begun = 0.0  # when it began, by the loop's clock
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._compression = ""
        self._waits: asyncio.Future[None] | None = None
        self._ended = False
        self._sent = False  # headers
        self._failed = False
        self.on_cancel: Callable[[], None] | None = None  # called when no answer is waited for any more
        for name, value in fields:
            if name == b"grpc-timeout":
                self._expire_after(value)
            elif name == b"grpc-encoding":
                self._reader.encoding = value.decode("latin-1")
            elif name == b"grpc-accept-encoding" and calls.compression and calls.compression.encode() in value:
                self._compression = calls.compression
        if method.streaming is not None and not self._failed:
            self._begin(functools.partial(method.streaming, self))

    # -- its stream's ------------------------------------------------------------------------------------------------

    def received(self, payload: bytes) -> None:
        reader = self._reader
        try:
            whole = reader.push(payload)
        except MmeError as error:
            refuse(self, error)
            return
        if whole:
            if self._slow is not None:
                self._stop_looking()
            if self._waits is not None:
                self._wake()
        if reader.part and self._slow is None and not reader.uncut:
            loop = asyncio.get_running_loop()
            self._begun = loop.time()
            self._slow = loop.call_later(_GRACE_SECONDS, self._look)
        if not reader.is_full:
            self._stream.credit()

    def _look(self) -> None:
        """Fail where the message at hand arrives too slowly; where it waits for us, its time begins again."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._reader.is_full:
            self._begun = now
        late = now - self._begun - _GRACE_SECONDS
        if len(self._reader.part) < _LEAST_RATE * late:
            words = f"the message arrives too slowly: send at least {_LEAST_RATE} bytes a second"
            self.fail(Status.DEADLINE_EXCEEDED, words)
            return
        self._slow = loop.call_later(_LOOK_SECONDS, self._look)

    def _stop_looking(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def ended(self) -> None:
        """The client has sent all of its messages."""
        self._ended = True
        self._wake()
        unary, reader = self.method.unary, self._reader
        if unary is None or self.over:
            return
        if reader.part or not reader.messages:
            self.fail(Status.INTERNAL, "the call has no message, or half of one")
        elif reader.messages[0][0]:
            self._begin(functools.partial(self._inflated, unary))
        else:
            self._begin(functools.partial(unary, reader.messages.popleft()[1], self))

    def cancelled(self) -> None:
        """The client has left, or wants no answer."""
        self._leave()
        self._over()
        self._wake()

    @property
    def over(self) -> bool:
        return self._stream.over or self._failed

    def _wake(self) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    # -- its handler's -----------------------------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """The metadata that the client sent, by name; of keys that end in -bin the text that their bytes are.

        Of several values the last counts, also of bytes that have come as one, with commas between them.
        """
        if self._headers is None:
            self._headers = {
                name.decode("latin-1"): text_of(_binary(value.rpartition(b",")[2]))
                if name.endswith(b"-bin")
                else value.decode("latin-1")
                for name, value in self.fields
                if not name.startswith(b":") and name not in _INTERNAL
            }
        return self._headers

    async def read(self) -> bytes | None:
        """The next message; None behind the last one, or where the call has failed: one could not be inflated, say."""
        reader = self._reader
        while not reader.messages:
            if self._ended or self._stream.over:
                return None
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        await self._stream.turn(_KEPT)
        if not reader.messages:  # the call has ended meanwhile
            return None
        compressed, message = reader.pop()
        if reader.uncut and not reader.messages:
            self.received(b"")
        elif not reader.is_full:
            self._stream.credit()
        if not compressed:
            return message
        try:
            return await reader.inflate(message)
        except MmeError as error:
            if error.kind is Kind.UNAVAILABLE:
                self.fail(Status.RESOURCE_EXHAUSTED, error.message)
            else:
                refuse(self, error)
            return None

    def free(self, size: int) -> None:
        """Count so many bytes no more: what they asked for is answered."""
        self._reader.free(size)

    def write_now(self, message: bytes) -> bool:
        """Send one message if nothing has to be awaited for that; else False, and it is for `write`."""
        if self._compression or not self._stream.free:
            return False
        self._put(b"\0", message)
        return True

    async def write(self, message: bytes) -> None:
        """Send one message; returns when the client may be sent the next one."""
        await self._send(message)
        await self._stream.drained()

    def answer(self, message: bytes) -> None:
        """Send the one message of an answer, and end the call well."""
        self.on_cancel = None
        if self.over:
            return
        if self._compression:
            self._start(self._write_last(message))
        else:
            self._over()
            self._stream.whole(_HEAD, (b"\0" + len(message).to_bytes(4, "big"), message), _GOOD)

    # -- its end -----------------------------------------------------------------------------------------------------

    def _begin(self, handle: Callable[[], Rest | None]) -> None:
        """Have a handler do what it does at once, and a task what is left."""
        try:
            work = handle()
        except Exception as error:  # noqa: BLE001 - every error is a status, or its client reads nothing of it
            refuse(self, error)
            return
        if work is not None:
            self._start(work)

    def _start(self, work: Rest) -> None:
        task = self._task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _inflated(self, unary: Unary) -> bytes | None:
        message = await self.read()
        work = None if message is None else unary(message, self)
        return None if work is None else await work

    async def _write_last(self, message: bytes) -> None:
        await self._send(message)
        self._end()

    def _done(self, task: asyncio.Task[bytes | None]) -> None:
        """What was left to do is done."""
        self._tasks.discard(task)
        if self._task is task:
            self._task = None
        error = None if task.cancelled() else task.exception()
        if self.over:
            self._over()
        elif task.cancelled():
            self.fail(Status.CANCELLED, "the call was cancelled")
        elif error is not None:
            refuse(self, error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
        elif task.result() is not None:
            self.answer(task.result() or b"")
        elif self.method.unary is None:
            self._end()

    def _end(self) -> None:
        """Nothing more is sent."""
        if not self._sent:
            self._stream.headers(_HEAD)
        self._over()
        self._stream.end(_GOOD)

    async def _send(self, message: bytes) -> None:
        """Send one message, compressed where that was agreed and makes it smaller."""
        flag = b"\0"
        if self._compression:
            if len(message) < _LONG:
                smaller = compress((message,), self._compression)
            else:
                smaller = await by_thread(compress, (message,), self._compression)
            if len(smaller) < len(message):
                flag, message = b"\1", smaller
        self._put(flag, message)

    def _put(self, flag: bytes, message: bytes) -> None:
        if not self._sent:
            self._sent = True
            self._stream.headers(_HEADS.get(self._compression, _HEAD))
        self._stream.data(flag + len(message).to_bytes(4, "big") + message)

    def fail(self, status: Status, words: str) -> None:
        """End it with a status that is not good."""
        if self._failed:
            return
        self._failed = True
        fields = _status(status, words)
        stream = self._stream
        self._leave()
        self._over()
        if stream.over:
            return
        stream.end(frames.header_block(fields if self._sent else [*_FIELDS, *fields]))

    def _leave(self) -> None:
        told, self.on_cancel = self.on_cancel, None
        if self._task is not None:
            self._task.cancel()
        if told is not None:
            told()

    def _expire_after(self, value: bytes) -> None:
        timeout = _TIMEOUT.fullmatch(value)
        if timeout is None:
            text = value[:32].decode("latin-1")
            self.fail(Status.INTERNAL, f"the grpc-timeout '{text}' is none: 1 to 8 digits and H, M, S, m, u or n")
        elif self._deadline is None and not self._failed:
            seconds = int(timeout[1]) * _SECONDS[timeout[2]]
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._expired)

    def _expired(self) -> None:
        self.fail(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _over(self) -> None:
        """Nothing is kept any more."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._stop_looking()
        self._reader.close()
        self._stream.receiver = None  # what comes now is of no use, while what was sent may have to wait


def refuse(call: Rpc, error: Exception) -> None:
    problem = known(error)
    message = problem.message
    most = _MAX_MESSAGE if message.isascii() else _MAX_FOREIGN
    call.fail(STATUSES[problem.kind].grpc, message[:most])


def _refuse_stream(stream: Http2Stream, http_status: int, words: str, status: Status = Status.INTERNAL) -> None:
    """Answer what is no call of gRPC, or one whose headers are not taken, where both its clients and others look."""
    fields = [(b":status", b"%d" % http_status), _TYPE, *_status(status, words)]
    stream.end(frames.header_block(fields))


def _status(status: Status, words: str) -> list[tuple[bytes, bytes]]:
    return [(b"grpc-status", b"%d" % status), (b"grpc-message", _percent_encoded(words))]


def _binary(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return value


def _percent_encoded(words: str) -> bytes:
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in words.encode()
    )
