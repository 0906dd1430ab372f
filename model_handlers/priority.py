"""The priority of threads that load and unload: below those that serve, where it can be given back.

A thread hands its priority down to all that it starts. Threads and processes that outlive a load, a framework's above
all, which execute the model later, are therefore given the usual one again. That takes a right that root in a container
may lack: without it loads run as everything else does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from pathlib import Path

_NICENESS = 10  # a tenth of the processor time of threads at 0, where there is not enough for all
_STATUS = Path("/proc/self/status")
_CAP_SYS_NICE = 1 << 23
_RANGE = 20  # RLIMIT_NICE counts from the other end: 20 allows 0


def lower_priority() -> None:
    """The calling thread leaves the cores to inference; nice is per thread on Linux."""
    if may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


def usual_priority(thread: int = 0) -> None:
    """Give a thread, by default the calling one, the priority of those that serve, as far as that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 0)


@functools.cache
def may_raise_priority() -> bool:
    """Whether this process may give a thread the usual priority again."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= _RANGE:
        return True
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_SYS_NICE)
