"""What one connection may have handled in a turn of the loop, in bytes, fields and frames; no clock is asked."""

import asyncio

import pytest

from container.http1 import Http1Server, Limits
from container.http2 import frames
from container.http2.connection import Connection, Keepalive
from container.http2.frames import MOST_FIELDS, ConnectionFault, ErrorCode, HeaderBlocks, OversizedFault
from container.inference.limits import (
    ALL_SECONDS,
    EACH_SECONDS,
    HEADS,
    LEAST_SECONDS,
    STEP,
    ConnectionCap,
    RequestMemory,
    TurnBudget,
    Turns,
)
from tests.container.http2.conftest import FIELDS, OPENING, REQUEST, Told, Wire

TRAILERS = frames.header_block([(b"n", b"v")])


class Loop:
    """Turns that a test takes one by one, and a clock that it sets."""

    def __init__(self):
        self.calls, self.now, self.each_look, self.turns = [], 0.0, 0.0, Turns(self.calls_soon, self.clock)

    def calls_soon(self, call):
        """Remember it."""
        self.calls.append(call)

    def clock(self):
        """Seconds; each look takes `each_look` of them."""
        self.now += self.each_look
        return self.now

    def turn(self):
        """One turn; tells whether there was anything to do."""
        calls, self.calls[:] = list(self.calls), []
        for call in calls:
            call()
        return bool(calls)


class Client(Wire):
    """The transport of a connection of HTTP/2, and what was told of its streams."""

    def __init__(self, loop, cap=None):
        super().__init__()
        self.told, running = {}, asyncio.get_running_loop()
        self.connection = Connection(
            running, self.begin, set(), Keepalive(running), loop.turns, cap or ConnectionCap(100)
        )
        self.connection.connection_made(self)
        self.connection.data_received(OPENING)

    def begin(self, stream, _fields):
        """Take a stream."""
        self.told[stream.id] = Told(stream)
        return self.told[stream.id]

    def ends(self):
        """The code with which the connection has ended."""
        at = self.written.index(b"\x07\0\0\0\0\0")  # GOAWAY's type, flags and stream
        return ErrorCode(int.from_bytes(self.written[at + 10 : at + 14], "big"))


class Plain:
    """The transport of a connection of HTTP/1.1."""

    def __init__(self):
        self.reads, self.written, self.closed = True, b"", False

    def set_write_buffer_limits(self, high):
        """As they are."""

    def pause_reading(self):
        """Bring no more."""
        assert self.reads
        self.reads = False

    def resume_reading(self):
        """Bring more."""
        assert not self.reads
        self.reads = True

    def is_closing(self):
        """It never does."""
        return False

    def get_write_buffer_size(self):
        """All is taken at once."""
        return 0

    def write(self, data):
        """Keep it."""
        self.written += data

    def can_write_eof(self):
        """As TCP can."""
        return True

    def write_eof(self):
        """End."""

    def close(self):
        """End."""
        self.closed = True


@pytest.fixture
def loop():
    """A loop whose turns the test takes."""
    return Loop()


async def test_frames_of_one_connection_are_handled_up_to_its_budget(loop):
    """64 KiB of frame headers in a turn: then reading pauses, and all of them are handled in the end."""
    client = Client(loop)
    client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    raw = frames.frame(frames.DATA, 0, 1, b"x")
    client.connection.data_received(raw * 25_000)
    most = (HEADS + 2 * STEP) // frames.HEAD
    seen, turns = 0, 0
    while not client.reads:
        got = len(client.told[1].data)
        assert got - seen <= most
        seen, turns = got, turns + 1
        assert loop.turn()
    assert len(client.told[1].data) == 25_000
    assert turns >= 25_000 // most
    client.connection.connection_lost(None)


