"""Answers of unknown length: what is on the wire and when, for whom, and what may be done in which order."""

from __future__ import annotations

import gc
import http.client
import socket
import struct
import threading

import numpy as np
import pytest

from container.http1 import HttpProtocol

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
OLD = b"GET /1 HTTP/1.0\r\n\r\n"
TEXT = b"Content-Type: text/plain\r\n"
BIG = bytes(range(256)) * 4096  # 1 MiB
FLOATS = memoryview(struct.pack("4f", 1, 2, 3, 4)).cast("f")
MANY_FLOATS = memoryview(BIG).cast("f")


def streaming(*parts, status=200, headers=b""):
    """A handler that streams these parts at once."""

    def handler(exchange):
        exchange.begin(status, headers)
        for part in parts:
            exchange.write(part)
        exchange.end()

    return handler


def begun(server, later, headers=TEXT):
    """The exchange that comes last, its answer begun."""
    server.until(lambda: len(later) > 0)
    exchange = later.exchanges[-1]
    server.call(exchange.begin, 200, headers)
    return exchange


def raw_answer(server, request):
    """All bytes that come back until the server closes."""
    return server.connect().send(request).reader.read()


def test_bytes(serve):
    """The handler's lines, the framing, then a chunk for each part and the last chunk."""
    raw = raw_answer(
        serve(streaming(b"abc", b"x" * 26, headers=TEXT)), b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    )

    status, date, rest = raw.split(b"\r\n", 2)
    assert status == b"HTTP/1.1 200 OK"
    assert date.startswith(b"Date: ")
    assert rest == (
        b"Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b"3\r\nabc\r\n1a\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n"
    )


PARTS = {
    "none": (),
    "empty ones": (b"", memoryview(b""), b"", FLOATS[:0], memoryview(np.empty((0, 3)))),
    "empty ones between others": (b"a", b"", b"b", memoryview(b"")),
    "views": (memoryview(b"abc"), FLOATS),
    "views of rows": (memoryview(b"abcdef").cast("B", (2, 3)), memoryview(BIG).cast("B", (1024, 1024))),
    "large ones": (BIG, memoryview(BIG), MANY_FLOATS),
    "all sizes": (b"a", BIG, b"b", BIG[:65536], BIG[:65537], memoryview(b"c")),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts(serve, case):
    """Each part is a chunk of its own, counted in bytes; an empty part is none, and does not end the answer."""
    client = serve(streaming(*PARTS[case])).connect().send(GET % 1 * 2)
    expected = [bytes(part) for part in PARTS[case] if memoryview(part).nbytes]

    assert client.answer().parts == expected
    assert client.answer().parts == expected


def test_at_once(serve, later):
    """The head goes out with `begin` and each part with its `write`, before anything follows."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)

    assert client.head().headers["transfer-encoding"] == "chunked"
    for number in range(3):
        server.call(exchange.write, b"part %d" % number)
        assert client.chunk() == b"part %d" % number
    server.call(exchange.end)
    assert client.chunk() == b""


def test_parts_of_one_turn_leave_together(serve, later):
    """The first at once, with the head, and the others in one piece, with the end; each is a chunk all the same."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) > 0)
    exchange = later.exchanges[-1]

    def write_many():
        exchange.begin(200, TEXT)
        for number in range(100):
            exchange.write(b"part %d" % number)
        assert exchange.unsent > 100 * len(b"part 0")

    server.call(write_many)
    client.head()
    assert [client.chunk() for _ in range(100)] == [b"part %d" % number for number in range(100)]
    assert segments(client) == 2
    server.call(lambda: (exchange.write(b"a"), exchange.write(b"b"), exchange.end()))
    assert [client.chunk() for _ in range(3)] == [b"a", b"b", b""]
    assert segments(client) == 4


def segments(client):
    """How many came with data, as Linux counts them: `tcpi_data_segs_in`."""
    return struct.unpack_from("=I", client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160), 152)[0]


def test_http_client(serve, later):
    """A client that knows nothing of us reads each part as it comes, and uses its connection again."""
    server = serve(later)
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for number in range(3):
        client.request("POST", f"/{number}", b"body")
        server.until(lambda: len(later) == number + 1)  # noqa: B023
        exchange = later.exchanges[-1]
        assert (exchange.target, exchange.body) == (b"/%d" % number, b"body")
        server.call(exchange.begin, 200 + number, TEXT)
        answer = client.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200 + number, "text/plain")
        for part in (b"one", b"two"):
            server.call(exchange.write, part)
            assert answer.read1() == part
        server.call(exchange.write, BIG)
        server.call(exchange.end)
        assert answer.read() == BIG
    assert len(server.server.connections) == 1
    client.close()


