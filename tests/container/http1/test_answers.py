"""Answers: what is on the wire, in which order, and when the next request begins."""

from __future__ import annotations

import logging
import struct
import threading

import pytest

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
BIG = bytes(range(256)) * 4096  # 1 MiB


def fixed(status, headers=b"", body=()):
    """A handler that always says the same."""
    return lambda exchange: exchange.respond(status, headers, body)


def test_lines(serve):
    """The handler's lines are sent as they are; Date and Content-Length join them, Connection does not."""
    answer = serve(fixed(200, b"X-One: 1\r\nX-Two: 2\r\n", (b"abc",))).connect().ask(GET % 1)

    date, *lines = answer.lines

    assert date.startswith("Date: ")
    assert date.endswith(" GMT")
    assert lines == ["X-One: 1", "X-Two: 2", "Content-Length: 3"]
    assert answer.body == b"abc"


def test_date_moves(serve):
    """Date is kept for a second and made anew when the second has changed."""
    server = serve(fixed(200))
    client = server.connect()
    server.call(lambda: server.server.heads.update({200: b"HTTP/1.1 200 OK\r\nDate: kept\r\n"}))
    assert client.ask(GET % 1).headers["date"] == "kept"
    server.call(lambda: setattr(server.server, "_date", b"Date: of another second\r\n"))

    server.elapse(0)

    assert client.ask(GET % 1).headers["date"].endswith(" gmt")


@pytest.mark.parametrize("status", [200, 404, 507, 599, 799])
def test_any_status(serve, status):
    """A status is sent as given, also one without a name."""
    assert serve(fixed(status)).connect().ask(GET % 1).status == status


def test_head(serve):
    """HEAD gets the headers of GET with the length and no body, and the connection stays in step."""
    client = serve(fixed(200, b"", (b"abc",))).connect()

    answer = client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n").answer("HEAD")

    assert answer.headers["content-length"] == "3"
    assert client.ask(GET % 1).body == b"abc"


@pytest.mark.parametrize(("status", "length"), [(204, None), (304, "3")])
def test_statuses_without_body(serve, status, length):
    """204 has neither length nor body; 304 has the length of the body that it leaves out."""
    client = serve(fixed(status, b"", (b"abc",))).connect()

    for _ in range(2):
        answer = client.send(GET % 1).answer("HEAD")

        assert (answer.status, answer.headers.get("content-length")) == (status, length)


def test_http10_is_told_that_the_connection_stays(serve):
    """A client of HTTP/1.0 that asked for it reads Connection: keep-alive."""
    answer = serve().connect().ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")

    assert answer.headers["connection"] == "keep-alive"


FLOATS = memoryview(struct.pack("4f", 1, 2, 3, 4)).cast("f")
BODIES = {
    "none": (),
    "an empty part": (b"",),
    "a small view": (memoryview(b"abc"),),
    "a view of floats": (FLOATS,),
    "small parts": [b"abc", memoryview(b"def"), FLOATS],
    "a large part": (BIG,),
    "a large view": (memoryview(BIG),),
    "large and small parts": [b"abc", BIG, memoryview(b"def"), FLOATS, memoryview(BIG)],
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies(serve, case):
    """A body may be any number of parts of any size; it is sent in order and counted in bytes."""
    client = serve(fixed(200, b"", BODIES[case])).connect().send(GET % 1 * 2)
    expected = b"".join(BODIES[case])

    assert client.answer().body == expected
    assert client.answer().body == expected


@pytest.mark.parametrize("size", [10, 70_000, 3_000_000])
def test_large_requests(serve, size):
    """A body that comes in many reads is handed over whole, by length and by chunks."""
    body = BIG * 3
    client = serve().connect()

    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + body[:size])

    assert client.answer().body == b"POST / " + body[:size]

    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for start in range(0, size, 100_000):
        piece = body[start : min(start + 100_000, size)]
        client.send(b"%x\r\n%b\r\n" % (len(piece), piece))

    assert client.ask(b"0\r\n\r\n").body == b"POST / " + body[:size]


