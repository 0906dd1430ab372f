"""Bytes of connections: whatever comes, in whatever pieces, is requests that are answered once each, or an end."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any

import hpack
from hypothesis import strategies as st

from container.http1 import Http1Server, Limits
from container.http2 import frames
from container.http2.frames import ConnectionFault, ErrorCode, HeaderBlocks, StreamFault
from container.inference.limits import Turns
from tests.container.http2.conftest import FIELDS, OPENING, REQUEST, Life, Told, Wire
from tests.fuzz.hunt import FindingError, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_LIMITS = Limits(request_line=256, headers=1024, header_count=20, body=2048, chunks=32, pipelined=3, linger=4096)
_PIECES = 6
_ENDS = b"\r\n\r\n"


def pieces(data: bytes) -> list[bytes]:
    """The bytes as they may arrive: always the same for the same bytes."""
    number = zlib.crc32(data)
    if number % 16 == 0 and len(data) < 300:
        return [data[at : at + 1] for at in range(len(data))]
    places = {(number >> shift) * 2654435761 % (len(data) + 1) for shift in range(0, 5 * (1 + number % _PIECES), 5)}
    bounds = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds) if start < end]


class Loop:
    """As much of a loop as connections ask for; no timer is ever due."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def time(self) -> float:
        """It stands still."""
        return 0.0

    def call_soon(self, call: Callable[[], None]) -> None:
        """Remember it for the next turn."""
        self.calls.append(call)

    def call_later(self, *_: Any) -> Loop:
        """Return what can be cancelled."""
        return self

    def cancel(self) -> None:
        """Nothing was planned."""

    def turn(self) -> None:
        """Run what is to be done."""
        while self.calls:
            calls, self.calls = self.calls, []
            for call in calls:
                call()


class Plain(Wire):
    """What else a connection of HTTP/1.1 asks of its transport."""

    def set_write_buffer_limits(self, high: int) -> None:
        """As they are."""

    def writelines(self, parts: Any) -> None:
        """Keep them."""
        self.write(b"".join(parts))


