"""Responses kept for requests that come again: least recently used first out, bounded in bytes. PURE.

One for all models. It knows keys and sizes, and not what either is made of: an owner's responses go with the owner.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")


class ResponseCache(Generic[T]):
    """What was answered, by owner and key.

    Attributes:
        budget: bytes that all of it may take together; 0 keeps nothing.
        used: bytes that it takes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._kept: OrderedDict[tuple[Hashable, Hashable], tuple[T, int]] = OrderedDict()
        self._keys: dict[Hashable, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<ResponseCache: {len(self)} responses of {len(self._keys)} models, {self.used} of {self.budget} bytes>"

    def find(self, owner: Hashable, key: Hashable) -> T | None:
        """What was kept under the key, which counts as a use; None where nothing is."""
        found = self._kept.get((owner, key))
        if found is None:
            return None
        self._kept.move_to_end((owner, key))
        return found[0]

    def keep(self, owner: Hashable, key: Hashable, value: T, size: int) -> None:
        """Keep a value of so many bytes, in the place of those that were not used for longest."""
        self._drop(owner, key)
        if size > self.budget:
            return
        while self.used + size > self.budget:
            self._drop(*next(iter(self._kept)))
        self._kept[owner, key] = value, size
        self._keys.setdefault(owner, set()).add(key)
        self.used += size

    def forget(self, owner: Hashable) -> None:
        """Drop everything of an owner's."""
        for key in list(self._keys.get(owner, ())):
            self._drop(owner, key)

    def _drop(self, owner: Hashable, key: Hashable) -> None:
        found = self._kept.pop((owner, key), None)
        if found is None:
            return
        self.used -= found[1]
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]
