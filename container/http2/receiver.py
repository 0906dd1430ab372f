"""Who takes what comes on a stream behind its headers."""

from __future__ import annotations

from typing import Protocol


class Receiver(Protocol):
    """One stream's."""

    def received(self, payload: bytes) -> None:
        """Some data came."""

    def ended(self) -> None:
        """No more will."""

    def cancelled(self) -> None:
        """The client has given the stream up, or has left."""
