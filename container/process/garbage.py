"""When Python looks for garbage that refers to itself: all of it at a time at which nobody waits.

A full collection looks at every object that the process has, holding Python's lock, and so keeps every request waiting:
with a thousand models for some 50 ms. Left alone Python does that whenever a quarter more has come, which is when
models come and go, and others are asked. Young objects, with nearly all garbage among them, it still collects itself.

`QuietCollector` is called on the event loop, about once a second; the functions while a server starts, which makes tens
of thousands of objects and next to no garbage.
"""

from __future__ import annotations

import gc
import time

_QUIET = 0.1  # of a processor
_DUE = 10  # collections of the young between two of all, as Python has it
_OVERDUE = 1000
_NEVER = 1 << 30


def put_off() -> None:
    """Collect nothing until `keep_all`: what is imported meanwhile would be looked at again and again."""
    gc.disable()


def keep_all() -> None:
    """Never look again at what there is. Before a fork: a collection would write to, and so copy, every shared page."""
    gc.freeze()
    gc.enable()


class QuietCollector:
    """Collects all garbage when the process has little else to do, and once in a while though it has. One a process."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what start-up left behind lives as long as we do: it need not be looked at again and again
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._looked_at = time.monotonic()
        self._used = time.process_time()

    def look(self) -> None:
        """Collect, if it is time for that."""
        now, used = time.monotonic(), time.process_time()
        quiet = used - self._used < _QUIET * (now - self._looked_at)
        if gc.get_count()[2] >= (_DUE if quiet else _OVERDUE):
            gc.collect()
        self._looked_at, self._used = now, time.process_time()
