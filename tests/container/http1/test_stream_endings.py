"""How streams end that do not just end: cut, left by their clients, read too slowly, drained. Time passes by hand."""

from __future__ import annotations

import http.client
import logging

import pytest

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
OLD = b"GET /1 HTTP/1.0\r\n\r\n"
BIG = b"x" * 1_000_000


def begun(server, later):
    """The exchange that comes last, its answer begun with one part."""
    server.until(lambda: len(later) > 0)
    exchange = later.exchanges[-1]
    server.call(exchange.begin, 200, b"")
    server.call(exchange.write, b"one")
    return exchange


# cut


def test_cut(serve, later):
    """A client reads what was sent before the cut, then that there is no last chunk; what it asked behind is dropped."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2)
    exchange = begun(server, later)
    server.until(lambda: server.server.in_flight == 2)
    server.call(exchange.cut)

    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.at_end()
    client.close()
    server.empty()
    assert len(later) == 1
    assert later.left == []


def test_cut_before_the_first_part(serve, later):
    """So it does when there was none."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    server.call(later.exchanges[0].begin, 200, b"")
    server.call(later.exchanges[0].cut)

    assert client.head().headers["transfer-encoding"] == "chunked"
    assert client.at_end()


def test_cut_inside_the_handler(serve):
    """A handler may cut at once, also for a request that waited; requests of the same read are not begun."""
    asked = []

    def handler(exchange):
        asked.append(exchange.target)
        exchange.begin(200, b"")
        exchange.write(exchange.target)
        if exchange.target == b"/2":
            exchange.cut()
        else:
            exchange.end()

    client = serve(handler).connect().send(GET % 1 + GET % 2 + GET % 3)

    assert client.answer().parts == [b"/1"]
    assert client.head().status == 200
    assert client.chunk() == b"/2"
    assert client.at_end()
    assert asked == [b"/1", b"/2"]


@pytest.mark.parametrize("behind", [GET % 3, b"\0\r\n\r\n"])
def test_cut_inside_the_handler_of_a_request_that_waited(serve, behind):
    """The same holds when the requests have waited for an answer, and for the refusal of a malformed one behind."""
    asked = []

    def handler(exchange):
        asked.append(exchange)
        if len(asked) > 1:
            exchange.begin(200, b"")
            exchange.write(b"one")
            exchange.cut()

    server = serve(handler)
    client = server.connect().send(GET % 1 + GET % 2 + behind)
    connection = server.alone()
    server.until(lambda: connection.pipeline.in_flight == 3 or connection.parser.closed)
    server.call(asked[0].respond, 200, b"", (b"first",))

    assert client.answer().body == b"first"
    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.at_end()
    assert len(asked) == 2


def test_cut_behind_much(serve, later):
    """Parts that the client has not read when the cut comes still reach it."""
    server = serve(later)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    exchange = begun(server, later)
    for _ in range(20):
        server.call(exchange.write, BIG)
    server.call(exchange.cut)

    assert client.head().status == 200
    assert [client.chunk() for _ in range(21)] == [b"one", *[BIG] * 20]
    assert client.at_end()


def test_cut_while_reading_is_paused(serve, later):
    """A client with many requests behind the one that is cut is let go as well."""
    server = serve(later, pipelined=3, linger_timeout=1e9)
    client = server.connect().send(b"".join(GET % number for number in range(10)))
    connection = server.alone()
    server.until(lambda: connection.paused)
    server.call(begun(server, later).cut)

    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.at_end()
    client.close()
    server.empty()
    assert len(later) == 1


