"""Whether a first dimension of any size is the batch, where no configuration says so. PURE.

Names decide where a model has them. What they leave open is a guess, which `serve/models/batch_proof.py` has to prove.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

from model_handlers.config import Guess

if TYPE_CHECKING:
    from collections.abc import Iterable


class BatchGuess(Enum):
    """What is done about models whose configuration does not say whether they batch."""

    PROVE = "prove"  # batched by the names of their dimensions, or once their requests have proven it
    OFF = "off"  # executed one request at a time


_BATCH = re.compile(r"[NB]|(?i:batch|batch_?size|bs)")
_OTHER = re.compile(r"T|(?i:seq.*|time.*|(.*_)?len(gth)?)")
# Written by converters, one for each dimension of which they know nothing: unk__12, DynamicDimension.0, Add_dim_0.
_MACHINE_MADE = re.compile(r"unk__\d+|(.*\.)?DynamicDimension\.\d+|.*_dim_\d+|\?|-1|None|")


def guess(names: Iterable[str]) -> Guess:
    """What the names of the first dimensions of all inputs and outputs say; "" for one without a name."""
    all_names = list(names)
    known = [name for name in all_names if not _MACHINE_MADE.fullmatch(name)]
    if any(_OTHER.fullmatch(name) for name in known) or len({_spelled_alike(name) for name in known}) > 1:
        return Guess.OTHER
    if len(known) == len(all_names) > 0 and _BATCH.fullmatch(known[0]):
        return Guess.BATCH
    return Guess.UNKNOWN


def _spelled_alike(name: str) -> str:
    """One spelling for batch, Batch, batch_size and bs; N and B may be the numbers of two different things."""
    return "batch" if len(name) > 1 and _BATCH.fullmatch(name) else name