class _Plain:
    """One connection of HTTP/1.1: what was asked on it, and what was answered."""

    def __init__(self, reads: list[bytes]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._loop, self._later = Loop(), []
        self.wire = Plain()
        turns = Turns(self._loop.call_soon, lambda: 0.0)
        server = Http1Server(self._handle, _LIMITS, self._loop, turns=turns)
        self._connection = server.protocol_factory()
        self._connection.connection_made(self.wire)
        for read in reads:
            self._settle()
            if self.wire.aborted:
                break
            self._connection.data_received(read)
        self._settle()
        ended = self.wire.closed or not self._connection.eof_received()
        self._settle()
        while self._later:
            self._later.pop(0).respond(200, b"", (b"x",))
            self._loop.turn()
        if not (ended or self.wire.closed):
            raise FindingError("the client has sent all, and the connection does not end")
        self.answers = _answers(self.wire.written, [method for method, *_ in self.asked])
        self._connection.connection_lost(None)
        if server.connections or server.in_flight:
            raise FindingError("something is left of the connection")

    def _handle(self, exchange: Any) -> None:
        self.asked.append((exchange.method, exchange.target, dict(exchange.headers), exchange.body, exchange.final))
        if len(exchange.target) % 4 == 3:
            self._later.append(exchange)
        else:
            exchange.respond(200, b"", (b"x",))

    def _settle(self) -> None:
        """Go on until more is read."""
        self._loop.turn()
        while not self.wire.reads and not self.wire.closed:
            if not self._later:
                raise FindingError("nothing more is read, and nothing is waited for")
            self._later.pop(0).respond(200, b"", (b"x",))
            self._loop.turn()


def _answers(raw: bytes, methods: list[str]) -> list[int]:
    """The statuses of final answers, read by the letter; one for each request, and one for a refusal at most."""
    found: list[int] = []
    while raw:
        head, end, raw = raw.partition(_ENDS)
        if not end or not head.startswith(b"HTTP/1.1 "):
            raise FindingError("an answer that is none")
        status = int(head[9:12])
        if status == 100:
            continue
        size = int(head.partition(b"\r\nContent-Length: ")[2].partition(b"\r\n")[0])
        if found[len(methods) :]:
            raise FindingError("an answer behind a refusal")
        if not (len(found) < len(methods) and methods[len(found)] == "HEAD"):
            raw = raw[size:]
        found.append(status)
    if found[: len(methods)] != [200] * len(methods):
        raise FindingError("not every request has one answer, in its place")
    return found


def http1(data: bytes) -> Hashable:
    """What comes of the bytes of a connection is the same in pieces."""
    whole = _Plain([data] if data else [])
    parts = _Plain(pieces(data))
    if whole.asked != parts.asked:
        raise FindingError("other requests in pieces")
    if len(whole.answers) != len(parts.answers):
        raise FindingError("refused in one way and not in the other")
    return tuple(whole.answers[-3:]), tuple(method for method, *_ in whole.asked[-2:])


class _Answering(Told):
    """A receiver that answers what is complete."""

    def ended(self) -> None:
        """The request is complete."""
        super().ended()
        self.stream.whole(REQUEST, (b"12345", self.data[:64]), REQUEST)


class _Streams(Life):
    """One connection of HTTP/2: what was told of its streams, and with which code it ended."""

    def __init__(self, reads: list[bytes]) -> None:
        loop = Loop()
        super().__init__(loop, max_ping_strikes=0)
        for read in reads:
            if self.wire.aborted:
                break
            self.send(read)
            loop.turn()
            if not self.wire.reads and not self.wire.closed:
                raise FindingError("nothing more is read, and nothing is waited for")
        loop.turn()
        self.code = _ending(self.wire)
        self.connection.connection_lost(None)
        if self.connection.streams.open or self.all:
            raise FindingError("something is left of the connection")
        if not all(each.gone or each.stream.over for each in self.told.values()):
            raise FindingError("a stream that was not told of its end")
        self.came = {number: (each.data, each.over) for number, each in self.told.items()}

    def begin(self, stream: Any, _fields: Any) -> Told:
        """Take a stream, and answer it once it is complete."""
        self.told[stream.id] = _Answering(stream)
        return self.told[stream.id]


def _ending(wire: Wire) -> ErrorCode | None:
    """The code of the last frame, if it says the end; frames are read by the letter."""
    data, at, code = wire.written, 0, None
    while at < len(data) and data[at : at + 5] != b"HTTP/":
        size = int.from_bytes(data[at : at + 3], "big")
        if len(data) < at + frames.HEAD + size:
            raise FindingError("half a frame was sent")
        if code is not None:
            raise FindingError("something was sent behind the end")
        if data[at + 3] == frames.GOAWAY:
            code = ErrorCode(int.from_bytes(data[at + 13 : at + 17], "big"))
        at += frames.HEAD + size
    return code


def http2(data: bytes) -> Hashable:
    """What comes of the frames of a connection is the same in pieces."""
    raw = data if data.startswith(b"PRI") else OPENING + data
    whole, parts = _Streams([raw]), _Streams(pieces(raw))
    if whole.code != parts.code:
        raise FindingError("another end in pieces")
    if whole.came != parts.came:
        raise FindingError("other streams in pieces")
    return whole.code, len(whole.came), sum(over for _, over in whole.came.values())


_BETWEEN = b"\0\0\0\0"


def blocks(data: bytes) -> Hashable:
    """Header blocks of a connection, each sent twice, are what hpack alone makes of them, though some are remembered."""
    ours, plain = HeaderBlocks(), hpack.Decoder(1 << 18)
    outcome: list[Hashable] = []
    for block in data.split(_BETWEEN):
        for _ in range(2):
            try:
                found = ours.read(block)
            except StreamFault as fault:
                found = None
                outcome.append((fault.code, fault.why[:20]))
            except ConnectionFault as fault:
                return (*outcome, fault.code, fault.why[:20])
            expected = tuple((bytes(name), bytes(value)) for name, value in plain.decode(block, raw=True))
            if found is not None and found != expected:
                raise FindingError("other headers where they are remembered")
    return tuple(outcome[-2:]), len(data.split(_BETWEEN))


# -- what is expected ------------------------------------------------------------------------------------------------

_HEADERS = st.sampled_from(
    [
        b"Host: a",
        b"Host: b",
        b"Content-Length: 3",
        b"Content-Length: 0",
        b"Content-Length: 4",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Connection: close",
        b"Connection: keep-alive",
        b"Connection: upgrade",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"X: 1",
        b" folded",
        b"X : 1",
        b"Content-Length: 3\nX: y",
    ]
)
_BODIES = st.sampled_from(
    [
        b"",
        b"abc",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"0x3\r\nabc\r\n",
    ]
)


@st.composite
def _plain(draw: st.DrawFn) -> bytes:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        line = draw(
            st.sampled_from([b"GET /", b"POST /abc", b"HEAD /ab", b"OPTIONS *", b"POST http://h/p", b"GET //x"])
        )
        version = draw(st.sampled_from([b" HTTP/1.1"] * 5 + [b" HTTP/1.0", b"", b" HTTP/2.0"]))
        lines = [line + version, b"Host: a", *draw(st.lists(_HEADERS, max_size=3))]
        parts.append(b"\r\n".join(lines) + _ENDS + draw(_BODIES))
    return b"".join(parts)


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    parts = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]))
        payload = (
            draw(st.just(REQUEST) | _block())
            if kind in (1, 9)
            else draw(_PAYLOADS[kind] if kind in _PAYLOADS else st.binary(max_size=12))
        )
        flags = draw(st.sampled_from([0, 1, 4, 5, 5, 4, 8, 0x2C, 0xFF]))
        stream = draw(st.sampled_from([0, 1, 1, 3, 5, 7, 2, 2**31 - 1]))
        parts.append(frames.frame(kind, flags, stream, payload))
    return b"".join(parts)


