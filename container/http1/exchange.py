"""One request and its one answer: all that a handler sees of HTTP. Lives on the event loop; not for other threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Answerer(Protocol):
    """The connection, as an exchange sees it."""

    def answer(self, exchange: Exchange, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Send the exchange's answer and forget the exchange."""


class Exchange:
    """A request that was read completely, and the way to answer it.

    Attributes:
        method: `GET`, `POST`, … in capitals.
        target: path and query as sent, `/` first (`*` for OPTIONS); scheme and host of an absolute target are gone.
        headers: names in lower case, values as latin-1; repeated fields are joined with `, `. Read only: a client that
            repeats its headers is given the same dict again.
        body: all of it, b"" for none.
        on_disconnect: set by the handler; called once if the client leaves before `respond`.
        connection, http10, final, plain: the server's own: where to answer, None once answered; an HTTP/1.0 client;
            the last exchange of its connection; an answer without any such speciality.
    """

    __slots__ = (
        "body",
        "connection",
        "final",
        "headers",
        "http10",
        "method",
        "on_disconnect",
        "plain",
        "target",
    )

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
        self.on_disconnect: Callable[[], None] | None = None
        self.http10 = http10
        self.final = final
        self.plain = not (final or http10 or method == "HEAD")

    def respond(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        r"""Answer the request. Does nothing when the client has left.

        Args:
            status: the HTTP status, 200 or above.
            headers: ready-made lines, each `b"Name: value\r\n"`, without Date, Content-Length and Connection.
            body: the parts of the body in order. The server may read them until they are sent: do not change them.

        Raises:
            RuntimeError: the exchange was answered before.
        """
        connection = self.connection
        if connection is None:
            raise RuntimeError(f"{self!r} has been answered before: respond exactly once")
        connection.answer(self, status, headers, body)

    def __repr__(self) -> str:
        return f"<Exchange {self.method} {self.target.decode('latin-1')} {len(self.body)} bytes>"
