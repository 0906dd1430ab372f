"""One connection of HTTP/2, from its first words to the last: frames in, one write a turn of the loop out.

What costs more than the connection's budget of a turn of the loop waits for a later turn, and reading with it.

A client is pinged now and then, by the rules and names of gRPC's settings: one that neither answers nor shows another
sign of life is left, one that pings too often is told off, and old connections end, so that clients look for a server
again.

The end is said, and nothing is sent behind it. What comes is read and forgotten until the client ends it as well:
closing a socket that holds something unread takes back what was sent (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from container.http2 import frames
from container.http2.frames import LARGEST, ConnectionFault, ErrorCode
from container.http2.streams import MAX_STREAMS, WIDE, WINDOW, FloodGuard, Output, StreamTable
from container.inference.limits import BODY, SMALL, STEP, TurnBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.http2.streams import Begin
    from container.inference.limits import ConnectionCap, Turns

_log = logging.getLogger("mme.http2")
_FRAME = 1 << 18  # bytes of the largest frame that we take
_JITTER = 0.1  # of an age: connections that were made together need not end together
_STRICT_SECONDS = 7200.0  # between pings of clients without calls, where these are not permitted
_LOOK_SECONDS = 0.01
_PING = b"mme-ping"
LAST_PING = b"mme-ends"  # whose answer says that the client has heard of the end that is near
_OF_HTTP1 = re.compile(rb"[A-Z]{3,7} ")
_NO_HTTP1 = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this port speaks gRPC, by HTTP/2 from the first byte on; ask for anything else at the server's port for HTTP\n"
)
_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: WINDOW,
        frames.MAX_FRAME_SIZE: _FRAME,
        frames.MAX_HEADER_LIST_SIZE: LARGEST,
    }
) + frames.window_update(0, WIDE - frames.DEFAULT_WINDOW)


class Keepalive(NamedTuple):
    """How long connections last. Times are seconds."""

    loop: asyncio.AbstractEventLoop
    time: float = 7200.0  # without a word, after which a client is pinged
    timeout: float = 20.0  # that it has for the answer
    permit_without_calls: bool = False  # whether that is done, and may be done by clients, while there are no calls
    max_pings_without_data: int = 2  # of ours before something else is sent; 0 for any number
    min_ping_interval: float = 300.0  # that clients leave between theirs, as long as nothing else is sent to them
    max_ping_strikes: int = 2  # how often they may fail to; 0 for any number
    max_age: float = 0.0  # after which a connection takes no more calls; 0 for never
    grace: float | None = None  # that those have then which there are; None for ever
    greeting: float = 20.0  # that a client has for its first words
    notice: float = 2.0  # that it has to hear of the end that is near
    parting: float = 1.0  # that it has to end the connection itself
    goodbye: float = 5.0  # in which something has to leave, or to come, once all is said


class Watch:
    """Pings of both sides, and the age of a connection."""

    def __init__(self, rules: Keepalive, connection: Connection) -> None:
        self._rules = rules
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._age: asyncio.TimerHandle | None = None
        self._pings = 0  # of ours since anything else was sent
        self._strikes = 0
        self._pinged = float("-inf")
        self._signs = (0, 0)  # of the client, when it was pinged

    def begin(self) -> None:
        rules = self._rules
        self._timer = rules.loop.call_later(rules.time, self.ping)
        if rules.max_age:
            spread = 1 + random.uniform(-_JITTER, _JITTER)  # noqa: S311 - no secret
            self._age = rules.loop.call_later(rules.max_age * spread, self._old)

    def end(self) -> None:
        for timer in (self._timer, self._age):
            if timer is not None:
                timer.cancel()
        self._timer = self._age = None

    def sent(self) -> None:
        self._strikes = 0
        self._pings = 0
        self._pinged = float("-inf")

    def ping(self) -> None:
        """Ask whether the client lives, if it may be asked; it is to answer in time."""
        rules = self._rules
        limit = rules.max_pings_without_data
        if (self._connection.streams.open or rules.permit_without_calls) and not (limit and self._pings >= limit):
            self._pings += 1
            self._connection.output.put(frames.frame(frames.PING, 0, 0, _PING))
            self._signs = self._connection.signs()
            self._timer = rules.loop.call_later(rules.timeout, self._silent)
        else:
            self._timer = rules.loop.call_later(rules.time, self.ping)

    def answered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._rules.loop.call_later(self._rules.time, self.ping)

    def _silent(self) -> None:
        """The client has not answered: our ping may lie behind much that a slow one has yet to read."""
        signs = self._connection.signs()
        if signs == self._signs:
            self._connection.abort()
            return
        self._signs = signs
        self._timer = self._rules.loop.call_later(self._rules.timeout, self._silent)

    def pinged(self) -> None:
        """The client has sent a ping.

        Raises:
            ConnectionFault: it does so too often.
        """
        rules, now = self._rules, self._rules.loop.time()
        idle = not self._connection.streams.open and not rules.permit_without_calls
        interval = _STRICT_SECONDS if idle else rules.min_ping_interval
        if now - self._pinged < interval:
            self._strikes += 1
            if rules.max_ping_strikes and self._strikes > rules.max_ping_strikes:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged = now

    def _old(self) -> None:
        self._connection.drain()
        if self._rules.grace is not None:
            self._age = self._rules.loop.call_later(self._rules.grace, self._connection.abort)


class Shutdown:
    """The end of a connection: word that it is near, then which stream is the last, then the client's own end."""

    def __init__(self, rules: Keepalive, connection: Connection) -> None:
        self.begun = False  # whether the client was told that it is near
        self._rules = rules
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None

    def after(self, seconds: float, then: Callable[..., object], *args: Any) -> None:
        """Have something done unless `stop` comes first."""
        self.stop()
        self._timer = self._rules.loop.call_later(seconds, then, *args)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self) -> None:
        """Ask the client to open no more streams. Those count as well that it opens before it has heard of it."""
        self.begun = True
        near = frames.go_away(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR)
        self._connection.output.put(near, frames.frame(frames.PING, 0, 0, LAST_PING))
        self.after(self._rules.notice, self.take_no_more)

    def answered(self, payload: bytes) -> None:
        if payload == LAST_PING and self.begun:
            self.take_no_more()

    def take_no_more(self) -> None:
        """The client has heard of the end, or had its time to: what it opens from now on is refused."""
        streams = self._connection.streams
        if streams.final is not None:
            return
        self.stop()
        streams.final = streams.last
        self._connection.output.put(frames.go_away(streams.final, ErrorCode.NO_ERROR))
        if not streams.open:
            self.part()

    def part(self) -> None:
        """All is answered: the client ends the connection, as calls may be on their way that are refused; or we do."""
        if self._timer is None and not self._connection.output.over:
            self.after(self._rules.parting, self._connection.end, ErrorCode.NO_ERROR)

    def linger(self, before: tuple[int, int] | None) -> None:
        """Wait for the client's end, as long as there are signs of it."""
        connection = self._connection
        now = connection.signs()
        if now != before:
            self.after(self._rules.goodbye, self.linger, now)
        elif connection.output.transport.can_write_eof():
            connection.abort()
        else:
            connection.output.transport.close()  # TLS has a goodbye of its own, which waits for so long again


