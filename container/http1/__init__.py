"""A small HTTP/1.1 server: bytes on a socket in, exchanges out; answers in, bytes on the socket out.

It knows HTTP and nothing else: no route, no JSON but that of its own refusals, no model, no process manager. All of it
runs on one event loop in one thread, and nothing in it waits. From the bottom up:

- `limits.py`      what a client may send and how long it may take
- `head.py`        the rules for a request's head, as plain functions (PURE)
- `stream.py`      an answer of unknown length under way
- `exchange.py`    one request and its one answer: what a handler sees
- `known_heads.py` heads that clients repeat, which llhttp need not see again
- `connection.py`  bytes → exchanges → answers, strictly in order, and how a connection ends
- `server.py`      all connections: the clock, the sweep, the drain
"""

from container.http1.connection import HttpProtocol
from container.http1.exchange import Exchange
from container.http1.head import Refusal, error_body
from container.http1.limits import Limits
from container.http1.server import Http1Server

__all__ = ["Exchange", "Http1Server", "HttpProtocol", "Limits", "Refusal", "error_body"]
