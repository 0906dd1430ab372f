"""The priority of threads that load and unload: below those that serve, where it can be given back.

A thread hands its priority down to all that it starts. Threads and processes that outlive a load, a framework's above
all, which execute the model later, are therefore given the usual one again. That takes a right that root in a container
may lack: without it loads have the share of a core that everything else has.

What it may do without any right is to take its share in long turns. Of two that want a core Linux lets the one go first
that wants it for a shorter time (since 6.12; before, all turns are alike): a thread that wakes up to answer does not
wait for the end of a load's turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
from pathlib import Path

_NICENESS = 10  # a tenth of the processor time of threads at 0, where there is not enough for all
_STATUS = Path("/proc/self/status")
_CAP_SYS_NICE = 1 << 23
_RANGE = 20  # RLIMIT_NICE counts from the other end: 20 allows 0
_LONG_TURNS = 100_000_000  # ns, the longest there are
_USUAL_TURNS = 0  # the system's own
_SCHED_SETATTR, _SCHED_GETATTR = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))


class _Attributes(ctypes.Structure):
    """The kernel's `sched_attr`; the C library of Debian 12 does not have it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),  # a turn's length
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def lower_priority() -> None:
    """The calling thread leaves the cores to inference; both its share and its turns are per thread on Linux."""
    if may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _take_turns(0, _LONG_TURNS)


def usual_priority(thread: int = 0) -> None:
    """Give a thread, by default the calling one, the priority of those that serve, as far as that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 0)
    _take_turns(thread, _USUAL_TURNS)


def _take_turns(thread: int, nanoseconds: int) -> None:
    """Have a thread keep a core for so long, at least, once it has it. Where that can't be had all is as it was."""
    if not _SCHED_SETATTR:
        return
    attributes, libc = _Attributes(), ctypes.CDLL(None)
    if libc.syscall(_SCHED_GETATTR, thread, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) == 0:
        attributes.runtime = nanoseconds
        libc.syscall(_SCHED_SETATTR, thread, ctypes.byref(attributes), 0)


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
