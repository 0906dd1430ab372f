"""What a process is held to that reads a file on trial: little memory beyond the file, and the last turn of all.

A damaged length has a reader ask for any amount of memory; what it is refused costs nobody else anything. Called in
that process, once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
from pathlib import Path

from model_handlers.system.priority import lower_priority_for_good

_PROC = Path("/proc/self")
_ALWAYS = 512 << 20  # bytes that a file of any size may take
_TIMES_FILE = 64  # XGBoost takes up to 24 bytes for one of JSON
_STACK = 8 << 20  # bytes of a thread's, where there is no limit
_FIRST_TO_GO = "1000"


def restrain(size: int) -> None:
    """Hold this process to what a file of `size` bytes may take."""
    faulthandler.disable()  # whoever is told of its death can do nothing with a stack
    lower_priority_for_good()
    with contextlib.suppress(OSError):
        (_PROC / "oom_score_adj").write_text(_FIRST_TO_GO)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = _taken() + _ALWAYS + _of_threads() + _TIMES_FILE * size
    limits = [limit for limit in (soft, allowed) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def _of_threads() -> int:
    """Bytes that a library's threads reserve for their stacks: it may start one a processor, whatever it is told."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return (_STACK if stack == resource.RLIM_INFINITY else stack) * (os.cpu_count() or 1)


def _taken() -> int:
    """Bytes that count already."""
    lines = (_PROC / "status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)
