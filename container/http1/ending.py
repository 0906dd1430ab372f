"""How a connection ends: refusals, last answers, clients that are gone, and the clock.

A connection ends in one of three ways. *Idle*: it just closes. *After a last answer* (the client or HTTP/1.0 says so,
a drain, a refusal): we close our direction, throw away what still comes and wait a while for the client to close: were
the socket closed over unread bytes, the client might lose the answer. *Gone*: the client left, or kept us waiting.
Runs on the event loop.
"""

from __future__ import annotations

import select
from collections import deque
from typing import TYPE_CHECKING

from container.http1.head import JSON_TYPE, Refusal, error_body
from container.http1.reader import RequestReader
from container.http1.stream import Stream, reset_at_close

if TYPE_CHECKING:
    import asyncio

    from container.http1.exchange import Exchange
    from container.http1.server import Http1Server

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class EndingConnection(RequestReader):
    """What is owed to the client of one connection, and how it ends. How what is owed is given, its heir says.

    Attributes:
        streamed: bytes that streamed answers took on the wire.
    """

    def __init__(self, server: Http1Server) -> None:
        super().__init__(server)
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None  # the handler has it
        self._waiting: deque[Exchange] = deque()  # parsed ahead
        self._pending_refusal: Refusal | None = None  # goes out behind all of them
        self._behind = False  # whether anything is to be done once `_current` is answered
        self._half_closed = False  # by the client
        self._probed = False
        self._lingering = False
        self._patience = server.limits.header_timeout  # of an idle connection
        self._taken: int | None = None  # moves whenever the client reads; what a stream writes does not move it
        self._until_close = False  # the last answer is whole when the connection closes, and not before
        self.streamed = 0

    @property
    def owed(self) -> int:
        """Accepted requests without an answer."""
        return len(self._waiting) + (self._current is not None)

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client's socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # what the heir does

    def _advance(self) -> None:
        """Go on with what waits."""
        raise NotImplementedError

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
        if refusal.status == 503:
            lines = b"Retry-After: 1\r\n" + lines
        self._send(self._server.head(refusal.status) + refusal.headers + JSON_TYPE + lines + body)
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
        if self._half_closed or not transport.can_write_eof():  # by TLS both directions close at once, in good order
            transport.close()
            return
        transport.write_eof()

    def _discard(self, data: bytes | memoryview) -> None:
        super()._discard(data)
        if self._lingering and self._discarded > self._limits.linger:
            self.abort()

    def abort(self) -> None:
        """End the connection now, whatever it is owed."""
        transport = self._transport
        if transport is None:
            return
        if self._until_close and transport.get_write_buffer_size():
            reset_at_close(transport, reset=True)  # again: the end of this answer is among what is unsent
        transport.abort()

    # the server calls

    def drain(self) -> None:
        """Finish what was begun, then close. If nothing was, the next request will be the last."""
        if self._boundary and self._taking and self.owed:
            self._end_with_last()

    def close_if_idle(self) -> None:
        """Close, unless a request has begun to arrive, or an answer is on its way."""
        if self._transport is not None and self._boundary and not (self.owed or self._rest or self._lingering):
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
                self.abort()
        elif self._lingering:
            if waited > limits.linger_timeout:
                self.abort()
        elif self.owed:
            self._measure_from(self._arriving, now)  # which may wait for answers
            if self._half_closed:
                self._probe(transport)
        elif self._rest:
            self._since = now  # what waits here is late by our doing
            self._measure_from(self._arriving, now)
        elif self._arriving is not None:
            if waited > limits.body_timeout:
                self._refuse(Refusal(408, "The body stopped arriving: send the whole request without long pauses."))
            elif self._too_slow(now):
                self._refuse(
                    Refusal(408, f"The body arrives too slowly: send at least {limits.body_rate} bytes a second.")
                )
        elif not self._boundary:
            if waited > limits.header_timeout:
                self._refuse(Refusal(408, "The headers took too long to arrive: send the whole request at once."))
        elif waited > self._patience:
            transport.close()

    def _too_slow(self, now: float) -> bool:
        """Whether the body at hand comes at less than the least rate, on average after the first seconds."""
        exchange, limits = self._measured, self._limits
        if exchange is None or exchange is not self._arriving:
            return False
        late = now - self._measured_since - limits.sweep - limits.body_grace
        return late > 0 and self._body_size(exchange) - self._measured_size < limits.body_rate * late

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
                transport.write(CONTINUE)
        if asked:
            return
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLHUP | select.POLLERR)
        if poll.poll(0):
            transport.abort()
