"""What a model in a process of its own has counted, on its way to the server: see `model_handlers.metrics`.

Most of it goes with the answers to batches, at the price of the bytes. What is counted by other threads, or while the
model is loaded or closed, is told by a thread of ours, a fifth of a second later at most; models that count nothing do
without it.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from model_handlers.metrics import METRICS

if TYPE_CHECKING:
    from model_handlers.isolation.events import Events

_PAUSE = 0.2  # seconds


class Reports:
    """Tells the server of changes that no batch's answer has taken along.

    Args:
        events: the process's channel.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._due: SimpleQueue[None] = SimpleQueue()
        self._is_due = self._runs = False
        self.tell()
        METRICS.when_dirty(self._soon)

    def tell(self) -> None:
        """Tell now."""
        changes = METRICS.changes()
        if changes is not None:
            self._events.send({"metrics": changes})

    def _soon(self) -> None:
        """There are changes. In the middle of anything, a collection of garbage even."""
        if self._is_due:
            return
        self._is_due = True
        self._due.put(None)
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._main, name="mme metrics", daemon=True).start()

    def _main(self) -> None:
        while True:
            self._due.get()
            time.sleep(_PAUSE)
            self._is_due = False
            self.tell()
