"""Results in the order in which their batches left the queue, though lanes finish as they please. PURE."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """Holds back results that overtook others. Tickets count up from 0 without a gap."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}

    def release(self, ticket: int, result: T) -> list[T]:
        """Take the result of a ticket; return all that may leave now, oldest first."""
        self._held[ticket] = result
        ready: list[T] = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready
