"""`python -m container.health`: whether the server of this container is healthy, for engines that run a command.

Asks /ping as the server's variables say, by TLS where they say that: whose certificate it is does not matter on this
machine. Where clients have to show one, its part of the handshake has to do, since the image has none to show.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = 2.0


def is_healthy(environ: Mapping[str, str]) -> bool:
    """Whether /ping answers 200. http.client, because it heeds no proxy."""
    port = int(environ.get("SAGEMAKER_BIND_TO_PORT") or environ.get("MME_PORT") or 8080)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    if environ.get("MME_TLS_CERT"):
        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - on loopback
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=_SECONDS, context=context)
    try:
        connection.connect()
        if environ.get("MME_TLS_CLIENT_CA"):
            return True
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(os.environ))
