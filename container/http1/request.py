"""Bytes → requests, by llhttp, and heads that clients repeat, which llhttp need not see again. Without a socket."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from container.control.routes import shown
from container.http1 import rules
from container.http1.rules import KIB, Refusal
from serve.request import Bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from container.http1.connection import BodyStream, HttpProtocol
    from container.http1.rules import Fields, Limits
    from container.http1.server import Http1Server
    from container.inference.limits import RequestMemory

HEAD_END = b"\r\n\r\n"
# uvloop reads 256 KiB at once, at most: by so much may we overestimate a head that began in the middle of a read.
_LONGEST_READ = 257 * KIB
# Wire bytes that chunk sizes, extensions and trailers may take per byte of body: "1\r\nx\r\n" takes six.
_CHUNK_OVERHEAD = 8
_SPECIAL = frozenset(("transfer-encoding", "expect", "upgrade", "origin", "sec-fetch-site"))
_SLASH = 47

_LONGEST_KNOWN = 2 * KIB
_MOST_KNOWN = 4096
_MOST_KNOWN_BYTES = 8 << 20
_KNOWN_OVERHEAD = 1024  # bytes that a known head takes beside itself


class HttpRequest:
    """A request that was read completely, and the way to answer it: at once by `respond`, or part by part.

    The latter is `begin`, any number of `write`, then `end`, or `cut` if it cannot be finished. Each does nothing when
    the client has left, and raises RuntimeError out of its turn. On the event loop; not for other threads.

    Attributes:
        method: `GET`, `POST`, … in capitals.
        target: path and query as sent, `/` first (`*` for OPTIONS); scheme and host of an absolute target are gone.
        headers: names in lower case, values as latin-1; repeated fields are joined with `, `. Read only: a client that
            repeats its headers is given the same dict again.
        body: all of it, b"" for none.
        on_disconnect: set by the handler; called once if the client leaves, or is cut off because it reads too slowly,
            before `respond`, `end` or `cut`.
    """

    def __init__(
        self,
        memory: RequestMemory,
        method: str,
        target: bytes,
        headers: Mapping[str, str],
        http10: bool,  # noqa: FBT001  positional, for the speed of it
        final: bool,  # noqa: FBT001
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = b""
        self.held = 0  # bytes that count in the memory of requests; -1 once it is answered
        self.on_disconnect: Callable[[], None] | None = None
        self.connection: HttpProtocol | None = None  # until it is answered
        self.stream: BodyStream | None = None  # from the beginning of an answer to its end
        self.http10 = http10
        self.final = final  # the last one of its connection
        self.plain = not (final or http10 or method == "HEAD")
        self._memory = memory

    def hold(self, size: int) -> bool:
        """Count further bytes in the memory of requests until this one is answered; False if they do not fit."""
        if self.held < 0:
            return True
        if not self._memory.take(size):
            return False
        self.held += size
        return True

    def release(self) -> None:
        if self.held > 0:
            self._memory.used -= self.held
        self.held = -1

    def respond(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        r"""Answer the request.

        Header lines are ready-made, each `b"Name: value\r\n"`, without Date, Content-Length and Connection. Parts of
        the body are read until they are sent: do not change them.
        """
        if self.connection is None:
            raise self._out_of_turn("respond exactly once")
        self.connection.answer(self, status, headers, body)

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer whose length is not known yet. Its head goes out at once.

        So the client learns that it is served, however long the first part takes, and an answer that is cut before its
        first part is seen to be one. A client of HTTP/1.0 gets it until the connection closes, any other in chunks.
        """
        if self.connection is None:
            raise self._out_of_turn("begin one answer at most")
        self.connection.begin(self, status, headers)

    def write(self, data: bytes | memoryview) -> None:
        """Send one part of the body at once, as one chunk; nothing for b"", or if the request was HEAD.

        A handler with many parts ready looks at `unsent` first: a client that leaves more than `Limits.stream_buffer`
        unread when another part comes is cut off.
        """
        self._begun().write(self, data)

    def end(self) -> None:
        """The answer that has begun is whole; the connection goes on with the next request."""
        self._begun().end(self)

    def cut(self) -> None:
        """The answer that has begun can't be finished: close the connection, so that the client knows."""
        self._begun().cut(self)

    @property
    def unsent(self) -> int:
        """Bytes accepted and not yet taken by the client's socket; 0 when the client has left."""
        if self.stream is not None:
            return self.stream.unsent
        return 0 if self.connection is None else self.connection.unsent

    def _begun(self) -> BodyStream:
        if self.stream is None:
            raise self._out_of_turn("begin, write, then end or cut once")
        return self.stream

    def _out_of_turn(self, rule: str) -> RuntimeError:
        if self.stream is not None:
            return RuntimeError(f"the answer to {self!r} has begun: write to it and end it, or cut it")
        what = "has been answered before" if self.connection is None else "has no answer that has begun"
        return RuntimeError(f"{self!r} {what}: {rule}")

    def __repr__(self) -> str:
        return f"<HttpRequest {self.method} {shown(self.target)} {len(self.body)} bytes>"