async def drain(connections: set[Connection], seconds: float) -> None:
    """Have connections end, those as well that are being made; return once they have, or are left after a while."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while connections and loop.time() < ends:
        for connection in list(connections):
            connection.drain()
        await asyncio.sleep(_LOOK_SECONDS)
    for connection in list(connections):
        connection.abort()


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        begin: told of each stream.
        connections: those that there are, of which this one is one while it lasts.
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
        guard, budget = FloodGuard(), TurnBudget()
        self.watch = Watch(keepalive, self)
        self.shutdown = Shutdown(keepalive, self)
        self.output = Output(loop, guard, self.watch)
        self.streams = StreamTable(self, begin, self.output, guard, turns, budget)
        self._rules = keepalive
        self._connections = connections
        self._cap = cap
        self._refused = False  # beyond the cap
        self._greeted = False
        self._turns = turns
        self._budget = budget
        self._waits = False  # for a later turn of the loop
        self._held = bytearray()  # what came and is not handled: a part of a frame, or frames that wait
        self._needs = 0  # bytes of that
        self._came = 0  # pieces, of which only the change counts

    # -- asyncio's ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.output.transport = cast("asyncio.Transport", transport)  # as a stream's is, also uvloop's
        self._connections.add(self)
        self._refused = not self._cap.enter()
        if self._refused and self._cap.is_crowded:
            self.abort()
        self.shutdown.after(self._rules.greeting, self.abort)

    def data_received(self, data: bytes) -> None:
        self._came += 1
        if self.output.over:
            return
        if self._held:
            self._held += data
            if self._waits or len(self._held) < self._needs:
                return
            data, self._held = bytes(self._held), bytearray()
        self._handle(bytes(data))

    def go_on(self) -> None:
        """Take more of what came, in a later turn; then listen again."""
        self._waits = False
        if self.output.deaf:
            return
        if self._held:
            data, self._held = bytes(self._held), bytearray()
            self._handle(data)
        if not (self._waits or self.output.deaf or self.output.transport.is_closing()):
            self.output.transport.resume_reading()

    def pause_writing(self) -> None:
        self.output.paused = True

    def resume_writing(self) -> None:
        self.output.paused = False
        if self.output.deaf:
            self.output.deaf = False
            if not self._waits:
                self.go_on()
        for stream in list(self.streams.open.values()):
            stream.tell_drained()

    def connection_lost(self, _error: Exception | None) -> None:
        self.output.over = True
        self.shutdown.stop()
        self.watch.end()
        self._connections.discard(self)
        self._cap.leave()
        self._held.clear()
        self.streams.give_up()

    # -- from the client -----------------------------------------------------------------------------------------------

    def _handle(self, data: bytes) -> None:
        """Take what came, as far as the budget of this turn goes."""
        try:
            at = self._read(data)
        except ConnectionFault as fault:
            self.end(fault.code, fault.why)
            return
        if at == len(data):
            self._waits = False
            return
        self._held = bytearray(memoryview(data)[at:])
        if self._waits:
            self.output.transport.pause_reading()
            self._turns.wait(self, self._budget)

    def _read(self, data: bytes) -> int:
        """Take whole frames; returns how far. Further ones wait where `_waits` says so."""
        size, turns, streams, at = len(data), self._turns, self.streams, 0
        part = SMALL if size <= STEP else 1
        if not self._greeted:
            at = self._greet(data)
            if not at:
                return 0
        while size - at >= frames.HEAD and not self.output.over:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > _FRAME:
                why = f"a frame of {length} bytes, at most {_FRAME} are taken"
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, why)
            start = at + frames.HEAD
            if size - start < length:
                self._needs = frames.HEAD + length
                return at
            number = int.from_bytes(data[at + 5 : start], "big") & frames.LARGEST_WINDOW
            at = start + length
            kind = data[start - 6]
            streams.take(kind, data[start - 5], number, data[start:at])
            turns.left -= (frames.HEAD + (length // BODY if kind == frames.DATA else length)) // part
            if turns.left < 0 and turns.spent(self._budget):
                self._waits = True
                return at
        self._needs = frames.HEAD
        return size if self.output.over else at

    def _greet(self, data: bytes) -> int:
        """Answer the client's first words by ours; returns how far they go, 0 while they are not complete."""
        first = len(frames.PREFACE)
        if not data.startswith(frames.PREFACE[: len(data)]):
            if _OF_HTTP1.match(data):
                self.output.put(_NO_HTTP1)
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is no HTTP/2")
        if len(data) < first + frames.HEAD:
            return 0
        self._greeted = True
        self.shutdown.stop()
        self.output.put(_SETTINGS)
        if data[first + 3] != frames.SETTINGS or data[first + 4] & frames.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no SETTINGS in front")
        if self._refused:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, self._cap.full)
        self.watch.begin()
        return first

    # -- its end -------------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that the transport holds for the client."""
        transport = self.output.transport
        return 0 if transport.is_closing() else transport.get_write_buffer_size()

    def signs(self) -> tuple[int, int]:
        """What changes while the client lives: it sends something, or takes some of what waits for it."""
        waits = self.output.transport.get_write_buffer_size()
        return self._came, self.output.written - waits if waits else -1

    def drain(self) -> None:
        """Take no more streams, once the client has heard of that; end when those that there are have ended."""
        if self.shutdown.begun or self.output.over:
            return
        if self._greeted:
            self.shutdown.begin()
        else:
            self.abort()

    def end(self, code: ErrorCode, why: str = "") -> None:
        """Say why, and end."""
        if self.output.over:
            return
        if why:
            _log.info("a connection ends: %s", why)
        final = self.streams.final
        says = self._greeted and (why or final is None)
        self.output.end(frames.go_away(self.streams.last if final is None else final, code, why) if says else b"")
        self._stop_handling()
        transport = self.output.transport
        if transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
        self.shutdown.stop()
        self.shutdown.linger(None)
        self.streams.give_up()

    def _stop_handling(self) -> None:
        """Forget what came and is not handled, and read what else comes."""
        paused = self._waits or self.output.deaf
        self._held.clear()
        self._waits = False
        self.output.deaf = False
        if paused and not self.output.transport.is_closing():
            self.output.transport.resume_reading()

    def abort(self) -> None:
        self.output.transport.abort()
