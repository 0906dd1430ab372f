"""The priority of threads that load and unload: below those that serve, where it can be given back.

A thread hands its priority down to all that it starts, so what outlives a load is given the usual one again. That takes
a right that root in a container may lack: without it loads have the usual share of a core. To take that in long turns
needs no right: of two that want a core Linux prefers the one that wants it for a shorter time (since 6.12).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


_NICENESS = 10  # a tenth of the processor time of threads at 0, where there is not enough for all
_PROCESSES = Path("/proc")
_CAP_SYS_NICE = 1 << 23
_RANGE = 20  # RLIMIT_NICE counts from the other end: 20 allows 0
_LONG_TURNS = 100_000_000  # ns, the longest there are
_USUAL_TURNS = 0  # the system's own
_syscall = ctypes.PyDLL(None).syscall  # takes a microsecond: nothing to let others have Python's lock for
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


def lower_priority_for_good() -> None:
    """The same for the calling process, whose only thread this is, and for good: it takes no right to give it up."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _take_turns(0, _LONG_TURNS)


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Do something at that priority; what it leaves behind, threads and processes, has the usual one in the end."""
    before = threads()
    lower_priority()
    try:
        yield
    finally:
        usual_priority()
        begun = threads() - before
        left = _descendants() if has_started_any() else ()
        for thread in begun.union(*map(threads, left)):
            _recall(thread)


def usual_priority(thread: int = 0) -> None:
    """Give a thread, by default the calling one, the priority of those that serve, as far as that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 0)
    _take_turns(thread, _USUAL_TURNS)


def _recall(thread: int) -> None:
    """Take from a thread what it has inherited of a load's priority, and nothing that it chose itself."""
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) == _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, 0)
    attributes = _attributes(thread)
    if attributes is not None and attributes.runtime == _LONG_TURNS:
        _take_turns(thread, _USUAL_TURNS)


def _take_turns(thread: int, nanoseconds: int) -> None:
    """Have a thread keep a core for so long once it has it. Where that can't be had all is as it was."""
    attributes = _attributes(thread)
    if attributes is not None:
        attributes.runtime = nanoseconds
        _syscall(_SCHED_SETATTR, thread, ctypes.byref(attributes), 0)


def _attributes(thread: int) -> _Attributes | None:
    attributes = _Attributes()
    asked = _SCHED_GETATTR, thread, ctypes.byref(attributes), ctypes.sizeof(attributes), 0
    return attributes if _SCHED_GETATTR and _syscall(*asked) == 0 else None


def threads(process: int | str = "self") -> set[int]:
    """The threads of a process, none where it has ended. Python's lock is not held for long, several times a load."""
    try:
        return set(map(int, os.listdir(f"/proc/{process}/task")))  # noqa: PTH208 - a fifth of the time
    except OSError:
        return set()


def _descendants() -> set[int]:
    """The processes below this one, and of a model's process those that were."""
    children: dict[int, list[int]] = {}
    found, parents = set(), [os.getpid()]
    for process, parent in processes():
        children.setdefault(parent, []).append(process)
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if family_of(process) == os.getpid():
                found.add(process)
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents += below
    return found


@functools.cache
def may_raise_priority() -> bool:
    """Return whether this process may give a thread the usual priority again."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= _RANGE:
        return True
    try:
        lines = (_PROCESSES / "self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_SYS_NICE)


_FILE_LOCKS = 10  # the resource module does not name it


def found_family() -> None:
    """What the calling process starts from now on is of its family."""
    with contextlib.suppress(OSError, ValueError):  # fewer than that are allowed
        resource.setrlimit(_FILE_LOCKS, (os.getpid(), resource.getrlimit(_FILE_LOCKS)[1]))


def processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                yield int(entry.name), int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])


def children() -> list[int]:
    """This process's children, inherited and unburied too; complete if no other thread buries meanwhile."""
    try:
        lists = [(task / "children").read_bytes() for task in Path("/proc/self/task").iterdir()]
    except OSError:  # a thread ended meanwhile, or the system keeps no such lists
        return [process for process, parent in processes() if parent == os.getpid()]
    return [int(number) for numbers in lists for number in numbers.split()]


def has_started_any() -> bool:
    """Return whether the calling process has children, or had any and waited for their end."""
    return bool(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss or children())


def family_of(process: int = 0) -> int:
    """The founder of a process's family, our own by default; -1 for none. OSError: ended, or another user's."""
    return resource.prlimit(process, _FILE_LOCKS)[0]
