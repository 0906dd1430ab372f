"""A TCP proxy before an S3 server, which does to answers what networks and services do to them.

Each connection carries one request; the answer passes through unless a fault was set for its method.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


class FaultyS3:
    """Runs as a context manager.

    Attributes:
        port: where it listens.
        requests: (method, path) of all that came, in order.
        faults: method → what answers instead where it is asked for what faults are for: a function of the socket to the
            client and the answer of the server.
        where: part of the paths that faults are for, which are archives' if nobody says otherwise.
        before: called with the method before the server is asked.
    """

    def __init__(self, upstream):
        self._upstream = urlsplit(upstream).hostname, urlsplit(upstream).port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests = []
        self.faults = {}
        self.where = b".tar.gz"
        self.before = lambda _method: None
        self._threads = []
        self._accepting = threading.Thread(target=self._accept)

    @property
    def url(self):
        """What S3 clients are told."""
        return f"http://127.0.0.1:{self.port}"

    def count(self, method):
        """How many requests of that method came."""
        return sum(each == method for each, _ in self.requests)

    def __enter__(self):
        self._accepting.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client):
        with client:
            client.settimeout(60)
            request = _head(client)
            if not request:
                return
            method, path = request.split(b" ", 2)[:2]
            self.requests.append((method.decode(), path.decode()))
            self.before(method.decode())
            answer = self._ask(request)
            try:
                fault = self.faults.get(method.decode(), passed) if self.where in path else passed
                fault(client, answer)
            except OSError:
                return  # the client has had enough

    def _ask(self, request):
        with closing(socket.create_connection(self._upstream, 20)) as server:
            server.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            return b"".join(iter(lambda: server.recv(1 << 16), b""))


def _head(client):
    request = b""
    while b"\r\n\r\n" not in request:
        try:
            data = client.recv(1 << 16)
        except OSError:
            return b""
        if not data:
            return b""
        request += data
    return request


# -- faults ------------------------------------------------------------------------------------------------------------


def passed(client, answer):
    """None."""
    client.sendall(answer)


def status(code, error="Fault", headers=b""):
    """An answer of S3 that is an error."""
    body = f"<Error><Code>{error}</Code><Message>m</Message></Error>".encode()

    def fault(client, answer):
        head = b"HTTP/1.1 %d X\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n" % (code, headers, len(body))
        client.sendall(head + body)

    return fault


def hung_up(client, answer):
    """The connection is reset instead of an answer."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(client, answer):
    """The connection is closed in good order, without an answer."""


def reset_after(size):
    """The connection is reset behind so many bytes of the body."""

    def fault(client, answer):
        head, body = answer.split(b"\r\n\r\n", 1)
        client.sendall(head + b"\r\n\r\n" + body[:size])
        hung_up(client, answer)

    return fault


def cut_after(size):
    """Of the body come so many bytes, then the connection is closed in good order."""

    def fault(client, answer):
        head, body = answer.split(b"\r\n\r\n", 1)
        client.sendall(head + b"\r\n\r\n" + body[:size])

    return fault


def slowly(pieces):
    """The body comes in so many pieces, a moment apart."""

    def fault(client, answer):
        head, body = answer.split(b"\r\n\r\n", 1)
        client.sendall(head + b"\r\n\r\n")
        step = max(len(body) // pieces, 1)
        for start in range(0, len(body), step):
            client.sendall(body[start : start + step])
            time.sleep(0.01)

    return fault


def claiming(difference):
    """The length that is announced is so much more than what comes."""

    def fault(client, answer):
        client.sendall(_LENGTH.sub(lambda found: b"\r\nContent-Length: %d" % (int(found[1]) + difference), answer, 1))

    return fault


def garbled(client, answer):
    """The body is as long as it should be, and something else."""
    head, body = answer.split(b"\r\n\r\n", 1)
    client.sendall(head + b"\r\n\r\n" + bytes(255 - byte for byte in body))


def once(fault):
    """The first answer alone has that fault."""
    faults = iter([fault])

    def first(client, answer):
        next(faults, passed)(client, answer)

    return first


def with_checksum(fault):
    """S3's checksum of the whole object comes with it, and is that of nothing."""

    def checked(client, answer):
        head, body = answer.split(b"\r\n\r\n", 1)
        head = re.sub(rb"(?i)\r\nx-amz-checksum-[^\r]*", b"", head)
        fault(client, head + b"\r\nx-amz-checksum-crc32: AAAAAA==\r\n\r\n" + body)

    return checked