async def test_bytes_of_bodies_count_little(loop):
    """A MiB of large frames is handled at once."""
    client = Client(loop)
    client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    client.connection.data_received(frames.frame(frames.DATA, 0, 1, bytes(1 << 17)) * 7)
    assert client.reads
    assert len(client.told[1].data) == 7 << 17
    client.connection.connection_lost(None)


async def test_what_came_is_read_on_where_it_was_left(loop):
    """Also where it was left within a frame, and the rest of that comes later."""
    client = Client(loop)
    client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    raw = b"".join(frames.frame(frames.DATA, 0, 1, b"%06d" % number) for number in range(20_000))
    for at in range(0, len(raw), 100_001):
        client.connection.data_received(raw[at : at + 100_001])
        while not client.reads:
            assert loop.turn()
    assert client.told[1].data == b"".join(b"%06d" % number for number in range(20_000))
    client.connection.connection_lost(None)


async def test_a_connection_that_ends_drops_what_waits(loop):
    """Nothing of it is handled, and reading goes on so that the client's end is seen."""
    client = Client(loop)
    client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    client.connection.data_received(frames.frame(frames.DATA, 0, 1, b"x") * 25_000)
    assert not client.reads
    seen = len(client.told[1].data)
    client.connection.end(ErrorCode.NO_ERROR)
    assert client.reads
    while loop.turn():
        pass
    assert len(client.told[1].data) == seen
    client.connection.connection_lost(None)


async def test_streams_that_the_server_has_to_reset_count_as_given_up(loop):
    """By WINDOW_UPDATEs of nothing (CVE-2025-8671): as many as a client may reset itself, then the connection ends."""
    client = Client(loop)
    for number in range(1, 40_001, 2):
        client.connection.data_received(
            frames.frame(frames.HEADERS, frames.END_HEADERS, number, REQUEST) + frames.window_update(number, 0)
        )
        while not client.reads:
            loop.turn()
        if client.closed:
            break
    assert len(client.told) == 10_241
    assert client.ends() is ErrorCode.ENHANCE_YOUR_CALM
    client.connection.connection_lost(None)


async def test_reading_goes_on_behind_a_fault_in_a_later_turn(loop):
    """So that the client's end is seen."""
    client = Client(loop)
    client.can_write_eof = lambda: False
    client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    client.connection.data_received(
        frames.frame(frames.DATA, 0, 1, b"x") * 12_000 + frames.frame(frames.PUSH_PROMISE, 0, 1)
    )
    assert not client.reads
    while loop.turn():
        pass
    assert client.reads
    assert client.ends() is ErrorCode.PROTOCOL_ERROR
    client.connection.connection_lost(None)


