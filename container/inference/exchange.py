"""One HTTP request and its one answer, over HTTP/1.1 or HTTP/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Exchange(Protocol):
    """A request, complete with its body, waiting for `respond`, or for `begin`, `write` … and then `end` or `cut`.

    All of these do nothing once the client has left, and raise RuntimeError out of their turn.

    Attributes:
        method: upper case.
        target: the request target as sent: a path, perhaps with a query.
        headers: by lower-case name.
        body: all of it, decoded from chunks.
        on_disconnect: called once, on the loop, if the client leaves before `respond`, `end` or `cut`.
    """

    method: str
    target: bytes
    headers: Mapping[str, str]
    body: bytes
    on_disconnect: Callable[[], None] | None

    def hold(self, size: int) -> bool:
        """Count further bytes in the memory of requests until this one is answered; False if they do not fit."""

    def respond(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Answer, exactly once. `headers` holds whole lines, each ending in CR LF; length and date are added."""

    def begin(self, status: int, headers: bytes) -> None:
        """Begin an answer whose length is not known yet; `headers` as of `respond`."""

    def write(self, data: bytes | memoryview) -> None:
        """One part of the body, sent at once; nothing for b"". Do not change it afterwards."""

    def end(self) -> None:
        """The body is whole."""

    def cut(self) -> None:
        """The body can't be finished: the client is left to see that it is not whole."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and that the client has not taken yet; 0 when it has left."""
