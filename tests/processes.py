"""What becomes of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from tests.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def children(process: int) -> list[int]:
    """What it has started and is not buried, by Linux's own list: psutil reads the machine's whole table of processes.

    Looked at three times a test, and so without `pathlib`, which takes three times as long.
    """
    threads: list[str] = []
    with suppress(OSError):  # it has ended
        threads = os.listdir(f"/proc/{process}/task")  # noqa: PTH208
    return [int(child) for thread in threads for child in read(f"/proc/{process}/task/{thread}/children").split()]


def below(process: int) -> set[int]:
    """Its children and theirs."""
    return {each for child in children(process) for each in (child, *below(child))}


def still_there(numbers: Iterable[int]) -> list[psutil.Process]:
    """Those of them that have not ended since."""
    found = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found


def read(path: str) -> bytes:
    """What the system tells there, as long as it is there."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def is_over(process: psutil.Process) -> bool:
    """Whether a process has ended, buried or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends_with_all_it_started(number: int, program: Path, *arguments: Path) -> int:
    """Run a program until it says `up`, end it by a signal, and wait for the end of its processes; how many they were."""
    with subprocess.Popen(
        [sys.executable, program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as parent:
        assert parent.stdout.readline() == b"up\n"
        started = still_there(below(parent.pid))
        parent.send_signal(number)
        parent.wait(PATIENCE)
    try:
        eventually(lambda: all(map(is_over, started)), "the end of what it started")
    finally:
        for left in started:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    return len(started)