class KnownHead:
    """What a head means, and how long a whole request with it is."""

    def __init__(self, head: bytes, size: int, method: str, target: bytes, headers: Mapping[str, str]) -> None:
        self.head = head
        self.size = size
        self.method, self.target, self.headers = method, target, headers


class KnownHeads:
    """Heads that clients repeat byte for byte, on any connection of a server, parsed once.

    A head is known from its second time on, so that those that never come again cost no memory.
    """

    def __init__(self) -> None:
        self._known = Bounded(_MOST_KNOWN, _MOST_KNOWN_BYTES)
        self._came: set[int] = set()  # hashes of those that came once

    def of(self, data: bytes) -> KnownHead | None:
        """Return the head of a read that is one whole request, if it is known."""
        end = data.find(HEAD_END, 0, _LONGEST_KNOWN) + len(HEAD_END)
        known: KnownHead | None = self._known.get(data[:end])
        return known if known is not None and known.size == len(data) else None

    def learn(self, data: bytes, request: HttpRequest) -> KnownHead | None:
        """Remember the head of a read and its last request, if it came before and asks for nothing special.

        A read that is just that head and its body is as long as the sum below; one that holds anything more, or a
        longer head, is longer than that.
        """
        end = data.find(HEAD_END, 0, _LONGEST_KNOWN) + len(HEAD_END)
        size = end + int(request.headers.get("content-length", 0))
        is_special = request.final or request.http10 or request.headers.keys() & _SPECIAL
        if size != len(data) or is_special or not data.startswith(b"/", data.find(b" ") + 1):
            return None
        head = data[:end]
        mark = hash(head)
        if mark not in self._came:
            if len(self._came) >= _MOST_KNOWN:
                self._came.clear()
            self._came.add(mark)
            return None
        known = KnownHead(head, len(data), request.method, request.target, request.headers)
        self._known.keep(head, known, 2 * len(head) + _KNOWN_OVERHEAD)
        return known

    def forget(self) -> None:
        self._known = Bounded(_MOST_KNOWN, _MOST_KNOWN_BYTES)
        self._came.clear()