def _coded(size):
    length, found = size - 127, bytearray()
    while length > 127:
        found.append(length & 127 | 128)
        length >>= 7
    return b"\0\1a\xff" + bytes((*found, length)) + b"\x18\xc6\x31" * (size // 3)


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\x20" * (250 << 10) + REQUEST, ErrorCode.COMPRESSION_ERROR),
        (b"\x20\x20\x20" + REQUEST, ErrorCode.COMPRESSION_ERROR),
        (REQUEST + b"\x82" * 7000, ErrorCode.ENHANCE_YOUR_CALM),
        (REQUEST + TRAILERS * 7000, ErrorCode.ENHANCE_YOUR_CALM),
        (REQUEST + _coded(60_000), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_blocks_that_take_long_to_read_are_refused_unread(block, code, monkeypatch):
    """However they are made: by updates of the table, by fields, by Huffman's code."""
    monkeypatch.setattr("hpack.Decoder.decode", lambda *_args, **_named: pytest.fail("it was read"))
    with pytest.raises(ConnectionFault) as fault:
        HeaderBlocks().read(block)
    assert fault.value.code is code


def test_two_updates_and_a_hundred_fields_are_taken():
    """One field more ends the stream alone, since the table is as it should be behind it."""
    blocks = HeaderBlocks()
    more = [(b"n", b"v")] * (MOST_FIELDS - len(FIELDS))
    assert len(blocks.read(b"\x20\x3f\xe1\x1f" + frames.header_block([*FIELDS, *more]))) == MOST_FIELDS
    with pytest.raises(OversizedFault):
        blocks.read(frames.header_block([*FIELDS, *more, (b"n", b"v")]) + b"\x40\1m\1w")
    assert blocks.read(b"\xbe") == ((b"m", b"w"),)


def _http1(loop, handler, **limits):
    server = Http1Server(handler, Limits(**limits), asyncio.get_running_loop(), turns=loop.turns)
    connection, plain = server.protocol_factory(), Plain()
    connection.connection_made(plain)
    return server, connection, plain


async def test_chunk_sizes_of_one_connection_are_handled_up_to_its_budget(loop):
    """60,000 chunks of a byte: 64 KiB of sizes in a turn, and the whole body in the end."""
    bodies = []
    server, connection, plain = _http1(loop, lambda exchange: bodies.append(exchange.body))
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.data_received(head + b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n")
    turns = 0
    while not plain.reads:
        assert loop.turn()
        turns += 1
    assert turns >= 60_000 * 5 // (HEADS + STEP + 4096) - 1
    assert bodies == [b"x" * 60_000]
    connection.connection_lost(None)
    server.abort()


async def test_a_body_of_known_length_counts_little(loop):
    """32 MiB in one read are handled at once."""
    bodies = []
    server, connection, plain = _http1(loop, lambda exchange: bodies.append(exchange.body))
    connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (32 << 20) + bytes(32 << 20))
    assert plain.reads
    assert len(bodies[0]) == 32 << 20
    connection.connection_lost(None)
    server.abort()


async def test_bodies_of_many_connections_share_the_time_of_a_turn(loop):
    """Where taking a part of a body is 1 ms, those behind the time of all wait, and read nothing more meanwhile."""
    memory, part, pairs = RequestMemory(1 << 30), bytes(1 << 18), []
    for _ in range(50):
        server = Http1Server(lambda _: None, Limits(), asyncio.get_running_loop(), turns=loop.turns, memory=memory)
        connection, plain = server.protocol_factory(), Plain()
        connection.connection_made(plain)
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n")
        pairs.append((connection, plain))
    while loop.turn():
        pass
    loop.now, loop.each_look = 1.0, 0.001
    for connection, _ in pairs:
        connection.data_received(part)
    taken, most = memory.used // len(part), round(ALL_SECONDS / loop.each_look) + 2
    assert 0 < taken <= most
    assert sum(not plain.reads for _, plain in pairs) == 50 - taken
    while memory.used < 50 * len(part):
        before = memory.used
        assert loop.turn()
        assert memory.used - before <= most * len(part)
    assert all(plain.reads for _, plain in pairs)
    for connection, _ in pairs:
        connection.connection_lost(None)
    assert not memory.used


async def test_requests_behind_one_another_are_handled_up_to_the_budget(loop):
    """Those that are answered at once too; each is answered, in its order."""
    count = 10_000
    asked = []

    def answer(exchange):
        asked.append(exchange.target)
        exchange.respond(204, b"", ())

    server, connection, plain = _http1(loop, answer)
    head = len(b"GET /00000 HTTP/1.1\r\nHost: a\r\n\r\n")
    connection.data_received(b"".join(b"GET /%05d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(count)))
    seen = 0
    while not plain.reads:
        assert len(asked) - seen <= (HEADS + 2 * STEP) // head
        seen = len(asked)
        assert loop.turn()
    assert asked == [b"/%05d" % number for number in range(count)]
    assert plain.written.count(b"HTTP/1.1 204") == count
    connection.connection_lost(None)
    server.abort()


async def test_no_more_is_parsed_than_may_wait(loop):
    """Of many requests in one read whose first is not answered: the others stay bytes."""
    kept = []
    server, connection, plain = _http1(loop, kept.append, pipelined=16)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 1000)
    assert connection.pipeline.in_flight <= 17
    assert not plain.reads
    while kept and len(kept) < 1000:
        kept[-1].respond(204, b"", ())
        while loop.turn():
            pass
    assert len(kept) == 1000
    connection.connection_lost(None)
    server.abort()


async def test_the_clients_end_waits_behind_what_it_sent(loop):
    """It closes its direction while its requests wait for their turn: each is answered, then the connection ends."""
    server, connection, plain = _http1(loop, lambda exchange: exchange.respond(204, b"", ()))
    connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000)
    assert not plain.reads
    assert connection.eof_received()
    while loop.turn():
        pass
    assert plain.written.count(b"HTTP/1.1 204") == 10_000
    connection.connection_lost(None)
    server.abort()


class _Work:
    """A connection that always has more to do, of so many seconds at a time."""

    def __init__(self, loop, name, seconds, done):
        self.loop, self.name, self.seconds, self.done, self.budget = loop, name, seconds, done, TurnBudget()

    def go_on(self):
        """Work until the budget is spent, and wait again."""
        self.done.append(self.name)
        while True:
            self.loop.now += self.seconds
            self.loop.turns.left -= STEP + 1
            if self.loop.turns.spent(self.budget):
                break
        self.loop.turns.wait(self, self.budget)


def test_connections_go_on_round_robin_where_the_turn_before_ended(loop):
    """As many in a turn as the time of all is for."""
    done = []
    for name in range(8):
        _Work(loop, name, EACH_SECONDS, done).go_on()
    done.clear()
    order = []
    for _ in range(8):
        loop.turn()
        assert len(done) * EACH_SECONDS <= ALL_SECONDS + 2 * EACH_SECONDS
        order += done
        done.clear()
    assert order == [number % 8 for number in range(len(order))]
    assert len(order) >= 16


def test_the_more_wait_the_less_each_may_do(loop):
    """So that 200 have had their turn before a neighbour is kept for long."""
    done = []
    for name in range(200):
        _Work(loop, name, LEAST_SECONDS, done).go_on()
    done.clear()
    began = loop.now
    while len(set(done)) < 200:
        loop.turn()
    assert loop.now - began <= 200 * 2 * LEAST_SECONDS + ALL_SECONDS


def test_a_connection_that_rested_goes_before_those_that_had_their_turn(loop):
    """A neighbour's request is not behind 50 attackers."""
    done = []
    for name in range(50):
        _Work(loop, name, EACH_SECONDS, done).go_on()
    for _ in range(50):
        loop.turn()
    neighbour = _Work(loop, "neighbour", EACH_SECONDS, done)
    neighbour.go_on()
    done.clear()
    for _ in range(5):
        loop.turn()
    assert done[0] == "neighbour"
    assert done.count("neighbour") == 1


async def test_once_the_time_of_all_is_over_each_handles_one_frame(loop):
    """Not a step of its own each: there may be thousands of connections."""
    clients = [Client(loop) for _ in range(50)]
    for client in clients:
        client.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST))
    loop.turn()
    _Work(loop, "long", 2 * ALL_SECONDS, []).go_on()
    for client in clients:
        client.connection.data_received(frames.frame(frames.DATA, 0, 1, b"x") * 100)
    assert [len(client.told[1].data) for client in clients] == [1] * 50
    while any(not client.reads for client in clients):
        loop.turn()
    assert [len(client.told[1].data) for client in clients] == [100] * 50
    for client in clients:
        client.connection.connection_lost(None)


def test_nothing_is_asked_of_the_loop_while_little_comes(loop):
    """A turn is looked for again a moment after the last one."""
    budget = TurnBudget()
    for _ in range(100):
        loop.turns.left -= STEP + 1
        assert not loop.turns.spent(budget)
        loop.turn()
    assert not loop.calls
