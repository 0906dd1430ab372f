"""Bytes → exchanges: the half of a connection that reads. llhttp calls back, limits are kept, nothing is written.

The common case, one short read that holds whole requests, is kept short on purpose: a look at the clock, exact
measuring and everything rare happen only when a read ends inside a request or is longer than the shortest limit. A head
that a client repeats byte for byte is not parsed again. A longer read is parsed piece by piece: a head, a few chunks,
or the rest of a body; what the connection's budget of this turn of the loop does not allow waits. Runs on the loop.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from container.http1 import head
from container.http1.exchange import Exchange
from container.http1.head import METHODS, Refusal
from container.http1.known_heads import END
from container.http1.limits import KIB
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
        """One header field, or one trailer field: nobody looks at those."""
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
            self._take_no_more()  # again: this is behind the last request, and nobody's business
            return
        if not isinstance(error, HttpParserCallbackError):
            version = self._parser.get_http_version() if self._parser is not None else "0.0"
            self._refuse(head.malformed(error, self._target, version))
            return
        cause = error.__context__
        if not isinstance(cause, Refusal):
            raise cause if cause is not None else error
        self._refuse(cause)
