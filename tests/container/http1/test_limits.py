"""Limits of size and time. Time passes by hand: the sweep is told what the clock says."""

from __future__ import annotations

import threading

import pytest

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def in_one(client, raw):
    """As few packets as possible."""
    client.send(raw)


def in_pieces(client, raw):
    """A packet for every seven bytes, so that no read holds the whole."""
    for start in range(0, len(raw), 7):
        client.send(raw[start : start + 7])


LIMITS = {
    # of the server → a request that is as long as it is told, how long it may be, and what one that is longer is refused with
    "request line": (
        {"request_line": 30 + len("GET  HTTP/1.1")},
        lambda n: b"GET /" + b"x" * (n - 1) + GET[5:],
        30,
        414,
    ),
    "header bytes": (
        {"request_line": 20, "headers": len("Host: a\r\nX: \r\n") + 100},
        lambda n: GET[:-2] + b"X: " + b"x" * n + b"\r\n\r\n",
        100,
        431,
    ),
    "header fields": (
        {"header_count": 10},
        lambda n: GET[:-2] + b"".join(b"X-%d: 1\r\n" % number for number in range(n)) + b"\r\n",
        9,
        431,
    ),
    "repeated header fields": ({"header_count": 10}, lambda n: GET[:-2] + b"X: 1\r\n" * n + b"\r\n", 9, 431),
    "body": (
        {"body": 1000},
        lambda n: b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % n + b"x" * n,
        1000,
        413,
    ),
}


@pytest.mark.parametrize("send", [in_one, in_pieces])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_request_of_exactly_a_limit_is_taken(serve, send, limit):
    """One of a byte or a header field more is refused, with the status for it."""
    limits, request, most, status = LIMITS[limit]
    server = serve(**limits)
    for length, expected in ((most, 200), (most + 1, status)):
        client = server.connect()
        send(client, request(length))
        assert client.answer().status == expected


@pytest.mark.parametrize(
    ("start", "filling", "status"),
    [
        (b"GET /", b"x" * 1000, 414),
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 1000, 431),
        (b"GET / HTTP/1.1\r\nX", b"x" * 1000, 431),
        (b"GET / HTTP/1.1\r\n" + b"X-Y: z\r\n" * 50, b"x" * 1000, 431),
        (CHUNKED, b"1;" + b"x" * 1000 + b"\r\nx\r\n", 413),
        (CHUNKED + b"1;", b"x" * 1000, 413),
        (CHUNKED + b"0\r\nX-T: ", b"x" * 1000, 413),
        (CHUNKED + b"0\r\n", b"X-T: 1\r\n" * 100, 413),
    ],
)
def test_what_has_no_end_is_refused_while_it_grows(serve, start, filling, status):
    """A head, and chunk extensions and trailers although the body stays small."""
    client = serve(body=1000).connect().send(start)
    for _ in range(500):
        client.send(filling)

    assert client.answer().status == status
    assert client.at_end()


def test_a_read_of_many_small_heads_is_not_a_large_head(serve):
    """Heads are measured one by one, also when many come at once and the last is cut."""
    client = serve(request_line=20, headers=100).connect()
    client.send(GET * 200 + GET[:-3])

    assert [client.answer().status for _ in range(200)] == [200] * 200
    assert client.ask(GET[-3:]).status == 200


@pytest.mark.parametrize("send", [in_one, in_pieces])
@pytest.mark.parametrize("chunks", [[1000], [500, 500], [1] * 1000])
@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)])
def test_chunked_body(serve, send, chunks, more, status):
    """Chunks of exactly the limit together are taken, one byte more is refused with 413."""
    client = serve(body=1000).connect()
    sizes = [*chunks[:-1], chunks[-1] + more]

    send(client, CHUNKED + b"".join(b"%x\r\n%b\r\n" % (size, b"x" * size) for size in sizes) + b"0\r\n\r\n")

    assert client.answer().status == status


