"""When the master starts a worker in place of one that ended, and when it gives up. In gunicorn's master.

A worker that ends without being asked to is followed by another after a pause, which doubles. Five in a row of which
none came to answer a /ping with 200 are a start that can't succeed: the server ends, with the last error. A worker that
has served is always followed, as is one that lived for a minute and loads nothing: not every platform asks for /ping.
A model whose load was under way at two ends of the first kind is not brought back.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.process.last_words import LastWords

_FIRST_SECONDS = 0.5
_MOST_SECONDS = 30.0  # shorter than gunicorn's patience with a worker that gives no sign of life
_STEADY_SECONDS = 60.0  # a worker that lived for so long begins the pauses again
_MOST_UNSERVED = 5
_MOST_LOADS = 2


class Restarts:
    """The ends of workers, one after the other.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._ended = 0  # in a row, none of which lived for long
        self._unserved = 0  # in a row
        self._loading: Counter[str] = Counter()  # ends of that kind, by the models that were being loaded

    def __repr__(self) -> str:
        return f"<Restarts: {self._ended} in a row, {self._unserved} of them before they served>"

    def begins(self, words: LastWords) -> None:
        """A worker is about to be started."""
        words.pause = min(_FIRST_SECONDS * 2.0 ** (self._ended - 1), _MOST_SECONDS) if self._ended else 0.0
        words.left_out = frozenset(name for name, count in self._loading.items() if count >= _MOST_LOADS)
        self._began = self._clock() + words.pause

    def ends(self, words: LastWords) -> str:
        """A worker has ended: why no other is to be started, "" if one is."""
        if words.was_asked:
            return ""
        steady = self._clock() - self._began > _STEADY_SECONDS
        has_served = words.has_served or (steady and not words.loading)
        self._ended = 1 if has_served and steady else min(self._ended + 1, 32)
        if has_served:
            self._unserved = 0
            return ""
        self._unserved += 1
        self._loading.update(words.loading)
        if self._unserved < _MOST_UNSERVED:
            return ""
        loading = ", ".join(f"'{name}'" for name in sorted(words.loading))
        while_loading = f", the last one while it loaded {loading}" if loading else ""
        error = words.error or "none was told; the lines above say how it ended"
        return (
            f"{self._unserved} worker processes in a row ended before /ping was answered 200{while_loading}: "
            f"this server can't start; the last error: {error}"
        )
