"""One HTTP request and its one answer, whoever speaks HTTP: our own server, or Flask on somebody else's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Exchange(Protocol):
    """A request, complete with its body, waiting for `respond`.

    Attributes:
        method: upper case.
        target: the request target as sent: a path, perhaps with a query.
        headers: by lower-case name.
        body: all of it, decoded from chunks.
        on_disconnect: called once, on the loop, if the client leaves before the answer.
    """

    method: str
    target: bytes
    headers: Mapping[str, str]
    body: bytes
    on_disconnect: Callable[[], None] | None

    def respond(self, status: int, headers: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Answer, exactly once. `headers` holds whole lines, each ending in CR LF; length and date are added."""
