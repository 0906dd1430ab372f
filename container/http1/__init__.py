"""A small HTTP/1.1 server: bytes on a socket in, requests out; answers in, bytes on the socket out.

It knows HTTP and nothing else: no route, no JSON but that of its own refusals, no model, no process manager. All of it
runs on one event loop in one thread, and nothing in it waits. From the bottom up:

- `rules.py`      what a client may send and how long it may take (PURE)
- `request.py`    one request and its one answer, as a handler sees them; bytes → requests
- `connection.py` requests → answers, strictly in order, and how a connection ends
- `server.py`     all connections: the clock, the sweep, the drain
"""

from container.http1.connection import HttpProtocol
from container.http1.request import HttpRequest
from container.http1.rules import Limits, Refusal, error_body
from container.http1.server import Http1Server

__all__ = ["Http1Server", "HttpProtocol", "HttpRequest", "Limits", "Refusal", "error_body"]
