"""A connection over a transport that keeps what is written, and a client that counts its windows."""

import asyncio
import contextlib

import pytest

from container.http2 import frames
from container.http2.connection import Connection, Keepalive, drain
from container.inference.limits import ConnectionCap, Turns
from tests.waiting import until

OPENING = frames.PREFACE + frames.settings({})
FIELDS = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/service/Method"))
REQUEST = frames.header_block(FIELDS)


class Wire:
    """The transport: as much of one as a connection asks for; by TLS where it is `secure`."""

    def __init__(self):
        self.written, self.closed, self.aborted, self.reads, self.unread = b"", False, False, True, 0
        self.secure, self.said_goodbye = False, False

    def write(self, data):
        """Keep it."""
        assert not self.closed
        self.written += data

    def is_closing(self):
        """Whether it ends."""
        return self.closed

    def can_write_eof(self):
        """As TCP can, and TLS can't."""
        return not self.secure

    def write_eof(self):
        """End behind what is written."""
        self.closed = True

    def close(self):
        """End behind what is written, by TLS."""
        self.closed = self.said_goodbye = True

    def abort(self):
        """End."""
        self.closed = self.aborted = True

    def get_write_buffer_size(self):
        """What a test says of it."""
        return self.unread

    def pause_reading(self):
        """Bring no more."""
        self.reads = False

    def resume_reading(self):
        """Bring more."""
        self.reads = True


class Told:
    """A receiver that remembers."""

    def __init__(self, stream):
        self.stream, self.data, self.over, self.gone = stream, b"", False, False

    def received(self, payload):
        """Some data came."""
        self.data += payload

    def ended(self):
        """No more will."""
        assert not self.over
        self.over = True

    def cancelled(self):
        """The client has left."""
        assert not self.gone
        self.gone = True


class Life:
    """One connection, what was told of its streams, and what it has sent."""

    def __init__(self, loop, **rules):
        self.told, self.wire, self.all = {}, Wire(), set()
        self.turns = Turns(loop.call_soon, lambda: 0.0)
        keepalive = Keepalive(loop, **{"parting": 0.001, **rules})
        self.connection = Connection(loop, self.begin, self.all, keepalive, self.turns, ConnectionCap(100))
        self.connection.connection_made(self.wire)

    def begin(self, stream, _fields):
        """Take a stream."""
        self.told[stream.id] = Told(stream)
        return self.told[stream.id]

    def open(self, *numbers, flags=frames.END_HEADERS):
        """Open streams."""
        for number in numbers:
            self.send(frames.frame(frames.HEADERS, flags, number, REQUEST))

    def send(self, data):
        """Bring bytes."""
        self.connection.data_received(data)

    async def sent(self):
        """The frames since the last look, as kind, flags, stream and payload."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        while self.turns.waiting:  # noqa: ASYNC110 - turns are what it waits for
            await asyncio.sleep(0)
        data, self.wire.written, found = self.wire.written, b"", []
        while data:
            length = int.from_bytes(data[:3], "big")
            found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + length]))
            assert len(data) >= 9 + length
            data = data[9 + length :]
        return found

    async def fault(self):
        """The code with which it has ended; None while it lasts."""
        *_, (kind, _flags, _stream, payload) = await self.sent() or [(None, 0, 0, b"")]
        assert (kind == frames.GOAWAY) == self.wire.closed
        return frames.ErrorCode(int.from_bytes(payload[4:8], "big")) if self.wire.closed else None


@contextlib.asynccontextmanager
async def live(**rules):
    """A life on the running loop, which ends with it."""
    life = Life(asyncio.get_running_loop(), **rules)
    try:
        yield life
    finally:
        life.connection.connection_lost(None)
    assert not life.connection.streams.open
    assert not life.all
    assert all(each.gone or each.stream.over for each in life.told.values())


@contextlib.asynccontextmanager
async def listening(begin):
    """A server; gives its address and the connections that there are, of which none is left."""
    loop, connections = asyncio.get_running_loop(), set()
    keepalive, turns, cap = Keepalive(loop), Turns(loop.call_soon), ConnectionCap(100)
    server = await loop.create_server(
        lambda: Connection(loop, begin, connections, keepalive, turns, cap), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname(), connections
    finally:
        server.close()
        await drain(connections, 0)
        await until(lambda: not connections)


@pytest.fixture
def life():
    """A life without rules of its own."""
    return live()
