"""A port that answers /metrics and nothing else, as Triton has one. On the event loop; Flask makes the answer as ever.

Whoever scrapes goes on where it always did, and need not reach the port that serves.
"""

from __future__ import annotations

import functools
import logging
import socket
from typing import TYPE_CHECKING

from container.authority import authority
from container.http1 import Http1Server, Limits, error_body
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from container.http1 import Exchange

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
        self._listener: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> None:
        """Listen; 0 takes a free port.

        Raises:
            MmeError: INVALID_ARGUMENT when the port is taken.
        """
        make = functools.partial(self._loop.create_server, self._http.protocol_factory)
        try:
            if ":" in host:  # as HTTP's own port and gRPC's, "::" means IPv4 too
                listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
                self._listener = await make(sock=listening)
            else:
                self._listener = await make(host, port)
        except OSError as error:
            sentence = (
                f"the server cannot listen to metrics requests at {authority(host, port)}; "
                "choose another MME_METRICS_PORT"
            )
            raise invalid_argument(sentence) from error
        _log.info("metrics listening at port %d", self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Answer nobody any more."""
        if self._listener is not None:
            self._listener.close()
        self._http.abort()

    def _answer(self, exchange: Exchange) -> None:
        path = exchange.target.partition(b"?")[0]
        if path == b"/metrics":
            self._handle(exchange)
        else:
            sentence = f"Not Found: {path.decode('latin-1')} is not a route of this port, which has /metrics alone"
            exchange.respond(404, _JSON, (error_body(sentence),))
