"""How connections end: half-closed clients, clients that leave, and the drain."""

from __future__ import annotations

import gc

import pytest

from container.http1 import HttpProtocol

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"


def answer_last(server, later):
    """Answer the exchange that came last with its target."""
    server.call(later.exchanges[-1].respond, 200, b"", (later.exchanges[-1].target,))


def test_half_closed(serve, later):
    """A client that closed its direction after its requests gets all of its answers, the last with a close."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2).done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)

    answer_last(server, later)
    first = client.answer()
    answer_last(server, later)
    second = client.answer()

    assert (first.body, "connection" in first.headers) == (b"/1", False)
    assert (second.body, second.headers["connection"]) == (b"/2", "close")
    assert client.at_end()
    server.empty()
    assert later.left == []


def test_half_closed_before_a_synchronous_answer(serve):
    """So it does when the answer is there before the server notices."""
    client = serve().connect().send(GET % 1).done_sending()

    assert client.answer().body == b"GET /1 "
    assert client.at_end()


def test_half_closed_while_a_large_answer_leaves(serve):
    """A client that closes its direction in the middle of a large answer gets the rest of it."""
    body = b"x" * 20_000_000
    server = serve(lambda exchange: exchange.respond(200, b"", (body,)))
    client = server.connect(receive_buffer=64 * 1024).send(GET % 1)
    connection = server.alone()
    server.until(lambda: connection.pipeline.blocked)
    client.done_sending()

    assert client.answer().body == body
    assert client.at_end()


@pytest.mark.parametrize("part", [b"GE", b"GET / HTTP/1.1\r\nHo", POST[:-1] % 1])
@pytest.mark.parametrize("together", [False, True])
def test_half_closed_in_the_middle_of_a_request(serve, later, part, together):
    """A client that closes its direction inside a request reads that it was cut short, behind what it is owed.

    Whether its next request had begun in the same packet or not.
    """
    server = serve(later)
    client = server.connect().send(GET % 1 + part * together)
    if not together:
        server.until(lambda: len(later) == 1)
        client.send(part)
    client.done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)

    answer_last(server, later)

    assert client.answer().body == b"/1"
    answer = client.answer()
    assert answer.status == 400
    assert "ended before" in answer.error
    assert client.at_end()
    assert len(later) == 1


def test_client_that_resets(serve, later):
    """A handler learns once that its client is gone; its answer is then ignored, a second one still an error."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2)
    server.until(lambda: server.server.in_flight == 2)

    client.reset()

    server.until(lambda: len(later.left) == 1)
    server.empty()
    (exchange,) = later.left
    assert exchange.target == b"/1"
    server.call(exchange.respond, 200, b"", (b"late",))
    with pytest.raises(RuntimeError, match="answered before"):
        server.call(exchange.respond, 200, b"", (b"later",))
    assert len(later) == 1
    assert len(later.left) == 1


def test_client_that_just_closes(serve, later):
    """A client that closes its socket is found to be gone, although that looks like half-closing at first."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    connection = server.alone()
    server.until(lambda: len(later) == 1)
    client.close()
    server.until(lambda: connection.half_closed)

    server.elapse(0)
    server.elapse(0)

    server.until(lambda: len(later.left) == 1)
    server.empty()


@pytest.mark.parametrize(("request_", "asked"), [(GET % 1, [100]), (b"GET /1 HTTP/1.0\r\n\r\n", [])])
def test_half_closed_client_that_waits_long(serve, later, request_, asked):
    """One that still reads is asked by an interim answer, but for HTTP/1.0; it stays, and gets its own."""
    server = serve(later)
    client = server.connect().send(request_).done_sending()
    connection = server.alone()
    server.until(lambda: connection.half_closed)
    for _ in range(3):
        server.elapse(0)

    answer_last(server, later)

    assert [client.answer().status for _ in asked] == asked
    assert client.answer().body == b"/1"
    assert client.at_end()
    assert later.left == []


def test_nobody_is_told_after_the_answer(serve, later):
    """A client that leaves after its answer was given concerns the handler no more."""
    server = serve(later)
    client = server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    server.call(later.exchanges[0].respond, 200, b"", (b"x" * 50_000_000,))

    client.reset()

    server.empty()
    assert later.left == []


@pytest.mark.parametrize("part", [b"", b"GE", b"GET / HTTP/1.1\r\nHo", POST[:-1] % 1])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_client_that_leaves_inside_a_request(serve, later, part, how):
    """A client that leaves before its request is complete leaves nothing behind, and the next one is served."""
    server = serve(later)
    client = server.connect().send(part)
    connection = server.alone()
    server.until(lambda: connection.parser.arriving or connection.parser.head_size == len(part) or len(part) > 50)

    getattr(client, how)()

    server.empty()
    assert len(later) == 0
    server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)


def test_nothing_is_leaked(serve, later):
    """No protocol, exchange or body outlives its connection, however that ended."""
    server = serve(later)
    for number in range(20):
        client = server.connect().send((GET % 1, POST % 1 + POST[:-2] % 2, b"GE", b"\0")[number % 4])
        if number % 4 < 2:
            server.until(lambda: len(later) == 1)
            if number % 3:
                answer_last(server, later)
        (client.close, client.reset)[number % 2]()
        server.until(lambda: all(each.half_closed for each in server.server.connections))
        server.elapse(0)
        server.elapse(0)
        server.empty()
        later.exchanges.clear()
        later.left.clear()
    gc.collect()

    assert [each for each in gc.get_objects() if issubclass(type(each), HttpProtocol)] == []


def test_drain_of_idle_connections(serve):
    """A drain without patience closes idle connections at once, used or not, and waiting for the end succeeds."""
    server = serve()
    used, unused = server.connect(), server.connect()
    assert used.ask(GET % 1).status == 200
    server.until(lambda: len(server.server.connections) == 2)

    server.call(server.server.drain)

    assert used.at_end()
    assert unused.at_end()
    assert server.wait_closed(60)


def test_drain_lets_idle_clients_ask_once_more(serve):
    """With patience a kept connection's next request, and that of one that comes late, is answered, and told to close."""
    server = serve()
    kept, silent = server.connect(), server.connect()
    assert kept.ask(GET % 1).status == 200
    server.until(lambda: len(server.server.connections) == 2)

    server.call(server.server.drain, 3600)

    for client in (kept, server.connect()):
        answer = client.ask(GET % 2)
        assert (answer.body, answer.headers["connection"]) == (b"GET /2 ", "close")
        assert client.at_end()
        client.close()
    assert not server.wait_closed(0.01)
    server.call(server.server.drain, 0)
    assert silent.at_end()
    assert server.connect().at_end()
    assert server.wait_closed(60)


