"""A port that answers /metrics and nothing else, as Triton has one. On the event loop; Flask makes the answer as ever.

Whoever scrapes goes on where it always did, and need not reach the port that serves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from container.http1 import Http1Server, Limits, error_body
from container.process.sockets import listening

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from container.http1 import Exchange
    from container.http1.server import Gate

_log = logging.getLogger("mme.metrics")
_JSON = b"Content-Type: application/json\r\n"


class MetricsPort:
    """It, while it is open.

    Args:
        handle: answers a request for /metrics.
        loop: that it is open on.
    """

    def __init__(self, handle: Callable[[Exchange], None], loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._loop = loop
        self._http = Http1Server(self._answer, Limits(), loop)
        self._listeners: list[asyncio.Server] = []

    async def open(
        self,
        host: str,
        port: int,
        gate: Callable[[Sequence[socket.socket]], Gate],
        tls: Mapping[str, Any],
    ) -> None:
        """Listen; 0 takes a free port.

        Args:
            host: where.
            port: likewise.
            gate: of a server with such sockets.
            tls: how, as of `loop.create_server`.

        Raises:
            MmeError: INVALID_ARGUMENT when the port is taken.
        """
        sockets = listening(host, port, "metrics", "MME_METRICS_PORT or MME_METRICS_ADDRESS")
        self._http.gate = gate(sockets)
        for each in sockets:
            self._listeners.append(await self._loop.create_server(self._http.protocol_factory, sock=each, **tls))
        _log.info("metrics listening at port %d", sockets[0].getsockname()[1])

    def forget_heads(self) -> None:
        """See `Http1Server.forget_heads`."""
        self._http.forget_heads()

    def close(self) -> None:
        """Answer nobody any more."""
        for listener in self._listeners:
            listener.close()
        self._http.abort()

    def _answer(self, exchange: Exchange) -> None:
        path = exchange.target.partition(b"?")[0]
        if path == b"/metrics":
            self._handle(exchange)
        else:
            sentence = f"Not Found: {path.decode('latin-1')} is not a route of this port, which has /metrics alone"
            exchange.respond(404, _JSON, (error_body(sentence),))
