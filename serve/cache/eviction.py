"""Whom to evict. PURE: values in, values out.

A policy puts the models in memory in an order, the one to be missed least in front:

    lru   by last use
    lfu   by uses since the load, among equals by last use
    gdsf  by what it would cost to bring the model back: uses times seconds of a reload, by the share of the budget
          that it takes, plus the age at its last use (GreedyDual-Size-Frequency). The age is the worth of the last
          victim, so that what was precious once and is not asked for any more falls behind what is used now.

Never a leased model, a pinned one, or one that has not been in memory for long enough; never anybody for a model that
can't fit at all. Memory is the host's and each device's, a budget of its own each: who takes none of what is short
makes no room. The plan names the shortest prefix of the candidates in that order which makes enough room, then
spares whoever turns out not to be needed, so that a large victim does not cost a small one its place.

What several of them take together, as the weights of copies, comes back with the last of them.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from model_handlers.base import Footprint, total

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from serve.cache.shared_bytes import Tally

FOR_EVER = math.inf


class Policy(Enum):
    """Which models go first."""

    LRU = "lru"
    LFU = "lfu"
    GDSF = "gdsf"

    @property
    def reason(self) -> str:
        """What is said of a victim."""
        return _REASONS[self]


_REASONS = {
    Policy.LRU: "least recently used",
    Policy.LFU: "least frequently used",
    Policy.GDSF: "cheapest to bring back for its size and use",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator decides about evictions.

    Attributes:
        policy: the order.
        pins: names, or patterns of names with `*`, `?` and `[…]`, of models that are never evicted.
        min_residency: seconds that a model stays after its load, whoever needs the room.
    """

    policy: Policy = Policy.LRU
    pins: tuple[str, ...] = ()
    min_residency: float = 0.0

    def pins_name(self, *names: str) -> bool:
        """Whether a model that goes by any of these names is pinned."""
        return any(fnmatch.fnmatchcase(name, pin) for pin in self.pins for name in names)


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Resident:
    """What the plan has to know of a model in memory.

    Attributes:
        name: the target model.
        footprint: bytes that it is charged for.
        last_used: any clock's reading at its last use; smaller is longer ago.
        uses: how often it was used since its load.
        reload_seconds: what it would take to bring it back.
        age: the age at its last use; see the module.
        keep_until: that clock's reading before which it stays; `FOR_EVER` if it is pinned.
        leased: whether a request holds it now.
        leaving: whether it is being unloaded already: its bytes come without anybody's doing.
        shared: files that others in memory may map too, by name: bytes that come back with the last of them.
        charged: how many of those bytes are in its footprint.
        part: how many that were if all who map them were charged alike.
    """

    name: str
    footprint: Footprint
    last_used: float
    uses: int = 0
    reload_seconds: float = 0.0
    age: float = 0.0
    keep_until: float = 0.0
    leased: bool = False
    leaving: bool = False
    shared: Mapping[str, int] = field(default_factory=dict)
    charged: int = 0
    part: int = 0

    @property
    def own(self) -> Footprint:
        """What of its footprint comes back when it goes, whoever stays."""
        return self.footprint - Footprint(self.charged) if self.charged else self.footprint


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to make room.

    Attributes:
        victims: names to evict now, in the policy's order.
        fits: whether the model fits once the victims, and those already leaving, are gone.
        possible: whether it could fit if everybody left who may. If not, there are no victims.
        age: the age once the victims are gone, 0 if there are none, or if the policy knows no age.
        again_at: when it does not fit: the clock's reading at which the first resident may leave that may not yet, 0
            if time alone changes nothing.
        short: when it does not fit: bytes that those would have to hold who may not leave yet, and then may.
    """

    victims: tuple[str, ...]
    fits: bool
    possible: bool
    age: float = 0.0
    again_at: float = 0.0
    short: Footprint | None = field(default=None, compare=False)


class Residents(Protocol):
    """Everybody in memory, as far as a plan has to look at them."""

    @property
    def taken(self) -> Footprint:
        """What they are charged for together."""

    @property
    def staying(self) -> Tally:
        """Those that are not leaving already."""

    @property
    def pinned(self) -> Tally:
        """Those of them that are pinned."""

    def candidates(self, now: float, *, and_from_disk: bool = False) -> Iterable[Resident]:
        """Those who may go at that reading of the clock, in the policy's order.

        Who leaves the disk as well costs a download too when it comes back.
        """

    def again_at(self, now: float) -> float:
        """When the first of those may go who may not yet, by the clock alone; 0 if there are none."""

    def named(self, name: str) -> Resident | None:
        """The one of that name that is not leaving already."""


def plan(
    residents: Residents,
    reserved: Footprint,
    need: Footprint,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
) -> Plan:
    """Decide who must go so that `need` fits.

    Args:
        residents: everybody in memory.
        reserved: bytes promised to loads under way, which nobody can evict.
        need: the new model's estimate.
        budget: bytes for all models together.
        policy: the order in which models go.
        now: the reading of the clock that `last_used` and `keep_until` are of.
    """
    if not need.fits(budget - residents.pinned.total):
        return Plan((), fits=False, possible=False)
    free = budget - residents.staying.total - reserved
    victims, free = _victims(residents.candidates(now), Going(residents.staying), free, need)
    if victims is None:
        return Plan((), fits=False, possible=True, again_at=residents.again_at(now), short=need.beyond(free))
    return Plan(_names(victims), fits=True, possible=True, age=_age(victims, budget, policy))


def regain(
    residents: Residents,
    reserved: Footprint,
    grown: Resident | None,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
) -> Plan:
    """Decide who must go for one that grew while it was in memory, and stays; None where what grew is `reserved`.

    Other arguments are those of `plan`.
    """
    stays = Footprint() if grown is None else grown.own + Footprint(sum(grown.shared.values()))
    need, free = stays + reserved, budget - residents.staying.total + stays
    others = (each for each in residents.candidates(now) if grown is None or each.name != grown.name)
    victims = _victims(others, Going(residents.staying), free, need)[0] or []
    return Plan(_names(victims), fits=True, possible=True, age=_age(victims, budget, policy))


def relief(
    residents: Residents,
    need: Footprint | None,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
    *,
    name: str = "",
    and_from_disk: bool = False,
) -> Plan:
    """Decide who must go so that `need` bytes come back, whatever room the budget has.

    It is everybody who may go and holds any of a memory of which all of them hold less than that. Where the need is
    None one goes, whatever it holds. For model `name`, which stays; other arguments are those of `plan`.
    """
    candidates = [each for each in residents.candidates(now, and_from_disk=and_from_disk) if each.name != name]
    if need is None:
        first = candidates[:1]
        return Plan(_names(first), fits=bool(first), possible=True, age=_age(first, budget, policy))
    everybody = Going(residents.staying)
    there = need.within(total(everybody.frees(r) for r in candidates))
    victims = _victims(candidates, Going(residents.staying), Footprint(), there)[0] or []
    return Plan(_names(victims), fits=there == need, possible=True, age=_age(victims, budget, policy))


def without(together: Tally, gone: Iterable[Resident]) -> Footprint:
    """Bytes of those that are together, when some of them have left."""
    going, left = Going(together), together.total
    for each in gone:
        left -= going.frees(each)
    return left


def beside(together: Tally, more: Iterable[Resident]) -> Footprint:
    """Bytes of those that are together and of some more."""
    there = list(more)
    files = {file: size for each in there for file, size in each.shared.items() if file not in together.users}
    return total((each.own for each in there), together.total + Footprint(sum(files.values())))


class Going:
    """Some of those that are together go, one after the other: the last that maps a file frees it."""

    def __init__(self, together: Tally) -> None:
        self._users = together.users
        self._gone: dict[str, int] = {}  # of each file: how many of its users

    def frees(self, resident: Resident) -> Footprint:
        """It goes; what comes back."""
        alone = 0
        for file, size in resident.shared.items():
            gone = self._gone[file] = self._gone.get(file, 0) + 1
            alone += size if gone == self._users[file] else 0
        return resident.own + Footprint(alone) if resident.shared else resident.footprint

    def takes(self, resident: Resident) -> Footprint:
        """It stays after all; what that costs."""
        alone = 0
        for file, size in resident.shared.items():
            alone += size if self._gone[file] == self._users[file] else 0
            self._gone[file] -= 1
        return resident.own + Footprint(alone)


def _victims(
    candidates: Iterable[Resident], going: Going, free: Footprint, need: Footprint
) -> tuple[list[Resident] | None, Footprint]:
    """Who of those that may go, in that order, makes `need` fit, and what is free then; None where all don't."""
    chosen: list[Resident] = []
    for candidate in candidates:
        if need.fits(free):
            break
        chosen.append(candidate)
        free += going.frees(candidate)
    if not need.fits(free):
        return None, free
    for victim in reversed(chosen[:-1]):  # the one to be missed most of them first
        left = free - going.takes(victim)
        if need.fits(left):
            chosen.remove(victim)
            free = left
        else:
            going.frees(victim)
    return chosen, free


def _names(residents: Iterable[Resident]) -> tuple[str, ...]:
    return tuple(resident.name for resident in residents)


def worth(resident: Resident, budget: Footprint) -> float:
    """What GreedyDual-Size-Frequency thinks of a resident: who is worth least goes first.

    Bytes of the host and of each device count by what share of their budget they are. What several take counts for each
    in part, whoever is charged: else the first of them would seem to be the largest.
    """
    share = 0.0
    for taken, whole in (
        (resident.own.host + resident.part, budget.host),
        *zip(resident.footprint.devices, budget.devices, strict=False),
    ):
        share += taken / whole if whole else 0.0
    return resident.age + (resident.uses * resident.reload_seconds / share if share else FOR_EVER)


def _age(victims: list[Resident], budget: Footprint, policy: Policy) -> float:
    return max((worth(victim, budget) for victim in victims), default=0.0) if policy is Policy.GDSF else 0.0
