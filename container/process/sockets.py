"""Ports: the sockets that listen, which requests they let in, and TLS with certificates as they are now."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

from container.process.resources import Followed
from container.settings.places import load_certificates
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.settings.places import Certificates


BACKLOG = 1024
PORT_SECONDS = 4.0  # that a port may need to be left
_AGAIN_SECONDS = 0.1
_LACKING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def authority(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets: without them the port could not be told from it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(host: str, port: int, protocol: str, setting: str, *, seconds: float = 0.0) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host; port 0 is a free one, the same at all of them.

    A name may have addresses that this machine lacks, as `localhost` has where IPv6 is off: one that listens suffices.
    A port that is taken may be about to be left, by the worker before this one or another server: it is tried again
    for some seconds, in which the thread waits. `protocol` and `setting` are for the error: what is to be listened to,
    and what says where.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            return _all_listening(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= ends:
                raise invalid_argument(
                    f"the server cannot listen to {protocol} requests at {authority(host, port)}: {error.strerror}; "
                    f"choose another {setting}"
                ) from error
        time.sleep(_AGAIN_SECONDS)


def _all_listening(host: str, port: int) -> list[socket.socket]:
    found: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, kind, number, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            place = (address[0], port or (found[0].getsockname()[1] if found else 0), *address[2:])
            try:
                found.append(_listening(family, kind, number, place, only_ipv6=host != "::"))
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
                lacking = error
        if lacking is not None and not found:
            raise lacking
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def _listening(family: int, kind: int, protocol: int, place: Any, *, only_ipv6: bool) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_ipv6))
        made.bind(place)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


_HANDSHAKE_SECONDS = 20.0
_SHUTDOWN_SECONDS = 5.0  # for a client to close, once it has its last answer
_log = logging.getLogger("mme.tls")
_QUIET_SECONDS = 60.0  # between two lines that say the same
_REASONS = {
    "HTTP_REQUEST": "a client spoke plain HTTP: its URL has to begin with https://",
    "WRONG_VERSION_NUMBER": "a client spoke no TLS: its URL has to begin with https://",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "a client showed no certificate, which this port wants",
    "CERTIFICATE_VERIFY_FAILED": "a client showed a certificate that nothing vouches for here",
}


class Tls(Followed):
    """A context for servers, in which each handshake gets the certificates as they are now.

    A file that is broken changes nothing: a context is made as a whole, or not at all.
    """

    def __init__(self, what: str, certificates: Certificates, protocol: str) -> None:
        super().__init__(f"certificates of {what}", certificates.paths)
        self._port = what
        self._certificates = certificates
        self._protocol = protocol
        self._told: dict[str, float] = {}
        self.context = self._latest = self._made()
        self.context.sni_callback = self._use_latest  # with every handshake, whether the client names a server or not

    @property
    def options(self) -> dict[str, Any]:
        return {
            "ssl": self.context,
            "ssl_handshake_timeout": _HANDSHAKE_SECONDS,
            "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
        }

    def read(self) -> None:
        self._latest = self._made()

    def _made(self) -> ssl.SSLContext:
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.failed = self._failed
        load_certificates(context, self._certificates)
        context.set_alpn_protocols([self._protocol])
        return context

    def _use_latest(self, connection: Any, _server: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _failed(self, error: ssl.SSLError) -> None:
        """Tell why a handshake failed, once a minute for each reason: ports are scanned."""
        reason = error.reason or type(error).__name__
        now = time.monotonic()
        if now < self._told.get(reason, 0.0):
            return
        self._told[reason] = now + _QUIET_SECONDS
        words = _REASONS.get(reason) or f"a handshake failed ({reason.replace('_', ' ').lower()})"
        _log.warning("%s by TLS: %s", self._port, words)


class _Handshake(ssl.SSLObject):
    """One connection's; its server drops it without a word where the handshake fails."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            context = self.context
            if isinstance(context, _Context):
                context.failed(error)
            raise


class _Context(ssl.SSLContext):
    """A context that tells of handshakes which fail."""

    failed: Callable[[ssl.SSLError], None]
    sslobject_class = _Handshake
