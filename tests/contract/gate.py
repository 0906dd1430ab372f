"""An S3 endpoint before another one, whose downloads stop at a gate for as long as a test wants.

It makes a load slow without a clock: the load begins, the test does what it has to do meanwhile, and opens the gate.
"""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PATIENCE = 60.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


class Gate(ThreadingHTTPServer):
    """Forwards every request; a GET of a held key waits until it is let go.

    Attributes:
        downloads: keys of all downloads that were asked for, in order.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.downloads: list[str] = []
        self._held: dict[str, threading.Event] = {}
        self._asked = threading.Condition()

    def handle_error(self, *_: object) -> None:
        """A client that gave up waiting at the gate is no news."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="gate", kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @contextmanager
    def held(self, *keys: str) -> Iterator[None]:
        """Downloads of these keys wait for as long as the context lasts, or until `release`."""
        self._held |= {key: threading.Event() for key in keys}
        try:
            yield
        finally:
            for key in keys:
                self.release(key)

    def release(self, key: str) -> None:
        """Let the downloads of a key go on."""
        if key in self._held:
            self._held.pop(key).set()

    def wait_for(self, keys: Sequence[str], times: int = 1) -> None:
        """Until downloads of these keys have been asked for so many times in all."""
        with self._asked:
            asked = self._asked.wait_for(lambda: sum(map(self.downloads.count, keys)) >= times, _PATIENCE)
        assert asked, "nobody came"

    def passes(self, key: str) -> None:
        """Note a download and wait at the gate."""
        with self._asked:
            self.downloads.append(key)
            self._asked.notify_all()
        held = self._held.get(key)
        if held is not None:
            assert held.wait(_PATIENCE)


class _Handler(BaseHTTPRequestHandler):
    server: Gate
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        _, _, key = urlsplit(self.path).path.lstrip("/").partition("/")
        if key:
            self.server.passes(key)
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def _forward(self) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=_PATIENCE)
        try:
            upstream.request(self.command, self.path, headers=dict(self.headers.items()))
            answer = upstream.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            if answer.getheader("Content-Length") is None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        finally:
            upstream.close()

    def log_message(self, *_: object) -> None:
        """Nothing."""
