"""Where something listens: the sockets, and as URLs and messages write it."""

from __future__ import annotations

import socket

from model_handlers.errors import invalid_argument

BACKLOG = 1024


def authority(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets: without them nobody could tell the port from it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(host: str, port: int, protocol: str, setting: str) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host; port 0 is a free one, the same at all of them.

    `protocol` and `setting` are for the error: what is to be listened to, and what says where.

    Raises:
        MmeError: INVALID_ARGUMENT when one of them can't.
    """
    found: list[socket.socket] = []
    try:
        for family, kind, number, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            each = socket.socket(family, kind, number)
            found.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            each.bind((address[0], port or found[0].getsockname()[1], *address[2:]))
            each.listen(BACKLOG)
            each.setblocking(False)
    except OSError as error:
        for each in found:
            each.close()
        raise invalid_argument(
            f"the server cannot listen to {protocol} requests at {authority(host, port)}; choose another {setting}"
        ) from error
    return found