class RequestParser:
    """The requests of one connection, as far as they have come."""

    def __init__(self, server: Http1Server) -> None:
        self.between = True  # what was read so far ends with a request
        self.arriving: HttpRequest | None = None  # whose body is coming in
        self.head_size = 0  # at least as many bytes as the head at hand has so far
        self.wants_continue = False  # the client waits for a 100 (Continue)
        self.body_bytes = 0  # of all bodies so far
        self.closed = False  # nothing more is parsed
        self._server = server
        self._memory = server.memory
        self._limits: Limits = server.limits
        self._llhttp: HttpRequestParser | None = HttpRequestParser(self)
        self._found: list[HttpRequest | Refusal] = []
        self._target = b""
        self._fields: Fields = []
        self._buffer: BytesIO | None = None  # of a body of several pieces
        self._chunks = 0  # of it, the last and empty one too
        self._wire = 0  # bytes of a chunked body on the wire
        self._replay = b""  # the head of a request without its Upgrade

    @property
    def in_head(self) -> bool:
        """Whether a part of a head has come."""
        return not self.between and self.arriving is None

    def feed(self, data: bytes | memoryview) -> list[HttpRequest | Refusal]:
        """Return the requests that are complete now, and behind them what is answered to what is none."""
        found = self._found = []
        self.head_size += len(data)
        try:
            self._feed(data)
            if self.between:
                self.head_size = 0
            else:
                self._check_part(len(data))
        except Refusal as refusal:
            refusal.__traceback__ = refusal.__context__ = None  # which know the bytes
            found.append(refusal)
        return found

    def close(self) -> None:
        """Forget what was half read, and llhttp, which knows this object."""
        self.closed = self.between = True
        if self.arriving is not None:
            self.arriving.release()
        self.arriving = self._buffer = self._llhttp = None
        self._fields, self._found = [], []
        self._target = self._replay = b""
        self.head_size = 0
        self.wants_continue = False

    def _feed(self, data: bytes | memoryview) -> None:
        llhttp: HttpRequestParser = self._llhttp  # type: ignore[assignment]  # it is not closed
        upgrade_at = 0
        try:
            llhttp.feed_data(data)
        except HttpParserUpgrade as stop:
            upgrade_at = stop.args[0]
        except HttpParserCallbackError as error:
            cause = error.__context__
            raise error if cause is None else cause  # noqa: B904  it is what was raised below
        except HttpParserError as error:
            raise rules.malformed(error, self._target, llhttp.get_http_version()) from None
        if upgrade_at > 0:
            # It has skipped the body of that request: a new one gets the head without the Upgrade, then the rest.
            replay, self._replay = self._replay, b""
            self._llhttp = HttpRequestParser(self)
            self._feed(replay)
            self._feed(memoryview(data)[upgrade_at:])

    def _check_part(self, size: int) -> None:
        """Look whether too much has come of the request at hand, with a read of so many bytes."""
        limits = self._limits
        if self.arriving is not None:
            self.head_size = 0
            if "transfer-encoding" in self.arriving.headers:
                self._wire += size
                if self._wire > _CHUNK_OVERHEAD * self.arriving.held + limits.headers + _LONGEST_READ:
                    raise Refusal(413, "The chunks are mostly extensions or trailers: send larger chunks without them.")
        elif self.head_size > limits.request_line:
            self._measure(len(self._target), self._fields)

    # llhttp calls

    def on_message_begin(self) -> None:
        """Begin a request; empty lines before it are none."""
        self.between = False

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field, or one trailer field: those are ignored."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        llhttp: HttpRequestParser = self._llhttp  # type: ignore[assignment]  # it is calling
        raw, target, fields = llhttp.get_method(), self._target, self._fields
        method = rules.METHODS.get(raw) or raw.decode("latin-1")
        if method == "CONNECT":
            raise Refusal(501, "CONNECT is not offered: this server is no proxy, send the request itself.")
        if self.head_size > self._limits.request_line or len(fields) > self._limits.header_count:
            self._measure(len(method) + len(target) + len("  HTTP/1.1"), fields)
        self._target, self._fields = b"", []
        self.arriving = self._checked(llhttp, method, target, fields)

    def on_chunk_header(self) -> None:
        """Another chunk of the body; behind the last one comes an empty one."""
        self._chunks += 1
        if self._chunks > self._limits.chunks + 1:
            too_many = f"Chunked request body exceeds maximum of {self._limits.chunks} non-empty chunks."
            raise Refusal(400, f"{too_many} Send fewer or larger HTTP chunks.")

    def on_body(self, piece: bytes) -> None:
        """A piece of the body: all of a small one. Of several pieces each is copied once."""
        request: HttpRequest = self.arriving  # type: ignore[assignment]  # the head came first
        if not request.hold(len(piece)):
            raise Refusal(503, self._memory.full)
        self.body_bytes += len(piece)
        if request.held > self._limits.body:
            raise self._server.too_large(request.target, request.held, self._limits.body)
        if not request.body:
            request.body = piece
        elif self._buffer is not None:
            self._buffer.write(piece)
        else:
            self._buffer = BytesIO()
            self._buffer.writelines((request.body, piece))

    def on_message_complete(self) -> None:
        request = self.arriving
        if request is None:
            return  # an upgrade: llhttp stops here
        if self._buffer is not None:
            request.body, self._buffer = self._buffer.getvalue(), None
        if self._fields:  # trailers
            self._fields = []
        self.arriving = None
        self.between = True
        self.wants_continue = False
        self._found.append(request)

    def _checked(self, llhttp: HttpRequestParser, method: str, target: bytes, fields: Fields) -> HttpRequest | None:
        """Check the header fields and begin a request; None for one that begins when its Upgrade is gone."""
        limits, server = self._limits, self._server
        final, version = not llhttp.should_keep_alive(), llhttp.get_http_version()
        if version not in rules.SUPPORTED_VERSIONS:
            raise rules.unsupported(version)
        http10 = version == "1.0"
        whole, target = target, target if target[0] == _SLASH else rules.origin_form(target)
        headers = rules.joined(fields)
        if "host" not in headers and not http10:
            raise Refusal(400, "The Host header is missing: HTTP/1.1 asks for exactly one.")
        if server.gate is not None:
            refusal = server.gate(method, target, headers, rules.asked_host(whole, headers))
            if refusal is not None:
                raise refusal
        if (size := int(headers.get("content-length", 0))) > limits.body:
            raise server.too_large(target, size, limits.body)
        if not self._memory.fits(size):
            raise Refusal(503, self._memory.full)
        if "transfer-encoding" in headers:
            coding = headers["transfer-encoding"]
            if http10:
                advice = "send Content-Length, or speak HTTP/1.1."
                raise Refusal(400, f"Transfer-Encoding does not exist in HTTP/1.0: {advice}")
            if coding.lower() != "chunked":
                advice = "send chunked alone, or Content-Length."
                raise Refusal(501, f"Transfer-Encoding {coding[:64]!r} is not supported: {advice}")
            self._wire = self._chunks = 0
        if "expect" in headers:
            if headers["expect"].lower() != "100-continue":
                wrong = headers["expect"][:64]
                raise Refusal(417, f"The expectation {wrong!r} cannot be met: send 100-continue or no Expect.")
            self.wants_continue = not http10
        if "upgrade" in headers and llhttp.should_upgrade():
            del headers["upgrade"]
            self._replay = rules.rebuild(method, target, headers, http10=http10)
            return None
        return HttpRequest(self._memory, method, target, headers, http10, final)

    def _measure(self, line: int, fields: Fields) -> None:
        """Refuse a head whose parts, so far as they arrived, are over a limit."""
        limits = self._limits
        if line > limits.request_line:
            line_limit = limits.request_line
            raise Refusal(414, f"The request line is longer than {line_limit} bytes: shorten the path or the query.")
        if len(fields) > limits.header_count:
            raise Refusal(431, f"There are more than {limits.header_count} header fields: send fewer.")
        size = sum([len(name) + len(value) + 4 for name, value in fields])
        # It may be one endless field, which llhttp still collects.
        if size > limits.headers or self.head_size > limits.request_line + limits.headers + _LONGEST_READ:
            raise Refusal(431, f"The header fields take more than {limits.headers} bytes: send fewer or shorter ones.")
