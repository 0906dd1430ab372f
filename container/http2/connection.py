"""One connection of HTTP/2: frames in, streams out, windows kept. On the event loop.

What serves streams is told of each when its headers have come, and gives a receiver for the rest of it. What is sent
in one turn of the loop leaves in one write: the answers of a batch, as a rule.

Both sides send no more than the other side's windows allow. Ours are opened again when a receiver has made use of what
came (`Http2Stream.credit`); the connection's own is opened at once, since streams hold back what belongs to them.

A client that breaks the protocol, or makes us work for nothing (frames without content, pings, resets without end),
loses its connection with a word of why; one that breaks it on a stream alone loses the stream.

What costs more than the connection's budget of a turn of the loop waits for a later turn, and reading with it.

The end is said, and nothing is sent behind it. What comes is read and forgotten until the client ends it as well:
closing a socket that holds something unread takes back what was sent (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol, cast

from container.http2 import frames
from container.http2.frames import ConnectionFault, ErrorCode, OversizedFault, StreamFault
from container.http2.header_blocks import LARGEST, LARGEST_READ, OVERSIZED, HeaderBlocks
from container.inference.turn_budget import BODY, SMALL, STEP, TurnBudget


class Receiver(Protocol):
    """One stream's."""

    def received(self, payload: bytes) -> None:
        """Some data came."""

    def ended(self) -> None:
        """No more will."""

    def cancelled(self) -> None:
        """The client has given the stream up, or has left."""


if TYPE_CHECKING:
    from collections.abc import Callable

    from container.http2.header_blocks import Fields
    from container.http2.keepalive import Keepalive
    from container.inference.turn_budget import Turns
    from container.process.resources import ConnectionCap

    Begin = Callable[["Http2Stream", Fields], Receiver | None]

_log = logging.getLogger("mme.http2")
WINDOW = 1 << 20  # bytes that a client may send on a stream before any of it is used
_WIDE = 1 << 24  # and on the connection
_FRAME = 1 << 18  # of the largest frame that we take
_MOST_STREAMS = 1024
_MOST_EMPTY = 4 * _MOST_STREAMS  # frames in a row that bring nothing, while nothing of a call is sent either,
_EMPTY_SECONDS = 10.0  # within so short a time
_MOST_RESETS = 10 * _MOST_STREAMS  # within the last seconds: all calls of a busy proxy may be past their deadlines
_RESET_SECONDS = 10.0
_NEW_STREAM = 128  # bytes of heads that a new stream counts for, beside its own
_MOST_UNREAD = 1 << 20  # bytes that a client leaves unread while we listen to it
_GREETING_SECONDS = 20.0  # that a client has for its first words
_NOTICE_SECONDS = 2.0  # for word that it has heard of the end that is near
_PARTING_SECONDS = 1.0  # for the client to end the connection itself
_GOODBYE_SECONDS = 5.0  # in which something has to leave, or to come, once all is said
_TCP_INFO = struct.Struct("=120xQ")  # of Linux's, up to the bytes that were acknowledged
_NEAR_THE_END = b"mme-ends"
_OF_HTTP1 = re.compile(rb"[A-Z]{3,7} ")
_NO_HTTP1 = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this port speaks gRPC, by HTTP/2 from the first byte on; ask for anything else at the server's port for HTTP\n"
)


