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
    from pathlib import Path


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
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(number)
        parent.wait(PATIENCE)
    try:
        eventually(lambda: all(map(is_over, children)), "the end of what it started")
    finally:
        for left in children:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    return len(children)
