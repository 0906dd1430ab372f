"""Bytes that executions took of one memory, beyond what loading took, and the models charged. PURE.

What one look alone sees may be a batch under way, so growth counts once two looks in a row have seen it. What a look
does not see any more is gone, and counts no longer. It is charged to the models that have executed, by the bytes of
their inputs; the rest, of models that have left, is charged to none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

K = TypeVar("K")


class Growth(Generic[K]):
    """The growth of one memory.

    Attributes:
        counted: bytes.
        charged: model → how many of them.
        pending: whether the last look saw more than is counted.
    """

    def __init__(self) -> None:
        self.counted = 0
        self.charged: dict[K, int] = {}
        self.pending = False
        self._seen = 0

    def __repr__(self) -> str:
        return f"<Growth of {self.counted} bytes, {len(self.charged)} models charged>"

    @property
    def uncharged(self) -> int:
        """Bytes that count and are charged to no model."""
        return self.counted - sum(self.charged.values())

    def look(self, beyond: int, inputs: Mapping[K, int]) -> None:
        """A look saw so many bytes beyond what is known; `inputs` are those of recent executions, in bytes."""
        beyond = max(beyond, 0)
        self.counted, self._seen = min(beyond, self._seen), beyond
        self.pending = beyond > self.counted
        rest, whole = self.uncharged, sum(inputs.values())
        if rest > 0 and whole:
            for key, size in inputs.items():
                self.charged[key] = self.charged.get(key, 0) + rest * size // whole
        elif rest < 0:
            charged = self.counted - rest
            self.charged = {key: size * self.counted // charged for key, size in self.charged.items()}

    def keep(self, stays: Callable[[K], bool]) -> None:
        """Charge those no more that left: what they took and did not give back is charged to none."""
        self.charged = {key: size for key, size in self.charged.items() if size and stays(key)}
