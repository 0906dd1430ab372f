"""Which process, of all that ever had its number: a name for one life, that says when it began and if it goes on.

Linux only: a process is known by its number and the tick of its start, in one run of the system.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_START = 19  # the field of /proc/<pid>/stat that says when it started, counted behind the name of the program


def life_of(pid: int) -> str:
    """A name for the life of a process that lives now, fit for a file; "" if it does not."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        # The program's name stands in brackets and may hold anything, brackets too.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return f"{boot}-{pid}-{int(fields[_START])}"
    except (OSError, IndexError, ValueError):
        return ""


def began(life: str) -> float:
    """When that life began, as `time.time()` counts; now for ""."""
    if not life:
        return time.time()
    up = time.clock_gettime(time.CLOCK_BOOTTIME) - int(life.split("-")[2]) / os.sysconf("SC_CLK_TCK")
    return time.time() - up


def is_followed(parent: int) -> bool:
    """Whether that process has started another one since it started the calling one."""
    ours = life_of(os.getpid())
    try:
        children = (_PROC / f"{parent}/task/{parent}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not tell
        return False
    return any(life != ours and began(life) > began(ours) for life in map(life_of, map(int, children)) if life)


def goes_on(life: str) -> bool:
    """Whether that life has not ended."""
    pid = life.split("-")[1] if life.count("-") == 2 else ""
    return pid.isdigit() and life_of(int(pid)) == life
