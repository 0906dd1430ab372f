"""How often a thread has gone to sleep, as Linux counts it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


def times_asleep(thread: threading.Thread) -> int:
    """How often a thread went to sleep, once it sleeps."""
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    while "State:\tS" not in (text := status.read_text()) or _waits_elsewhere(thread):
        time.sleep(0.01)
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def _waits_elsewhere(thread: threading.Thread) -> bool:
    """Whether what it waits for is Python's lock."""
    wchan = Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()
    return "futex" in wchan
