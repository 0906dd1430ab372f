"""One connection of HTTP/1.1: bytes → requests, and requests → answers, strictly in their order.

The common case, one short read that holds whole requests, is kept short on purpose. A longer read is parsed piece by
piece: a head, a few chunks, or the rest of a body; what the connection's budget of this turn of the loop does not allow
waits. Requests reach the handler one after another: the next one when the one before is answered and the client reads
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

from container.http1.request import HEAD_END, HttpRequest, RequestParser
from container.http1.rules import JSON_TYPE, KIB, Refusal, error_body
from container.inference.limits import BODY, SMALL, STEP, TurnBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.http1.request import KnownHead
    from container.http1.rules import Limits
    from container.http1.server import Http1Server

LOG = logging.getLogger("mme.http")

_PIECE = 4 * KIB  # of heads, or of chunks, that are parsed at once
_LARGEST_PIECE = 64 * KIB  # of large chunks
_JOINED_UP_TO = 64 * KIB  # bytes of body that are cheaper to copy than to write apart
_BODILESS = frozenset((204, 304))
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BUG = error_body("The server failed to handle the request: this is a bug in it, its log has the traceback.")


class Unparsed:
    """What was read and is not parsed yet: `data` from `at` on."""

    def __init__(self) -> None:
        self.data = b""
        self.at = 0
        self.whole = False  # whether it is a read that begins with a request
        self.parsing = False
        self.waits = False  # for a later turn of the loop
        self.ends = False  # whether the client's end comes behind it
        self.chunks = _PIECE  # bytes of them that are parsed at once
        self.budget = TurnBudget()

    def add(self, data: bytes, *, begins: bool) -> None:
        if self.data:
            self.data = self.data[self.at :] + data
            self.whole = False
        else:
            self.data, self.whole = data, begins
        self.at = 0

    def take(self, parser: RequestParser) -> memoryview:
        """Return what comes next: a head, a few chunks, or the rest of a body, which costs little."""
        data, at, arriving = self.data, self.at, parser.arriving
        if arriving is None:
            head_end = data.find(HEAD_END, at, at + _PIECE)
            end = head_end + len(HEAD_END) if head_end >= 0 else at + _PIECE
        elif "transfer-encoding" in arriving.headers:
            end = at + self.chunks
        else:
            end = at + max(int(arriving.headers.get("content-length", 0)) - arriving.held, 1)
        if end < len(data):
            self.at = end
        else:
            self.data, self.at = b"", 0
        return memoryview(data)[at:end]

    def drop(self) -> None:
        self.data, self.at = b"", 0


class Pipeline:
    """Requests in their order."""

    def __init__(self) -> None:
        self.current: HttpRequest | None = None  # the handler has it
        self.waiting: deque[HttpRequest | Refusal] = deque()  # parsed ahead; a refusal is the last
        self.advancing = False
        self.blocked = False  # the client reads its answers too slowly for the next one

    @property
    def in_flight(self) -> int:
        """Accepted requests without an answer."""
        return len(self.waiting) + (self.current is not None)

    def has_room(self, limits: Limits) -> bool:
        """Whether so few wait that others may be parsed, and hold less than the largest body."""
        waiting = self.waiting
        return not waiting or (
            len(waiting) < limits.pipelined
            and sum([len(each.body) for each in waiting if isinstance(each, HttpRequest)]) <= limits.body
        )

    def drop(self) -> None:
        """Leave without answer those that wait: their client has to ask again."""
        for each in self.waiting:
            if isinstance(each, HttpRequest):
                each.release()
        self.waiting.clear()


class Clock:
    """What the sweep has seen of a connection. Times are noted to the sweep, so one sweep is granted on top."""

    def __init__(self, now: float, patience: float) -> None:
        self.since = now  # when something last happened
        self.patience = patience  # of an idle connection
        self.streamed = 0  # bytes that streamed answers took on the wire
        self.taken: int | None = None  # moves whenever the client reads; what a stream writes does not move it
        self.measured_from = -1.0  # when the body at hand had `measured_size` bytes; -1 while it is not measured
        self.measured_size = 0
        self.asked = False  # a client that closed its direction, whether it still reads

    def is_stuck(self, unsent: int, now: float, seconds: float) -> bool:
        """Whether the client has read nothing for so long."""
        taken = self.streamed - unsent
        if taken != self.taken:
            self.taken, self.since = taken, now
            return False
        return now - self.since > seconds

    def measure(self, size: int, now: float) -> None:
        self.measured_from, self.measured_size = now, size

    def complaint(self, arriving: HttpRequest | None, now: float, limits: Limits) -> Refusal | None:
        """What is said of a request that arrives too slowly: a body, on average after the first seconds."""
        waited = now - self.since - limits.sweep
        if arriving is None:
            if waited > limits.header_timeout:
                return Refusal(408, "The headers took too long to arrive: send the whole request at once.")
            return None
        if waited > limits.body_timeout:
            return Refusal(408, "The body stopped arriving: send the whole request without long pauses.")
        if self.measured_from < 0:
            self.measure(arriving.held, now)
        late = now - self.measured_from - limits.sweep - limits.body_grace
        if late > 0 and arriving.held - self.measured_size < limits.body_rate * late:
            return Refusal(408, f"The body arrives too slowly: send at least {limits.body_rate} bytes a second.")
        return None

    def look_for_client(self, current: HttpRequest | None, transport: asyncio.Transport) -> None:
        """Find out whether a client that closed its direction is still there, if the handler wants to know.

        TCP does not say. But the system of a client that is gone resets the connection on whatever comes, and a client
        that reads has to skip an interim answer.
        """
        if current is None or current.on_disconnect is None:
            return
        if not (self.asked or current.http10 or current.stream is not None):
            self.asked = True
            transport.write(_CONTINUE)
            return
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLHUP | select.POLLERR)
        if poll.poll(0):
            transport.abort()


class HttpProtocol(asyncio.Protocol):
    """One connection. `answer` and `begin` are for requests, `ended` and `abort_response` for streams."""

    def __init__(self, server: Http1Server) -> None:
        self.parser = RequestParser(server)
        self.unparsed = Unparsed()
        self.pipeline = Pipeline()
        self.clock = Clock(server.now, server.limits.header_timeout)
        self.limits: Limits = server.limits
        self.transport: asyncio.Transport | None = None
        self.known: KnownHead | None = None  # of the last request
        self.paused = False  # nothing is read
        self.half_closed = False  # by the client
        self.lingering = False  # everything is answered, and our direction is closed
        self.discarded = 0  # bytes that came when nothing more was taken
        self._server = server
        self._handler = server.handler
        self._heads = server.heads
        self._known_heads = server.known_heads
        self._memory = server.memory
        self._turns = server.turns

    @property
    def unsent(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    # asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a stream's, always
        self.transport = transport
        transport.set_write_buffer_limits(high=self.limits.write_buffer)
        self._server.connections.add(self)
        cap = self._server.cap
        if not cap.enter():
            self._reject(Refusal(503, cap.full))
            if cap.is_crowded:
                transport.close()  # without waiting for the client to
        elif self._server.closing_idle:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  why does not matter
        """Forget everything, and tell the handler that no answer is waited for any more."""
        self.transport = None
        self._stop_taking()
        self.pipeline.drop()
        self._server.forget(self)
        self._server.cap.leave()
        current, self.pipeline.current = self.pipeline.current, None
        if current is not None:
            current.release()
            if current.on_disconnect is not None:
                leaves, current.on_disconnect = current.on_disconnect, None
                leaves()

    def eof_received(self) -> bool:
        """The client sends no more; what it is owed it still gets, unless it speaks TLS, where that is the end."""
        if self.transport is not None and not self.transport.can_write_eof():
            return False
        if self.unparsed.data:
            self.unparsed.ends = True
            return True
        self.half_closed = True
        if self.lingering:
            return False
        if not self.parser.between:
            self._reject(Refusal(400, "The request ended before it was complete: send all of it."))
            return True
        self.drain()
        return self.pipeline.in_flight > 0

    def pause_writing(self) -> None:
        """The client reads too slowly: nothing new is begun for it."""
        self.pipeline.blocked = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.pipeline.blocked = False
        if self.pipeline.waiting or self.parser.wants_continue:
            self._advance()

    def data_received(self, data: bytes) -> None:
        parser, turns, known = self.parser, self._turns, self.known
        if parser.closed:
            self.discarded += len(data)
            if self.lingering and self.discarded > self.limits.linger:
                self.abort()
            return
        begins = parser.between
        if begins and (known is None or len(data) != known.size or not data.startswith(known.head)):
            self.known = known = self._known_heads.of(data)
        if begins and known is not None:
            turns.left -= len(known.head) // SMALL
            if not self.unparsed.data and (turns.left >= 0 or not turns.spent(self.unparsed.budget)):
                # Between requests llhttp holds nothing: the same bytes mean what they meant, and it need not see them.
                request = HttpRequest(self._memory, known.method, known.target, known.headers, False, False)
                request.body = data[len(known.head) :]
                if self._memory.take(len(request.body)):
                    request.held = len(request.body)
                    self._accept(request)
                else:
                    self._reject(Refusal(503, self._memory.full))
                return
        elif len(data) <= STEP:
            turns.left -= len(data) // SMALL
            if turns.left >= 0 and not self.unparsed.data:
                last = self._parse(data)
                if last is not None and begins:
                    self.known = self._known_heads.learn(data, last)
                return
        self.unparsed.add(data, begins=begins)
        if not self.unparsed.waits:
            self.go_on()

    # requests in

    def _parse(self, data: bytes | memoryview) -> HttpRequest | None:
        """Take the requests that are complete now; returns the last of them."""
        parser, last = self.parser, None
        was_in_head = parser.in_head
        for found in parser.feed(data):
            self.clock.measured_from = -1.0
            if isinstance(found, HttpRequest):
                last = found
                if parser.closed:
                    found.release()
                else:
                    self._accept(found)
            elif not parser.closed:
                self._reject(found)
        if not parser.between:
            if not (was_in_head and parser.in_head):
                self.clock.since = self._server.now
            if parser.wants_continue and self.pipeline.current is None:  # no piece of the body came with the head
                self._advance()
        return last

    def go_on(self) -> None:
        """Parse what was read, as far as the budget of this turn of the loop and the room for requests go."""
        unparsed, parser, turns = self.unparsed, self.parser, self._turns
        unparsed.waits = False
        if unparsed.parsing:
            return
        unparsed.parsing = True
        try:
            while unparsed.data and self.pipeline.has_room(self.limits):
                if turns.left <= 0 and turns.spent(unparsed.budget):
                    unparsed.waits = True
                    break
                data, body = unparsed.data, parser.body_bytes
                piece = unparsed.take(parser)
                last = self._parse(piece)
                body = parser.body_bytes - body
                counts = len(piece) - body + body // BODY
                unparsed.chunks = min(2 * unparsed.chunks, _LARGEST_PIECE) if 16 * counts < len(piece) else _PIECE
                turns.left -= counts
                if last is not None and unparsed.whole and not unparsed.data:
                    self.known = self._known_heads.learn(data, last)
        finally:
            unparsed.parsing = False
        if unparsed.data:
            self._pause()
            if unparsed.waits:
                turns.wait(self, unparsed.budget)
        else:
            self._resume()

    def _accept(self, request: HttpRequest) -> None:
        """Take a complete request, as the last one if its client or a drain says so."""
        request.connection = self
        if request.final or self._server.draining:
            request.final, request.plain = True, False
            self._stop_taking()
        pipeline = self.pipeline
        if pipeline.current is None and not pipeline.blocked:
            pipeline.current = request
            self._handle(request)
        else:
            pipeline.waiting.append(request)
            if not pipeline.has_room(self.limits):
                self._pause()

    def _handle(self, request: HttpRequest) -> None:
        try:
            self._handler(request)
        except Exception:  # whatever it is, the client gets an answer, or sees that the one it has is not whole
            LOG.exception("the handler of %r raised", request)
            if self.pipeline.current is not request:
                return
            if request.stream is None:
                request.respond(500, JSON_TYPE, (_BUG,))
            else:
                request.cut()

    def _reject(self, refusal: Refusal) -> None:
        """Answer with a refusal once all accepted requests are answered, and end the connection."""
        self._stop_taking()
        self.pipeline.waiting.append(refusal)
        if self.pipeline.current is None:
            self._advance()

    def _advance(self) -> None:
        """Hand over what waits, one by one; when nothing is owed any more, what comes behind.

        A handler may answer at once, and its answer calls us: the call that is already here goes on with the next.
        """
        pipeline, transport = self.pipeline, self.transport
        if pipeline.advancing or transport is None or transport.is_closing():
            return
        pipeline.advancing = True
        while pipeline.waiting and pipeline.current is None and not pipeline.blocked:
            following = pipeline.waiting.popleft()
            if isinstance(following, HttpRequest):
                pipeline.current = following
                self._handle(following)
            else:
                transport.write(_rejection(self._server.head(following.status), following))
                self._end()
        pipeline.advancing = False
        if self.paused and not self.unparsed.waits and not transport.is_closing():
            self.go_on()
        if self.parser.wants_continue and pipeline.in_flight == 0:
            transport.write(_CONTINUE)
            self.parser.wants_continue = False

    # answers out

    def answer(self, request: HttpRequest, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Send the answer to the current request, then go on with what waits."""
        transport = self.transport
        if transport is None:
            request.connection = None
            return
        start = self._heads.get(status) or self._server.head(status)
        if len(body) == 1 and type(body[0]) is bytes:
            length = len(body[0])
        else:
            length = sum(memoryview(part).nbytes for part in body)
        if request.plain and status not in _BODILESS:
            lead = b"%b%bContent-Length: %d\r\n\r\n" % (start, headers, length)
        else:
            framing = b"" if status == 204 else b"Content-Length: %d\r\n" % length
            lead = start + headers + _last_lines(request, framing)
            if request.method == "HEAD" or status in _BODILESS:
                body, length = (), 0
        if length <= _JOINED_UP_TO:
            transport.write(lead + body[0] if len(body) == 1 else b"".join((lead, *body)))
        else:
            transport.writelines((lead, *body))
        request.connection = None
        self._answered(request)

    def begin(self, request: HttpRequest, status: int, headers: bytes) -> None:
        """Send the head of the current request's answer; its stream sends the rest."""
        bodiless = request.method == "HEAD" or status in _BODILESS
        framing = b"" if request.http10 or status in _BODILESS else b"Transfer-Encoding: chunked\r\n"
        if request.http10 and not bodiless:  # which knows no chunks: the answer lasts until the close
            request.final = True
            self._drop_waiting()
        start = self._heads.get(status) or self._server.head(status)
        lead = start + headers + _last_lines(request, framing)
        request.connection = None
        request.stream = BodyStream(self, lead, chunked=not request.http10, bodiless=bodiless)

    def ended(self, request: HttpRequest) -> None:
        """A streamed answer is whole: go on as after any other."""
        if self.pipeline.current is request and self.transport is not None:
            self._answered(request)

    def _answered(self, request: HttpRequest) -> None:
        request.release()
        self.pipeline.current = None
        self.clock.since, self.clock.patience = self._server.now, self.limits.idle_timeout
        if request.final:
            self._end()
        elif self.pipeline.waiting or self.parser.wants_continue:
            self._advance()

    def abort_response(self, request: HttpRequest) -> None:
        """A streamed answer is cut: it was the last thing on this connection, which closes."""
        if self.pipeline.current is request:
            request.release()
            self.pipeline.current = None
            self._drop_waiting()
            self._end()

    # the end

    def _stop_taking(self) -> None:
        """Throw away whatever else the client sends, and whatever was half read."""
        self.parser.close()
        self.unparsed.drop()
        self.known = None

    def _drop_waiting(self) -> None:
        """Take no further request, and leave without answer those that wait."""
        self._stop_taking()
        self.pipeline.drop()
        self._resume()

    def _end(self) -> None:
        """Everything is answered: close our direction, and give the client time to read and to close its own."""
        self._stop_taking()
        self.lingering = True
        self.discarded = 0
        self.clock.since = self._server.now
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.half_closed or not transport.can_write_eof():  # by TLS both directions close at once, in good order
            transport.close()
            return
        transport.write_eof()

    def _pause(self) -> None:
        if not self.paused and self.transport is not None and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        transport = self.transport
        if transport is None or not self.pipeline.has_room(self.limits):
            return
        if self.paused and not transport.is_closing():
            self.paused = False
            transport.resume_reading()
        if self.unparsed.ends:
            self.unparsed.ends = False
            if not self.eof_received():
                transport.close()

    # the server calls

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def drain(self) -> None:
        """Finish what was begun, then close. If nothing was, the next request will be the last."""
        pipeline = self.pipeline
        if self.parser.between and not self.parser.closed and pipeline.in_flight:
            self._stop_taking()
            last = pipeline.waiting[-1] if pipeline.waiting else pipeline.current
            if isinstance(last, HttpRequest):
                last.final, last.plain = True, False

    def close_if_idle(self) -> None:
        """Close, unless a request has begun to arrive, or an answer is on its way."""
        busy = self.pipeline.in_flight or self.unparsed.data or self.lingering or not self.parser.between
        if self.transport is not None and not busy:
            self.transport.close()

    def sweep(self, now: float) -> None:
        """Look at the clock for this connection."""
        transport = self.transport
        if transport is None:
            return
        clock, limits, arriving = self.clock, self.limits, self.parser.arriving
        waited = now - clock.since - limits.sweep
        unsent = transport.get_write_buffer_size()
        if unsent:
            if clock.is_stuck(unsent, now, limits.body_timeout + limits.sweep):
                self.abort()
        elif self.lingering:
            if waited > limits.linger_timeout:
                self.abort()
        elif self.pipeline.in_flight or self.unparsed.data:
            if arriving is not None:  # what waits here is late by our doing
                clock.measure(arriving.held, now)
            if not self.pipeline.in_flight:
                clock.since = now
            elif self.half_closed:
                clock.look_for_client(self.pipeline.current, transport)
        elif not self.parser.between:
            refusal = clock.complaint(arriving, now, limits)
            if refusal is not None:
                self._reject(refusal)
        elif waited > clock.patience:
            transport.close()


