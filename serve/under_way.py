"""Which models are being loaded now, told at each change: what is known of it when the process ends in the middle."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def _unheard(_: Iterable[str]) -> None:
    """Nothing outlives this process."""


class UnderWay:
    """Loads on threads.

    Args:
        tell: told the names of all at each change.
    """

    def __init__(self, tell: Callable[[Iterable[str]], None] = _unheard) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._names: list[str] = []

    def __repr__(self) -> str:
        return f"<UnderWay: {', '.join(self._names)}>"

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """While a model of that name is loaded."""
        with self._lock:
            self._names.append(name)
            self._tell(self._names)
        try:
            yield
        finally:
            with self._lock:
                self._names.remove(name)
                self._tell(self._names)
