"""The gRPC server of a service: where it listens, how it drains, how it ends. On the event loop of the engine.

Knows no message; a handler gets bytes and gives bytes, and what it raises becomes a status.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc

from container.authority import authority
from container.forwarding import forwarding
from container.grpc.infer import Codec, Inference
from container.grpc.methods import HEALTH, INFERENCE, Methods
from container.grpc.status import refuse
from container.grpc.stream import Streams
from container.grpc.traces import headers_of
from container.restrictions import GRPC_PREFIX, Restrictions, category_of_method
from container.settings import GrpcCompression
from container.settings.protocol_values import channel_options
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from container.service import Service
    from container.settings import Settings

    Handle = Callable[[Any, Any], Awaitable[Any]]

_log = logging.getLogger("mme.grpc")
_LEVELS = {level: number for number, level in enumerate(GrpcCompression)}  # grpcio's, in the same order


class GrpcServer:
    """Serves both services on a port of its own.

    Args:
        service: what it serves, whose settings say where it listens, and how.

    Attributes:
        port: where it listens, also where the settings leave that to the system.

    Raises:
        MmeError: INVALID_ARGUMENT when the port is taken, or a certificate can't be read.
    """

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self._secure = settings.grpc_use_ssl
        self._draining = asyncio.Event()
        self._server = grpc.aio.server(options=_options(settings))
        self._restrictions = Restrictions(settings.grpc_restrictions, GRPC_PREFIX, "protocol")
        codec = Codec(service.engine, forwarding(settings.grpc_header_pattern), service.regions)
        self._streams = Streams(service.engine, codec, service.tracer)
        methods = Methods(service, self._draining)
        inference = {
            **{name: self._unary(name, method) for name, method in methods.by_name().items()},
            "ModelInfer": self._unary("ModelInfer", Inference(service.engine, codec, service.tracer).infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._guarded("ModelStreamInfer", self._streams.serve)
            ),
        }
        health = {
            "Check": self._unary("Check", methods.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._guarded("Watch", methods.watch)),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(INFERENCE, inference),
                grpc.method_handlers_generic_handler(HEALTH, health),
            )
        )
        self.port = self._listen(
            settings.grpc_address or settings.host, settings.grpc_port or 0, _credentials(settings)
        )

    def _listen(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        address = authority(host, port)
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError as error:
            raise invalid_argument(
                f"the server cannot listen to gRPC requests at {address}; choose another --grpc-port/MME_GRPC_PORT"
            ) from error

    async def start(self) -> None:
        """Answer requests from now on."""
        await self._server.start()
        _log.info("gRPC listening at port %d%s", self.port, ", by TLS" if self._secure else "")

    async def drain(self, seconds: float) -> None:
        """Take no more requests; return when those that there are have been answered, or are given up after a while."""
        self._draining.set()
        self._streams.drain()
        await self._server.stop(seconds)

    def _unary(self, method: str, handle: Handle) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._guarded(method, handle))

    def _guarded(self, method: str, handle: Handle) -> Handle:
        """The method, for those who bring what its category wants."""
        category, restrictions = category_of_method(method), self._restrictions
        if not restrictions:
            return _told(handle)

        async def guarded(request: Any, context: Any) -> Any:
            restrictions.check(category, headers_of(context))
            return await handle(request, context)

        return _told(guarded)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server on the port is a mistake to be told of
        ("grpc.default_compression_level", _LEVELS[settings.grpc_compression]),  # by what each client can read
        *channel_options(settings.grpc_keepalive),
    ]


def _credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """What clients are shown, and what they have to show; None where there is no TLS."""
    if not settings.grpc_use_ssl:
        return None
    if settings.grpc_server_cert is None or settings.grpc_server_key is None:
        raise invalid_argument("gRPC by TLS needs a certificate and its key")
    try:
        pair = settings.grpc_server_key.read_bytes(), settings.grpc_server_cert.read_bytes()
        root = settings.grpc_root_cert.read_bytes() if settings.grpc_root_cert is not None else None
    except OSError as error:
        raise invalid_argument(f"a file of gRPC's TLS can't be read: {error}") from error
    return grpc.ssl_server_credentials([pair], root, settings.grpc_use_ssl_mutual)


def _told(handle: Handle) -> Handle:
    """The method, with a status in place of what it raises."""

    async def told(request: Any, context: Any) -> Any:
        try:
            return await handle(request, context)
        except grpc.aio.InternalError:  # its client has just left
            raise
        except Exception as error:  # noqa: BLE001 - every error is a status, or its client reads nothing of it
            return refuse(context, error)

    return told
