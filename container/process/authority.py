"""Where something listens: the sockets, which requests they let in, and how URLs and messages write the place."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any

from container.steps.access import Access, is_local
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BACKLOG = 1024
_LACKING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def authority(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets: without them nobody could tell the port from it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def access_of(sockets: Iterable[socket.socket], allowed: Sequence[str]) -> Access:
    """Return which requests a server on these sockets lets in; see `Access`."""
    internet = [each for each in sockets if each.family in {socket.AF_INET, socket.AF_INET6}]
    return Access(allowed, local=bool(internet) and all(is_local(each.getsockname()[0]) for each in internet))


def listening(host: str, port: int, protocol: str, setting: str) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host; port 0 is a free one, the same at all of them.

    A name may have addresses that this machine lacks, as `localhost` has where IPv6 is off: one that listens suffices.
    `protocol` and `setting` are for the error: what is to be listened to, and what says where.

    Raises:
        MmeError: INVALID_ARGUMENT when one of them can't, or none is this machine's.
    """
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
    except OSError as error:
        for each in found:
            each.close()
        raise invalid_argument(
            f"the server cannot listen to {protocol} requests at {authority(host, port)}: {error.strerror}; choose "
            f"another {setting}"
        ) from error
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
