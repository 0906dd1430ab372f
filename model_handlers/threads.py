"""How many threads a model computes on where its configuration does not say.

Pure but for a look at the file's size and the processors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SMALL_MODEL = 1 << 20  # bytes of the model file


def default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else processors()


def processors() -> int:
    """How many of them this process may use."""
    return len(os.sched_getaffinity(0))
