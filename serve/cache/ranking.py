"""The models in memory as an eviction plan has to see them, and the age that GreedyDual-Size-Frequency goes by.

Nothing is noted when a model is used but what its lease and its statistics note anyway. The order in which models go is
a heap by what was known of each when somebody last looked. Use only moves a model to the back, so whoever is in front
and was used since is put back by what is known now, until the one in front is where it belongs. The age at a model's
last use is the one that was reached by then. On the event loop only.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from model_handlers.base import Footprint
from serve.cache import eviction
from serve.cache.entry import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from serve.cache.charges import Charges
    from serve.cache.entry import Entry
    from serve.cache.shared_bytes import Tally

K = TypeVar("K")

_REPLACED_SECONDS = 1.0  # until it is looked at again whether a model that is being replaced may leave for others
_FEW = 64


class Order(Generic[K]):
    """Things in the order of something that only grows, unless `put` is told. PURE.

    Attributes:
        looks: how often it was asked what that is of a thing.
    """

    def __init__(self, key: Callable[[K], tuple[float, float]]) -> None:
        self.looks = 0
        self._key = key
        self._numbers: dict[K, int] = {}  # of each the one that it has in the heap; others there are of no use
        self._things: dict[int, K] = {}  # by that number: the heap itself keeps nothing that was removed
        self._heap: list[tuple[tuple[float, float], int]] = []  # by what was known at the last look at each
        self._passed: list[tuple[tuple[float, float], int]] = []  # in the last walk, which put them in order
        self._number = 0

    def __repr__(self) -> str:
        return f"<Order of {len(self._numbers)}>"

    def put(self, thing: K) -> None:
        """It is there, or has another place now."""
        self.remove(thing)
        self._number += 1
        self._numbers[thing] = self._number
        self._things[self._number] = thing
        heapq.heappush(self._heap, (self._look(thing), self._number))
        if len(self._heap) + len(self._passed) > 2 * len(self._numbers) + _FEW:
            self._heap = [each for each in self._heap + self._passed if each[1] in self._things]
            self._passed = []
            heapq.heapify(self._heap)

    def remove(self, thing: K) -> None:
        """It is not there any more."""
        self._things.pop(self._numbers.pop(thing, 0), None)

    def walk(self) -> Iterator[K]:
        """All of them, as far as anybody asks. Nothing changes meanwhile."""
        passed, self._passed = self._passed, []
        self._heap = self._heap or passed  # what is in order is a heap
        for each in passed if self._heap is not passed else ():
            heapq.heappush(self._heap, each)
        while self._heap:
            key, number = self._heap[0]
            thing = self._things.get(number)
            if thing is None:  # it left, or has another place
                heapq.heappop(self._heap)
                continue
            now = self._look(thing)
            if now != key:
                heapq.heapreplace(self._heap, (now, number))
                continue
            self._passed.append(heapq.heappop(self._heap))
            yield thing

    def _look(self, thing: K) -> tuple[float, float]:
        self.looks += 1
        return self._key(thing)


class Ranking:
    """Who is in memory, in terms of an eviction plan: see `eviction.Residents`.

    Args:
        entries: those that names mean.
        charges: what those in memory are charged for.
        rules: what the operator decided.
        budget: bytes for all models together.
    """

    def __init__(
        self, entries: Mapping[str, Entry[Any]], charges: Charges, rules: eviction.Rules, budget: Footprint
    ) -> None:
        self.order: Order[Entry[Any]] = Order(self._place)
        self._entries = entries
        self._charges = charges
        self._rules = rules
        self._budget = budget
        self._ages = [0.0]
        self._aged_at = [0.0]  # from when on it was that age

    # -- what a plan asks ------------------------------------------------------------------------------------------

    @property
    def taken(self) -> Footprint:
        """See `eviction.Residents`."""
        return self._charges.taken

    @property
    def staying(self) -> Tally:
        """See `eviction.Residents`."""
        return self._charges.staying

    @property
    def pinned(self) -> Tally:
        """See `eviction.Residents`."""
        return self._charges.pinned

    def candidates(self, now: float, *, and_from_disk: bool = False) -> Iterator[eviction.Resident]:
        """See `eviction.Residents`."""
        free = (entry for entry in self.order.walk() if self._may_go(entry, now))
        residents = (self._resident(entry, and_from_disk=and_from_disk) for entry in free)
        if and_from_disk and self._rules.policy is eviction.Policy.GDSF:
            return iter(sorted(residents, key=lambda each: eviction.worth(each, self._budget)))
        return residents

    def again_at(self, now: float) -> float:
        """See `eviction.Residents`."""
        staying = (entry for entry in self._charges.charged if entry.state is not State.UNLOADING)
        until = [kept for entry in staying if now < (kept := self._keep_until(entry)) < eviction.FOR_EVER]
        return min(until, default=0.0)

    def named(self, name: str) -> eviction.Resident | None:
        """See `eviction.Residents`."""
        entry = self._entries.get(name)
        if entry is None or entry not in self._charges.charged or entry.state is State.UNLOADING:
            return None
        return self._resident(entry)

    def holds(self, entry: Entry[Any]) -> Footprint:
        """What comes back at most if it leaves now; nothing if it may not."""
        own = self._charges.charged.get(entry)
        if own is None or entry.state is State.UNLOADING or not self._may_go(entry, time.monotonic()):
            return Footprint()
        return own + Footprint(sum(self._charges.shared.files(entry).values()))

    # -- what changes it -------------------------------------------------------------------------------------------

    def arrived(self, entry: Entry[Any]) -> None:
        """It is in memory."""
        self.order.put(entry)

    def remeasured(self, entry: Entry[Any], footprint: Footprint) -> None:
        """It takes this instead of what it took."""
        beside = self._beside(entry)
        self._charges.recharge(entry, footprint)
        self._worth_less({entry, *beside})

    def leaves(self, entry: Entry[Any]) -> None:
        """It is on its way out."""
        self.order.remove(entry)
        self._charges.leaves(entry)

    def left(self, entry: Entry[Any]) -> None:
        """It is out of memory."""
        beside = self._beside(entry)
        self._charges.discharge(entry)
        self._worth_less(beside - {entry})

    def _beside(self, entry: Entry[Any]) -> set[Entry[Any]]:
        """Those who map files that it maps, where a larger part of these makes them worth less."""
        return self._charges.shared.beside(entry) if self._rules.policy is eviction.Policy.GDSF else set()

    def _worth_less(self, entries: set[Entry[Any]]) -> None:
        for entry in entries:
            if entry.state is State.READY:
                self.order.put(entry)

    @property
    def age(self) -> float:
        """Now."""
        return self._ages[-1]

    def grows_to(self, age: float) -> None:
        """Victims of that worth are about to go."""
        if age <= self.age:
            return
        if len(self._ages) > max(_FEW, len(self._charges.charged)):
            for entry in self._charges.charged:
                entry.age = self._age_at_last_use(entry)
            del self._ages[:-1], self._aged_at[:-1]
        self._ages.append(age)
        self._aged_at.append(time.monotonic())

    # -- one of them -----------------------------------------------------------------------------------------------

    def _resident(self, entry: Entry[Any], *, and_from_disk: bool = False) -> eviction.Resident:
        shared = self._charges.shared
        files = shared.files(entry)
        return eviction.Resident(
            entry.name,
            entry.footprint,
            entry.last_used,
            entry.uses,
            (entry.reload_ns + (entry.download_ns if and_from_disk else 0)) / 1e9,
            self._age_at_last_use(entry),
            self._keep_until(entry),
            entry.leases + entry.pins > 0,
            entry.state is State.UNLOADING,
            files,
            shared.charge(entry) if files else 0,
            shared.part(entry) if files else 0,
        )

    def _place(self, entry: Entry[Any]) -> tuple[float, float]:
        policy = self._rules.policy
        if policy is eviction.Policy.GDSF:
            return eviction.worth(self._resident(entry), self._budget), entry.last_used
        return (entry.uses if policy is eviction.Policy.LFU else 0), entry.last_used

    def _age_at_last_use(self, entry: Entry[Any]) -> float:
        reached = bisect_left(self._aged_at, entry.last_used) - 1
        return self._ages[reached] if reached >= 0 else entry.age

    def _may_go(self, entry: Entry[Any], now: float) -> bool:
        return entry.leases + entry.pins == 0 and self._keep_until(entry) <= now

    def _keep_until(self, entry: Entry[Any]) -> float:
        if entry.pinned:
            return eviction.FOR_EVER
        if entry.successor is not None:  # it serves until that one does
            return time.monotonic() + _REPLACED_SECONDS
        return entry.loaded_at + self._rules.min_residency
