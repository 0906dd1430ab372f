"""HTTP servers on loopback that answer as the test says."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Handler(BaseHTTPRequestHandler):
    """Says nothing of what it is asked."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def body(self) -> bytes:
        """Of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: bytes | dict | list, **headers: str) -> None:
        """All of it: bytes, or a document; `_` in a header's name stands for `-`."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content_Type": "application/json", **headers, "Content_Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with suppress(BrokenPipeError):  # who asked has left
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering(handler: type[Handler], **state: Any) -> Iterator[ThreadingHTTPServer]:
    """A server of such requests; `url` is its address, and handlers find `state` on it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(state, url=f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
