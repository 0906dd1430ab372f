"""One request and its one answer: all that a handler sees of HTTP. Lives on the event loop; not for other threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from container.control.routes import shown
from container.http1.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Answerer(Protocol):
    """The connection, as an exchange sees it; a `Stream` once an answer of unknown length has begun."""

    @property
    def unsent(self) -> int:
        """Bytes that the client's socket has not taken yet."""

    def answer(self, exchange: Exchange, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Send the exchange's answer and forget the exchange."""

    def begin(self, exchange: Exchange, status: int, headers: bytes) -> None:
        """Send the head of the exchange's answer and leave the rest to a stream."""

    def hold(self, exchange: Exchange, size: int) -> bool:
        """Count further bytes for the request, if they fit."""


class Exchange:
    """A request that was read completely, and the way to answer it: at once by `respond`, or part by part.

    The latter is `begin`, any number of `write`, then `end`, or `cut` if it cannot be finished. Each does nothing when
    the client has left, and raises RuntimeError out of its turn.

    Attributes:
        method: `GET`, `POST`, … in capitals.
        target: path and query as sent, `/` first (`*` for OPTIONS); scheme and host of an absolute target are gone.
        headers: names in lower case, values as latin-1; repeated fields are joined with `, `. Read only: a client that
            repeats its headers is given the same dict again.
        body: all of it, b"" for none.
        on_disconnect: set by the handler; called once if the client leaves, or is cut off because it reads too slowly,
            before `respond`, `end` or `cut`.
        held: bytes that count in the memory of requests; -1 once it is answered.
        connection, http10, final, plain: the server's own: where to answer, None once answered; an HTTP/1.0 client;
            the last exchange of its connection; an answer without any such speciality.
    """

    def __init__(
        self,
        connection: Answerer,
        method: str,
        target: bytes,
        headers: Mapping[str, str],
        http10: bool,  # noqa: FBT001  positional, for the speed of it
        final: bool,  # noqa: FBT001
    ) -> None:
        self.connection: Answerer | None = connection
        self.method = method
        self.target = target
        self.headers = headers
        self.body = b""
        self.held = 0
        self.on_disconnect: Callable[[], None] | None = None
        self.http10 = http10
        self.final = final
        self.plain = not (final or http10 or method == "HEAD")

    def hold(self, size: int) -> bool:
        """Count further bytes in the memory of requests until this one is answered; False if they do not fit."""
        connection = self.connection
        return connection is None or connection.hold(self, size)

    def respond(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        r"""Answer the request. Does nothing when the client has left.

        Args:
            status: the HTTP status, 200 or above.
            headers: ready-made lines, each `b"Name: value\r\n"`, without Date, Content-Length and Connection.
            body: the parts of the body in order. The server may read them until they are sent: do not change them.

        Raises:
            RuntimeError: the exchange was answered before, or an answer has begun.
        """
        connection = self.connection
        if connection is None:
            raise RuntimeError(f"{self!r} has been answered before: respond exactly once")
        connection.answer(self, status, headers, body)

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer whose length is not known yet. Its head goes out at once.

        So the client learns that it is served, however long the first part takes, and an answer that is cut before its
        first part is seen to be one. A client of HTTP/1.0 gets it until the connection closes, any other in chunks.

        Args:
            status: as of `respond`.
            headers: as of `respond`; without Transfer-Encoding too.

        Raises:
            RuntimeError: the exchange was answered before, or an answer has begun.
        """
        connection = self.connection
        if connection is None:
            raise RuntimeError(f"{self!r} has been answered before: begin one answer at most")
        connection.begin(self, status, headers)

    def write(self, data: bytes | memoryview) -> None:
        """Send one part of the body at once, as one chunk; nothing for b"", or if the request was HEAD.

        A handler with many parts ready looks at `unsent` first: a client that leaves more than `Limits.stream_buffer`
        unread when another part comes is cut off.

        Args:
            data: the server may read it until it is sent: do not change it.

        Raises:
            RuntimeError: no answer has begun, or it is over.
        """
        self._stream().write(self, data)

    def end(self) -> None:
        """The answer that has begun is whole; the connection goes on with the next request.

        Raises:
            RuntimeError: no answer has begun, or it is over.
        """
        self._stream().end(self)

    def cut(self) -> None:
        """The answer that has begun can't be finished: close the connection, so that the client knows.

        Raises:
            RuntimeError: no answer has begun, or it is over.
        """
        self._stream().cut(self)

    @property
    def unsent(self) -> int:
        """Bytes accepted and not yet taken by the client's socket; 0 when the client has left."""
        connection = self.connection
        return 0 if connection is None else connection.unsent

    def _stream(self) -> Stream:
        connection = self.connection
        if isinstance(connection, Stream):
            return connection
        what = "has been answered before" if connection is None else "has no answer that has begun"
        raise RuntimeError(f"{self!r} {what}: begin, write, then end or cut once")

    def __repr__(self) -> str:
        return f"<Exchange {self.method} {shown(self.target)} {len(self.body)} bytes>"