def test_one_after_another(serve, later):
    """Of pipelined requests the handler gets the next one only when the one before is answered."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2 + GET % 3)
    server.until(lambda: server.server.in_flight == 3)

    for number in (1, 2, 3):
        assert [each.target for each in later.exchanges] == [b"/%d" % each for each in range(1, number + 1)]

        server.call(lambda: later.exchanges[-1].respond(200, b"", (later.exchanges[-1].target,)))

        assert client.answer().body == b"/%d" % number
    assert server.server.in_flight == 0


def test_connections_do_not_wait_for_each_other(serve, later):
    """Requests of different connections are handed over at once and answered in any order."""
    server = serve(later)
    clients = [server.connect().send(GET % number) for number in range(3)]
    server.until(lambda: len(later) == 3)

    for exchange in reversed(later.exchanges):
        server.call(exchange.respond, 200, b"", (exchange.target,))

    assert [client.answer().body for client in clients] == [b"/0", b"/1", b"/2"]


def test_thousands_at_once(serve):
    """Thousands of pipelined requests that are answered inside the handler do not pile up on the stack."""
    client = serve().connect()
    sender = threading.Thread(target=client.send, args=(b"".join(GET % number for number in range(5000)),))
    sender.start()

    assert [client.answer().body for _ in range(5000)] == [b"GET /%d " % number for number in range(5000)]
    sender.join()


def test_thousands_behind_a_late_one(serve):
    """Nor do those that waited for a late answer."""
    first = []

    def handler(exchange):
        if first:
            exchange.respond(200, b"", (exchange.target,))
        else:
            first.append(exchange)

    server = serve(handler, pipelined=5000)
    client = server.connect().send(b"".join(GET % number for number in range(3000)))
    server.until(lambda: server.server.in_flight == 3000)
    server.call(first[0].respond, 200, b"", (b"/0",))

    assert [client.answer().body for _ in range(3000)] == [b"/%d" % number for number in range(3000)]


@pytest.mark.parametrize("limits", [{"pipelined": 4}, {"body": 200_000}])
def test_reading_pauses_when_enough_waits(serve, later, limits):
    """When enough requests or bytes wait, nothing more is read; when they are answered, reading goes on."""
    server = serve(later, **limits)
    raw = b"".join(
        b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n" % n + b"x" * 90_000 for n in range(60)
    )
    client = server.connect()
    sender = threading.Thread(target=client.send, args=(raw,))
    sender.start()
    connection = server.alone()
    server.until(lambda: connection.paused)

    assert server.call(lambda: server.server.in_flight) < 12

    for number in range(60):
        server.until(lambda: len(later) == number + 1)  # noqa: B023
        server.call(later.exchanges[-1].respond, 200, b"", (later.exchanges[-1].target,))
        assert client.answer().body == b"/%d" % number
    sender.join()


def test_nothing_is_begun_for_a_client_that_does_not_read(serve):
    """While a client leaves its answers unread, its next pipelined requests wait; then all come, in order."""
    begun = []

    def handler(exchange):
        begun.append(exchange.target)
        exchange.respond(200, b"", (exchange.target, BIG))

    server = serve(handler, pipelined=100)
    client = server.connect(receive_buffer=64 * 1024).send(b"".join(GET % number for number in range(40)))
    connection = server.alone()
    server.until(lambda: connection.pipeline.blocked and connection.pipeline.in_flight)

    assert len(begun) < 20
    assert [client.answer().body[: -len(BIG)] for _ in range(40)] == [b"/%d" % number for number in range(40)]


def test_nothing_is_begun_behind_a_late_answer_that_is_not_read(serve):
    """The same holds for requests that waited for a late answer."""
    begun = []

    def handler(exchange):
        begun.append(exchange)
        if len(begun) > 1:
            exchange.respond(200, b"", (exchange.target, BIG))

    server = serve(handler, pipelined=100)
    client = server.connect(receive_buffer=64 * 1024).send(b"".join(GET % number for number in range(40)))
    server.until(lambda: server.server.in_flight == 40)
    server.call(lambda: begun[0].respond(200, b"", (b"/0", BIG)))

    assert server.call(lambda: server.server.in_flight) > 20
    assert [client.answer().body[: -len(BIG)] for _ in range(40)] == [b"/%d" % number for number in range(40)]


def test_continue(serve):
    """A client that expects 100-continue is told so once its headers are accepted, then sends its body."""
    client = serve().connect()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n"

    for _ in range(2):
        assert client.ask(head).status == 100
        assert client.ask(b"abc").body == b"POST / abc"


def test_no_continue_for_a_body_that_is_there(serve):
    """A client that sends its body without waiting is not told to."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"

    assert serve().connect().ask(head + b"abc").status == 200


