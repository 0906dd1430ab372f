"""Exchanges → answers: the part of a connection that writes and keeps the order.

Requests reach the handler strictly one after another: the next one when the one before is answered and the client reads
its answers. What was parsed ahead waits; when too much waits, reading pauses. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from container.http1.ending import CONTINUE, EndingConnection
from container.http1.head import JSON_TYPE, Refusal, error_body
from container.http1.stream import BODILESS, JOINED_UP_TO, Form, Stream, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.http1.exchange import Exchange
    from container.http1.server import Http1Server

LOG = logging.getLogger("mme.http")

_BUG = error_body("The server failed to handle the request: this is a bug in it, its log has the traceback.")


class HttpProtocol(EndingConnection, asyncio.Protocol):
    """One connection. `answer` and `begin` are for exchanges, `ended` and `hang_up` for streams, others for asyncio."""

    def __init__(self, server: Http1Server) -> None:
        super().__init__(server)
        self._handler = server.handler
        self._heads = server.heads
        self._advancing = False
        self._full = False  # reading is paused: enough waits
        self._write_paused = False
        self._reads = True  # whether the transport does
        self._ends = False  # whether the client's end waits behind what is not parsed yet

    # asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a stream's, always
        """Begin."""
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.write_buffer)
        self._server.connections.add(self)
        cap = self._server.cap
        if not cap.enter():
            self._refuse(Refusal(503, cap.full))
            if cap.is_crowded:
                transport.close()  # without waiting for the client to
        elif self._server.parted:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  why does not matter
        """Forget everything, and tell the handler that nobody waits any more."""
        current, self._current = self._current, None
        if current is not None:
            self.release(current)
        for each in self._waiting:
            self.release(each)
        self._transport = None
        self._waiting.clear()
        self._take_no_more()
        self._rest = b""
        self._server.forget(self)
        self._server.cap.leave()
        if current is not None and current.on_disconnect is not None:
            leaves, current.on_disconnect = current.on_disconnect, None
            leaves()

    def eof_received(self) -> bool:
        """The client sends no more; what it is owed it still gets, unless it speaks TLS, where that is the end."""
        if self._transport is not None and not self._transport.can_write_eof():
            return False
        if self._rest:
            self._ends = True
            return True
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
        except Exception:  # whatever it is, the client gets an answer, or sees that the one it has is not whole
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
        self.release(exchange)
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
            exchange.final = self._until_close = True
            self._drop_waiting()
        start = self._heads.get(status) or self._server.head(status)
        lead = start + headers + self._last_lines(exchange, framing)
        exchange.connection = Stream(self, self._transport, self._limits.stream_buffer, form, lead)

    def ended(self, exchange: Exchange) -> None:
        """A streamed answer is whole: go on as after any other."""
        if self._current is not exchange or self._transport is None:
            return
        self.release(exchange)
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
        self.release(exchange)
        self._current = None
        self._drop_waiting()
        if now:
            self.abort()
        else:
            self._end()

    def _drop_waiting(self) -> None:
        """Take no further request, and leave without answer those that wait: their client has to ask again."""
        self._take_no_more()
        for each in self._waiting:
            self.release(each)
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
                self._send(CONTINUE)
                self._wants_continue = False

    def _inside_request(self, data: bytes | memoryview) -> None:
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
            self._pause()

    def _resume_if_room(self) -> None:
        if self._transport is None or self._transport.is_closing() or len(self._waiting) >= self._limits.pipelined:
            return
        self._full = False
        if not self._rest:
            self._resume()
        elif not self._waits:
            self.go_on()

    def _has_room(self) -> bool:
        return not self._full

    def _pause(self) -> None:
        if self._reads and self._transport is not None and not self._transport.is_closing():
            self._reads = False
            self._transport.pause_reading()

    def _resume(self) -> None:
        transport = self._transport
        if self._full or transport is None:
            return
        if not self._reads and not transport.is_closing():
            self._reads = True
            transport.resume_reading()
        if self._ends:
            self._ends = False
            if not self.eof_received():
                transport.close()
