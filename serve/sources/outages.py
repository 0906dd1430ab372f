"""What of a store can't be asked now: single names, or the whole store. While it can't, what is on disk has to do.

An answer that is an error, as a 503 of S3 for a prefix that is busy, is no answer for any other name, which asks for
itself; without a connection no name need try. Thread-safe; used on load threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cachetools import LRUCache

from serve.sources.store import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 60.0  # after something could not be asked, before it is asked again for what is on disk
_WHOLE = ""  # the scope of the whole store, which is no name
_MOST = 10_000  # names


class Outages:
    """Those of one store.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._until: LRUCache[str, float] = LRUCache(_MOST)
        # Until when the store asks for it, and why.
        self._left_alone: LRUCache[str, tuple[float, str]] = LRUCache(_MOST)

    def __repr__(self) -> str:
        return f"<Outages of {len(self._until)}>"

    def goes_on(self, name: str) -> bool:
        """Whether a name need not be asked for: then another thread does, or did a moment ago."""
        now = self._clock()
        with self._guard:
            for scope in (_WHOLE, name):
                until = self._until.get(scope)
                if until is not None and now < until:
                    return True
            for scope in (_WHOLE, name):
                if scope in self._until:  # others need not wait until this one knows
                    self._until[scope] = now + _SECONDS
        return False

    def must_wait(self, name: str) -> None:
        """Leave the store alone as long as it asks for it.

        Raises:
            UnreachableError: that long is not over.
        """
        with self._guard:
            until, why = self._left_alone.get(name, (0.0, ""))
        left = until - self._clock()
        if left > 0:
            raise UnreachableError(f"{why}; it is asked again in {left:.0f} s", whole=False)

    def begins(self, name: str, error: UnreachableError) -> bool:
        """A name could not be asked for; whether that is news."""
        scope, now = _WHOLE if error.whole else name, self._clock()
        with self._guard:
            is_new = scope not in self._until
            self._until[scope] = now + max(_SECONDS, error.asked_pause)
            if error.asked_pause:
                self._left_alone[name] = now + error.asked_pause, error.message
        return is_new

    def is_over(self, name: str) -> bool:
        """A name was asked for; whether that is news."""
        with self._guard:
            self._left_alone.pop(name, None)
            return [self._until.pop(scope, None) for scope in (_WHOLE, name)] != [None, None]
