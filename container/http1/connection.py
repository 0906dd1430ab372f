"""Exchanges → answers: the half of a connection that writes, keeps the order, and knows how to end.

Requests reach the handler strictly one after another: the next one when the one before is answered and the client reads
its answers. What was parsed ahead waits; when too much waits, reading pauses.

A connection ends in one of three ways. *Idle*: it just closes. *After a last answer* (the client or HTTP/1.0 says so,
a drain, a refusal): we close our direction, throw away what still comes and wait a while for the client to close: were
the socket closed over unread bytes, the client might lose the answer. *Gone*: the client left, or kept us waiting.
Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections import deque
from typing import TYPE_CHECKING

from container.http1.head import JSON_TYPE, Refusal, error_body
from container.http1.reader import RequestReader
from container.http1.stream import BODILESS, JOINED_UP_TO, Form, Stream, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.http1.exchange import Exchange
    from container.http1.server import Http1Server

LOG = logging.getLogger("mme.http")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BUG = error_body("The server failed to handle the request: this is a bug in it, its log has the traceback.")


class HttpProtocol(RequestReader, asyncio.Protocol):
    """One connection. `answer` and `begin` are for exchanges, `ended` and `hang_up` for streams, the rest for others.

    Attributes:
        streamed: bytes that the parts of streamed answers took on the wire.
    """

    __slots__ = (
        "_advancing",
        "_behind",
        "_current",
        "_full",
        "_half_closed",
        "_handler",
        "_heads",
        "_lingering",
        "_patience",
        "_pending_refusal",
        "_probed",
        "_taken",
        "_transport",
        "_waiting",
        "_write_paused",
        "streamed",
    )

    def __init__(self, server: Http1Server) -> None:
        super().__init__(server)
        self._handler = server.handler
        self._heads = server.heads
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None  # the handler has it
        self._waiting: deque[Exchange] = deque()  # parsed ahead
        self._pending_refusal: Refusal | None = None  # goes out behind all of them
        self._behind = False  # whether anything is to be done once `_current` is answered
        self._advancing = False
        self._full = False  # reading is paused: enough waits
        self._write_paused = False
        self._half_closed = False  # by the client
        self._probed = False
        self._lingering = False
        self._patience = server.limits.header_timeout  # of an idle connection
        self.streamed = 0
        self._taken: int | None = None  # moves whenever the client reads; what a stream writes does not move it

    @property
    def owed(self) -> int:
        """Accepted requests without an answer."""
        return len(self._waiting) + (self._current is not None)

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client's socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a stream's, always
        """Begin."""
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.write_buffer)
        self._server.connections.add(self)
        if self._server.draining:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  why does not matter
        """Forget everything, and tell the handler that nobody waits any more."""
        current, self._current = self._current, None
        self._transport = None
        self._waiting.clear()
        self._take_no_more()
        self._server.forget(self)
        if current is not None and current.on_disconnect is not None:
            leaves, current.on_disconnect = current.on_disconnect, None
            leaves()

    def eof_received(self) -> bool:
        """The client sends no more; what it is owed it still gets."""
        self._half_closed = True
        if self._lingering:
            return False
        if not self._boundary:
            self._refuse(Refusal(400, "The request ended before it was complete: send all of it."))
            return True
        if self.owed == 0:
            return False
        if self._taking:
            self._end_with_last()
        return True

    def pause_writing(self) -> None:
        """The client reads too slowly: nothing new is begun for it."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_paused = False
        if self._behind:
            self._advance()

    # requests in, answers out

    def _accept(self, exchange: Exchange) -> None:
        if self._current is None and not self._write_paused:
            self._current = exchange
            self._handle(exchange)
        else:
            self._waiting.append(exchange)
            self._behind = True
            self._pause_if_full()

    def _handle(self, exchange: Exchange) -> None:
        try:
            self._handler(exchange)
        except Exception:  # whatever it is, the client gets an answer and the connection lives on
            LOG.exception("the handler of %r raised", exchange)
            if self._current is not exchange:
                return
            if exchange.connection is self:
                exchange.respond(500, JSON_TYPE, (_BUG,))
            else:
                exchange.cut()

    def answer(self, exchange: Exchange, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Send the answer of the current exchange, then go on with what waits."""
        transport = self._transport
        if transport is None:
            exchange.connection = None
            return
        start = self._heads.get(status) or self._server.head(status)
        if len(body) == 1 and type(body[0]) is bytes:
            length = len(body[0])
        else:
            length = sum(memoryview(part).nbytes for part in body)
        if exchange.plain and status not in BODILESS:
            lead = b"%b%bContent-Length: %d\r\n\r\n" % (start, headers, length)
        else:
            framing = b"" if status == 204 else b"Content-Length: %d\r\n" % length
            lead = start + headers + self._last_lines(exchange, framing)
            if exchange.method == "HEAD" or status in BODILESS:
                body, length = (), 0
        if length <= JOINED_UP_TO:
            transport.write(lead + body[0] if len(body) == 1 else b"".join((lead, *body)))
        else:
            transport.writelines((lead, *body))
        exchange.connection = self._current = None
        self._since, self._patience = self._server.now, self._limits.idle_timeout
        if exchange.final:
            self._end()
        elif self._behind:
            self._advance()

    def _last_lines(self, exchange: Exchange, framing: bytes) -> bytes:
        """The end of a head that has something special about it."""
        if exchange.final:
            framing += b"Connection: close\r\n"
        elif exchange.http10:
            framing += b"Connection: keep-alive\r\n"
        return framing + b"\r\n"

    def begin(self, exchange: Exchange, status: int, headers: bytes) -> None:
        """Send the head of the current exchange's answer; the stream that takes our place there sends the rest."""
        form = form_of(exchange, status)
        framing = b"" if exchange.http10 or status in BODILESS else b"Transfer-Encoding: chunked\r\n"
        if form is Form.UNTIL_CLOSE:
            exchange.final = True
            self._drop_waiting()
        start = self._heads.get(status) or self._server.head(status)
        lead = start + headers + self._last_lines(exchange, framing)
        exchange.connection = Stream(self, self._transport, self._limits.stream_buffer, form)
        self._taken = None
        self._send(lead)

    def ended(self, exchange: Exchange) -> None:
        """A streamed answer is whole: go on as after any other."""
        if self._current is not exchange or self._transport is None:
            return
        self._current = None
        self._since, self._patience = self._server.now, self._limits.idle_timeout
        if exchange.final:
            self._end()
        elif self._behind and not self._transport.is_closing():
            self._advance()

    def hang_up(self, exchange: Exchange, *, now: bool) -> None:
        """A streamed answer is cut: it was the last thing on this connection, which closes, `now` or in good order."""
        if self._current is not exchange:
            return
        self._current = None
        self._drop_waiting()
        if now:
            self.abort()
        else:
            self._end()

    def _drop_waiting(self) -> None:
        """Take no further request, and leave without answer those that wait: their client has to ask again."""
        self._take_no_more()
        self._waiting.clear()
        self._pending_refusal = None
        if self._full:
            self._resume_if_room()

    def _advance(self) -> None:
        """Hand over what waits, one by one; when nothing is owed any more, what comes behind.

        A handler may answer at once, and its answer calls us: the call that is already here goes on with the next.
        """
        if self._advancing:
            return
        self._advancing = True
        waiting = self._waiting
        while waiting and self._current is None and not self._write_paused:
            self._current = waiting.popleft()
            self._handle(self._current)
        self._advancing = False
        if self._full:
            self._resume_if_room()
        if self._current is None and not waiting:
            self._behind = False
            if self._pending_refusal is not None:
                self._send_refusal(self._pending_refusal)
            elif self._wants_continue:
                self._send(_CONTINUE)
                self._wants_continue = False

    def _inside_request(self, data: bytes) -> None:
        super()._inside_request(data)
        if self._wants_continue:  # still: no piece of the body came with the head, or not all of it
            self._behind = True
            if self._current is None:
                self._advance()

    def _pause_if_full(self) -> None:
        """Stop reading when enough requests wait, or when they hold as much as the largest body."""
        waiting = self._waiting
        if self._full or self._transport is None or self._transport.is_closing():
            return
        if len(waiting) >= self._limits.pipelined or sum(len(each.body) for each in waiting) > self._body_limit:
            self._full = True
            self._transport.pause_reading()

    def _resume_if_room(self) -> None:
        if self._transport is None or self._transport.is_closing() or len(self._waiting) >= self._limits.pipelined:
            return
        self._full = False
        self._transport.resume_reading()

    # the end

    def _refuse(self, refusal: Refusal) -> None:
        self._take_no_more()
        self._pending_refusal = refusal
        self._behind = True
        if self._current is None:
            self._advance()

    def _send_refusal(self, refusal: Refusal) -> None:
        self._pending_refusal = None
        body = error_body(str(refusal))
        lines = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        self._send(self._server.head(refusal.status) + JSON_TYPE + lines + body)
        self._end()

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end_with_last(self) -> None:
        """Take no further request; the last one that was accepted ends the connection."""
        self._take_no_more()
        last = self._waiting[-1] if self._waiting else self._current
        if last is not None:
            last.final, last.plain = True, False

    def _end(self) -> None:
        """Everything is answered: close our direction, and give the client time to read and to close its own."""
        self._take_no_more()
        self._lingering = True
        self._discarded = 0
        self._since = self._server.now
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._half_closed:
            transport.close()
            return
        transport.write_eof()

    def _discard(self, data: bytes) -> None:
        super()._discard(data)
        if self._lingering and self._discarded > self._limits.linger:
            self.abort()

    def abort(self) -> None:
        """End the connection now, whatever it is owed."""
        if self._transport is not None:
            self._transport.abort()

    # the server calls

    def drain(self) -> None:
        """Finish what was begun, then close; close at once if nothing was."""
        if self._lingering or not self._boundary:
            return  # ending already, or in the middle of a request, which will be the last
        if self.owed:
            if self._taking:
                self._end_with_last()
        elif self._transport is not None:
            self._transport.close()

    def sweep(self, now: float) -> None:
        """Look at the clock for this connection. Times are noted to the sweep, so one sweep is granted on top."""
        transport = self._transport
        if transport is None:
            return
        limits = self._limits
        waited = now - self._since - limits.sweep
        unsent = transport.get_write_buffer_size()
        if unsent:
            taken = self.streamed - unsent
            if taken != self._taken:
                self._taken, self._since = taken, now
            elif waited > limits.body_timeout:
                transport.abort()
        elif self._lingering:
            if waited > limits.linger_timeout:
                transport.abort()
        elif self.owed:
            if self._half_closed:
                self._probe(transport)
        elif self._arriving is not None:
            if waited > limits.body_timeout:
                self._refuse(Refusal(408, "The body stopped arriving: send the whole request without long pauses."))
        elif not self._boundary:
            if waited > limits.header_timeout:
                self._refuse(Refusal(408, "The headers took too long to arrive: send the whole request at once."))
        elif waited > self._patience:
            transport.close()

    def _probe(self, transport: asyncio.Transport) -> None:
        """Find out whether a client that closed its direction still reads, if the handler wants to know.

        TCP does not say. But the system of a client that is gone resets the connection on whatever comes, and a client
        that reads has to skip an interim answer, or a zero before the size of a chunk.
        """
        current = self._current
        if current is None or current.on_disconnect is None:
            return
        if isinstance(current.connection, Stream):
            asked = current.connection.ask()
        else:
            asked = not (self._probed or current.http10)
            if asked:
                self._probed = True
                transport.write(_CONTINUE)
        if asked:
            return
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLHUP | select.POLLERR)
        if poll.poll(0):
            transport.abort()