def test_no_continue_for_http10(serve):
    """A client of HTTP/1.0 does not know interim answers and gets none."""
    client = serve().connect().send(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")

    assert client.ask(b"abc").status == 200


def test_no_continue_for_a_body_over_the_limit(serve):
    """A client that announces too large a body is refused instead."""
    client = serve(body=2).connect()

    answer = client.ask(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")

    assert answer.status == 413


def test_continue_keeps_the_order(serve, later):
    """100 Continue for a pipelined request comes behind the answers to those before it."""
    server = serve(later)
    head = b"POST /2 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    client = server.connect().send(GET % 1 + head)
    connection = server.alone()
    server.until(lambda: connection.parser.wants_continue)
    server.call(later.exchanges[0].respond, 200, b"", (b"first",))

    assert client.answer().body == b"first"
    assert client.answer().status == 100

    client.send(b"abc")
    server.until(lambda: len(later) == 2)
    server.call(later.exchanges[1].respond, 200, b"", (later.exchanges[1].body,))

    assert client.answer().body == b"abc"


def test_handler_that_raises(serve, caplog):
    """A handler that raises answers 500 and is logged with its traceback; the connection goes on."""

    def handler(exchange):
        if exchange.target == b"/1":
            raise LookupError("oh")
        exchange.respond(200, b"", (b"fine",))

    client = serve(handler).connect().send(GET % 1 + GET % 2)
    answer = client.answer()

    assert answer.status == 500
    assert "bug" in answer.error
    assert client.answer().body == b"fine"
    assert client.ask(GET % 2).body == b"fine"
    (record,) = [each for each in caplog.records if each.name == "mme.http"]
    assert record.levelno == logging.ERROR
    assert record.exc_info[0] is LookupError


def test_handler_that_raises_after_its_answer(serve, caplog):
    """A handler that answers and then raises is logged; its answer stands."""

    def handler(exchange):
        exchange.respond(200, b"", (b"fine",))
        raise LookupError("oh")

    server = serve(handler)
    client = server.connect()

    assert [client.ask(GET % 1).body for _ in range(2)] == [b"fine", b"fine"]
    server.until(lambda: len(caplog.records) == 2)
    assert [each.exc_info[0] for each in caplog.records] == [LookupError, LookupError]


def test_handler_that_raises_for_a_request_that_waited(serve, later):
    """A late handler call that raises answers 500 as well, and what waits behind is served."""

    def handler(exchange):
        if exchange.target == b"/2":
            raise LookupError("oh")
        later(exchange)

    server = serve(handler)
    client = server.connect().send(GET % 1 + GET % 2 + GET % 3)
    server.until(lambda: server.server.in_flight == 3)
    server.call(later.exchanges[0].respond, 200, b"", ())
    server.call(later.exchanges[1].respond, 200, b"", ())

    assert [client.answer().status for _ in range(3)] == [200, 500, 200]


def test_answer_that_is_no_bytes(serve, caplog):
    """A handler whose body cannot be sent has sent nothing: its client gets a 500."""
    client = serve(fixed(200, b"", ("text",))).connect()

    assert client.ask(GET % 1).status == 500
    assert "TypeError" in caplog.text


def test_only_one_answer(serve, later):
    """A second answer to an exchange is an error of the handler, and sends nothing."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    server.call(later.exchanges[0].respond, 200, b"", (b"one",))

    with pytest.raises(RuntimeError, match="GET /1 0 bytes> has been answered"):
        server.call(later.exchanges[0].respond, 200, b"", (b"two",))

    assert client.answer().body == b"one"
    client.send(GET % 2)
    server.until(lambda: len(later) == 2)
    server.call(later.exchanges[1].respond, 200, b"", (b"three",))
    assert client.answer().body == b"three"
