"""Whether a process that was killed was killed by the kernel for want of memory.

A SIGKILL does not say who sent it, but the kernel counts its own: per control group, or for the whole machine. A count
that grew since the process started and was not yet put down to another death is taken for this one's. Called on the
threads that start children and find them dead.
"""

from __future__ import annotations

import threading
from pathlib import Path

from model_handlers.system.control_groups import folders

_FILES = ("memory.events", "memory.oom_control")  # as version 2 calls them, and version 1
_WORD = "oom_kill"


def counters(membership: str) -> list[Path]:
    """Where the kernel may count, the nearest first. `membership` is the text of /proc/self/cgroup."""
    return [*(folder / name for folder in folders(membership) for name in _FILES), Path("/proc/vmstat")]


def read_count(paths: list[Path]) -> int:
    """Kills counted by the first of `paths` that counts any; 0 where none does."""
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            word, _, number = line.partition(" ")
            if word == _WORD:
                return int(number)
    return 0


class OomLedger:
    """Which of the kernel's kills are accounted for."""

    def __init__(self, paths: list[Path] | None = None) -> None:
        self._paths = paths
        self._claimed = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        """Kills so far: to be remembered at the start of a process."""
        if self._paths is None:
            self._paths = counters(Path("/proc/self/cgroup").read_text())
        return read_count(self._paths)

    def claim(self, at_start: int) -> bool:
        """Whether a kill is there for a process that started at this count, and died of SIGKILL just now."""
        with self._lock:
            accounted = max(at_start, self._claimed)
            if self.count() <= accounted:
                return False
            self._claimed = accounted + 1
            return True


LEDGER = OomLedger()  # one a process, as the kernel's count is
