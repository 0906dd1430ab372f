"""Which models an instance holds, and which one leaves when its container says 507. PURE.

A model is queued, loading, loaded or leaving. The one that leaves is the loaded one that was used longest ago and has
no request now, one that waited for its load included; SageMaker documents no more than that it unloads unused models.
Where all are busy it is worth waiting for one, but not for one that waits in turn: of two that want room, one gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(Enum):
    """Where a model is on its way."""

    QUEUED = "queued"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Resident:
    """A model of the instance.

    Attributes:
        name: that the container knows it by.
        target: that clients know it by.
        in_flight: requests that it answers now, or that wait for it.
        last_used: when it was loaded, or the last one was over, on the clock of the platform.
        wants_room: whether it waits itself for somebody to leave.
    """

    name: str
    target: str
    state: State = State.QUEUED
    in_flight: int = 0
    last_used: float = 0.0
    wants_room: bool = False


def least_used(residents: Iterable[Resident], spare: Resident) -> Resident | None:
    """Who makes room for `spare`, None where nobody can."""
    idle = [each for each in residents if each.state is State.LOADED and not each.in_flight and each is not spare]
    return min(idle, key=lambda each: each.last_used, default=None)


def may_give_way(residents: Iterable[Resident], spare: Resident) -> bool:
    """Whether somebody may leave for `spare` after a while, or has just begun to."""
    return any(
        not each.wants_room and each.state is not State.QUEUED  # its load may need the very thread that waits
        for each in residents
        if each is not spare
    )
