"""AWS as moto plays it: a server on loopback."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from moto.moto_server.threaded_moto_server import ThreadedMotoServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def moto_server() -> Iterator[str]:
    """The endpoint of one."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
