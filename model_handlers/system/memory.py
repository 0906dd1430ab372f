"""The host's memory: what this process may use of it, what processes take, what the C library's heap gives back.

Limits of control groups hold on all levels: of the group that the process is in, and of those around it. Where their
folders can't be seen, as in most containers, there is the one that is mounted, which is the container's own. Memory is
in bytes. A worker imports this: nothing here needs a package but psutil, where it is called.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# As version 2 calls them, and version 1.
_LIMIT = ("memory.max", "memory.limit_in_bytes")
_TAKEN = ("memory.current", "memory.usage_in_bytes")
_UNUSED_FILES = (
    "total_inactive_file",
    "inactive_file",
)  # version 1 tells both: with the groups inside, and without


def folders(membership: str, mount: Path = _MOUNT, controller: str = "memory") -> list[Path]:
    """Where the kernel may tell of a controller, the nearest first. `membership` is the text of /proc/self/cgroup."""
    found: list[Path] = []
    for line in membership.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found += _upwards(mount, path)
        elif controller in controllers.split(","):
            found += _upwards(mount / controller, path)
    return list(dict.fromkeys([*found, mount, mount / controller]))


def own_folders(controller: str = "memory") -> list[Path]:
    try:
        return folders(_MEMBERSHIP.read_text(), _MOUNT, controller)
    except OSError:  # a system without any
        return []


def group_limit() -> int | None:
    return min((size for folder in own_folders() if (size := _number(folder, _LIMIT)) is not None), default=None)


def group_free() -> int | None:
    """What they may take beyond what they take now, unmapped files included; None without a limit."""
    return min((size for folder in own_folders() if (size := _free_of(folder)) is not None), default=None)


def granted_processors() -> float | None:
    """How many processors' time all processes of the groups may take together, such as 1.5; None without a limit."""
    return min((share for folder in own_folders("cpu") if (share := _processors_of(folder)) is not None), default=None)


def free_tasks() -> int | None:
    """How many more threads and processes the groups may have; None without a limit."""
    limits = [(_number(folder, ("pids.max",)), _number(folder, ("pids.current",))) for folder in own_folders("pids")]
    return min((max(most - now, 0) for most, now in limits if most is not None and now is not None), default=None)


def _processors_of(folder: Path) -> float | None:
    told = _text(folder / "cpu.max").split() or [  # version 2 has both in one file
        _text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(told) == 2 and all(each.isdecimal() and int(each) for each in told):
        return int(told[0]) / int(told[1])
    return None


def _upwards(root: Path, path: str) -> list[Path]:
    own = root / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]


def _free_of(folder: Path) -> int | None:
    most, taken = _number(folder, _LIMIT), _number(folder, _TAKEN)
    if most is None or taken is None:
        return None
    return most - max(taken - _unused_files(folder), 0)


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        text = _text(folder / name).strip()
        if text.isdigit():
            return int(text)
    return None


def _unused_files(folder: Path) -> int:
    told = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return next((int(told[name]) for name in _UNUSED_FILES if name in told), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_LARGE_BLOCK = 1 << 20


def return_large_blocks() -> None:
    """Have the C library give every large block back to the system as soon as it is freed. Called once a process.

    By default glibc stops doing so after the first, and blocks up to 32 MiB come from heaps of the threads, whose free
    ends not even `malloc_trim` gives back: a model would take twice its size, most of it after it was closed.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; musl always gives large blocks back
    if option is not None:
        option(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def trim() -> None:
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not


def _psutil() -> Any:
    import psutil  # noqa: PLC0415 - an environment of a model's own may lack it

    return psutil


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control groups' limit where that is lower."""
    total: int = _psutil().virtual_memory().total
    limit = group_limit()
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes of memory that are free for this process, those of files that are mapped nowhere among them."""
    available: int = _psutil().virtual_memory().available
    free = group_free()
    return available if free is None else min(available, free)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that the machine has, and that are in use by any process."""
    memory = _psutil().virtual_memory()
    return memory.total, memory.total - memory.available


def processor_share() -> float:
    """The share of the processors, 0 to 1, that was busy since this was last asked; 0 the first time."""
    busy: float = _psutil().cpu_percent(None)
    return busy / 100


def private_memory(process: int | str = "self") -> int:
    """Bytes of a process that are its own: resident pages less file-backed and shared. OSError: no such process."""
    return touched_memory(Path(f"/proc/{process}/statm").read_bytes())[1]


def touched_memory(statm: bytes) -> tuple[int, int]:
    """Bytes that a process has touched, and those of them that are of no file, shared or not."""
    _, resident, of_files, _ = statm.split(None, 3)
    return int(resident) * mmap.PAGESIZE, (int(resident) - int(of_files)) * mmap.PAGESIZE


def unshared_memory(process: int) -> int:
    """Bytes of a process that no other shares, files too; walks through its memory. OSError: no such process."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
