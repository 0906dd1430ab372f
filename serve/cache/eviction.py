"""Which models to evict. PURE: values in, values out.

Never a leased model, a pinned one, or one not in memory for long enough; never any for a model that can't fit at all.
Each memory, the host's and each device's, has a budget: a model that takes none of what is short makes no room. The
plan is the shortest prefix in the policy's order that makes enough room, without those that turn out not to be needed.
What several take together, as the weights of copies, comes back with the last of them.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from model_handlers.base import Footprint, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FOR_EVER = math.inf


# The models in memory in an order, the one to be missed least in front:
#
# lru   by last use
# lfu   by uses since the load, among equals by last use
# gdsf  by what it would cost to bring the model back: uses times seconds of a reload, by the share of the budget that
#       it takes, plus the age at its last use (GreedyDual-Size-Frequency). The age is the worth of the last victim,
#       so that what was precious once and is not asked for any more falls behind what is used now.
class Policy(Enum):
    """Which models go first."""

    LRU = "lru"
    LFU = "lfu"
    GDSF = "gdsf"

    @property
    def reason(self) -> str:
        """What is said of a victim."""
        return {
            Policy.LRU: "least recently used",
            Policy.LFU: "least frequently used",
            Policy.GDSF: "cheapest to bring back for its size and use",
        }[self]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator decides about evictions."""

    policy: Policy = Policy.LRU
    pins: tuple[str, ...] = ()  # names, or patterns of names with `*`, `?` and `[…]`, of models that are never evicted
    min_residency: float = 0.0  # seconds that a model stays after its load

    def pins_name(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pin) for pin in self.pins)


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the plan has to know of a model in memory."""

    name: str
    footprint: Footprint  # bytes that it is charged for
    last_used: float  # any clock's reading at its last use; smaller is longer ago
    uses: int = 0  # how often it was used since its load
    reload_seconds: float = 0.0  # what it would take to bring it back
    age: float = 0.0  # the age at its last use; see the module
    keep_until: float = 0.0  # that clock's reading before which it stays; `FOR_EVER` if it is pinned
    leased: bool = False
    leaving: bool = False  # whether it is being unloaded already, so that its bytes come back
    # files that others in memory may map too, by name: bytes that come back with the last of them
    shared: Mapping[str, int] = field(default_factory=dict)
    charged: int = 0  # how many of those bytes are in its footprint
    part: int = 0  # how many that were if all that map them were charged alike

    @property
    def own(self) -> Footprint:
        """What of its footprint comes back when it goes alone."""
        return self.footprint - Footprint(self.charged) if self.charged else self.footprint


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to make room."""

    victims: tuple[str, ...]  # names to evict now, in the policy's order
    fits: bool  # whether the model fits once the victims, and those already leaving, are gone
    possible: bool  # whether it could fit if all left that may. If not, there are no victims
    age: float = 0.0  # the age once the victims are gone, 0 if there are none, or if the policy knows no age
    # when it does not fit: when the first may leave that may not yet, 0 if time alone changes nothing
    again_at: float = 0.0
    # when it does not fit: bytes that those would have to hold that may not leave yet, and then may
    short: Footprint | None = field(default=None, compare=False)


class Candidates(Protocol):
    """The models in memory, as far as a plan has to look at them."""

    @property
    def taken(self) -> Footprint: ...  # what they are charged for together
    @property
    def staying(self) -> Tally: ...  # those that are not leaving already
    @property
    def pinned(self) -> Tally: ...  # those of them that are pinned

    def candidates(self, now: float, *, and_from_disk: bool = False) -> Iterable[Candidate]:
        """Those that may go at that reading of the clock, in the policy's order.

        One that leaves the disk as well costs a download too when it comes back.
        """

    def again_at(self, now: float) -> float:
        """When the first of those may go that may not yet, by the clock alone; 0 if there are none."""

    def named(self, name: str) -> Candidate | None:
        """The one of that name that is not leaving already."""