@pytest.mark.parametrize("how", ["cut", "abort", "limit", "unread", "unread after the end"])
def test_half_an_answer_is_never_taken_for_all_of_it(serve, later, how):
    """However an answer fails to become whole, a common client of HTTP/1.1 raises; HTTP/1.0 has no way to say it."""
    server = serve(later, stream_buffer=1000, body_timeout=60)
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    client.request("GET", "/")
    exchange = begun(server, later)
    with client.getresponse() as answer:
        assert answer.read1(3) == b"one"
        if how in ("limit", "unread", "unread after the end"):
            server.call(exchange.write, b"x" * 50_000_000)
        if how == "unread after the end":
            server.call(exchange.end)
        if how == "limit":
            server.call(exchange.write, b"one part too many")
        elif how.startswith("unread"):
            server.elapse(0)
            server.elapse(61)
        elif how == "abort":
            server.call(server.server.abort)
        else:
            server.call(exchange.cut)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    client.close()


def test_a_whole_answer_is_never_taken_for_half_of_it(serve, later):
    """What the system has when a client of HTTP/1.0 is waited for no longer still reaches it, and then the end."""
    server = serve(later, linger_timeout=5)
    client = server.connect(receive_buffer=4096).send(OLD)
    exchange = begun(server, later)
    server.call(exchange.write, BIG[:100_000])
    server.until(lambda: exchange.unsent == 0)
    server.call(exchange.end)
    server.elapse(6)
    server.empty()

    assert client.head().status == 200
    assert client.reader.read() == b"one" + BIG[:100_000]


# clients that leave


