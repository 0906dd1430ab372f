"""Whom to evict. PURE: values in, values out.

Least recently used first, never a leased model, never anybody for a model that can't fit at all. The plan names the
shortest prefix of the candidates in that order which makes enough room, then spares whoever turns out not to be
needed, so that a large victim does not cost a small one its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_handlers.base import Footprint


@dataclass(frozen=True, slots=True)
class Resident:
    """What the plan has to know of a model in memory.

    Attributes:
        name: the target model.
        footprint: bytes that come back when it goes.
        last_used: any clock's reading at its last use; smaller is longer ago.
        leased: whether a request holds it now.
        leaving: whether it is being unloaded already: its bytes come without anybody's doing.
    """

    name: str
    footprint: Footprint
    last_used: float
    leased: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to make room.

    Attributes:
        victims: names to evict now, least recently used first.
        fits: whether the model fits once the victims, and those already leaving, are gone.
        possible: whether it could fit in an otherwise empty budget. If not, there are no victims.
    """

    victims: tuple[str, ...]
    fits: bool
    possible: bool


def plan(residents: Iterable[Resident], reserved: Footprint, need: Footprint, budget: Footprint) -> Plan:
    """Decide who must go so that `need` fits.

    Args:
        residents: everybody in memory.
        reserved: bytes promised to loads under way, which nobody can evict.
        need: the new model's estimate.
        budget: bytes for all models together.
    """
    if not need.fits(budget):
        return Plan((), fits=False, possible=False)
    everybody = list(residents)
    staying = [r for r in everybody if not r.leaving]
    used = sum((r.footprint for r in staying), reserved)
    candidates = sorted((r for r in staying if not r.leased), key=lambda r: r.last_used)
    chosen: list[Resident] = []
    for candidate in candidates:
        if need.fits(budget - used):
            break
        chosen.append(candidate)
        used = used - candidate.footprint
    if not need.fits(budget - used):
        return Plan((), fits=False, possible=True)
    for victim in reversed(chosen[:-1]):  # the most recently used of them first
        if need.fits(budget - used - victim.footprint):
            chosen.remove(victim)
            used = used + victim.footprint
    return Plan(tuple(victim.name for victim in chosen), fits=True, possible=True)