def test_in_order(serve, later):
    """Requests behind a streamed answer wait for its end, then come one by one; their answers may be of any kind."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2 + GET % 3)
    first = begun(server, later)
    server.call(first.write, b"one")
    server.until(lambda: server.server.in_flight == 3)
    assert len(later) == 1
    server.call(first.end)
    assert len(later) == 2
    server.call(later.exchanges[1].respond, 200, b"", (b"plain",))
    third = begun(server, later, b"")
    server.call(third.write, b"three")
    server.call(third.end)

    assert client.answer().parts == [b"one"]
    plain = client.answer()
    assert (plain.body, plain.headers["content-length"], plain.parts) == (b"plain", "5", [])
    assert client.answer().parts == [b"three"]
    assert server.call(lambda: server.server.in_flight) == 0
    assert later.left == []


def test_thousands_at_once(serve):
    """Thousands of pipelined requests whose streams end inside the handler do not pile up on the stack."""
    client = serve(lambda exchange: streaming(exchange.target)(exchange)).connect()
    sender = threading.Thread(target=client.send, args=(b"".join(GET % number for number in range(5000)),))
    sender.start()

    assert [client.answer().parts for _ in range(5000)] == [[b"/%d" % number] for number in range(5000)]
    sender.join()


def test_thousands_behind_a_late_one(serve):
    """Nor do those that waited for a stream's end."""
    first = []

    def handler(exchange):
        if first:
            streaming(exchange.target)(exchange)
        else:
            first.append(exchange)
            exchange.begin(200, b"")

    server = serve(handler, pipelined=5000)
    client = server.connect().send(b"".join(GET % number for number in range(3000)))
    server.until(lambda: server.server.in_flight == 3000)
    server.call(first[0].write, b"/0")
    server.call(first[0].end)

    assert [client.answer().parts for _ in range(3000)] == [[b"/%d" % number] for number in range(3000)]


EXPECTING = b"POST /2 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"


@pytest.mark.parametrize(
    ("behind", "read", "status"), [(EXPECTING, "wants_continue", 100), (b"\0\r\n\r\n", "closed", 400)]
)
def test_what_the_server_says_itself_comes_behind_a_stream(serve, later, behind, read, status):
    """100 Continue for a pipelined request, or the refusal of a malformed one, not between the parts of an answer."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)
    connection = server.alone()
    client.send(behind)
    server.until(lambda: getattr(connection.parser, read))
    server.call(exchange.write, b"one")
    server.call(exchange.end)

    assert client.answer().parts == [b"one"]
    assert client.answer().status == status
    assert status == 100 or client.at_end()


@pytest.mark.parametrize("how", [b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", OLD])
def test_the_client_wants_it_closed(serve, how):
    """A stream is told to be the last of its connection if it is, and requests behind it are not begun."""
    asked = []

    def handler(exchange):
        asked.append(exchange)
        streaming(b"one", b"two")(exchange)

    client = serve(handler).connect().send(how + GET % 2)

    assert client.head().headers["connection"] == "close"
    assert client.reader.read() in (b"onetwo", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert len(asked) == 1


@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"])
def test_http10(serve, later, keep):
    """HTTP/1.0 knows no chunks: its client gets the parts as they are until the close, which it is told."""
    server = serve(later)
    client = server.connect().send(b"GET /1 HTTP/1.0\r\n" + keep + b"\r\n")
    exchange = begun(server, later)
    answer = client.head()

    assert answer.lines[1:] == ["Content-Type: text/plain", "Connection: close"]

    for part in (b"one", b"", memoryview(b"two"), FLOATS):
        server.call(exchange.write, part)
    assert client.reader.read(6) == b"onetwo"
    server.call(exchange.write, BIG)
    server.call(exchange.end)

    assert client.reader.read() == bytes(FLOATS) + BIG
    client.close()
    server.empty()
    assert later.left == []


def test_http10_with_requests_behind(serve, later):
    """A pipelining client of HTTP/1.0 learns by the close that the rest of its requests was not begun."""
    server = serve(later, pipelined=3)
    request = b"GET /%d HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    client = server.connect().send(b"".join(request % number for number in range(10)))
    connection = server.alone()
    server.until(lambda: connection.paused)
    exchange = begun(server, later)
    client.send(request % 10)
    server.until(lambda: connection.discarded)
    assert server.call(lambda: server.server.in_flight) == 1
    server.call(exchange.write, b"one")
    server.call(exchange.end)

    assert client.head().headers["connection"] == "close"
    assert client.reader.read() == b"one"
    client.close()
    server.empty()
    assert len(later) == 1


@pytest.mark.parametrize(
    ("request_line", "lines"),
    [
        (b"HEAD / HTTP/1.1\r\nHost: a\r\n", ["Transfer-Encoding: chunked"]),
        (b"HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n", ["Connection: keep-alive"]),
    ],
)
def test_head(serve, request_line, lines):
    """HEAD gets the head alone, and the connection stays in step."""
    client = serve(streaming(b"one", BIG)).connect()

    for _ in range(2):
        assert client.send(request_line + b"\r\n").head().lines[1:] == lines
    assert client.ask(GET % 1).parts == [b"one", BIG]


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_body(serve, status):
    """So do statuses that have no body, and nothing promises one."""
    client = serve(streaming(b"one", status=status)).connect()

    for _ in range(2):
        answer = client.ask(GET % 1)
        assert (answer.status, answer.lines[1:], answer.body) == (status, [], b"")


MISUSES = {
    "write first": (["write"], "has no answer that has begun"),
    "end first": (["end"], "has no answer that has begun"),
    "cut first": (["cut"], "has no answer that has begun"),
    "begin twice": (["begin", "begin"], "has begun"),
    "begin twice, with parts": (["begin", "write", "begin"], "has begun"),
    "respond after begin": (["begin", "respond"], "has begun"),
    "respond after parts": (["begin", "write", "respond"], "has begun"),
    "begin after respond": (["respond", "begin"], "answered before"),
    "write after respond": (["respond", "write"], "answered before"),
    "end after respond": (["respond", "end"], "answered before"),
    "cut after respond": (["respond", "cut"], "answered before"),
    "respond after end": (["begin", "end", "respond"], "answered before"),
    "begin after end": (["begin", "end", "begin"], "answered before"),
    "write after end": (["begin", "write", "end", "write"], "answered before"),
    "end twice": (["begin", "end", "end"], "answered before"),
    "cut after end": (["begin", "end", "cut"], "answered before"),
    "write after cut": (["begin", "cut", "write"], "answered before"),
    "end after cut": (["begin", "cut", "end"], "answered before"),
    "cut twice": (["begin", "cut", "cut"], "answered before"),
}


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("case", MISUSES)
def test_misuse(serve, later, case, leaves):
    """What comes out of its turn is an error of the handler, and sends nothing; also when the client has left."""
    steps, sentence = MISUSES[case]
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    exchange = later.exchanges[0]
    if leaves:
        client.reset()
        server.empty()
    arguments = {"respond": (200, b"", (b"one",)), "begin": (200, b""), "write": (b"one",)}
    for step in steps[:-1]:
        server.call(getattr(exchange, step), *arguments.get(step, ()))

    with pytest.raises(RuntimeError, match=rf"GET /1 0 bytes>.* {sentence}"):
        server.call(getattr(exchange, steps[-1]), *arguments.get(steps[-1], ()))

    if not leaves and steps[0] == "begin" and "cut" not in steps:
        if "end" not in steps:
            server.call(exchange.end)
        assert client.answer().parts == [b"one"] * steps[:-1].count("write")
        client.send(GET % 2)
        server.until(lambda: len(later) == 2)


def test_parts_that_are_no_bytes(serve, later):
    """What cannot be sent is an error of the handler, and sends nothing; the stream goes on."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    exchange = begun(server, later)

    for wrong in ("text", 7, None, memoryview(b"abcd")[::2], memoryview(BIG)[::2]):
        with pytest.raises(TypeError):
            server.call(exchange.write, wrong)
    server.call(exchange.write, b"one")
    server.call(exchange.end)

    assert client.answer().parts == [b"one"]


