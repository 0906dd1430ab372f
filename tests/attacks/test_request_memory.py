"""What requests take together on their way, in counted bytes, and how many connections there may be."""

import asyncio
import gzip
import zlib

import pytest

from container.codec.bodies import inflate
from container.grpc.rpc import Calls, Method
from container.http1 import Http1Server, Limits
from container.http2 import frames
from container.http2.connection import Connection, Keepalive
from container.inference.limits import ConnectionCap, Inflating, RequestMemory, Turns
from container.process.resources import most_connections
from container.process.service import request_memory
from container.settings import Settings, SettingsError
from model_handlers.errors import Kind, MmeError
from tests.attacks.test_connections import Plain
from tests.container.http2.conftest import OPENING, Wire
from tests.waiting import until

HEAD = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Http:
    """A server of HTTP/1.1 whose requests are kept, and its connections."""

    def __init__(self, limit, cap=100):
        self.kept, self.memory, self.cap = [], RequestMemory(limit), ConnectionCap(cap)
        loop = asyncio.get_running_loop()
        turns = Turns(loop.call_soon, lambda: 0.0)
        self.server = Http1Server(self.kept.append, Limits(), loop, turns=turns, memory=self.memory, cap=self.cap)
        self.open = []

    def connect(self):
        """Another connection."""
        connection, plain = self.server.protocol_factory(), Plain()
        connection.connection_made(plain)
        self.open.append(connection)
        return connection, plain

    def close(self):
        """End all of them; nothing is counted then."""
        for connection in self.open:
            connection.connection_lost(None)
        self.server.abort()
        assert (self.memory.used, self.cap.taken) == (0, 0)


async def test_half_sent_bodies_are_refused_beyond_the_budget():
    """30 of 10 KiB each, all but a byte of them: those that do not fit are a 503 at once, and hold nothing."""
    http = Http(100_000)
    answers = []
    for number in range(30):
        connection, plain = http.connect()
        connection.data_received(HEAD % (number, 10_240) + bytes(10_239))
        assert http.memory.used <= 100_000
        answers.append(plain.written)
    assert sum(not each for each in answers) == 9
    refused = next(each for each in answers if each)
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in refused
    assert b"MME_REQUEST_MEMORY" in refused
    http.close()


async def test_a_declared_length_that_does_not_fit_is_refused_before_its_body():
    """And takes nothing that others could have."""
    http = Http(100_000)
    http.connect()[0].data_received(HEAD % (1, 90_000) + bytes(80_000))
    connection, plain = http.connect()
    connection.data_received(HEAD % (2, 30_000))
    assert plain.written.startswith(b"HTTP/1.1 503 ")
    small, plain = http.connect()
    small.data_received(HEAD % (3, 10_000) + bytes(10_000))
    assert [each.target for each in http.kept] == [b"/3"]
    http.close()


async def test_chunks_are_refused_when_they_pass():
    """Their length is not known before; what they held is free again."""
    http = Http(100_000)
    connection, plain = http.connect()
    connection.data_received(CHUNKED)
    for _ in range(9):
        connection.data_received(b"2710\r\n" + bytes(10_000) + b"\r\n")
    assert (plain.written, http.memory.used) == (b"", 90_000)
    connection.data_received(b"2711\r\n" + bytes(10_001) + b"\r\n")
    assert plain.written.startswith(b"HTTP/1.1 503 ")
    assert http.memory.used == 0
    http.close()


async def test_bytes_count_until_the_answer():
    """One by one, of requests that came together too, and of heads that a client repeats; inflated sizes as well."""
    http = Http(100_000)
    connection, plain = http.connect()
    request = HEAD % (1, 1000) + bytes(1000)
    for used in (1000, 1000, 1000):
        connection.data_received(request)
        assert http.memory.used == used
        http.kept[-1].respond(200, b"", (b"",))
        assert http.memory.used == 0
    connection.data_received(request * 5)
    assert http.memory.used == 5000
    assert http.kept[-1].hold(50_000)
    assert not http.kept[-1].hold(50_000)
    assert http.memory.used == 55_000
    for left in (4000, 3000, 2000, 1000, 0):
        http.kept[-1].respond(200, b"", (b"",))
        assert http.memory.used == left
    assert plain.written.count(b"HTTP/1.1 200") == 8
    connection.data_received(request)
    http.kept[-1].begin(200, b"")
    assert http.memory.used == 1000
    http.kept[-1].end()
    assert http.memory.used == 0
    http.close()