_PAYLOADS = {
    3: st.sampled_from([bytes(4), b"\0\0\0\x08", b""]),
    4: st.sampled_from(
        [
            b"",
            b"\0\4\0\0\0\0",
            b"\0\4\x7f\xff\xff\xff",
            b"\0\1\0\0\0\0",
            b"\0\5\0\0\x40\0",
            b"\0\4\xff\xff\xff\xff",
            b"\0",
        ]
    ),
    6: st.sampled_from([bytes(8), b"mme-ends", b""]),
    8: st.sampled_from([bytes(4), b"\0\0\0\1", b"\x7f\xff\xff\xff", b"\0\1\0\0"]),
}
_NAMES = st.sampled_from(
    [b":method", b":path", b":scheme", b":authority", b"te", b"x", b"content-length", b"connection", b"X", b""]
)
_TEXTS = st.sampled_from([b"POST", b"/a", b"http", b"trailers", b"3", b" 3", b"", b"a\nb", b"v" * 50])


@st.composite
def _block(draw: st.DrawFn) -> bytes:
    encoder = hpack.Encoder()
    found = b""
    for number in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 5)) == 0:
            encoder.header_table_size = draw(st.sampled_from([0, 64, 4096, 256]))
        fields = [*FIELDS, *draw(st.lists(st.tuples(_NAMES, _TEXTS), max_size=4))]
        found += (_BETWEEN if number else b"") + bytes(encoder.encode(fields, huffman=draw(st.booleans())))
    return found


_HTTP1 = (
    *(
        b"GET / HTTP/1.1\r\n",
        b"Host: a\r\n",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"\r\n\r\n",
        b"\r\n",
    ),
    *(
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"0\r\n\r\n",
        b";",
    ),
    *(b"HTTP/1.0", b"HEAD ", b"http://", b"\r", b"\n", b"\t", b"chunked", b","),
)
_HTTP2 = (
    *(
        frames.frame(kind, flags, 1, REQUEST if kind == frames.HEADERS else b"")
        for kind in range(10)
        for flags in (0, 5)
    ),
    *(frames.window_update(0, 1), frames.window_update(1, 2**31 - 1), frames.settings({frames.INITIAL_WINDOW_SIZE: 0})),
    *(REQUEST, b"\x3f\xe1\x1f", b"\x20", b"\x82", b"\x40\1x\1y"),
)
TARGETS = (
    Target("http1", http1, _plain(), _HTTP1),
    Target("http2", http2, _frames(), _HTTP2),
    Target(
        "blocks", blocks, _block(), (REQUEST, b"\x20", b"\x3f\xe1\x1f", b"\xbe", b"\x40\1x\1y", b"\x7f\xff", _BETWEEN)
    ),
)
