"""Requests whose head is one that the connection knows: they are answered as ever, without llhttp."""

from __future__ import annotations

import pytest

from container.http1 import Refusal

HEAD = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"
POST = HEAD + b"abc"


@pytest.fixture
def known(serve):
    """A server and a client that has repeated itself: the connection knows its head."""

    def start(*handler, **limits):
        server = serve(*handler, **limits)
        client = server.connect()
        for _ in range(2):
            assert client.ask(POST).body == b"POST /a abc"
        assert server.alone().known
        return server, client

    return start


def unparsed(server, client, raw):
    """The answer to a request that llhttp must not see."""
    server.server.gate = lambda *_: Refusal(403, "it was parsed")
    answer = client.ask(raw)
    server.server.gate = None
    return answer


def test_a_repeat_is_not_parsed(known):
    """It is answered by what its own body says."""
    server, client = known()

    for number in range(5):
        answer = unparsed(server, client, HEAD + b"%03d" % number)

        assert (answer.status, answer.body) == (200, b"POST /a %03d" % number)
        assert "connection" not in answer.headers


def test_a_repeat_of_another_connection_is_not_parsed(known):
    """Heads are known to the server, from whichever client they came."""
    server, first = known()
    first.close()
    server.until(lambda: not server.server.connections)
    client = server.connect()

    assert unparsed(server, client, POST).body == b"POST /a abc"


def test_a_repeated_head_request(serve):
    """It is answered without a body each time."""
    client = serve().connect()
    for _ in range(4):
        answer = client.send(POST.replace(b"POST", b"HEAD")).answer("HEAD")
        assert answer.headers["content-length"] == "11"

    assert client.ask(POST).body == b"POST /a abc"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (POST.replace(b"POST", b"PUT"), b"PUT /a abc"),
        (POST.replace(b"/a", b"/b"), b"POST /b abc"),
        (POST.replace(b"3\r\n\r\nabc", b"2\r\n\r\nab"), b"POST /a ab"),
        (POST.replace(b"3\r\n\r\nabc", b"4\r\n\r\nabcd"), b"POST /a abcd"),
        (POST.replace(b"3\r\n\r\nabc", b"1\r\n\r\na\r\n"), b"POST /a a"),
        (POST.replace(b"Content-Length: 3\r\n\r\nabc", b"X-Length: 3\r\nY: 1\r\n\r\n"), b"POST /a "),
        (POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"), b"POST /a abc"),
    ],
)
def test_another_head_is_parsed(known, other, expected):
    """And the one that was known before means what it meant."""
    _, client = known()

    assert client.ask(other).body == expected
    assert client.ask(POST).body == b"POST /a abc"


@pytest.mark.parametrize(
    "line", [b"Host: b\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"X : y\r\n"]
)
def test_an_unsound_head_is_refused(known, line):
    """However well the connection knows one that is nearly the same."""
    _, client = known()

    assert client.ask(HEAD[:-2] + line + b"\r\nabc").status == 400
    assert client.at_end()


def test_repeats_while_an_answer_is_owed(serve, later):
    """They wait, each for the one before it, also behind others that were parsed."""
    server = serve(later)
    client = server.connect()

    def send(raw):
        received = server.server.in_flight
        client.send(raw)
        server.until(lambda: server.server.in_flight == received + 1)

    for body in (b"1..", b"2..", b"3..", b"4.."):
        send(HEAD + body)
    send(POST.replace(b"/a", b"/b"))
    send(HEAD + b"5..")
    assert len(later) == 1
    while server.call(lambda: server.server.in_flight):
        exchange = later.exchanges[-1]
        server.call(exchange.respond, 200, b"", (exchange.target + exchange.body,))

    assert [client.answer().body for _ in range(6)] == [b"/a1..", b"/a2..", b"/a3..", b"/a4..", b"/babc", b"/a5.."]


def test_reading_pauses_for_repeats(serve, later):
    """As for others: those that wait are limited in number."""
    server = serve(later, pipelined=2)
    client = server.connect()
    for number in range(1, 4):
        client.send(POST)
        server.until(lambda: server.server.in_flight == number)  # noqa: B023

    assert server.alone().paused
    for _ in range(3):
        server.call(later.exchanges[-1].respond, 200, b"", ())
    assert [client.answer().status for _ in range(3)] == [200] * 3


def test_a_repeat_in_a_drain(known):
    """It is the last one, and told so."""
    server, client = known()
    server.call(server.server.drain, 60)

    answer = unparsed(server, client, POST)

    assert (answer.body, answer.headers["connection"]) == (b"POST /a abc", "close")
    assert client.at_end()


def test_a_repeat_behind_the_last_answer(serve):
    """Nobody takes it: the connection has ended."""
    taken = []

    def handler(exchange):
        taken.append(exchange)
        exchange.begin(200, b"")
        exchange.write(b"part")
        if len(taken) == 3:
            exchange.cut()
        else:
            exchange.end()

    server = serve(handler)
    client = server.connect()
    for _ in range(2):
        assert client.ask(POST).body == b"part"

    client.send(POST)
    assert client.head().status == 200
    assert client.chunk() == b"part"
    client.send(POST)

    assert client.at_end()
    assert len(taken) == 3


def test_a_handler_that_raises_on_a_repeat(serve, caplog):
    """Its client reads 500 and goes on, as on any request."""
    bodies = []

    def handler(exchange):
        bodies.append(exchange.body)
        if exchange.body == b"bad":
            raise ValueError("on purpose")
        exchange.respond(200, b"", (exchange.body,))

    server = serve(handler)
    client = server.connect()

    assert [client.ask(HEAD + body).status for body in (b"1..", b"2..", b"bad", b"3..")] == [200, 200, 500, 200]
    assert len(bodies) == 4
    assert "on purpose" in caplog.text


def test_a_client_that_stops_after_a_repeat(serve):
    """Timeouts are those of any connection: idle between requests, and 408 within one."""
    server = serve(header_timeout=10, idle_timeout=75)
    clients = [server.connect() for _ in range(2)]
    for client in clients:
        for _ in range(4):
            assert client.ask(POST).status == 200
    server.elapse(60)
    clients[0].send(POST[:10])
    server.until(lambda: any(not each.parser.between for each in server.server.connections))
    server.elapse(11)
    assert clients[0].answer().status == 408

    server.elapse(60)

    assert clients[1].at_end()