async def test_clients_that_leave_hold_nothing():
    """Those whose request is under way, waits or is half there."""
    http = Http(100_000)
    connection, _ = http.connect()
    connection.data_received((HEAD % (1, 1000) + bytes(1000)) * 3 + HEAD % (2, 1000) + bytes(500))
    assert http.memory.used == 3500
    connection.connection_lost(None)
    http.open.remove(connection)
    assert http.memory.used == 0
    assert http.kept[0].hold(1 << 40)  # which is over
    http.close()


async def test_connections_beyond_the_cap_are_told_so():
    """By a 503, without a request being read; where many are beyond it they are closed at once."""
    http = Http(1000, cap=3)
    told = [http.connect()[1] for _ in range(25)]
    assert [each.written[:12] for each in told[:3]] == [b""] * 3
    assert [each.written[:12] for each in told[3:]] == [b"HTTP/1.1 503"] * 22
    assert b"MME_MAX_CONNECTIONS" in told[3].written
    assert [each.closed for each in told] == [False] * 19 + [True] * 6
    http.close()


def test_a_default_cap_leaves_files_for_models():
    """Half of few, and some thousand of many."""
    assert 1 <= most_connections() < 65_536


class Grpc:
    """A connection of gRPC, and the calls that it brought."""

    def __init__(self, limit, cap=100):
        loop = asyncio.get_running_loop()
        self.memory, self.cap, self.wire, self.got = RequestMemory(limit), ConnectionCap(cap), Wire(), []
        methods = {
            b"/unary": Method(unary=self.unary),
            b"/stream": Method(streaming=self.streaming),
            b"/once": Method(streaming=self.once),
        }
        self.calls = Calls(methods, 1 << 20, "", self.memory)
        self.connection = Connection(
            loop, self.calls.begin, set(), Keepalive(loop), Turns(loop.call_soon, lambda: 0.0), self.cap
        )

    def begin(self):
        """Open it."""
        self.connection.connection_made(self.wire)
        self.connection.data_received(OPENING)

    def unary(self, message, call):
        """Keep it."""
        self.got.append((message, call))

    async def streaming(self, call):
        """Read all of it."""
        while (message := await call.read()) is not None:
            self.got.append((message, call))

    async def once(self, call):
        """Answer whatever comes."""
        call.write_now(b"answer")

    def call(self, number, path, *more):
        """Begin a call."""
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b"content-type", b"application/grpc"),
        ]
        block = frames.header_block([*fields, *more])
        self.connection.data_received(frames.frame(frames.HEADERS, frames.END_HEADERS, number, block))

    def data(self, number, data, flags=0):
        """Bring data."""
        self.connection.data_received(frames.frame(frames.DATA, flags, number, data))

    async def close(self):
        """End it; nothing is counted then."""
        self.connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (self.memory.used, self.cap.taken) == (0, 0)


def _message(data, flag=0):
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


async def test_messages_count_until_the_answer():
    """As they arrive, in any number of frames."""
    grpc = Grpc(100_000)
    grpc.begin()
    grpc.call(1, b"/unary")
    message = _message(bytes(1000))
    grpc.data(1, message[:500])
    assert grpc.memory.used == 500
    grpc.data(1, message[500:], frames.END_STREAM)
    assert grpc.memory.used == len(message)
    grpc.got[0][1].answer(b"")
    assert grpc.memory.used == 0
    await grpc.close()


async def test_messages_beyond_the_budget_are_refused():
    """By RESOURCE_EXHAUSTED, as soon as their length says so; others go on."""
    grpc = Grpc(100_000)
    grpc.begin()
    grpc.call(1, b"/unary")
    grpc.data(1, _message(bytes(90_000))[:80_000])
    grpc.call(3, b"/unary")
    grpc.data(3, _message(bytes(50_000))[:10])
    for _ in range(3):
        await asyncio.sleep(0)
    assert b"grpc-status\x018" in grpc.wire.written
    assert b"MME_REQUEST_MEMORY" in grpc.wire.written
    assert grpc.memory.used == 80_000
    await grpc.close()


@pytest.mark.parametrize("size", [1000, 500_000])
async def test_messages_count_by_their_inflated_size(size):
    """Those that a thread inflates too; in place of what was sent."""
    grpc = Grpc(600_000)
    grpc.begin()
    grpc.call(1, b"/stream", (b"grpc-encoding", b"gzip"))
    grpc.data(1, _message(gzip.compress(bytes(size)), 1))
    await until(lambda: grpc.got)
    assert grpc.memory.used == size
    grpc.got[0][1].free(size)
    assert grpc.memory.used == 0
    await grpc.close()


