"""An answer of unknown length under way: how its parts travel, and what a client that reads slowly may cost.

A `Stream` takes the connection's place in its exchange from `begin` to `end` or `cut`. What travels has one of three
forms. *Chunked*: the last chunk says that the answer is whole. *Until the close*, for HTTP/1.0, which knows no chunks
and so can't tell half an answer from all of it. *Head only*: the parts are dropped.

The first part of a turn of the loop leaves at once, with the head if that was before it. Those behind it leave together
in the next turn, or sooner where they are much: the transport would make a system call and a packet of each. Runs on
the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.http1.connection import HttpProtocol
    from container.http1.exchange import Exchange

LOG = logging.getLogger("mme.http")

JOINED_UP_TO = 64 * 1024  # bytes of body that are cheaper to copy than to write apart
BODILESS = frozenset((204, 304))

_LAST_CHUNK = b"0\r\n\r\n"


class Form(Enum):
    """How the body of a streamed answer travels."""

    CHUNKED = "chunked"
    UNTIL_CLOSE = "until the close"
    HEAD_ONLY = "head only"


def form_of(exchange: Exchange, status: int) -> Form:
    """The form of a streamed answer to this request."""
    if exchange.method == "HEAD" or status in BODILESS:
        return Form.HEAD_ONLY
    return Form.UNTIL_CLOSE if exchange.http10 else Form.CHUNKED


class Stream:
    """The rest of an answer that has begun.

    Args:
        connection: where it goes on after the end.
        transport: of that connection; None when the client had left before the answer began.
        limit: bytes that may be unsent when another part comes.
        form: how the body travels.
        head: what goes before it.
    """

    def __init__(
        self, connection: HttpProtocol, transport: asyncio.Transport | None, limit: int, form: Form, head: bytes
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._limit = limit
        self._form = form
        self._asked = False  # the size of the next chunk has begun, with a zero
        self._pieces: list[bytes | memoryview] = [head]  # that are to be sent
        self._size = len(head)
        self._turns = False  # whether the next turn is waited for
        self._waits = False  # whether what is put waits for it: something was sent in this one
        self._flush_next()

    @property
    def unsent(self) -> int:
        """Bytes that the client's socket has not taken yet; 0 when the client has left."""
        transport = self._transport
        return 0 if transport is None or transport.is_closing() else transport.get_write_buffer_size() + self._size

    def answer(self, exchange: Exchange, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> NoReturn:  # noqa: ARG002
        """Refuse a second answer."""
        raise RuntimeError(f"the answer to {exchange!r} has begun: write to it and end it, or cut it")

    def begin(self, exchange: Exchange, status: int, headers: bytes) -> NoReturn:
        """Refuse a second beginning."""
        self.answer(exchange, status, headers, ())

    def hold(self, exchange: Exchange, size: int) -> bool:
        """Count further bytes of a request whose answer has begun."""
        return self._connection.hold(exchange, size)

    def write(self, exchange: Exchange, data: bytes | memoryview) -> None:
        """Send one part."""
        if type(data) is not bytes:
            view = memoryview(data)
            # Raises for a view that is not contiguous; the transport would, but with the chunk's size in its buffer.
            data = view.cast("B") if view.nbytes else b""
        size = len(data)
        transport = self._transport
        if not size or self._form is Form.HEAD_ONLY or transport is None or transport.is_closing():
            return
        # Looked at before the part joins it: one large part alone is no sign of a slow client.
        unsent = transport.get_write_buffer_size()
        if unsent > self._limit:
            LOG.warning("%r is cut off: its client has left %d bytes of the answer unread", exchange, unsent)
            transport.abort()
            return
        if self._form is Form.CHUNKED:
            line = b"%x\r\n" % size
            self._put((line, data, b"\r\n"), len(line) + size + 2)
        else:
            self._put((data,), size)
        self._asked = False

    def end(self, exchange: Exchange) -> None:
        """Send what says that the answer is whole, and let the connection go on."""
        exchange.connection = None
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._form is Form.CHUNKED:
                self._put((_LAST_CHUNK,), len(_LAST_CHUNK))
            self._flush()
        self._connection.ended(exchange)

    def cut(self, exchange: Exchange) -> None:
        """Close the connection without that. Chunks that were sent before still arrive."""
        exchange.connection = None
        self._flush()
        self._connection.hang_up(exchange, now=self._form is Form.UNTIL_CLOSE)

    def ask(self) -> bool:
        """Send something that means nothing, for the client's system to say whether it is read; False if we can't.

        A chunk's size may begin with zeros. One is enough until the next part, and some clients count them.
        """
        if self._asked or self._form is not Form.CHUNKED or self._transport is None:
            return False
        self._asked = True
        self._put((b"0",), 1)
        return True

    def _put(self, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        self._pieces += pieces
        self._size += size
        if self._size > JOINED_UP_TO or not self._waits:
            self._flush()
        self._waits = True
        self._flush_next()

    def _flush_next(self) -> None:
        """Send in the next turn what there is by then."""
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._turns = self._waits = False
        self._flush()

    def _flush(self) -> None:
        """Send what was put."""
        pieces, self._pieces = self._pieces, []
        size, self._size = self._size, 0
        transport = self._transport
        if not pieces or transport is None or transport.is_closing():
            return
        if size <= JOINED_UP_TO:
            transport.write(b"".join(pieces))
        else:
            transport.writelines(pieces)
        self._connection.streamed += size
