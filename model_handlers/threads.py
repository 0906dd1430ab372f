"""How many threads a model computes on where its configuration does not say.

Pure but for a look at the file's size, the processors and the control groups.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from model_handlers import control_groups

if TYPE_CHECKING:
    from pathlib import Path

_SMALL_MODEL = 1 << 20  # bytes of the model file


def default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else processors()


def processors() -> int:
    """How many of them this process may use: those it is bound to, no more than its control groups grant time of.

    More threads would use up the time of a period together, and then all of them stand still until the next one.
    """
    granted = control_groups.processors()
    bound = len(os.sched_getaffinity(0))
    return bound if granted is None else max(min(bound, math.ceil(granted)), 1)
