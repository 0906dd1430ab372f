"""Reading without sockets: how the bytes are cut into reads makes no difference."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.http1 import Http1Server, Limits
from container.inference.limits import Turns
from tests.fuzz.wires import Loop, Plain

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

HEAD = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"
POST = HEAD + b"abc"
OTHER = POST.replace(b"/a", b"/b")
LONG = POST.replace(b"/a", b"/" + b"a" * 2048)
NESTED = HEAD.replace(b"3", b"%d" % len(POST * 2)) + POST * 2
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
EXPECTING = POST.replace(b"\r\nC", b"\r\nExpect: 100-continue\r\nC")
UPGRADING = POST.replace(b"\r\nC", b"\r\nConnection: upgrade\r\nUpgrade: h2c\r\nC")
UNREMARKABLE = [
    POST,
    HEAD + b"\r\n\r",
    b"\r\n" + POST,
    NESTED,
    POST.replace(b"POST", b"HEAD"),
    POST.replace(b"\r\nC", b"\r\nConnection: keep-alive\r\nC"),
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
]
REQUESTS = [
    *UNREMARKABLE,
    OTHER,
    LONG,
    CHUNKED,
    EXPECTING,
    UPGRADING,
    POST + b"\r\n",
    POST.replace(b"Host", b"HOST"),
    POST.replace(b"1.1\r\n", b"1.0\r\nConnection: keep-alive\r\n"),
    POST.replace(b"\r\nC", b"\r\nConnection: close\r\nC"),
]


class Reader:
    """What came of these reads, and how often llhttp was asked; the request of this number ends the connection."""

    def __init__(self, pieces, last=None):
        self.requests, self.parsed, self.last = [], 0, last
        loop, self.wire = Loop(), Plain()
        turns = Turns(loop.call_soon, lambda: 0.0)
        server = Http1Server(self.handle, Limits(), loop, gate=self.let_in, turns=turns)
        self.connection = server.protocol_factory()
        self.connection.connection_made(self.wire)
        for piece in pieces:
            self.connection.data_received(piece)
            loop.turn()

    def let_in(self, *_request):
        """Count the heads that are parsed."""
        self.parsed += 1

    def handle(self, request):
        """Answer all but the last."""
        self.requests.append(request)
        if len(self.requests) == self.last:
            request.connection.abort_response(request)
        else:
            request.respond(204, b"", ())

    @property
    def refusals(self):
        """The statuses of what was refused."""
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", self.wire.written) if int(status) > 204]


def read(pieces):
    """The requests and refusals that come of these reads."""
    reader = Reader(pieces)
    return [
        (each.method, each.target, each.headers, each.body, each.http10, each.final) for each in reader.requests
    ], reader.refusals


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
def test_any_cutting_gives_the_same_exchanges(places):
    """However a stream of pipelined requests is cut into reads, the same exchanges come out."""
    assert read(cut(STREAM, places)) == WHOLE


@given(cuts, st.integers(1, len(STREAM) - 2), st.integers(0, 255))
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
def test_garbage_raises_nothing(garbage):
    """Whatever comes in, the reader gives exchanges and at most one refusal."""
    _, refusals = read([garbage[:50], garbage[50:]])

    assert len(refusals) <= 1


@pytest.mark.parametrize("raw", UNREMARKABLE)
def test_a_request_that_repeats_is_not_parsed(raw):
    """From the third time on, whatever its body; every time the same comes of it."""
    reader = Reader([raw] * 5)

    assert reader.parsed == 2
    assert read([raw] * 5) == read([raw * 5])


def test_requests_that_take_turns_are_not_parsed():
    """As a client of many models sends them: each head is known from its third time on."""
    reads = [POST.replace(b"/a", b"/%d" % number) for number in range(20)] * 5
    reader = Reader(reads)

    assert reader.parsed == 40
    assert read(reads) == read([b"".join(reads)])


@pytest.mark.parametrize(
    "reads",
    [
        [POST[:-1], POST[-1:]],
        [POST * 2],
        [POST + b"\r\n"],
        [b"\r\n\r\n" + POST],
        [LONG],
        [CHUNKED],
        [EXPECTING],
    ],
)
def test_nothing_is_remembered(reads):
    """Of a request that never is all of a read, has a long head or something special."""
    reader = Reader(reads * 5)

    assert not reader.connection.known
    assert reader.parsed >= len(reader.requests) >= 5
    assert read(reads * 5) == read([b"".join(reads * 5)])


@pytest.mark.parametrize(
    "reads",
    [
        [POST + b"PO", POST],
        [POST + b"\r\nP", POST],
        [POST + b"P", b"OST /", POST, POST],
        [POST[:20], POST, POST],
        [HEAD[:-2] + b"X: ", POST, POST],
        [HEAD, POST[:3], POST],
        [NESTED[: -2 * len(POST)], POST, POST, POST],
        [POST * 2, POST, POST + POST[:-3], b"xyz", POST],
        [CHUNKED[:-2], b"\r\n", POST],
        [OTHER[:25], OTHER[25:], OTHER[25:]],
        [OTHER, OTHER, OTHER[:25], OTHER[25:], OTHER[25:]],
    ],
)
def test_only_a_request_of_its_own_is_a_repeat(reads):
    """The same bytes inside another request, behind the beginning of one or before more mean what they mean there."""
    reads = [POST] * 3 + reads
    exchanges, refusals = read(reads)
    whole_exchanges, whole_refusals = read([b"".join(reads)])

    assert exchanges == whole_exchanges
    assert len(refusals) == len(whole_refusals)


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("reads", [[POST] * 6, [POST * 6], [POST * 5 + POST[:20]]])
def test_nothing_is_taken_behind_the_last(last, reads):
    """Whether the handler ended the connection with a repeat, with the request that made it one, or before."""
    reader = Reader(reads, last)

    assert len(reader.requests) == last
    assert reader.refusals == []
    assert reader.connection.parser.between


runs = st.lists(st.tuples(st.sampled_from(REQUESTS), st.integers(1, 4)), min_size=1, max_size=6)
few_places, few_joins = st.lists(st.integers(0, 2000), max_size=4), st.sets(st.integers(0, 20), max_size=4)


def in_reads(runs, places, joins):
    """A read for each request, but cut at these places too, and some of them joined to the next."""
    requests = [request for request, count in runs for _ in range(count)]
    raw = b"".join(requests)
    ends = {end for number, end in enumerate(accumulate(map(len, requests))) if number not in joins}
    return cut(raw, ends - {len(raw)} | {place % len(raw) for place in places})


@given(runs, few_places, few_joins)
def test_repeats_in_any_cutting_give_the_same_exchanges(runs, places, joins):
    """Requests that repeat, in reads of their own or not, mean what they mean in one read, where none is a repeat."""
    reads = in_reads(runs, places, joins)

    assert read(reads) == read([b"".join(reads)])


@given(runs, few_places, few_joins, st.integers(0, 2000), st.integers(0, 255))
def test_damaged_repeats_give_the_same_exchanges(runs, places, joins, place, byte):
    """So they do with one wrong byte, and are refused or not."""
    reads = in_reads(runs, places, joins)
    damaged = bytearray(b"".join(reads))
    damaged[place % len(damaged)] = byte
    exchanges, refusals = read(cut(bytes(damaged), [*accumulate(map(len, reads))][:-1]))
    whole_exchanges, whole_refusals = read([bytes(damaged)])

    assert exchanges == whole_exchanges
    assert len(refusals) == len(whole_refusals) <= 1