def test_drain_waits_so_long_for_idle_clients(serve):
    """Idle connections close when the drain's patience is over, but not one whose request has begun to arrive."""
    server = serve()
    idle, asking = server.connect(), server.connect().send((GET % 1)[:-2])
    server.until(lambda: sorted(each.parser.between for each in server.server.connections) == [False, True])

    server.call(server.server.drain, 0.01)

    assert idle.at_end()
    assert asking.ask((GET % 1)[-2:]).headers["connection"] == "close"


def test_drain_answers_what_was_accepted(serve, later):
    """A drain answers every accepted request, also those that wait; the last answer says that it is the last."""
    server = serve(later)
    client = server.connect().send(GET % 1 + GET % 2)
    server.until(lambda: server.server.in_flight == 2)

    server.call(server.server.drain)
    client.send(GET % 3)
    assert not server.wait_closed(0.01)
    answer_last(server, later)
    answer_last(server, later)

    first, second = client.answer(), client.answer()
    assert (first.body, "connection" in first.headers) == (b"/1", False)
    assert (second.body, second.headers["connection"]) == (b"/2", "close")
    assert client.at_end()
    client.close()
    assert server.wait_closed(60)
    assert len(later) == 2


@pytest.mark.parametrize("part", [2, 20, len(POST) - 2])
def test_drain_in_the_middle_of_a_request(serve, part):
    """A request that has begun to arrive when the drain begins is the last one, and is answered."""
    server = serve()
    raw = POST % 1
    client = server.connect().send(raw[:part])
    connection = server.alone()
    server.until(lambda: not connection.parser.between)

    server.call(server.server.drain)
    client.send(raw[part:] + GET % 2)

    answer = client.answer()
    assert (answer.body, answer.headers["connection"]) == (b"POST /1 abc", "close")
    assert client.at_end()


def test_drain_by_the_handler(serve):
    """A handler may begin the drain: its request is the last of the connection, though others were sent with it."""

    def handler(exchange):
        server.server.drain()
        exchange.respond(200, b"", (exchange.target,))

    server = serve(handler)
    client = server.connect().send(GET % 1 + GET % 2)

    answer = client.answer()

    assert (answer.body, answer.headers["connection"]) == (b"/1", "close")
    assert client.at_end()


def test_connection_after_the_drain(serve):
    """A connection that comes when the drain has begun is closed at once."""
    server = serve()
    server.call(server.server.drain)

    assert server.connect().at_end()


def test_abort(serve, later):
    """After a drain that takes too long everything can be ended: handlers are told, nothing is left."""
    server = serve(later)
    clients = [server.connect().send(GET % 1) for _ in range(3)]
    server.until(lambda: len(later) == 3)
    server.call(server.server.drain)
    assert not server.wait_closed(0.01)

    server.call(server.server.abort)

    assert server.wait_closed(60)
    assert len(later.left) == 3
    assert all(client.at_end() for client in clients)


def test_repr(serve, later):
    """A server shows in logs how much it has to do."""
    server = serve(later)
    server.connect().send(GET % 1)
    server.until(lambda: len(later) == 1)
    server.call(server.server.drain)

    assert repr(server.server) == "<Http1Server 1 connections, 1 in flight draining>"