async def test_what_comes_behind_the_answer_counts_nothing():
    """A client that goes on sending, while its window keeps the answer here, takes no memory from others for good."""
    grpc = Grpc(1000)
    grpc.begin()
    grpc.connection.data_received(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    grpc.call(1, b"/once")
    for _ in range(5):
        await asyncio.sleep(0)
    grpc.data(1, bytes(500))
    grpc.connection.data_received(frames.window_update(1, 100))
    assert not grpc.connection.streams.open
    assert grpc.memory.used == 0
    await grpc.close()


class _Time:
    """The loop's clock, which a test moves on."""

    def __init__(self, monkeypatch):
        loop = asyncio.get_running_loop()
        self.more, time = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.more, raising=False)

    async def elapse(self, seconds):
        """Let so many seconds pass."""
        self.more += seconds
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_message_below_the_least_rate_is_given_up(monkeypatch):
    """By DEADLINE_EXCEEDED, once its first ten seconds are over; one that comes at 1 KiB a second is not."""
    time, grpc = _Time(monkeypatch), Grpc(1 << 20)
    grpc.begin()
    for number in (1, 3):
        grpc.call(number, b"/stream")
        grpc.data(number, _message(b"first") + _message(bytes(100_000))[:1000])
    await time.elapse(10.5)
    for _ in range(5):
        grpc.data(1, bytes(5000))
        grpc.data(3, bytes(500))
        await time.elapse(3)
    assert grpc.wire.written.count(b"grpc-status\x014") == 1
    assert b"send at least 1024 bytes a second" in grpc.wire.written
    assert grpc.memory.used > 25_000
    await grpc.close()


async def test_a_stream_that_is_idle_between_messages_is_not_slow(monkeypatch):
    """Nor is one that has sent its last whole."""
    time, grpc = _Time(monkeypatch), Grpc(1 << 20)
    grpc.begin()
    grpc.call(1, b"/stream")
    message = _message(bytes(100_000))
    for _ in range(3):
        grpc.data(1, message[:60_000])
        grpc.data(1, message[60_000:])
        await time.elapse(11)
    assert len(grpc.got) == 3
    assert b"grpc-status" not in grpc.wire.written
    await grpc.close()


def test_what_is_inflated_counts_as_it_grows():
    """A bomb is refused before it has taken more than there is, and gives it all back."""
    memory = RequestMemory(10 << 20)
    bomb = zlib.compress(bytes(30 << 20), 1)
    assert memory.take(4 << 20)
    with pytest.raises(MmeError, match="MME_REQUEST_MEMORY") as error, Inflating(memory) as inflating:
        inflate(bomb, "deflate", 64 << 20, inflating.take)
    assert error.value.kind is Kind.UNAVAILABLE
    with Inflating(memory) as inflating:
        inflate(zlib.compress(bytes(6 << 20)), "deflate", 64 << 20, inflating.take)
        assert not memory.fits(1)
    assert memory.fits(6 << 20)
    assert not memory.fits((6 << 20) + 1)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_bodies_are_inflated_whole_whatever_their_size(size):
    """Piece by piece."""
    body = bytes(range(256)) * (size // 256 + 1)
    told = []
    assert inflate(gzip.compress(body[:size], 1), "gzip", 64 << 20, told.append) == body[:size]
    assert sum(told) == size


async def test_a_connection_beyond_the_cap_is_told_so_over_grpc():
    """By a GOAWAY that says why."""
    grpc = Grpc(1000, cap=0)
    grpc.begin()
    assert b"MME_MAX_CONNECTIONS" in grpc.wire.written
    assert grpc.wire.closed
    await grpc.close()


def test_the_budget_has_room_for_two_of_the_largest_bodies():
    """By default, and a setting of less refuses to start."""
    assert request_memory(Settings(memory_budget=1 << 30)) == 256 << 20
    assert request_memory(Settings(memory_budget=64 << 30)) == 8 << 30
    assert request_memory(Settings(memory_budget=1 << 30, max_body_bytes=1 << 30)) == 2 << 30
    assert request_memory(Settings(request_memory=128 << 20)) == 128 << 20
    with pytest.raises(
        SettingsError, match="MME_REQUEST_MEMORY=134217727: at least 134217728 bytes, twice the largest"
    ):
        request_memory(Settings(request_memory=(128 << 20) - 1))
