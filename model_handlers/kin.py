"""Which processes come from which model's: those that it orphaned too, which have another parent by then.

A process hands its limits down to all that it starts, and these to theirs. One of them, the number of file locks, Linux
keeps and has not applied since 2.4: in a model's process it is the process's number, so that it marks the whole family.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE_LOCKS = 10  # the resource module does not name it


def found_family() -> None:
    """What the calling process starts from now on is of its family."""
    with contextlib.suppress(OSError, ValueError):  # somebody allows fewer than that
        resource.setrlimit(_FILE_LOCKS, (os.getpid(), resource.getrlimit(_FILE_LOCKS)[1]))


def processes() -> Iterator[tuple[int, int]]:
    """Each process of the system and its parent."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                yield int(entry.name), int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])


def children() -> list[int]:
    """The processes whose parent is the calling one, those that it inherited too; ended ones until they are buried.

    None that is there all the time is missed, provided that nobody else buries any meanwhile.
    """
    try:
        lists = [(task / "children").read_bytes() for task in Path("/proc/self/task").iterdir()]
    except OSError:  # a thread ended meanwhile, or the system keeps no such lists
        return [process for process, parent in processes() if parent == os.getpid()]
    return [int(number) for numbers in lists for number in numbers.split()]


def has_started_any() -> bool:
    """Whether the calling process has children, or had any and waited for their end."""
    return bool(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss or children())


def family_of(process: int = 0) -> int:
    """The number of the process that founded the family of one, by default of the calling one; -1 where none did.

    Raises:
        OSError: it has ended, or is somebody else's.
    """
    return resource.prlimit(process, _FILE_LOCKS)[0]
