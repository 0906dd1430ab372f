"""What is remembered of what clients send: few things, and little of it in all. PURE.

Clients choose how many names they send, and how long: a number of entries alone would bound nothing.
"""

from __future__ import annotations

from typing import Any


class Bounded(dict[Any, Any]):
    """A dict that forgets everything rather than grow beyond its bounds: what is asked for again comes back.

    Args:
        most: entries.
        most_bytes: what all of them may weigh.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        super().__init__()
        self._most = most
        self._most_bytes = most_bytes
        self._weight = 0

    def keep(self, key: Any, value: Any, weight: int) -> None:
        """Remember it, unless it alone is too heavy."""
        if weight > self._most_bytes:
            return
        if len(self) >= self._most or self._weight + weight > self._most_bytes:
            self.clear()
            self._weight = 0
        self[key] = value
        self._weight += weight