@pytest.mark.parametrize("request_line", [GET % 1, OLD, b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_client_that_resets(serve, later, request_line):
    """A handler learns once that its client is gone in the middle of a stream; what it does then does nothing."""
    server = serve(later)
    client = server.connect().send(request_line + GET % 2)
    exchange = begun(server, later)
    client.reset()
    server.until(lambda: len(later.left) == 1)
    server.empty()

    for part in (b"two", BIG):
        server.call(exchange.write, part)
    assert server.call(lambda: exchange.unsent) == 0
    server.call(exchange.end)

    assert later.left == [exchange]
    assert len(later) == 1


@pytest.mark.parametrize("over", ["end", "cut"])
def test_client_that_had_left_before_the_answer(serve, later, over):
    """A stream for a client that is gone already goes nowhere."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    client.reset()
    server.empty()
    exchange = later.exchanges[0]
    assert server.call(lambda: exchange.unsent) == 0
    server.call(exchange.begin, 200, b"")
    server.call(exchange.write, BIG)
    assert server.call(lambda: exchange.unsent) == 0
    server.call(getattr(exchange, over))

    assert later.left == [exchange]


@pytest.mark.parametrize("over", ["end", "cut"])
def test_nobody_is_told_after_the_end(serve, later, over):
    """A client that leaves when its stream was ended or cut concerns the handler no more."""
    server = serve(later)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    exchange = begun(server, later)
    server.call(exchange.write, b"x" * 50_000_000)
    server.call(getattr(exchange, over))
    client.reset()
    server.empty()

    assert later.left == []


def test_client_that_closes_after_half_closing(serve, later):
    """A half-closed client that reads on and later goes is found to be gone: by the next part, if not before."""
    server = serve(later)
    client = server.connect().send(GET % 1).done_sending()
    connection = server.alone()
    exchange = begun(server, later)
    server.until(lambda: connection.half_closed)
    server.elapse(0)
    server.elapse(0)
    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert later.left == []
    client.close()

    server.call(exchange.write, b"two")
    server.until(lambda: server.elapse_here() or len(later.left) == 1)
    server.empty()


@pytest.mark.parametrize("request_line", [GET % 1, OLD])
def test_client_that_closes_between_two_parts(serve, later, request_line):
    """It is found gone by the next part: nothing else may be sent amid an answer."""
    server = serve(later)
    client = server.connect().send(request_line)
    connection = server.alone()
    exchange = begun(server, later)
    assert client.head().status == 200
    assert client.reader.read(3)
    client.close()
    server.until(lambda: connection.half_closed)

    server.call(exchange.write, b"two")
    server.until(lambda: server.elapse_here() or len(later.left) == 1)
    server.empty()


@pytest.mark.parametrize("old", [False, True])
def test_half_closed(serve, later, old):
    """A client that closed its direction gets all of a stream."""
    server = serve(later)
    client = server.connect().send(OLD if old else GET % 1).done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)
    exchange = begun(server, later)
    for part in (b"two", BIG, b"three"):
        server.elapse(0)
        server.elapse(0)
        server.call(exchange.write, part)
    server.elapse(0)
    server.elapse(0)
    server.call(exchange.end)

    if old:
        assert client.head().headers["connection"] == "close"
        assert client.reader.read() == b"onetwo" + BIG + b"three"
    else:
        assert client.answer().parts == [b"one", b"two", BIG, b"three"]
        assert client.at_end()
    server.empty()
    assert later.left == []


def test_half_closed_asked_before_and_after_the_beginning(serve, later):
    """The interim answer that asks a client comes before a stream, never between its parts."""
    server = serve(later)
    client = server.connect().send(GET % 1).done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)
    server.elapse(0)
    server.elapse(0)
    exchange = begun(server, later)
    exchange.on_disconnect = None
    server.elapse(0)
    server.call(exchange.end)

    assert client.answer().status == 100
    assert client.head().status == 200
    assert client.reader.read() == b"3\r\none\r\n0\r\n\r\n"


def test_half_closed_in_the_middle_of_a_request(serve, later):
    """A request that is cut short behind a stream is refused when the stream has ended."""
    server = serve(later)
    client = server.connect().send(GET % 1 + b"GET / HT").done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)
    server.call(begun(server, later).end)

    assert client.answer().parts == [b"one"]
    assert client.answer().status == 400
    assert client.at_end()


# clients that read slowly


def test_too_much_unread(serve, later, caplog):
    """A client that leaves more unread than the limit when a part comes is cut off, with one line and one call."""
    server = serve(later, stream_buffer=10_000_000)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1 + GET % 2)
    exchange = begun(server, later)

    def flood():
        for _ in range(100):
            exchange.write(BIG)
            assert exchange.unsent <= 10_000_000 + 1_000_100

    server.call(flood)
    server.until(lambda: len(later.left) == 1)
    server.empty()
    server.call(flood)
    server.call(exchange.end)

    assert later.left == [exchange]
    assert len(later) == 1
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mme.http", logging.WARNING)
    assert "GET /1" in record.message
    client.close()


@pytest.mark.parametrize("over", ["end", "cut"])
def test_too_much_unread_at_the_end(serve, later, over):
    """A handler that ends in the same breath is not told any more, and what waits behind is not begun."""
    server = serve(later, stream_buffer=10_000_000)
    server.connect(receive_buffer=64 * 1024).send(GET % 1 + GET % 2)
    exchange = begun(server, later)
    server.until(lambda: server.server.in_flight == 2)

    def flood():
        for _ in range(100):
            exchange.write(BIG)
        getattr(exchange, over)()

    server.call(flood)
    server.empty()

    assert later.left == []
    assert len(later) == 1


def test_one_large_part(serve, later):
    """One part may be larger than the limit: it says nothing of the client."""
    server = serve(later, stream_buffer=1_000_000)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    exchange = begun(server, later)
    server.call(exchange.write, BIG * 20)

    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.chunk() == BIG * 20
    server.until(lambda: exchange.unsent <= 1_000_000)
    server.call(exchange.write, BIG * 20)
    server.call(exchange.end)
    assert client.chunk() == BIG * 20
    assert client.chunk() == b""


def test_client_that_stops_reading(serve, later):
    """A client that reads nothing for the body timeout is cut off, although parts keep coming."""
    server = serve(later, body_timeout=60)
    server.connect(receive_buffer=64 * 1024).send(GET % 1)
    connection = server.alone()
    exchange = begun(server, later)
    server.call(exchange.write, BIG * 20)
    server.until(lambda: connection.pipeline.blocked)
    for _ in range(7):
        assert later.left == []
        server.elapse(10)
        server.call(exchange.write, b"x" * 10_000)

    server.until(lambda: len(later.left) == 1)
    server.empty()


def test_client_that_reads_slowly(serve, later):
    """A client that reads, however slowly, is not, whether or not more parts come meanwhile."""
    server = serve(later, body_timeout=60)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    connection = server.alone()
    exchange = begun(server, later)
    for _ in range(20):
        server.call(exchange.write, BIG)
    server.elapse(0)
    assert client.head().status == 200
    assert client.chunk() == b"one"
    for _ in range(5):
        before = server.call(lambda: connection.unsent)
        assert [client.chunk(), client.chunk()] == [BIG, BIG]
        server.until(lambda: connection.unsent < before)  # noqa: B023
        server.elapse(50)
        # as many bytes as were read, so that the number of those unsent does not tell
        more = before - server.call(lambda: connection.unsent)
        server.call(exchange.write, b"x" * (more - len(b"%x\r\n\r\n" % more)))
    server.call(exchange.end)

    rest = list(iter(client.chunk, b""))
    assert rest[:10] == [BIG] * 10
    assert len(rest) == 15
    assert later.left == []


def test_model_that_thinks_long(serve, later):
    """No timeout runs while nothing is unsent, and a part after a long silence gets its whole time."""
    server = serve(later, body_timeout=60, idle_timeout=75, header_timeout=10)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1 + GET[:10])
    connection = server.alone()
    exchange = begun(server, later)
    assert client.head().status == 200
    assert client.chunk() == b"one"

    server.elapse(10_000)
    server.elapse(10_000)
    server.call(exchange.write, BIG * 20)
    assert server.call(lambda: connection.unsent) > 0
    server.elapse(50)
    assert client.chunk() == BIG * 20
    server.elapse(10_000)
    server.call(exchange.end)

    assert client.chunk() == b""
    assert later.left == []


def test_idle_after_a_stream(serve, later):
    """A connection is idle from the end of its stream on, not from the beginning."""
    server = serve(later, idle_timeout=75, header_timeout=10)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)
    server.elapse(1000)
    server.call(exchange.end)
    assert client.answer().parts == [b"one"]
    server.elapse(60)
    client.send(GET % 2)
    server.until(lambda: len(later) == 2)
    server.call(begun(server, later).end)
    assert client.answer().parts == [b"one"]

    server.elapse(76)

    assert client.at_end()
    server.empty()


# the drain


def test_drain(serve, later):
    """A drain lets a stream that has begun go on to its end, and only then closes."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)
    server.call(server.server.drain)
    assert not server.wait_closed(0.01)
    client.send(GET % 2)
    server.call(exchange.write, b"two")
    server.call(exchange.end)

    assert client.answer().parts == [b"one", b"two"]
    assert client.at_end()
    client.close()
    assert server.wait_closed(60)
    assert len(later) == 1


def test_drain_with_requests_behind(serve, later):
    """So are requests that were accepted behind it; the last answer says that it is the last."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2)
    first = begun(server, later)
    server.until(lambda: server.server.in_flight == 2)
    server.call(server.server.drain)
    server.call(first.end)
    server.call(begun(server, later).end)

    answers = [client.answer(), client.answer()]
    assert [answer.parts for answer in answers] == [[b"one"], [b"one"]]
    assert ["connection" in answer.headers for answer in answers] == [False, True]
    assert client.at_end()


def test_abort_in_the_same_breath(serve, later):
    """A stream that ends when its connection is ending already begins nothing behind it."""
    server = serve(later)
    server.connect().send(GET % 1 + GET % 2)
    exchange = begun(server, later)
    server.until(lambda: server.server.in_flight == 2)

    def end_aborted():
        server.server.abort()
        exchange.end()

    server.call(end_aborted)
    server.empty()

    assert len(later) == 1
    assert later.left == []


def test_abort(serve, later):
    """After a drain that takes too long a stream is ended as well: its handler is told, its client sees it."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)
    server.call(server.server.drain)
    server.call(server.server.abort)

    assert server.wait_closed(60)
    assert later.left == [exchange]
    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.at_end()
