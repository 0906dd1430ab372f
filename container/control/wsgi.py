"""Calls a WSGI application for one complete request and gathers its answer. Runs on a thread of the worker.

PEP 3333, for answers that fit in memory: everything but inference.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import TYPE_CHECKING, Any

from container.control.pending import SLOT
from container.control.targets import path_of, shown
from container.inference.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import WSGIApplication

    from container.control.pending import Pending
    from container.inference.exchange import Exchange

_log = logging.getLogger("mme.wsgi")
_OURS = frozenset({"content-length", "connection", "date", "transfer-encoding"})  # the HTTP server writes these


Answered = tuple[int, bytes, bytes]  # status, header lines and body


def call_application(
    application: WSGIApplication, exchange: Exchange, pending: Pending | None = None
) -> Answered | Pending:
    """Return the application's answer, or one that has to wait for the loop. Never raises: errors become a 500.

    Args:
        application: that answers.
        exchange: with the request.
        pending: its answer, where that has waited.
    """
    answer = _Answer()
    environ = make_environ(exchange)
    environ[SLOT] = pending
    body = environ["wsgi.input"]  # the application may put something else there
    try:
        parts = application(environ, answer.start)
        try:
            answer.body += b"".join(parts)
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()
    except Exception:  # noqa: BLE001 - whatever an application throws is answered, or its client waits for ever
        _log.exception("%s %s failed", exchange.method, shown(exchange.target))
        message = error_body("the server failed to answer this request; its log says why")
        return 500, b"Content-Type: application/json\r\n", message
    finally:  # Flask's routing error and its request refer to each other, and would keep the body until some collection
        body.close()
        exchange.body = b""
    waits: Pending | None = environ[SLOT]
    if waits is not None and waits.work is not None:
        return waits
    return answer.status, answer.header_lines(), answer.body


def make_environ(exchange: Exchange) -> dict[str, Any]:
    """The WSGI environment of a request.

    Its path keeps `%2F` and `%25`, which the application's converters of names decode.
    """
    query = exchange.target.partition(b"?")[2]
    environ: dict[str, Any] = {
        # the HTTP server leaves the body of an answer to HEAD away, and has to know how long it would be
        "REQUEST_METHOD": "GET" if exchange.method == "HEAD" else exchange.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path_of(exchange.target).decode("latin-1"),
        "QUERY_STRING": query.decode("latin-1"),
        "RAW_URI": exchange.target.decode("latin-1"),
        "SERVER_NAME": "mme",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(exchange.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(exchange.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in exchange.headers.items():
        if name == "content-type":
            environ["CONTENT_TYPE"] = value
        elif name not in {"content-length", "transfer-encoding"}:
            environ["HTTP_" + name.upper().replace("-", "_")] = value
    return environ


class _Answer:
    """What an application passes to `start_response` and writes."""

    def __init__(self) -> None:
        self.status = 500
        self.body = b""
        self._headers: list[tuple[str, str]] = []

    def start(self, status: str, headers: list[tuple[str, str]], _exc_info: Any = None) -> Any:
        """The `start_response` of PEP 3333; returns its `write`."""
        self.status = int(status.split(" ", 1)[0])
        self._headers = headers
        return self._write

    def _write(self, data: bytes) -> None:
        self.body += data

    def header_lines(self) -> bytes:
        """The application's headers but those that the HTTP server writes itself."""
        return b"".join(_lines(self._headers))


def _lines(headers: list[tuple[str, str]]) -> Iterable[bytes]:
    return (f"{name}: {value}\r\n".encode("latin-1") for name, value in headers if name.lower() not in _OURS)
