"""One connection of HTTP/1.1: bytes → exchanges, by llhttp, and exchanges → answers, strictly in their order.

The common case, one short read that holds whole requests, is kept short on purpose: a look at the clock, exact
measuring and everything rare happen only when a read ends inside a request or is longer than the shortest limit. A head
that a client repeats byte for byte is not parsed again. A longer read is parsed piece by piece: a head, a few chunks,
or the rest of a body; what the connection's budget of this turn of the loop does not allow waits.

Requests reach the handler one after another: the next one when the one before is answered and the client reads its
answers. What was parsed ahead waits; when too much waits, reading pauses.

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
from io import BytesIO
from typing import TYPE_CHECKING

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from container.http1 import head
from container.http1.exchange import Exchange
from container.http1.head import JSON_TYPE, METHODS, Refusal, error_body
from container.http1.known_heads import END
from container.http1.limits import KIB
from container.http1.stream import BODILESS, JOINED_UP_TO, Form, Stream, form_of
from container.inference.turn_budget import BODY, SMALL, STEP, TurnBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from container.http1.head import Fields
    from container.http1.known_heads import KnownHead
    from container.http1.limits import Limits
    from container.http1.server import Http1Server


# uvloop reads at most so many bytes at once: by so much may we overestimate a head that began in the middle of a read.
_LONGEST_READ = 256 * 1024
# Wire bytes that chunk sizes, extensions and trailers may take per byte of body: "1\r\nx\r\n" takes six.
_CHUNK_OVERHEAD = 8
_SPECIAL = frozenset(("transfer-encoding", "expect", "upgrade", "origin", "sec-fetch-site"))
_SLASH = 47
_PIECE = 4 * KIB  # of heads, or of chunks, that are parsed at once
_LARGEST_PIECE = 64 * KIB  # of large chunks


class _NoMore(Exception):  # noqa: N818  no error
    """Raised through llhttp to stop it: what follows in this read is not for us."""


class RequestReader:
    """Assembles the requests of one connection. What becomes of them, its heir says.

    States, as the sweep and the drain see them: at a `_boundary` the client is between requests; else `_arriving` is
    the request whose body is coming in, or None while a head is.
    """

    def __init__(self, server: Http1Server) -> None:
        self._server = server
        self._turns = server.turns
        self._known_heads = server.known_heads
        self._budget = TurnBudget()
        self._memory = server.memory
        self._limits: Limits = server.limits
        self._line_limit = server.limits.request_line
        self._body_limit = server.limits.body
        self._since = server.now  # when something last happened, by the sweep's clock
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._feed: Callable[[bytes | memoryview], None] = self._parser.feed_data
        self._taking = True  # whether further requests are accepted
        self._boundary = True  # whether what was read so far ends with a request
        self._head_bound = 0  # at least as many bytes as the head at hand has so far
        self._target = b""
        self._fields: Fields = []
        self._recognised: Exchange | None = None  # of the read at hand, the last one that asks for nothing special
        self._repeat: KnownHead | None = None  # of the last request, if it is known
        self._arriving: Exchange | None = None
        self._buffer: BytesIO | None = None
        self._wants_continue = False
        self._replay = b""  # the head of a request without its Upgrade
        self._wire = 0  # bytes on the wire of a chunked body
        self._chunks = 0  # of it, the last and empty one too
        self._discarded = 0
        self._rest = b""  # what was read and is not parsed yet, from `_at` on
        self._at = 0
        self._whole = False  # whether it begins with a request
        self._piece = _PIECE
        self._measured: Exchange | None = None  # whose body's rate is
        self._measured_since = 0.0
        self._measured_size = 0
        self._parsing = False
        self._waits = False  # for a later turn of the loop

    # what the heir does with it

    def _accept(self, exchange: Exchange) -> None:
        """Take a complete request."""
        raise NotImplementedError

    def answer(self, exchange: Exchange, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Send the answer to an exchange."""
        raise NotImplementedError

    def begin(self, exchange: Exchange, status: int, headers: bytes) -> None:
        """Send the head of an answer and leave the rest to a stream."""
        raise NotImplementedError

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client's socket has not taken yet."""
        raise NotImplementedError

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal once all accepted requests are answered, and end the connection."""
        raise NotImplementedError

    def _has_room(self) -> bool:
        """Whether further requests may be parsed."""
        return True

    def _pause(self) -> None:
        """Read nothing more for now."""

    def _resume(self) -> None:
        """Read on, where nothing speaks against it."""

    # asyncio calls

    def data_received(self, data: bytes) -> None:
        """Parse one read."""
        begins, repeat, turns = self._boundary, None, self._turns
        if begins and self._taking:
            repeat = self._repeat
            if repeat is None or len(data) != repeat.size or not data.startswith(repeat.head):
                self._repeat = repeat = self._known_heads.of(data)
        if repeat is not None:
            turns.left -= len(repeat.head) // SMALL
            if not self._rest and (turns.left >= 0 or not turns.spent(self._budget)):
                # Between requests llhttp holds nothing: the same bytes mean what they meant, and it need not see them.
                exchange = Exchange(self, repeat.method, repeat.target, repeat.headers, False, False)
                exchange.body = data[len(repeat.head) :]
                if self._memory.take(len(exchange.body)):
                    exchange.held = len(exchange.body)
                    self._complete(exchange)
                else:
                    self._refuse(self._too_much())
                return
        elif len(data) <= STEP:
            turns.left -= len(data) // SMALL
            if turns.left >= 0 and not self._rest:
                self._parse(data)
                recognised, self._recognised = self._recognised, None
                if recognised is not None and begins and self._boundary:
                    self._repeat = self._known_heads.learn(data, recognised)
                return
        if self._rest:
            self._rest = self._rest[self._at :] + data
            self._whole = False
        else:
            self._rest, self._whole = data, begins
        self._at = 0
        if not self._waits:
            self.go_on()

    def _parse(self, data: bytes | memoryview) -> None:
        self._head_bound += len(data)
        upgrade_at = 0
        try:
            self._feed(data)
        except HttpParserUpgrade as stop:
            upgrade_at = stop.args[0]
        except HttpParserError as error:
            self._fail(error)
            return
        if upgrade_at and not self._ignore_upgrade(memoryview(data)[upgrade_at:]):
            return
        if self._boundary:
            self._head_bound = 0
        else:
            self._inside_request(data)

    def go_on(self) -> None:
        """Parse what was read, as far as the budget of this turn of the loop and the room for requests go."""
        self._waits = False
        if self._parsing:
            return
        self._parsing = True
        try:
            while self._rest and self._has_room():
                if self._turns.left <= 0 and self._turns.spent(self._budget):
                    self._waits = True
                    break
                self._parse_piece()
        finally:
            self._parsing = False
        if self._rest:
            self._pause()
            if self._waits:
                self._turns.wait(self, self._budget)
        else:
            self._resume()

    def _parse_piece(self) -> None:
        """Parse what comes next: a head, a few chunks, or the rest of a body, which costs little."""
        data, at, arriving = self._rest, self._at, self._arriving
        end, body = len(data), 0
        if arriving is None:
            if self._taking:
                head_end = data.find(END, at, at + _PIECE)
                end = min(end, head_end + len(END) if head_end >= 0 else at + _PIECE)
        elif "transfer-encoding" in arriving.headers:
            body = self._body_size(arriving)
            end = min(end, at + self._piece)
        else:
            body = self._body_size(arriving)
            end = min(end, at + max(int(arriving.headers.get("content-length", 0)) - body, 1))
        if end < len(data):
            self._at = end
        else:
            self._rest, self._at = b"", 0
        self._parse(memoryview(data)[at:end])
        counts = end - at
        if arriving is not None:
            body = self._body_size(arriving) - body
            counts += body // BODY - body
            self._piece = min(2 * self._piece, _LARGEST_PIECE) if 16 * counts < end - at else _PIECE
        self._turns.left -= counts
        if not self._rest:
            recognised, self._recognised = self._recognised, None
            if recognised is not None and self._whole and self._boundary:
                self._repeat = self._known_heads.learn(data, recognised)

    def _too_much(self) -> Refusal:
        return Refusal(503, self._memory.full)

    def hold(self, exchange: Exchange, size: int) -> bool:
        """Count further bytes for a request, if they fit, and if it is not over."""
        if exchange.held < 0:
            return True
        if not self._memory.take(size):
            return False
        exchange.held += size
        return True

    def release(self, exchange: Exchange) -> None:
        """Count nothing more for a request."""
        if exchange.held > 0:
            self._memory.free(exchange.held)
        exchange.held = -1

    def _body_size(self, exchange: Exchange) -> int:
        """Bytes of a body that have come."""
        return self._buffer.tell() if self._buffer is not None else len(exchange.body)

    # llhttp calls

    def on_message_begin(self) -> None:
        """The first byte of a request; empty lines before it are none."""
        self._boundary = False

    def on_url(self, piece: bytes) -> None:
        """A piece of the target, nearly always all of it."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field, or one trailer field: those are ignored."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the head and begin an exchange."""
        parser: HttpRequestParser = self._parser  # type: ignore[assignment]  # it is calling
        raw, target, fields = parser.get_method(), self._target, self._fields
        method = METHODS.get(raw) or head.unusual_method(raw)
        if self._head_bound > self._line_limit:
            self._measure(head.line_size(method, target), fields)
        self._target, self._fields = b"", []
        self._arriving = self._checked(parser, method, target, fields)

    def on_chunk_header(self) -> None:
        """Another chunk of the body; behind the last one comes an empty one."""
        self._chunks += 1
        if self._chunks > self._limits.chunks + 1:
            raise head.too_many_chunks(self._limits.chunks)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body: all of a small one."""
        exchange: Exchange = self._arriving  # type: ignore[assignment]  # the head came first
        if not self._memory.take(len(piece)):
            raise self._too_much()
        exchange.held += len(piece)
        if exchange.body:
            self._gather(exchange.target, exchange.body, piece)
        else:
            exchange.body = piece
            if len(piece) > self._body_limit:
                raise self._server.too_large(exchange.target, len(piece), self._body_limit)

    def on_message_complete(self) -> None:
        """The request is complete."""
        exchange = self._arriving
        if exchange is None:
            return  # an upgrade: llhttp stops here, and we start it again behind the head
        self._arriving = self._measured = None
        self._boundary = True
        self._wants_continue = False
        if self._buffer is not None:
            exchange.body = self._buffer.getvalue()
            self._buffer = None
        if self._fields:  # trailers
            self._fields = []
        self._complete(exchange)
        if not self._taking:
            raise _NoMore  # it was the last one, or its handler has ended the connection

    def _complete(self, exchange: Exchange) -> None:
        """Take a complete request, as the last one if its client or a drain says so."""
        if exchange.final or self._server.draining:
            exchange.final, exchange.plain = True, False
            self._take_no_more()
        self._accept(exchange)

    # the rare things

    def _take_no_more(self) -> None:
        """Throw away whatever else the client sends, and whatever was half read."""
        self._taking = False
        if self._arriving is not None:
            self.release(self._arriving)
        self._parser = None
        self._feed = self._discard
        self._arriving = self._measured = self._recognised = self._buffer = None
        self._repeat = None
        self._fields = []
        self._target = self._replay = b""
        self._head_bound = 0
        self._boundary = True
        self._wants_continue = False

    def _discard(self, data: bytes | memoryview) -> None:
        self._boundary = True
        self._discarded += len(data)

    def _checked(self, parser: HttpRequestParser, method: str, target: bytes, fields: Fields) -> Exchange | None:
        """Check the header fields and begin an exchange; None for one that begins when its Upgrade is gone.

        A short head that asks for nothing special may be known the next time.
        """
        final, http10 = not parser.should_keep_alive(), head.is_http10(parser.get_http_version())
        whole, target = target, target if target[0] == _SLASH else head.origin_form(target)
        if len(fields) > self._limits.header_count:
            raise head.too_many_headers(self._limits.header_count)
        headers = head.joined(fields)
        if "host" not in headers and not http10:
            raise head.no_host()
        self._let_in(method, target, headers, head.asked_host(whole, headers))
        if (size := int(headers.get("content-length", 0))) > self._body_limit:
            raise self._server.too_large(target, size, self._body_limit)
        if not self._memory.fits(size):
            raise self._too_much()
        if "transfer-encoding" in headers:
            head.check_transfer_encoding(headers["transfer-encoding"], http10=http10)
            self._wire = self._chunks = 0
        if "expect" in headers:
            self._wants_continue = head.expects_continue(headers["expect"], http10=http10)
        if "upgrade" in headers and parser.should_upgrade():
            del headers["upgrade"]
            self._replay = head.rebuild(method, target, headers, http10=http10)
            return None
        exchange = Exchange(self, method, target, headers, http10, final)
        if (
            self._head_bound <= self._line_limit
            and whole == target
            and not (final or http10 or headers.keys() & _SPECIAL)
        ):
            self._recognised = exchange
        return exchange

    def _let_in(self, method: str, target: bytes, headers: Mapping[str, str], host: str | None) -> None:
        """Refuse a request that the server's gate does not let in."""
        if self._server.gate is not None:
            refusal = self._server.gate(method, target, headers, host)
            if refusal is not None:
                raise refusal

    def forget_heads(self) -> None:
        """Check the next head, also one that repeats another: the rules of access have changed."""
        self._repeat = self._recognised = None

    def _measure(self, line: int, fields: Fields) -> None:
        """Refuse a head whose parts, so far as they arrived, are over a limit."""
        if line > self._line_limit:
            raise head.line_too_long(self._line_limit)
        if len(fields) > self._limits.header_count:
            raise head.too_many_headers(self._limits.header_count)
        if sum(len(name) + len(value) + 4 for name, value in fields) > self._limits.headers:
            raise head.headers_too_large(self._limits.headers)

    def _gather(self, target: bytes, first: bytes, piece: bytes) -> None:
        """Collect a body of several pieces, copying each once, whatever its size."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = BytesIO()
            buffer.write(first)
        buffer.write(piece)
        if buffer.tell() > self._body_limit:
            raise self._server.too_large(target, buffer.tell(), self._body_limit)

    def _inside_request(self, data: bytes | memoryview) -> None:
        """A read ended inside a request: note the time for the sweep and look whether too much has come."""
        try:
            if self._arriving is not None:
                self._head_bound = 0
                self._since = self._server.now
                if self._arriving is not self._measured:
                    self._measure_from(self._arriving, self._since)
                if "transfer-encoding" in self._arriving.headers:
                    self._count_chunks(self._arriving, data)
            else:
                self._inside_head(data)
        except Refusal as refusal:
            self._refuse(refusal)

    def _measure_from(self, exchange: Exchange | None, now: float) -> None:
        """Measure how quickly a body arrives, from now on."""
        self._measured, self._measured_since = exchange, now
        self._measured_size = 0 if exchange is None else self._body_size(exchange)

    def _inside_head(self, data: bytes | memoryview) -> None:
        if self._head_bound == len(data):  # the first of it
            self._since = self._server.now
        if self._head_bound > self._line_limit:
            self._measure(len(self._target), self._fields)
        if self._head_bound > self._line_limit + self._limits.headers + _LONGEST_READ:
            raise head.headers_too_large(self._limits.headers)  # one endless field, which llhttp still collects

    def _count_chunks(self, exchange: Exchange, data: bytes | memoryview) -> None:
        self._wire += len(data)
        body = self._body_size(exchange)
        if self._wire > _CHUNK_OVERHEAD * body + self._limits.headers + _LONGEST_READ:
            raise Refusal(413, "The chunks are mostly extensions or trailers: send larger chunks without them.")

    def _ignore_upgrade(self, rest: memoryview) -> bool:
        """Read on where llhttp stopped because of an Upgrade; False when the connection ends instead.

        llhttp has skipped the body of that request: a new parser gets the head again, without the Upgrade, then the
        rest.
        """
        stopped_at = 0
        while self._replay:
            rest = rest[stopped_at:]
            replay, self._replay = self._replay, b""
            parser = self._parser = HttpRequestParser(self)
            self._feed = parser.feed_data
            try:
                parser.feed_data(replay)
                parser.feed_data(rest)
            except HttpParserUpgrade as stop:  # the next one
                stopped_at = stop.args[0]
            except HttpParserError as error:
                self._fail(error)
                return False
        return True

    def _fail(self, error: HttpParserError) -> None:
        """Refuse what llhttp cannot parse, or what was refused by one of the calls above."""
        if not self._taking:
            self._take_no_more()  # again: this is behind the last request
            return
        if not isinstance(error, HttpParserCallbackError):
            version = self._parser.get_http_version() if self._parser is not None else "0.0"
            self._refuse(head.malformed(error, self._target, version))
            return
        cause = error.__context__
        if not isinstance(cause, Refusal):
            raise cause if cause is not None else error
        self._refuse(cause)


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
        if self._transport is not None:
            self._transport.abort()

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
        """Forget everything, and tell the handler that no answer is waited for any more."""
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
            exchange.final = True
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
