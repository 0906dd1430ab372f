"""What a model never loaded before is going to take, by what others took that the same handler loaded. PURE.

A handler's models take a fairly constant multiple of their files: weights are held once, and copied where a framework
lays them out anew. The multiple differs by framework, version and machine, so it is learned. An estimate that is too
small costs a second load, and one that is too large costs others their place; the former is worse.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REMEMBERED = 32  # ratios of a handler, the latest
SMALLEST = 1 << 20  # bytes on disk; below it what a session takes by itself hides what its weights take
_FEW = 3
_QUANTILE = 0.9
_BOUNDS = (0.05, 20.0)


def learned_factor(ratios: Sequence[float], default: float) -> float:
    """Bytes in memory per byte on disk.

    While few models have been seen it is the largest of what they took and of what the handler says; later, what nine
    of ten did not exceed, so that one strange model does not make all others look large.

    Args:
        ratios: of the models seen, in any order.
        default: the handler's own idea.
    """
    ranked = sorted(ratios) if len(ratios) >= _FEW else [max([default, *ratios])]
    low, high = _BOUNDS
    return min(max(ranked[math.ceil(_QUANTILE * len(ranked)) - 1], low), high)


def ratio(taken: int, on_disk: int) -> float | None:
    """What is to be learned from a model; None when it is too small to tell."""
    return taken / on_disk if on_disk >= SMALLEST else None