class Http2Stream:
    """One of a connection's streams.

    Attributes:
        id: its number.
        got_end: whether the client has sent all of it.
        over: whether nothing can be sent any more.
        awaited: bytes of data that are to come by its content-length, None where it has none.
    """

    def __init__(self, connection: Connection, number: int, window: int) -> None:
        self.id = number
        self.window = window
        self.receiver: Receiver | None = None
        self.got_end = False
        self.over = False
        self.awaited: int | None = None
        self._connection = connection
        self._queue: deque[tuple[memoryview, bool]] = deque()  # data, and headers with which the stream ends
        self._uncredited = 0
        self._drained: asyncio.Future[None] | None = None

    def headers(self, block: bytes) -> None:
        """Send headers in front of all data."""
        if self.over:
            return
        connection = self._connection
        if connection.shrinks:
            block = connection.shrunk(block)
        connection.say(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

    def data(self, payload: bytes) -> None:
        """Send data, as soon as the client takes it."""
        if self.over:
            return
        size = len(payload)
        if not self._queue and size <= self.window and self._connection.takes(size):
            self.window -= size
            self._connection.say(frames.frame_head(size, frames.DATA, 0, self.id), payload)
        else:
            self._queue.append((memoryview(payload), False))
            self.pump()

    def end(self, block: bytes) -> None:
        """Send headers behind all data, with which the stream is over."""
        if self._queue:
            self._queue.append((memoryview(block), True))
        elif not self.over:
            self._finish(block)

    def whole(self, head: bytes, payload: tuple[bytes, ...], tail: bytes) -> None:
        """Send headers, the parts of some data, and headers with which the stream is over: at once, where it may be."""
        if self.over:
            return
        size = sum(map(len, payload))
        if self._queue or size > self.window or self._connection.shrinks or not self._connection.takes(size):
            self.headers(head)
            self.data(b"".join(payload))
            self.end(tail)
            return
        self._connection.say(
            frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, head),
            frames.frame_head(size, frames.DATA, 0, self.id),
            *payload,
        )
        self._finish(tail)

    def _finish(self, block: bytes | memoryview) -> None:
        flags = frames.END_HEADERS | frames.END_STREAM
        if self._connection.shrinks:
            block = self._connection.shrunk(block)
        self._connection.say(frames.frame(frames.HEADERS, flags, self.id, bytes(block)))
        if not self.got_end:
            self._connection.put(frames.reset(self.id, ErrorCode.NO_ERROR))
        self.close()

    def pump(self) -> None:
        """Send as much as the windows allow."""
        while self.send_one():
            pass

    def send_one(self) -> bool:
        """Send one frame, if the windows allow it; tells whether more may be sent at once."""
        if not self._queue:
            return False
        connection = self._connection
        part = self._queue[0][0]
        if self.window <= 0:
            return False  # what opens it has it pumped
        size = connection.allowed(min(len(part), self.window))
        if size <= 0:
            connection.wait(self)
            return False
        self._queue.popleft()
        if size < len(part):
            self._queue.appendleft((part[size:], False))
        self.window -= size
        connection.say(frames.frame_head(size, frames.DATA, 0, self.id), part[:size])
        if not self._queue:
            self.tell_drained()
        elif self._queue[0][1]:
            self._finish(self._queue[0][0])  # which no window holds back
        return bool(self._queue)

    @property
    def free(self) -> bool:
        """Whether all that was sent is under way."""
        return not self._queue and not self._connection.paused

    async def drained(self) -> None:
        """Wait until all that was sent is under way."""
        while not self.over and not self.free:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def tell_drained(self) -> None:
        """Have those look again that wait."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def received(self, size: int) -> None:
        """So many bytes came, and are not used yet."""
        self._uncredited += size
        if self._uncredited > WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"more on stream {self.id} than its window allows")

    def credit(self) -> None:
        """All that came has been used."""
        if self._uncredited >= WINDOW // 2 and not self.got_end and not self.over:
            self._connection.put(frames.window_update(self.id, self._uncredited))
            self._uncredited = 0

    async def turn(self, heads: int) -> None:
        """Count a message as so many bytes of heads, and wait for a turn in which the connection may handle it."""
        turns, budget = self._connection.turns, self._connection.budget
        turns.left -= heads
        while turns.left < 0 and turns.spent(budget):
            pause = _Pause()
            turns.wait(pause, budget)
            await pause.over

    def close(self) -> None:
        """Nothing is sent any more."""
        self.over = True
        self.receiver = None
        self._queue.clear()
        self._connection.closed(self)
        self.tell_drained()


class _Pause:
    """The reader of a stream, until a later turn of the loop."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        """The turn has come."""
        if not self.over.done():
            self.over.set_result(None)


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        loop: the event loop.
        begin: told of each stream.
        connections: those that there are, of which this one is one while it lasts.
        keepalive: looks after idle and old ones.
        turns: what connections may do in a turn of the loop.
        cap: on the number of connections.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        begin: Begin,
        connections: set[Connection],
        keepalive: Keepalive,
        turns: Turns,
        cap: ConnectionCap,
    ) -> None:
        self._loop = loop
        self._cap = cap
        self._refused = False  # beyond the cap
        self.turns = turns
        self.budget = TurnBudget()
        self._rest = b""  # what came and is not handled yet, from `_at` on
        self._at = 0
        self._waits = False  # for a later turn of the loop
        self._begin = begin
        self._connections = connections
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._needs = 0
        self._greeted = False
        self._blocks = HeaderBlocks()
        self._block: tuple[int, int, bytearray] | None = None  # stream and flags of headers that are not complete
        self.streams: dict[int, Http2Stream] = {}
        self._last = 0  # the highest stream that the client has opened
        self._window = frames.DEFAULT_WINDOW
        self._stream_window = frames.DEFAULT_WINDOW
        self._frame_size = frames.SMALLEST_FRAME_SIZE
        self.shrinks = False  # the table of headers, which has to be said once
        self._uncredited = 0
        self._waiting: OrderedDict[Http2Stream, None] = (
            OrderedDict()
        )  # for the connection's window, which is closed then
        self._out: list[bytes | memoryview] = []
        self._flushes = False
        self._says = False  # something of a call is to be sent
        self._empty = 0
        self._empty_since = 0.0
        self._resets: deque[float] = deque(maxlen=_MOST_RESETS)
        self._draining = False
        self._final: int | None = None  # the highest stream that is served
        self._ended = False
        self._came = 0  # pieces, of which only the change counts
        self._written = 0  # bytes
        self.paused = False
        self._deaf = False
        self._patience: asyncio.TimerHandle | None = None  # with a client that does not begin, or does not go
        self.watch = keepalive.watch(self)

    def __repr__(self) -> str:
        return f"<Connection: {len(self.streams)} streams open, {self._last} the last>"

    # -- asyncio's ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self._transport = cast("asyncio.Transport", transport)  # as a stream's is, though uvloop's is no instance of it
        self._connections.add(self)
        self._refused = not self._cap.enter()
        if self._refused and self._cap.is_crowded:
            self.abort()
        self._patience = self._loop.call_later(_GREETING_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._came += 1
        if self._ended:
            return
        if self._rest:
            self._rest, self._at = self._rest[self._at :] + data, 0
            return
        buffer: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needs:
                return
            buffer, self._buffer = bytes(self._buffer), bytearray()
        self._handle(bytes(buffer), 0)

    def _handle(self, data: bytes, at: int) -> None:
        """Take what came from there on, as far as the budget of this turn goes."""
        try:
            at = self._read(data, at)
        except ConnectionFault as fault:
            self.end(fault.code, fault.why)
            return
        if at == len(data):
            self._waits = False
        elif self._waits:
            self._rest, self._at = data, at
            self._transport.pause_reading()
            self.turns.wait(self, self.budget)
        else:
            self._buffer = bytearray(memoryview(data)[at:])

    def go_on(self) -> None:
        """Take more of what came, in a later turn; then listen again."""
        self._waits = False
        if self._deaf or not self._rest:
            return
        data, self._rest = self._rest, b""
        self._handle(data, self._at)
        if not (self._waits or self._deaf or self._transport.is_closing()):
            self._transport.resume_reading()

    @property
    def unsent(self) -> int:
        """Bytes that the transport holds for the client."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """The client does not read."""
        self.paused = True

    def resume_writing(self) -> None:
        """It does again."""
        self.paused = False
        self._listen()
        for stream in list(self.streams.values()):
            stream.tell_drained()

    def _listen(self) -> None:
        if not self._deaf:
            return
        self._deaf = False
        if not self._rest:
            self._transport.resume_reading()
        elif not self._waits:
            self.go_on()

    def connection_lost(self, _error: Exception | None) -> None:
        """It is over."""
        self._ended = True
        self._wait_no_more()
        self.watch.end()
        self._connections.discard(self)
        self._cap.leave()
        self._out.clear()
        self._rest = b""
        for stream in list(self.streams.values()):
            self._give_up(stream)

    def _stop_waiting(self) -> None:
        """Forget what came and is not handled, and read what else comes."""
        held = bool(self._rest) or self._deaf
        self._rest, self._waits, self._deaf = b"", False, False
        if held and not self._transport.is_closing():
            self._transport.resume_reading()

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # -- from the client -------------------------------------------------------------------------------------------

    def _read(self, data: bytes, at: int) -> int:
        """Take whole frames; returns how far. Further ones wait where `_waits` says so."""
        size, turns = len(data), self.turns
        part = SMALL if size <= STEP else 1
        if not self._greeted:
            at = self._greet(data)
            if not at:
                return 0
        while size - at >= frames.HEAD and not self._ended:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > _FRAME:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, at most {_FRAME} are taken"
                )
            start = at + frames.HEAD
            if size - start < length:
                self._needs = frames.HEAD + length
                return at
            stream = int.from_bytes(data[at + 5 : start], "big") & frames.LARGEST_WINDOW
            at = start + length
            kind = data[start - 6]
            self._take(kind, data[start - 5], stream, data[start:at])
            turns.left -= (frames.HEAD + (length // BODY if kind == frames.DATA else length)) // part
            if turns.left < 0 and turns.spent(self.budget):
                self._waits = True
                return at
        self._needs = frames.HEAD
        return size if self._ended else at

    def _greet(self, data: bytes) -> int:
        """Answer the client's first words by ours; returns how far they go, 0 while they are not complete."""
        first = len(frames.PREFACE)
        if not data.startswith(frames.PREFACE[: len(data)]):
            if _OF_HTTP1.match(data):
                self._out.append(_NO_HTTP1)
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is no HTTP/2")
        if len(data) < first + frames.HEAD:
            return 0
        self._greeted = True
        self._wait_no_more()
        self.put(
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
                    frames.INITIAL_WINDOW_SIZE: WINDOW,
                    frames.MAX_FRAME_SIZE: _FRAME,
                    frames.MAX_HEADER_LIST_SIZE: LARGEST,
                }
            ),
            frames.window_update(0, _WIDE - frames.DEFAULT_WINDOW),
        )
        if data[first + 3] != frames.SETTINGS or data[first + 4] & frames.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no SETTINGS in front")
        if self._refused:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, self._cap.full)
        self.watch.begin()
        return first

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers were not brought to their end")
        if kind == frames.DATA:
            self._data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._headers(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == frames.PING:
            self._ping(flags, number, payload)
        elif kind == frames.SETTINGS:
            self._settings(flags, number, payload)
        elif kind == frames.RST_STREAM:
            self._reset(number, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, number, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients don't push")
        else:
            self._other(kind, number, len(payload))

    def _other(self, kind: int, number: int, size: int) -> None:
        """PRIORITY, which is ignored; GOAWAY, behind which streams go on; and what is unknown."""
        if (kind == frames.PRIORITY and not number) or (kind == frames.GOAWAY and number):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} for stream {number}")
        if (kind == frames.PRIORITY and size != 5) or (kind == frames.GOAWAY and size < 8):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} of {size} bytes")
        self._nothing_new()

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._uncredited += size
        if self._uncredited >= _WIDE // 2:
            self.put(frames.window_update(0, self._uncredited))
            self._uncredited = 0
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        stream = self._receiving(number, size)
        if stream is None:
            return
        if not size and not flags & frames.END_STREAM:
            self._nothing_new()
        else:
            self._empty = 0
        stream.received(size)
        if stream.awaited is not None:
            stream.awaited -= len(payload)
            if stream.awaited < 0:
                self._fault(number, ErrorCode.PROTOCOL_ERROR)
                return
        if stream.receiver is not None and payload:
            stream.receiver.received(payload)
        if flags & frames.END_STREAM:
            self._got_end(stream)

    def _receiving(self, number: int, size: int = 0) -> Http2Stream | None:
        """The stream that something came for, of so many bytes; None where it takes nothing any more."""
        stream = self.streams.get(number)
        if stream is None:
            self._late(number, size)
        elif stream.got_end:
            self._fault(number, ErrorCode.STREAM_CLOSED)
            stream = None
        return stream

    def _late(self, number: int, size: int = 0) -> None:
        """Something came for a stream that is over here, as may happen, or that never was."""
        if number == 0 or number > self._last or number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"data for stream {number}, which is not open")
        if not size:  # what it had sent of a long message may be any number of frames
            self._nothing_new()

    def _fault(self, number: int, code: ErrorCode) -> None:
        """The client broke the protocol on one stream, which ends, unless it has."""
        self._nothing_new()
        stream = self.streams.get(number)
        if stream is not None or number > self._last:
            self._count_reset()
            self.put(frames.reset(number, code))
        self._last = max(self._last, number)
        if stream is not None:
            self._give_up(stream)

    def _nothing_new(self) -> None:
        self._empty += 1
        if self._empty == 1:
            self._empty_since = time.monotonic()
        elif self._empty > _MOST_EMPTY:
            self._empty = 0
            if time.monotonic() - self._empty_since > _EMPTY_SECONDS:
                return
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a priority of less than 5 bytes")
            payload = payload[5:]
        if number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"headers on stream {number}, which no client can open")
        if flags & frames.END_HEADERS:
            self._open(flags, number, payload)
        else:
            self._block = number, flags, bytearray(payload)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
        _, first, block = self._block
        block += payload
        if len(block) > LARGEST_READ:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "headers of more than 256 KiB")
        if not payload:
            self._nothing_new()
        if flags & frames.END_HEADERS:
            self._block = None
            self._open(first, number, bytes(block))

    def _open(self, flags: int, number: int, block: bytes) -> None:
        try:
            fields = self._blocks.read(block)
        except StreamFault as fault:
            _log.info("a stream ends: %s", fault.why)
            if number <= self._last or not isinstance(fault, OversizedFault):
                self._fault(number, fault.code)
                return
            fields = OVERSIZED
        if number <= self._last:
            self._trailers(flags, number, fields)
            return
        self._last = number
        if len(self.streams) >= _MOST_STREAMS or self._final is not None:
            self._count_reset()
            self.put(frames.reset(number, ErrorCode.REFUSED_STREAM))
            return
        self._empty = 0
        self.turns.left -= _NEW_STREAM
        stream = self.streams[number] = Http2Stream(self, number, self._stream_window)
        stream.awaited = self._blocks.length
        if flags & frames.END_STREAM:
            if stream.awaited:
                self._fault(number, ErrorCode.PROTOCOL_ERROR)
                return
            stream.got_end = True
        receiver = self._begin(stream, fields)
        if stream.over or receiver is None:
            return
        stream.receiver = receiver
        if stream.got_end:
            receiver.ended()

    def _trailers(self, flags: int, number: int, fields: Fields) -> None:
        """Headers behind data, which say nothing that we want to know; or of a stream that is over here."""
        if fields and fields[0][0].startswith(b":"):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a request on stream {number}, which was opened before")
        stream = self._receiving(number)
        if stream is None:
            return
        if not flags & frames.END_STREAM:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers in the middle of a stream")
        self._got_end(stream)

    def _got_end(self, stream: Http2Stream) -> None:
        """The client has sent all of a stream."""
        stream.got_end = True
        if stream.awaited:
            self._fault(stream.id, ErrorCode.PROTOCOL_ERROR)
        elif stream.receiver is not None:
            stream.receiver.ended()

    def _reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length than 4")
        stream = self.streams.get(number)
        if stream is None:
            self._late(number)
            return
        self._count_reset()
        self._give_up(stream)

    def _count_reset(self) -> None:
        """Count a stream that the client gives up, or has us give up: its work was begun for nothing."""
        now = time.monotonic()
        if len(self._resets) == _MOST_RESETS and now - self._resets[0] < _RESET_SECONDS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams that were given up")
        self._resets.append(now)

    def _give_up(self, stream: Http2Stream) -> None:
        receiver = stream.receiver
        stream.close()
        if receiver is not None:
            receiver.cancelled()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledged with others")
            return
        wanted = frames.settings_of(payload)
        if frames.INITIAL_WINDOW_SIZE in wanted:
            more = wanted[frames.INITIAL_WINDOW_SIZE] - self._stream_window
            self._stream_window += more
            for stream in list(self.streams.values()):
                stream.window = _opened(stream.window, more)
        if wanted.get(frames.HEADER_TABLE_SIZE, frames.DEFAULT_TABLE) < frames.DEFAULT_TABLE:
            self.shrinks = True
        self._frame_size = wanted.get(frames.MAX_FRAME_SIZE, self._frame_size)
        self._reply(frames.frame(frames.SETTINGS, frames.ACK, 0))
        for stream in list(self.streams.values()):
            stream.pump()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR if not number else ErrorCode.PROTOCOL_ERROR, "a PING that is none"
            )
        if flags & frames.ACK:
            self._nothing_new()
            self.watch.answered()
            if payload == _NEAR_THE_END:
                self._take_no_more()
            return
        self.watch.pinged()
        self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _reply(self, answer: bytes) -> None:
        """Answer what a client may ask for any number of times, as long as it reads the answers."""
        self._nothing_new()
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many questions whose answers are not read")
        self.put(answer)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than 4")
        more = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        if number:
            stream = self.streams.get(number)
            if stream is None:
                self._late(number)
            elif not more or stream.window + more > frames.LARGEST_WINDOW:
                self._fault(number, ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR)
            else:
                stream.window += more
                stream.pump()
            return
        if not more:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that opens by nothing")
        self._window = _opened(self._window, more)
        self._pump()

    # -- to the client ---------------------------------------------------------------------------------------------

    def takes(self, size: int) -> bool:
        """Whether the client takes so many bytes at once, and in one frame; then they count as sent."""
        if size > self._window or size > self._frame_size:
            return False
        self._window -= size
        return True

    def allowed(self, size: int) -> int:
        """How many of so many bytes it takes in one frame, which then count as sent."""
        size = min(size, self._window, self._frame_size)
        if size > 0:
            self._window -= size
        return size

    def wait(self, stream: Http2Stream) -> None:
        """Have a stream go on when there is room."""
        self._waiting[stream] = None

    def _pump(self) -> None:
        """A frame of each in its turn, or a long answer keeps all others from theirs."""
        while self._waiting and self._window > 0:
            stream = self._waiting.popitem(last=False)[0]
            if stream.send_one():
                self._waiting[stream] = None

    def closed(self, stream: Http2Stream) -> None:
        """A stream is over."""
        self.streams.pop(stream.id, None)
        if self._waiting:
            self._waiting.pop(stream, None)
        if self._final is not None and not self.streams:
            self._part()

    def shrunk(self, block: bytes | memoryview) -> bytes:
        """A header block that says that the table is smaller, as the client wants it (RFC 7541, section 4.2)."""
        self.shrinks = False
        return frames.NO_TABLE + block

    def put(self, *parts: bytes | memoryview) -> None:
        """Have something sent at the end of this turn of the loop."""
        if self._ended:
            return
        self._out += parts
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def say(self, *parts: bytes | memoryview) -> None:
        """The same, of what belongs to a call."""
        self._says = True
        self.put(*parts)

    def _flush(self) -> None:
        self._flushes = False
        if self._out and not self._transport.is_closing():
            out, self._out = b"".join(self._out), []
            self._written += len(out)
            self._transport.write(out)
            if self.paused and not self._deaf and self._transport.get_write_buffer_size() > _MOST_UNREAD:
                self._deaf = True  # or its windows, as wide as it likes, have us keep the answers to all that it asks
                self._transport.pause_reading()
            if self._says:
                self._says = False
                self._empty = 0
                self.watch.sent()

    def signs(self) -> tuple[int, int]:
        """What changes while the client lives: it sends something, or takes some of what waits for it."""
        if not self._transport.can_write_eof():
            return self._came, _acknowledged(self._transport)
        waits = self._transport.get_write_buffer_size()
        return self._came, self._written - waits if waits else -1

    def drain(self) -> None:
        """Ask the client to open no more streams; end when those that there are have ended.

        Those count as well that it opens before it has heard of it.
        """
        if self._draining or self._ended:
            return
        self._draining = True
        if not self._greeted:
            self.abort()
            return
        self.put(
            frames.go_away(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR), frames.frame(frames.PING, 0, 0, _NEAR_THE_END)
        )
        self._patience = self._loop.call_later(_NOTICE_SECONDS, self._take_no_more)

    def _take_no_more(self) -> None:
        """The client has heard of the end, or had its time to: what it opens from now on is refused."""
        if not self._draining or self._final is not None:
            return
        self._wait_no_more()
        self._final = self._last
        self.put(frames.go_away(self._final, ErrorCode.NO_ERROR))
        if not self.streams:
            self._part()

    def _part(self) -> None:
        """All is answered: the client ends the connection, as calls may be on their way that are refused; or we do."""
        if self._patience is None and not self._ended:
            self._patience = self._loop.call_later(_PARTING_SECONDS, self.end, ErrorCode.NO_ERROR)

    def end(self, code: ErrorCode, why: str = "") -> None:
        """Say why, and end."""
        if self._ended:
            return
        self._ended = True
        if why:
            _log.info("a connection ends: %s", why)
        if self._greeted and (why or self._final is None):
            self._out.append(frames.go_away(self._last if self._final is None else self._final, code, why))
        self._flush()
        self._stop_waiting()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._wait_no_more()
        self._linger(None)
        for stream in list(self.streams.values()):
            self._give_up(stream)

    def _linger(self, signs: tuple[int, int] | None) -> None:
        """Wait for the client's end, as long as there are signs of it."""
        now = self.signs()
        if now == signs:
            self.abort()
            return
        if not self._transport.can_write_eof() and (now[1] < 0 or now[1] >= self._written):
            self._transport.close()  # TLS has a goodbye of its own, which waits only so long for what is not read yet
        self._patience = self._loop.call_later(_GOODBYE_SECONDS, self._linger, now)

    def abort(self) -> None:
        """End now, whatever is under way."""
        self._transport.abort()


def _acknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the client's system has taken, TLS's own included; -1 where the system does not tell.

    A transport of TLS tells only of what it has not encrypted yet.
    """
    end = transport.get_extra_info("socket")
    if end is None:  # TLS has let go of it, which is told a turn of the loop later
        return -1
    try:
        told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # it is closed
        return -1
    acknowledged: int = _TCP_INFO.unpack(told)[0] if len(told) == _TCP_INFO.size else -1
    return acknowledged


def _opened(window: int, more: int) -> int:
    """A window once it is open by so many more bytes."""
    if window + more > frames.LARGEST_WINDOW:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes")
    return window + more


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding of more than there is")
    return payload[1 : len(payload) - payload[0]]
