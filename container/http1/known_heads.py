"""Heads that clients repeat byte for byte, on any connection of a server, and what they mean, parsed once.

A head is known from its second time on, so that those that never come again cost no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.http1.limits import KIB
from serve.request import Bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from container.http1.exchange import Exchange

END = b"\r\n\r\n"
_LONGEST = 2 * KIB
_MOST = 4096
_MOST_BYTES = 8 << 20
_OVERHEAD = 1024  # bytes that a known head takes beside itself


class KnownHead:
    """What a head means, and the bytes of a whole request with it."""

    def __init__(self, head: bytes, size: int, method: str, target: bytes, headers: Mapping[str, str]) -> None:
        self.head = head
        self.size = size
        self.method, self.target, self.headers = method, target, headers


class KnownHeads:
    """Those of a server."""

    def __init__(self) -> None:
        self._known = Bounded(_MOST, _MOST_BYTES)
        self._came: set[int] = set()  # hashes of those that came once

    def of(self, data: bytes) -> KnownHead | None:
        """Return the head of a read that is one whole request, if it is known."""
        end = data.find(END, 0, _LONGEST) + len(END)
        known: KnownHead | None = self._known.get(data[:end])
        return known if known is not None and known.size == len(data) else None

    def learn(self, data: bytes, exchange: Exchange) -> KnownHead | None:
        """Remember the head of a read, if it came before and the read is just it and its body.

        Such a read is as long as the sum below; one that holds anything more, or a longer head, is longer than that.

        Args:
            data: the read.
            exchange: of its last request; whatever has its head asks for nothing special.
        """
        end = data.find(END, 0, _LONGEST) + len(END)
        if end + int(exchange.headers.get("content-length", 0)) != len(data):
            return None
        head = data[:end]
        mark = hash(head)
        if mark not in self._came:
            if len(self._came) >= _MOST:
                self._came.clear()
            self._came.add(mark)
            return None
        known = KnownHead(head, len(data), exchange.method, exchange.target, exchange.headers)
        self._known.keep(head, known, 2 * len(head) + _OVERHEAD)
        return known

    def forget(self) -> None:
        """Know none any more."""
        self._known = Bounded(_MOST, _MOST_BYTES)
        self._came.clear()
