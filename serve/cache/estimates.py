"""What a model never loaded before is going to take, by what others took that the same handler loaded. PURE.

A handler's models take a fairly constant multiple of their files: weights are held once, and copied where a framework
lays them out anew. The multiple differs by framework, version and machine, so it is learned. Beside it every model
takes something that no file tells: a process, the handles of a session, of the first one on a GPU CUDA's context. That
hides what a small model's weights take, so a larger one is expected to take more by the handler's own idea alone.

An estimate that is too small costs a second load, and one that is too large costs others their place, or has a model
refused that would fit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

REMEMBERED = 32  # models of a handler, the latest
SMALLEST = 1 << 20  # bytes on disk; below it what a session takes by itself hides what its weights take
_FEW = 3
_QUANTILE = 0.9
_BOUNDS = (0.05, 20.0)  # of bytes in memory per byte on disk


class Seen(NamedTuple):
    """A model that was measured: bytes of its files, which are `SMALLEST` at least, and of memory."""

    on_disk: int
    taken: int


def expected(seen: Sequence[Seen], on_disk: int, factor: float) -> int:
    """Bytes of memory that a model is going to take.

    While few models have been seen it is the most that they and the handler let expect; later, what nine of ten of them
    did not exceed, so that one strange model does not make all others look large.

    Args:
        seen: in any order.
        on_disk: bytes of its files.
        factor: the handler's own idea of bytes in memory per byte on disk.
    """
    ranked = sorted(_by(one, on_disk, factor) for one in seen)
    if len(ranked) < _FEW:
        return int(max([factor * on_disk, *ranked]))
    return int(ranked[math.ceil(_QUANTILE * len(ranked)) - 1])


def _by(one: Seen, on_disk: int, factor: float) -> float:
    """What one model lets expect of another."""
    low, high = _BOUNDS
    ratio = min(max(one.taken / one.on_disk, low), high)
    alike = min(on_disk, one.on_disk)
    return ratio * alike + min(ratio, factor) * (on_disk - alike)