def plan(
    residents: Candidates,
    reserved: Footprint,
    need: Footprint,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
) -> Plan:
    """Decide which models must go so that `need`, a new model's estimate, fits.

    No eviction gives back what is `reserved` for loads under way. `now` is of the clock of `last_used`.
    """
    if not need.fits(budget - residents.pinned.total):
        return Plan((), fits=False, possible=False)
    free = budget - residents.staying.total - reserved
    victims, free = _victims(residents.candidates(now), residents.staying, free, need)
    if victims is None:
        return Plan((), fits=False, possible=True, again_at=residents.again_at(now), short=need.beyond(free))
    return _evicting(victims, budget, policy)


def regain(
    residents: Candidates,
    reserved: Footprint,
    grown: Candidate | None,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
) -> Plan:
    """Decide which must go for one that grew while it was in memory, and stays; None where what grew is `reserved`."""
    stays = Footprint() if grown is None else grown.own + Footprint(sum(grown.shared.values()))
    need, free = stays + reserved, budget - residents.staying.total + stays
    others = (each for each in residents.candidates(now) if grown is None or each.name != grown.name)
    victims, _ = _victims(others, residents.staying, free, need)
    return _evicting(victims or [], budget, policy)


def relief(
    residents: Candidates,
    need: Footprint | None,
    budget: Footprint,
    policy: Policy = Policy.LRU,
    now: float = 0.0,
    *,
    name: str = "",
    and_from_disk: bool = False,
) -> Plan:
    """Decide which must go so that `need` bytes come back, whatever room the budget has.

    It is all that may go and hold any of a memory of which all of them hold less than that. Where the need is None one
    goes, whatever it holds. For model `name`, which stays.
    """
    candidates = [each for each in residents.candidates(now, and_from_disk=and_from_disk) if each.name != name]
    if need is None:
        return _evicting(candidates[:1], budget, policy, fits=bool(candidates))
    there = need.within(residents.staying.total - without(residents.staying, candidates))
    victims, _ = _victims(candidates, residents.staying, Footprint(), there)
    return _evicting(victims or [], budget, policy, fits=there == need)


def without(together: Tally, gone: Iterable[Candidate]) -> Footprint:
    """Bytes of those that are together, when some of them have left."""
    left = Tally(together)
    for each in gone:
        left.remove(each.own, each.shared)
    return left.total


def beside(together: Tally, more: Iterable[Candidate]) -> Footprint:
    """Bytes of those that are together and of some more."""
    there = Tally(together)
    for each in more:
        there.add(each.own, each.shared)
    return there.total


def worth(resident: Candidate, budget: Footprint) -> float:
    """What GreedyDual-Size-Frequency thinks of a model: that of least worth goes first.

    Bytes of the host and of each device count by what share of their budget they are. What several take counts for each
    in part, whichever is charged: else the first of them would seem to be the largest.
    """
    share = 0.0
    for taken, whole in (
        (resident.own.host + resident.part, budget.host),
        *zip(resident.footprint.devices, budget.devices, strict=False),
    ):
        share += taken / whole if whole else 0.0
    return resident.age + (resident.uses * resident.reload_seconds / share if share else FOR_EVER)


def _victims(
    candidates: Iterable[Candidate], staying: Tally, free: Footprint, need: Footprint
) -> tuple[list[Candidate] | None, Footprint]:
    """Those of them that make `need` fit, and what is free then; None where all of them don't."""
    chosen: list[Candidate] = []
    left, room = Tally(staying), free + staying.total
    for candidate in candidates:
        if need.fits(room - left.total):
            break
        chosen.append(candidate)
        left.remove(candidate.own, candidate.shared)
    if not need.fits(room - left.total):
        return None, room - left.total
    for victim in reversed(chosen[:-1]):  # the one to be missed most of them first
        left.add(victim.own, victim.shared)
        if need.fits(room - left.total):
            chosen.remove(victim)
        else:
            left.remove(victim.own, victim.shared)
    return chosen, room - left.total


def _evicting(victims: list[Candidate], budget: Footprint, policy: Policy, *, fits: bool = True) -> Plan:
    age = max((worth(victim, budget) for victim in victims), default=0.0) if policy is Policy.GDSF else 0.0
    return Plan(tuple(victim.name for victim in victims), fits=fits, possible=True, age=age)
