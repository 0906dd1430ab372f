"""Reading without sockets: how the bytes are cut into reads makes no difference."""

from __future__ import annotations

from itertools import pairwise

import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from container.http1 import Http1Server, Limits
from container.http1.reader import RequestReader

STREAM = (
    b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\n"
    b"POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nX-Long: some value\r\n\r\nGET / HTTP/1"
    b"\r\n"
    b"POST /3 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nX-T: 1\r\n\r\n"
    b"POST http://h/4?q HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nef"
    b"GET /5 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    b"HEAD /6 HTTP/1.0\r\nConnection: keep-alive\r\nX: 1\r\nX: 2\r\n\r\n"
    b"POST /7 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\nghij"
    b"GET /8 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
)


class Collector(RequestReader):
    """Keeps what was read."""

    def __init__(self, server):
        super().__init__(server)
        self.exchanges, self.refusals = [], []

    def _accept(self, exchange):
        self.exchanges.append(exchange)

    def _refuse(self, refusal):
        self._take_no_more()
        self.refusals.append(refusal)


def read(pieces, limits=None):
    """The exchanges and refusals that come of these reads."""
    loop = uvloop.new_event_loop()
    reader = Collector(Http1Server(lambda _: None, limits or Limits(), loop))
    for piece in pieces:
        reader.data_received(piece)
    loop.close()
    return [
        (each.method, each.target, each.headers, each.body, each.http10, each.final) for each in reader.exchanges
    ], [each.status for each in reader.refusals]


def cut(raw, places):
    """The same bytes in pieces."""
    bounds = [0, *sorted(places), len(raw)]
    return [raw[start:end] for start, end in pairwise(bounds) if start < end]


WHOLE = read([STREAM])
cuts = st.lists(st.integers(0, len(STREAM)), max_size=40)


def test_the_whole_stream_is_eight_requests():
    """The stream of the next tests means what it should."""
    exchanges, refusals = WHOLE

    assert [target for _, target, *_ in exchanges] == [b"/1", b"/2", b"/3", b"/4?q", b"/5", b"/6", b"/7", b"/8"]
    assert [body for *_, body, _, _ in exchanges] == [b"", b"GET / HTTP/1", b"abcd", b"ef", b"", b"", b"ghij", b""]
    assert [final for *_, final in exchanges] == [False] * 7 + [True]
    assert refusals == []


def test_one_byte_at_a_time():
    """A client may send every byte by itself."""
    assert read(cut(STREAM, range(len(STREAM)))) == WHOLE


@given(cuts)
@settings(deadline=None)
def test_any_cutting_gives_the_same_exchanges(places):
    """However a stream of pipelined requests is cut into reads, the same exchanges come out."""
    assert read(cut(STREAM, places)) == WHOLE


@given(cuts, st.integers(1, len(STREAM) - 2), st.integers(0, 255))
@settings(deadline=None)
def test_any_cutting_of_a_damaged_stream_gives_the_same(places, place, byte):
    """A stream with one wrong byte gives the same exchanges and the same refusal, however it is cut.

    llhttp may notice a wrong byte of a head earlier or later, so that what it says may differ, not whether it does.
    """
    damaged = STREAM[:place] + bytes([byte]) + STREAM[place + 1 :]
    exchanges, refusals = read([damaged])
    cut_exchanges, cut_refusals = read(cut(damaged, places))

    assert cut_exchanges == exchanges
    assert len(cut_refusals) == len(refusals) <= 1


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_raises_nothing(garbage):
    """Whatever comes in, the reader gives exchanges and at most one refusal."""
    _, refusals = read([garbage[:50], garbage[50:]])

    assert len(refusals) <= 1