def test_unsent(serve, later):
    """A handler can see how much its client has not taken yet, and so wait; nothing once all is read or over."""
    server = serve(later)
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    server.until(lambda: len(later) == 1)
    exchange = later.exchanges[0]
    assert server.call(lambda: exchange.unsent) == 0
    server.call(exchange.begin, 200, b"")
    server.call(exchange.write, BIG * 20)
    unsent = server.call(lambda: exchange.unsent)
    assert unsent == server.alone().unsent > 10_000_000

    assert client.head().status == 200
    assert client.chunk() == BIG * 20
    server.until(lambda: exchange.unsent == 0)
    server.call(exchange.write, BIG * 20)
    assert server.call(lambda: exchange.unsent) > 10_000_000
    server.call(exchange.end)
    assert server.call(lambda: exchange.unsent) == 0
    assert client.chunk() == BIG * 20
    assert client.chunk() == b""


def test_handler_that_raises_in_a_stream(serve, caplog):
    """A handler that raises after it began is logged, and its client sees that the answer is not whole."""

    def handler(exchange):
        exchange.begin(200, b"")
        exchange.write(b"one")
        raise LookupError("oh")

    client = serve(handler).connect().send(GET % 1 + GET % 2)

    assert client.head().status == 200
    assert client.chunk() == b"one"
    assert client.at_end()
    assert [record.exc_info[0] for record in caplog.records] == [LookupError]


def test_handler_that_raises_after_its_stream(serve, caplog):
    """One that raises after the end is logged; its answer stands and the connection goes on."""

    def handler(exchange):
        streaming(b"one")(exchange)
        raise LookupError("oh")

    client = serve(handler).connect()

    assert [client.ask(GET % 1).parts for _ in range(2)] == [[b"one"], [b"one"]]
    assert "LookupError" in caplog.text


def test_nothing_is_leaked(serve, later):
    """No protocol outlives its connection, wherever in a stream that ended."""
    server = serve(later)
    for number in range(20):
        client = server.connect().send(GET % 1)
        exchange = begun(server, later)
        server.call(exchange.write, b"one")
        if number % 4 < 2:
            server.call((exchange.end, exchange.cut)[number % 2])
        (client.close, client.reset)[number // 4 % 2]()
        for _ in range(3):
            server.elapse(0)
        server.empty()
        later.exchanges.clear()
        later.left.clear()
    del exchange
    gc.collect()

    assert [each for each in gc.get_objects() if issubclass(type(each), HttpProtocol)] == []
