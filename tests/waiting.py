"""Waiting for what threads and processes do, where no event tells of it. A deadline is for a hang, not for speed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

PATIENCE = 60.0  # seconds until a test gives up on something that takes a moment on an idle machine


def eventually(condition, what: str = "it"):
    """Wait until the condition holds; return what it returned."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return value


def ends(thread: threading.Thread) -> bool:
    """Whether a thread does, as the last that it did for the test said."""

    def joined() -> bool:
        try:
            thread.join(PATIENCE)
        except RuntimeError:  # it is just being started
            return False
        return True

    eventually(joined, "a thread to begin")
    return not thread.is_alive()


async def until(condition):
    """Let the loop turn until something on a thread, or in a process, has come about."""
    while not condition():  # noqa: ASYNC110 - which sets no event
        await asyncio.sleep(0.001)
