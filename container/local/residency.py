"""Which models an instance holds, and which one leaves when its container says 507. PURE.

A model is loading, loaded or leaving. The one that leaves is the loaded one that was used longest ago and answers
nobody now; SageMaker documents no more than that it unloads unused models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(Enum):
    """Where a model is on its way."""

    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Resident:
    """A model of the instance.

    Attributes:
        name: that the container knows it by.
        target: that clients know it by.
        in_flight: requests that it answers now.
        last_used: when the last one came, on the clock of whoever writes it here.
    """

    name: str
    target: str
    state: State = State.LOADING
    in_flight: int = 0
    last_used: float = 0.0


def least_used(residents: Iterable[Resident], spare: Resident) -> Resident | None:
    """Who makes room for `spare`, None where nobody can."""
    idle = [each for each in residents if each.state is State.LOADED and not each.in_flight and each is not spare]
    return min(idle, key=lambda each: each.last_used, default=None)
