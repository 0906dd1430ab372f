"""The gRPC server of a service: where it listens, how it drains, how it ends. On the event loop of the engine.

Knows no message; a handler gets bytes and gives bytes, and what it raises becomes a status.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

from container.control.routes import GRPC_ROUTES
from container.grpc.inference import Inference
from container.grpc.methods import Methods
from container.grpc.rpc import Calls, Method, Rpc
from container.http2.connection import Connection, Keepalive, drain
from container.inference.errors import Status
from container.process.sockets import BACKLOG, PORT_SECONDS, Tls, listening
from container.settings import GrpcCompression
from container.settings.parsers import keepalive_rules
from container.settings.places import grpc_certificates
from container.steps.access import GRPC_PREFIX, Restrictions, access_of, forwarding

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.http2.frames import Fields
    from container.inference.limits import ConnectionCap, Turns
    from container.process.service import Service

    Handle = Callable[..., Any]

_log = logging.getLogger("mme.grpc")
_LOOK_SECONDS = 0.01
_ALGORITHMS = {
    GrpcCompression.NONE: "",
    GrpcCompression.LOW: "gzip",
    GrpcCompression.MEDIUM: "deflate",
    GrpcCompression.HIGH: "deflate",
}


class GrpcServer:
    """Serves both services on a port of its own.

    Attributes:
        port: where it listens, also where the settings leave that to the system.
        tls: what clients are shown, None where it is plain.

    Raises:
        MmeError: INVALID_ARGUMENT when the port is taken, or a certificate can't be read.
    """

    def __init__(self, service: Service, turns: Turns, cap: ConnectionCap) -> None:
        settings = service.settings
        self._loop = asyncio.get_running_loop()
        certificates = grpc_certificates(settings)
        self.tls = None if certificates is None else Tls("gRPC", certificates, "h2")
        host, port = settings.grpc_address or settings.host, settings.grpc_port or 0
        where = "--grpc-port/MME_GRPC_PORT or --grpc-address/MME_GRPC_ADDRESS"
        self._sockets = listening(host, port, "gRPC", where, seconds=PORT_SECONDS)
        self.port: int = self._sockets[0].getsockname()[1]
        self._draining = asyncio.Event()
        self._restrictions = Restrictions(settings.grpc_restrictions, GRPC_PREFIX, "protocol")
        self._connections: set[Connection] = set()
        self._listeners: list[asyncio.Server] = []
        forwards = forwarding(settings.grpc_header_pattern)
        self._inference = Inference(service.engine, service.limit, service.regions, service.tracer, forwards)
        methods = Methods(service, self._draining)
        streaming = {"stream_infer": self._inference.stream_infer, "watch": methods.watch}
        found, self._roles = {}, {}
        for route in GRPC_ROUTES:
            path = f"/{route.pattern}".encode()
            self._roles[path] = route.key_role
            if route.operation in streaming:
                found[path] = Method(streaming=self._guarded(route.category, streaming[route.operation]))
            else:
                unary = self._inference.infer if route.operation == "infer" else methods.unary(route)
                found[path] = Method(unary=self._guarded(route.category, unary))
        hosts = access_of(self._sockets, settings.allowed_hosts).unknown_host
        compression = _ALGORITHMS[settings.grpc_compression]
        self._keys = service.keys
        denied = None if self._keys is None else self._denied
        self._calls = Calls(found, settings.max_body_bytes, compression, service.memory, hosts, denied)
        keepalive = Keepalive(self._loop, **keepalive_rules(settings.grpc_keepalive))
        begin, connections = self._calls.begin, self._connections
        self._connection = functools.partial(Connection, self._loop, begin, connections, keepalive, turns, cap)

    @property
    def unsent(self) -> int:
        """Bytes of answers that clients have not taken yet."""
        return sum([connection.unsent for connection in self._connections])

    async def start(self) -> None:
        options = {} if self.tls is None else self.tls.options
        for each in self._sockets:
            self._listeners.append(
                await self._loop.create_server(self._connection, sock=each, backlog=BACKLOG, **options)
            )
        _log.info("gRPC listening at port %d%s", self.port, ", by TLS" if self.tls is not None else "")

    async def drain(self, seconds: float) -> None:
        """Take no more requests; return when those that there are have been answered, or are given up after a while."""
        for listener in self._listeners:
            listener.close()
        self._draining.set()
        self._inference.drain()
        await drain(self._connections, seconds)
        if self._calls.tasks:
            await asyncio.wait(self._calls.tasks, timeout=_LOOK_SECONDS)

    def check_again(self) -> None:
        """End streams whose key does not suffice any more: keys have changed."""
        for stream in [stream for connection in self._connections for stream in connection.streams.open.values()]:
            call = stream.receiver
            if isinstance(call, Rpc) and call.method.streaming is not None:
                denial = self._denied(dict(call.fields)[b":path"], call.fields)
                if denial is not None:
                    call.fail(*denial)

    def _denied(self, path: bytes, fields: Fields) -> tuple[Status, str] | None:
        """Why a call's key does not suffice, None where it does, or none is needed."""
        role = self._roles.get(path, "")
        if role is None or self._keys is None:
            return None
        given = [value.decode("latin-1") for name, value in fields if name == b"authorization"]
        denial = self._keys.denial(role, ", ".join(given) if given else None)
        if denial is None:
            return None
        return Status.PERMISSION_DENIED if denial.status == 403 else Status.UNAUTHENTICATED, str(denial)

    def _guarded(self, category: str, handle: Handle) -> Handle:
        """The method, for calls that bring what its category wants."""
        restrictions = self._restrictions
        if not restrictions:
            return handle

        def guarded(*args: Any) -> Any:
            restrictions.check(category, args[-1].headers())
            return handle(*args)

        return guarded