class BodyStream:
    """The rest of an answer that has begun: how its parts travel, and what a client that reads slowly may cost.

    The first part of a turn of the loop leaves at once, with the head if that was before it. Those behind it leave
    together in the next turn, or sooner where they are much: the transport would make a system call and a packet of
    each. The last chunk says that the answer is whole; HTTP/1.0 has only the close. Without a body, parts are dropped.
    """

    def __init__(self, connection: HttpProtocol, head: bytes, *, chunked: bool, bodiless: bool) -> None:
        self._connection = connection
        self._transport = connection.transport  # None when the client had left before the answer began
        self._limit = connection.limits.stream_buffer
        self._chunked = chunked
        self._bodiless = bodiless
        self._pieces: list[bytes | memoryview] = [head]  # that are to be sent
        self._size = len(head)
        self._turns = False  # whether the next turn is waited for
        self._waits = False  # whether what is put waits for it: something was sent in this one
        self._flush_next()

    @property
    def unsent(self) -> int:
        """Bytes that the client's socket has not taken yet; 0 when the client has left."""
        transport = self._transport
        return 0 if transport is None or transport.is_closing() else transport.get_write_buffer_size() + self._size

    def write(self, request: HttpRequest, data: bytes | memoryview) -> None:
        if type(data) is not bytes:
            view = memoryview(data)
            # Raises for a view that is not contiguous; the transport would, but with the chunk's size in its buffer.
            data = view.cast("B") if view.nbytes else b""
        size = len(data)
        transport = self._transport
        if not size or self._bodiless or transport is None or transport.is_closing():
            return
        # Looked at before the part joins it: one large part alone is no sign of a slow client.
        unsent = transport.get_write_buffer_size()
        if unsent > self._limit:
            LOG.warning("%r is cut off: its client has left %d bytes of the answer unread", request, unsent)
            transport.abort()
            return
        if self._chunked:
            line = b"%x\r\n" % size
            self._put((line, data, b"\r\n"), len(line) + size + 2)
        else:
            self._put((data,), size)

    def end(self, request: HttpRequest) -> None:
        """Send what says that the answer is whole, and let the connection go on."""
        request.stream = None
        if self._chunked and not self._bodiless:
            self._put((_LAST_CHUNK,), len(_LAST_CHUNK))
        self._flush()
        self._connection.ended(request)

    def cut(self, request: HttpRequest) -> None:
        """Close the connection without that. Chunks that were sent before still arrive."""
        request.stream = None
        self._flush()
        self._connection.abort_response(request)

    def _put(self, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        self._pieces += pieces
        self._size += size
        if self._size > _JOINED_UP_TO or not self._waits:
            self._flush()
        self._waits = True
        self._flush_next()

    def _flush_next(self) -> None:
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._turns = self._waits = False
        self._flush()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        size, self._size = self._size, 0
        transport = self._transport
        if not pieces or transport is None or transport.is_closing():
            return
        if size <= _JOINED_UP_TO:
            transport.write(b"".join(pieces))
        else:
            transport.writelines(pieces)
        self._connection.clock.streamed += size


def _last_lines(request: HttpRequest, framing: bytes) -> bytes:
    if request.final:
        framing += b"Connection: close\r\n"
    elif request.http10:
        framing += b"Connection: keep-alive\r\n"
    return framing + b"\r\n"


def _rejection(start: bytes, refusal: Refusal) -> bytes:
    """The answer that is a refusal, behind its status line."""
    body = error_body(str(refusal))
    again = b"Retry-After: 1\r\n" if refusal.status == 503 else b""
    lines = b"%bContent-Length: %d\r\nConnection: close\r\n\r\n" % (again, len(body))
    return start + refusal.headers + JSON_TYPE + lines + body
