"""A real server on a real loop in a thread, and a client that is nothing but a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
import uvloop

from container.http1 import Http1Server, Limits
from tests.waiting import PATIENCE, eventually


@dataclass
class Answer:
    """What came back: `headers` in lower case, `lines` as sent, `parts` of a body that came in chunks."""

    status: int
    headers: dict[str, str]
    lines: list[str]
    body: bytes
    parts: list[bytes] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The sentence of a JSON error."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)["error"]


class Client:
    """A socket that can read answers."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(("127.0.0.1", port))
        self.reader = self.socket.makefile("rb")

    def send(self, raw: bytes) -> Client:
        """Send all of it."""
        self.socket.sendall(raw)
        return self

    def answer(self, method: str = "GET") -> Answer:
        """Read one answer, as the answer to a request with this method."""
        lines = []
        while (line := self.reader.readline()) not in (b"\r\n", b""):
            assert line.endswith(b"\r\n")
            lines.append(line[:-2].decode("latin-1"))
        assert lines, "the connection closed without an answer"
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(each.lower().split(": ", 1) for each in lines[1:])
        assert len(headers) == len(lines) - 1
        if method != "HEAD" and headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in headers
            parts = list(iter(self.chunk, b""))
            return Answer(int(status), headers, lines[1:], b"".join(parts), parts)
        length = int(headers.get("content-length", 0)) if method != "HEAD" else 0
        return Answer(int(status), headers, lines[1:], self.reader.read(length))

    def head(self) -> Answer:
        """Read the head of an answer, whatever follows it."""
        return self.answer("HEAD")

    def chunk(self) -> bytes:
        """Read one chunk, b"" for the last."""
        line = self.reader.readline()
        assert line.endswith(b"\r\n"), f"the connection closed within a chunk's size: {line}"
        size = int(line, 16)
        part = self.reader.read(size)
        assert len(part) == size, "the connection closed within a chunk"
        assert self.reader.read(2) == b"\r\n"
        return part

    def ask(self, raw: bytes) -> Answer:
        """Send and read one answer."""
        return self.send(raw).answer()

    def at_end(self) -> bool:
        """Whether the server has closed in an orderly way, with nothing left to read."""
        return self.reader.read(1) == b""

    def done_sending(self) -> Client:
        """Close the sending direction."""
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Leave without a good-bye."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Leave."""
        self.reader.close()
        self.socket.close()


@dataclass
class Running:
    """A server at work, seen from the test's thread."""

    loop: asyncio.AbstractEventLoop
    server: Http1Server
    listener: asyncio.Server
    port: int
    clients: list[Client] = field(default_factory=list)

    def connect(self, receive_buffer: int | None = None) -> Client:
        """A new client, which the fixture closes."""
        client = Client(self.port, receive_buffer)
        self.clients.append(client)
        return client

    def call(self, function, *arguments):
        """Run a function on the loop and return what it returns."""
        done: Future = Future()

        def run():
            try:
                done.set_result(function(*arguments))
            except Exception as error:  # noqa: BLE001  the caller gets it
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(PATIENCE)

    def until(self, condition) -> None:
        """Wait until the condition holds on the loop."""
        eventually(lambda: self.call(condition))

    def alone(self):
        """The one connection."""
        self.until(lambda: len(self.server.connections) == 1)
        return next(iter(self.server.connections))

    def elapse(self, seconds: float) -> None:
        """Let so much time pass for the server."""
        self.call(self.elapse_here, seconds)

    def elapse_here(self, seconds: float = 0) -> None:
        """The same, on the loop."""
        self.server.sweep(self.server.now + seconds + self.server.limits.sweep)

    def wait_closed(self, seconds: float) -> bool:
        """As the server's."""
        return asyncio.run_coroutine_threadsafe(self.server.wait_closed(seconds), self.loop).result(PATIENCE)

    def empty(self) -> None:
        """Wait until no connection is left."""
        self.until(lambda: not self.server.connections)


class Later:
    """A handler that keeps the exchanges for the test to answer."""

    def __init__(self) -> None:
        self.exchanges = []
        self.left = []

    def __call__(self, exchange) -> None:
        self.exchanges.append(exchange)
        exchange.on_disconnect = lambda: self.left.append(exchange)

    def __len__(self) -> int:
        return len(self.exchanges)


def echo(exchange) -> None:
    """Say what was asked."""
    body = b"%s %s " % (exchange.method.encode(), exchange.target) + exchange.body
    exchange.respond(200, b"Content-Type: text/plain\r\n", (body,))


@pytest.fixture
def later():
    """A handler that keeps the exchanges for the test to answer."""
    return Later()


@pytest.fixture
def serve():
    """A function that starts a server with a handler and limits; if one is of time, that passes by `Running.elapse` alone."""
    running: list[tuple[Running, threading.Thread]] = []

    def start(handler=echo, **limits) -> Running:
        by_hand = "sweep" not in limits and any(name.endswith("_timeout") for name in limits)
        loop = uvloop.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def listen():
            server = Http1Server(handler, Limits(**limits), loop)
            if by_hand:
                server.stop_sweeping()
            return server, await loop.create_server(server.protocol_factory, "127.0.0.1", 0)

        server, listener = asyncio.run_coroutine_threadsafe(listen(), loop).result(PATIENCE)
        run = Running(loop, server, listener, listener.sockets[0].getsockname()[1])
        running.append((run, thread))
        return run

    yield start
    for run, thread in running:
        for client in run.clients:
            client.close()
        run.call(run.listener.close)
        run.call(run.server.abort)
        run.empty()
        run.loop.call_soon_threadsafe(run.loop.stop)
        thread.join(PATIENCE)
        run.loop.close()
