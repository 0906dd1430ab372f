"""A connection's streams: what the client's frames mean to them, and what is sent on them within its windows.

What serves streams is told of each when its headers have come, and gives a receiver for the rest of it.

Both sides send no more than the other side's windows allow. Ours are opened again when a receiver has made use of what
came (`Http2Stream.credit`); the connection's own is opened at once, since streams hold back what belongs to them.

A client that breaks the protocol, or makes us work for nothing (frames without content, pings, resets without end),
loses its connection with a word of why; one that breaks it on a stream alone loses the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

from container.http2 import frames
from container.http2.frames import LARGEST_READ, ConnectionFault, ErrorCode, HeaderBlocks, OversizedFault, StreamFault


class Receiver(Protocol):
    """What takes the data of one stream."""

    def received(self, payload: bytes) -> None:
        """Take data that the client has sent."""

    def ended(self) -> None:
        """Learn that no more data will come."""

    def cancelled(self) -> None:
        """The client has given the stream up, or has left."""


if TYPE_CHECKING:
    from collections.abc import Callable

    from container.http2.connection import Connection, Watch
    from container.http2.frames import Fields
    from container.inference.limits import TurnBudget, Turns

    Begin = Callable[["Http2Stream", Fields | None], Receiver | None]

_log = logging.getLogger("mme.http2")
WINDOW = 1 << 20  # bytes that a client may send on a stream before any of it is used
WIDE = 1 << 24  # and on the connection
MAX_STREAMS = 1024
MAX_EMPTY = 4 * MAX_STREAMS  # frames in a row that bring nothing, while nothing of a call is sent either,
EMPTY_SECONDS = 10.0  # within so short a time
MAX_RESETS = 10 * MAX_STREAMS  # within the last seconds: all calls of a busy proxy may be past their deadlines
_RESET_SECONDS = 10.0
_NEW_STREAM = 128  # bytes of heads that a new stream counts for, beside its own
MAX_UNREAD = 1 << 20  # bytes that a client leaves unread while we listen to it


class FloodGuard:
    """What a client has us do for nothing: frames that bring nothing, and streams that are given up."""

    def __init__(self) -> None:
        self.empty = 0  # such frames in a row; whatever brings something sets it to 0
        self._since = 0.0
        self._resets: deque[float] = deque(maxlen=MAX_RESETS)

    def count_empty(self) -> None:
        """Count a frame that brings nothing; too many of them end the connection."""
        self.empty += 1
        if self.empty == 1:
            self._since = time.monotonic()
        elif self.empty > MAX_EMPTY:
            self.empty = 0
            if time.monotonic() - self._since <= EMPTY_SECONDS:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def count_reset(self) -> None:
        """Count a stream that the client gives up, or has us give up: its work was begun for nothing."""
        now = time.monotonic()
        if len(self._resets) == MAX_RESETS and now - self._resets[0] < _RESET_SECONDS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams that were given up")
        self._resets.append(now)


class Output:
    """What is sent: all of a turn of the loop in one write. What belongs to a call is said, the rest is put."""

    def __init__(self, loop: asyncio.AbstractEventLoop, guard: FloodGuard, watch: Watch) -> None:
        self.transport: asyncio.Transport
        self.written = 0  # bytes that it was given
        self.paused = False  # the client leaves something unread,
        self.deaf = False  # and so much that nothing is read from it either
        self.over = False  # the last word is said, behind which nothing is sent
        self.shrinks = False  # the client's table of headers is smaller than usual, which has to be said once
        self._loop = loop
        self._guard = guard  # is told when something of a call is sent,
        self._watch = watch  # as is this
        self._parts: list[bytes | memoryview] = []
        self._flushes = False
        self._says = False  # something of a call is to be sent

    def put(self, *parts: bytes | memoryview) -> None:
        """Have something sent at the end of this turn of the loop."""
        if self.over:
            return
        self._parts += parts
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self.flush)

    def say(self, *parts: bytes | memoryview) -> None:
        self._says = True
        self.put(*parts)

    def headers(self, number: int, block: bytes, flags: int = frames.END_HEADERS) -> None:
        """Have a header block of a call sent, behind word of a smaller table (RFC 7541, section 4.2)."""
        if self.shrinks:
            self.shrinks = False
            block = frames.NO_TABLE + block
        self.say(frames.frame(frames.HEADERS, flags, number, block))

    def flush(self) -> None:
        self._flushes = False
        transport = self.transport
        if not self._parts or transport.is_closing():
            return
        out, self._parts = b"".join(self._parts), []
        self.written += len(out)
        transport.write(out)
        if self.paused and not self.deaf and transport.get_write_buffer_size() > MAX_UNREAD:
            self.deaf = True  # or its windows, as wide as it likes, have us keep the answers to all that it asks
            transport.pause_reading()
        if self._says:
            self._says = False
            self._guard.empty = 0
            self._watch.sent()

    def end(self, last: bytes) -> None:
        """Send this behind everything else, and nothing any more."""
        if last:
            self.put(last)
        self.over = True
        self.flush()


class SendWindow:
    """How much data the client takes, of all streams together."""

    def __init__(self) -> None:
        self.of_streams = frames.DEFAULT_WINDOW  # what it takes of a new one at first
        self.frame_size = frames.SMALLEST_FRAME_SIZE  # bytes of its largest frame
        self._left = frames.DEFAULT_WINDOW
        self.waiting: OrderedDict[Http2Stream, None] = OrderedDict()  # have something to send once it takes more

    def takes(self, size: int) -> bool:
        """Whether the client takes so many bytes at once, and in one frame; then they count as sent."""
        if size > self._left or size > self.frame_size:
            return False
        self._left -= size
        return True

    def allowed(self, size: int) -> int:
        """How many of so many bytes it takes in one frame, which then count as sent."""
        size = min(size, self._left, self.frame_size)
        if size > 0:
            self._left -= size
        return size

    def open(self, more: int) -> None:
        """Take so much more: a frame of each stream in its turn, or a long answer keeps all others from theirs."""
        self._left = _opened(self._left, more)
        while self.waiting and self._left > 0:
            stream = self.waiting.popitem(last=False)[0]
            if stream.send_one():
                self.waiting[stream] = None


class Http2Stream:
    """One of a connection's streams."""

    def __init__(self, table: StreamTable, number: int, window: int) -> None:
        self.id = number
        self.window = window  # bytes of data that the client takes of it
        self.receiver: Receiver | None = None  # takes its data; None where that is of no use any more
        self.got_end = False  # the client has sent all of it
        self.over = False  # nothing can be sent any more
        self.awaited: int | None = None  # bytes of data that are to come by its content-length, where it has one
        self._table = table
        self._queue: deque[tuple[memoryview, bool]] = deque()  # data, and headers with which the stream ends
        self._uncredited = 0
        self._drained: asyncio.Future[None] | None = None
        self._turn: asyncio.Future[None] | None = None

    # -- to the client -----------------------------------------------------------------------------------------------

    def headers(self, block: bytes) -> None:
        """Send headers in front of all data."""
        if not self.over:
            self._table.output.headers(self.id, block)

    def data(self, payload: bytes) -> None:
        """Send data, as soon as the client takes it."""
        if self.over:
            return
        size = len(payload)
        if not self._queue and size <= self.window and self._table.window.takes(size):
            self.window -= size
            self._table.output.say(frames.frame_head(size, frames.DATA, 0, self.id), payload)
        else:
            self._queue.append((memoryview(payload), False))
            self.pump()

    def end(self, block: bytes) -> None:
        """Send headers behind all data, with which the stream is over."""
        if self._queue:
            self._queue.append((memoryview(block), True))
        elif not self.over:
            self._table.output.headers(self.id, block, frames.LAST_HEADERS)
            self._finish()

    def whole(self, head: bytes, payload: tuple[bytes, ...], tail: bytes) -> None:
        """Send headers, the parts of some data, and headers with which the stream is over: at once, where it may be."""
        if self.over:
            return
        size = sum(map(len, payload))
        output = self._table.output
        if self._queue or size > self.window or output.shrinks or not self._table.window.takes(size):
            self.headers(head)
            self.data(b"".join(payload))
            self.end(tail)
            return
        output.say(
            frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, head),
            frames.frame_head(size, frames.DATA, 0, self.id),
            *payload,
            frames.frame(frames.HEADERS, frames.LAST_HEADERS, self.id, tail),
        )
        self._finish()

    def _finish(self) -> None:
        """All is sent: a client that goes on sending need not."""
        if not self.got_end:
            self._table.output.put(frames.reset(self.id, ErrorCode.NO_ERROR))
        self.close()

    def pump(self) -> None:
        while self.send_one():
            pass

    def send_one(self) -> bool:
        """Send one frame, if the windows allow it; tells whether more may be sent at once."""
        if not self._queue:
            return False
        table = self._table
        part = self._queue[0][0]
        if self.window <= 0:
            return False  # what opens it has it pumped
        size = table.window.allowed(min(len(part), self.window))
        if size <= 0:
            table.window.waiting[self] = None
            return False
        self._queue.popleft()
        if size < len(part):
            self._queue.appendleft((part[size:], False))
        self.window -= size
        table.output.say(frames.frame_head(size, frames.DATA, 0, self.id), part[:size])
        if not self._queue:
            self.tell_drained()
        elif self._queue[0][1]:  # which no window holds back
            table.output.headers(self.id, bytes(self._queue[0][0]), frames.LAST_HEADERS)
            self._finish()
        return bool(self._queue)

    @property
    def free(self) -> bool:
        """Whether all that was sent is under way."""
        return not self._queue and not self._table.output.paused

    async def drained(self) -> None:
        """Wait until all that was sent is under way."""
        while not self.over and not self.free:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def tell_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def close(self) -> None:
        """Nothing is sent any more."""
        self.over = True
        self.receiver = None
        self._queue.clear()
        self._table.closed(self)
        self.tell_drained()

    # -- from the client ---------------------------------------------------------------------------------------------

    def received(self, size: int) -> None:
        """So many bytes came, and are not used yet."""
        self._uncredited += size
        if self._uncredited > WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"more on stream {self.id} than its window allows")

    def credit(self) -> None:
        """All that came has been used."""
        if self._uncredited >= WINDOW // 2 and not self.got_end and not self.over:
            self._table.output.put(frames.window_update(self.id, self._uncredited))
            self._uncredited = 0

    async def turn(self, heads: int) -> None:
        """Count a message as so many bytes of heads, and wait for a turn in which the connection may handle it."""
        turns, budget = self._table.turns, self._table.budget
        turns.left -= heads
        while turns.left < 0 and turns.spent(budget):
            self._turn = asyncio.get_running_loop().create_future()
            turns.wait(self, budget)
            await self._turn

    def go_on(self) -> None:
        """The turn has come that `turn` waits for."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


class StreamTable:
    """The streams of a connection. Takes the client's frames.

    Args:
        begin: told of each stream and of its headers, None of those that are larger than is taken.
    """

    def __init__(
        self,
        connection: Connection,
        begin: Begin,
        output: Output,
        guard: FloodGuard,
        turns: Turns,
        budget: TurnBudget,
    ) -> None:
        self.open: dict[int, Http2Stream] = {}  # by number
        self.last = 0  # the highest that the client has opened
        self.final: int | None = None  # the highest that is served, None while any is
        self.window = SendWindow()
        self.output = output
        self.turns = turns
        self.budget = budget
        self._connection = connection
        self._begin = begin
        self._guard = guard
        self._blocks = HeaderBlocks()
        self._block: tuple[int, int, bytearray] | None = None  # stream and flags of headers that are not complete
        self._uncredited = 0

    def take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle one frame; one that breaks the protocol is a ConnectionFault."""
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers were not brought to their end")
        if kind == frames.DATA:
            self._data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._headers(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, number, payload)
        else:
            frames.check(kind, number, len(payload))
            if kind == frames.WINDOW_UPDATE:
                self._window_update(number, payload)
            elif kind == frames.PING:
                self._ping(flags, payload)
            elif kind == frames.SETTINGS:
                self._settings(flags, payload)
            elif kind == frames.RST_STREAM:
                self._reset(number)
            else:  # PRIORITY, which is ignored; GOAWAY, behind which streams go on; and what is unknown
                self._guard.count_empty()

    def closed(self, stream: Http2Stream) -> None:
        self.open.pop(stream.id, None)
        if self.window.waiting:
            self.window.waiting.pop(stream, None)
        if self.final is not None and not self.open:
            self._connection.shutdown.part()

    def give_up(self) -> None:
        """All are over: the client has left, or is left."""
        for stream in list(self.open.values()):
            self._give_up(stream)

    def _give_up(self, stream: Http2Stream) -> None:
        receiver = stream.receiver
        stream.close()
        if receiver is not None:
            receiver.cancelled()

    # -- data and headers ----------------------------------------------------------------------------------------------

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._uncredited += size
        if self._uncredited >= WIDE // 2:
            self.output.put(frames.window_update(0, self._uncredited))
            self._uncredited = 0
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        stream = self._receiving(number, size)
        if stream is None:
            return
        if not size and not flags & frames.END_STREAM:
            self._guard.count_empty()
        else:
            self._guard.empty = 0
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
        stream = self.open.get(number)
        if stream is None:
            self._late(number, size)
        elif stream.got_end:
            self._fault(number, ErrorCode.STREAM_CLOSED)
            stream = None
        return stream

    def _late(self, number: int, size: int = 0) -> None:
        """Something came for a stream that is over here, as may happen, or that never was."""
        if number == 0 or number > self.last or number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"data for stream {number}, which is not open")
        if not size:  # what it had sent of a long message may be any number of frames
            self._guard.count_empty()

    def _fault(self, number: int, code: ErrorCode) -> None:
        """The client broke the protocol on one stream, which ends, unless it has."""
        self._guard.count_empty()
        stream = self.open.get(number)
        if stream is not None or number > self.last:
            self._guard.count_reset()
            self.output.put(frames.reset(number, code))
        self.last = max(self.last, number)
        if stream is not None:
            self._give_up(stream)

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
            self._got_headers(flags, number, payload)
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
            self._guard.count_empty()
        if flags & frames.END_HEADERS:
            self._block = None
            self._got_headers(first, number, bytes(block))

    def _got_headers(self, flags: int, number: int, block: bytes) -> None:
        """Open a stream by its headers, or end what came of one by trailers."""
        fields: Fields | None = None
        try:
            fields = self._blocks.read(block)
        except StreamFault as fault:
            _log.info("a stream ends: %s", fault.why)
            if number <= self.last or not isinstance(fault, OversizedFault):
                self._fault(number, fault.code)
                return
        if number <= self.last:
            self._trailers(flags, number, fields or ())
            return
        self.last = number
        if len(self.open) >= MAX_STREAMS or self.final is not None:
            self._guard.count_reset()
            self.output.put(frames.reset(number, ErrorCode.REFUSED_STREAM))
            return
        self._guard.empty = 0
        self.turns.left -= _NEW_STREAM
        stream = self.open[number] = Http2Stream(self, number, self.window.of_streams)
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
        stream.got_end = True
        if stream.awaited:
            self._fault(stream.id, ErrorCode.PROTOCOL_ERROR)
        elif stream.receiver is not None:
            stream.receiver.ended()

    # -- what is said beside them --------------------------------------------------------------------------------------

    def _reset(self, number: int) -> None:
        stream = self.open.get(number)
        if stream is None:
            self._late(number)
            return
        self._guard.count_reset()
        self._give_up(stream)

    def _settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledged with others")
            return
        wanted = frames.settings_of(payload)
        window = self.window
        if frames.INITIAL_WINDOW_SIZE in wanted:
            more = wanted[frames.INITIAL_WINDOW_SIZE] - window.of_streams
            window.of_streams += more
            for stream in list(self.open.values()):
                stream.window = _opened(stream.window, more)
        if wanted.get(frames.HEADER_TABLE_SIZE, frames.DEFAULT_TABLE) < frames.DEFAULT_TABLE:
            self.output.shrinks = True
        window.frame_size = wanted.get(frames.MAX_FRAME_SIZE, window.frame_size)
        self._reply(frames.frame(frames.SETTINGS, frames.ACK, 0))
        for stream in list(self.open.values()):
            stream.pump()

    def _ping(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            self._guard.count_empty()
            self._connection.watch.answered()
            self._connection.shutdown.answered(payload)
            return
        self._connection.watch.pinged()
        self._reply(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _reply(self, answer: bytes) -> None:
        """Answer what a client may ask for any number of times, as long as it reads the answers."""
        self._guard.count_empty()
        if self.output.transport.get_write_buffer_size() > MAX_UNREAD:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many questions whose answers are not read")
        self.output.put(answer)

    def _window_update(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        if not number:
            if not more:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that opens by nothing")
            self.window.open(more)
            return
        stream = self.open.get(number)
        if stream is None:
            self._late(number)
        elif not more or stream.window + more > frames.LARGEST_WINDOW:
            self._fault(number, ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR)
        else:
            stream.window += more
            stream.pump()


def _opened(window: int, more: int) -> int:
    """A window once it is open by so many more bytes, if it may be."""
    if window + more > frames.LARGEST_WINDOW:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes")
    return window + more


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding of more than there is")
    return payload[1 : len(payload) - payload[0]]