@pytest.mark.parametrize(("count", "status"), [(5, 200), (6, 400)])
def test_chunks_are_counted(serve, count, status):
    """As many as the limit are taken, and the empty one behind them; with one more the request is refused."""
    client = serve(chunks=5).connect()
    client.send(CHUNKED + b"1\r\nx\r\n" * count + b"0\r\n\r\n")
    answer = client.answer()
    assert answer.status == status
    assert status == 200 or "exceeds maximum of 5 non-empty chunks" in answer.error


def test_chunks_are_counted_anew_for_each_request(serve):
    """Of one connection."""
    client = serve(chunks=5).connect()
    client.send((CHUNKED + b"1\r\nx\r\n" * 5 + b"0\r\n\r\n") * 3)
    assert [client.answer().status for _ in range(3)] == [200] * 3


def test_body_is_refused_before_it_comes(serve):
    """A Content-Length over the limit is refused before any of the body is there, with the limit in the sentence."""
    client = serve(body=1000).connect()

    answer = client.ask(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n")

    assert answer.status == 413
    assert "1000 bytes" in answer.error
    assert client.at_end()


def test_answer_is_read_by_a_client_that_sends_it_all_first(serve):
    """A client that sends megabytes before it reads gets to read its refusal."""
    client = serve(body=1000).connect()
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n\r\n")
    for _ in range(20):
        client.send(b"x" * 1_000_000)

    assert client.answer().status == 413
    assert client.at_end()


def test_lingering_is_bounded_in_bytes(serve):
    """A client that never stops sending after a refusal is cut off."""
    server = serve(body=1000, linger=1_000_000)
    client = server.connect()
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")

    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        client.send(b"x" * 100_000_000)

    server.empty()


def test_lingering_is_bounded_in_time(serve):
    """A client that does not close after the last answer is cut off after a while."""
    server = serve(linger_timeout=5)
    client = server.connect().send(b"GET / HTTP/1.0\r\n\r\n")
    assert client.answer().status == 200
    assert client.at_end()
    connection = server.alone()
    server.elapse(4)
    assert connection in server.call(lambda: set(server.server.connections))

    server.elapse(6)

    server.empty()


def test_silent_connection(serve):
    """A connection on which nothing ever comes is closed after the header timeout, without a word."""
    server = serve(header_timeout=10, idle_timeout=75)
    client = server.connect()
    server.alone()

    server.elapse(11)

    assert client.at_end()
    server.empty()


@pytest.mark.parametrize("between", [b"", b"\r\n"])
def test_idle_connection(serve, between):
    """A connection between requests is closed after the idle timeout, not after that of headers, without a word."""
    server = serve(header_timeout=10, idle_timeout=75)
    client = server.connect()
    assert client.ask(GET).status == 200
    client.send(between)
    for _ in range(3):
        server.call(int)  # the loop has come round and read what was sent

    server.elapse(60)
    assert client.ask(GET).status == 200
    server.elapse(76)

    assert client.at_end()


@pytest.mark.parametrize("size", [1, 8, 18])
def test_slow_headers(serve, size):
    """Headers that do not arrive in time are answered with 408, however the client drips them."""
    server = serve(header_timeout=10)
    client = server.connect()
    assert client.ask(GET).status == 200
    client.send(GET[:size])
    connection = server.alone()
    server.until(lambda: connection.parser.head_size == size)
    server.elapse(6)
    client.send(GET[size : size + 1])
    server.until(lambda: connection.parser.head_size == size + 1)

    server.elapse(6)

    answer = client.answer()
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert client.at_end()


def test_slow_method_behind_a_request(serve):
    """Nor may the rest of a method be awaited longer, of which a part came in one packet with the request before."""
    server = serve(header_timeout=10, idle_timeout=75)
    client = server.connect()
    assert client.ask(GET + GET[:2]).status == 200

    server.elapse(11)

    assert client.answer().status == 408
    assert client.at_end()


def test_slow_body(serve):
    """A body that stops arriving is answered with 408; one that goes on at 1 KiB a second is not."""
    server = serve(header_timeout=1, body_timeout=60)
    client = server.connect().send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
    connection = server.alone()
    server.until(lambda: connection.parser.arriving)
    for size in range(1, 4):
        client.send(b"x" * 41_000)
        server.until(lambda: connection.parser.arriving.held == 41_000 * size)  # noqa: B023
        server.elapse(40)
    server.call(lambda: None)  # a turn of the loop later

    server.elapse(61)

    assert client.answer().status == 408
    assert client.at_end()


@pytest.mark.parametrize("head", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n"])
def test_body_below_the_least_rate(serve, head):
    """Pauses alone are not all: a byte now and then is answered with 408, once the first ten seconds are over."""
    server = serve(body_timeout=60)
    client = server.connect().send(b"POST / HTTP/1.1\r\nHost: a\r\n" + head)
    connection = server.alone()
    server.until(lambda: connection.parser.arriving)
    for size in range(1, 6):
        client.send(b"x")
        server.until(lambda: connection.parser.arriving.held == size)  # noqa: B023
        server.elapse(1)
    server.elapse(6)

    answer = client.answer()
    assert answer.status == 408
    assert answer.error == "The body arrives too slowly: send at least 1024 bytes a second."
    assert client.at_end()


def test_slow_handler(serve, later):
    """No timeout runs while the client waits for us, not for the next request either."""
    server = serve(later)
    client = server.connect().send(GET + GET[:10])
    server.until(lambda: len(later) == 1)

    server.elapse(10_000)
    server.call(later.exchanges[0].respond, 200, b"", ())

    assert client.answer().status == 200
    client.send(GET[10:])
    server.until(lambda: len(later) == 2)
    server.call(later.exchanges[1].respond, 200, b"", ())
    assert client.answer().status == 200


def test_client_that_stops_reading(serve):
    """A client that reads nothing of its answer for the body timeout is cut off; one that reads slowly is not."""
    server = serve(lambda exchange: exchange.respond(200, b"", (b"x" * 20_000_000,)), body_timeout=60)
    client = server.connect(receive_buffer=64 * 1024).send(GET)
    connection = server.alone()
    server.until(lambda: connection.pipeline.blocked)
    server.elapse(0)
    for _ in range(3):
        before = server.call(lambda: connection.unsent)
        client.reader.read(2_000_000)
        server.until(lambda: connection.unsent < before)  # noqa: B023
        server.elapse(50)
    assert connection in server.call(lambda: set(server.server.connections))
    server.elapse(0)

    server.elapse(61)

    server.empty()


def test_sweeping_goes_on_by_itself(serve):
    """The sweep runs on its own: a slow-loris client is thrown out without anybody asking."""
    server = serve(header_timeout=0.02, sweep=0.01)
    client = server.connect().send(b"GET /")

    assert client.answer().status == 408


def test_hundreds_of_dripping_clients_cost_others_nothing(serve):
    """While many clients drip their headers, another is served, and all of them end with 408."""
    server = serve(header_timeout=10)
    dripping = [server.connect().send(b"GET / HT") for _ in range(200)]
    server.until(lambda: len([each for each in server.server.connections if each.parser.head_size]) == 200)

    assert server.connect().ask(GET).status == 200

    server.elapse(11)

    assert [each.answer().status for each in dripping] == [408] * 200


def test_sender_that_never_reads_is_not_collected(serve):
    """Requests pipelined without end by a client that never reads an answer do not pile up."""
    server = serve(lambda exchange: exchange.respond(200, b"", (b"x" * 100_000,)), pipelined=4, body_timeout=60)
    client = server.connect(receive_buffer=64 * 1024)
    ended = threading.Event()

    def send():
        try:
            for _ in range(1000):
                client.send(GET * 5000)
        except OSError:
            ended.set()

    sender = threading.Thread(target=send)
    sender.start()
    connection = server.alone()
    server.until(lambda: connection.paused and connection.pipeline.blocked)
    assert server.call(lambda: connection.pipeline.in_flight) <= 256_000 // len(GET) + 4
    server.elapse(0)
    server.elapse(61)
    sender.join()

    assert ended.is_set()
