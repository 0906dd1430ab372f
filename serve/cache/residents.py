"""The models in memory: what each takes, what all take, and in which order they go. On the event loop only.

A file that several models map is charged to the first that maps it, then to the next, and is free when the last goes.
So charges are never less than what is taken, and a model whose files are there costs only what is its own. The order is
a heap by what was known at the last look: use only moves a model back, so one in front that was used is put back first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from model_handlers.base import Footprint, Tally
from serve.cache import eviction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from serve.cache.entry import Entry, Residency
    from serve.cache.load import Reservation

K = TypeVar("K")

_REPLACED_SECONDS = 1.0  # until it is looked at again whether a model that is being replaced may leave for others
_FEW = 64


class Order(Generic[K]):
    """Things in the order of a key that only grows, unless `put` is told."""

    def __init__(self, key: Callable[[K], tuple[float, float]]) -> None:
        self.looks = 0  # how often the key was asked
        self._key = key
        self._numbers: dict[K, int] = {}  # of each the one that it has in the heap; others there are of no use
        self._things: dict[int, K] = {}  # by that number: the heap itself keeps nothing that was removed
        self._heap: list[tuple[tuple[float, float], int]] = []  # by what was known at the last look at each
        self._passed: list[tuple[tuple[float, float], int]] = []  # in the last walk, which put them in order
        self._number = 0

    def __repr__(self) -> str:
        return f"<Order of {len(self._numbers)}>"

    def put(self, thing: K) -> None:
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
        self._things.pop(self._numbers.pop(thing, 0), None)

    def walk(self) -> Iterator[K]:
        """All of them, as far as the caller goes. Nothing changes meanwhile."""
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


class SharedBytes(Generic[K]):
    """Files by name, their bytes, and the models that map them, in the order in which they came."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._users: dict[str, dict[K, None]] = {}
        self._files: dict[K, dict[str, int]] = {}  # of each model

    def __repr__(self) -> str:
        return f"<SharedBytes {len(self._files)} models map {sum(self._bytes.values()) / 1e6:.1f} MB>"

    def beyond(self, files: Mapping[str, int]) -> int:
        """Bytes of those files that no model maps yet."""
        return sum(size for file, size in files.items() if file not in self._users)

    def map(self, model: K, files: Mapping[str, int]) -> int:
        """A model, which maps nothing so far, maps these files; returns the bytes that it is charged for."""
        if not files:
            return 0
        charge = self.beyond(files)
        self._files[model] = {file: self._bytes.setdefault(file, size) for file, size in files.items()}
        for file in files:
            self._users.setdefault(file, {})[model] = None
        return charge

    def unmap(self, model: K) -> dict[K, int]:
        """A model maps nothing any more; returns the models that are charged for more from now on, and how much."""
        heirs: dict[K, int] = {}
        for file, size in self._files.pop(model, {}).items():
            users = self._users[file]
            was_charged = next(iter(users)) == model
            del users[model]
            if not users:
                del self._users[file], self._bytes[file]
            elif was_charged:
                heir = next(iter(users))
                heirs[heir] = heirs.get(heir, 0) + size
        return heirs

    def files(self, model: K) -> Mapping[str, int]:
        """What a model maps, and the bytes of each: those that the first had it with."""
        return self._files.get(model, {})

    def maps(self, model: K, files: Mapping[str, int]) -> bool:
        """Whether a model maps these files, and no others."""
        return list(self.files(model)) == list(files)

    def charge(self, model: K) -> int:
        return sum(size for file, size in self.files(model).items() if next(iter(self._users[file])) == model)

    def part(self, model: K) -> int:
        """Bytes that it would be charged for if all models that map a file paid alike."""
        return sum(size // len(self._users[file]) for file, size in self.files(model).items())

    def beside(self, model: K) -> set[K]:
        """The models that map any of the files that a model maps, itself too."""
        return {user for file in self.files(model) for user in self._users[file]}


class Residents:
    """The models in memory, as the rules of eviction ask for them; see `eviction.Candidates`."""

    def __init__(self, entries: Mapping[str, Entry], rules: eviction.Rules, budget: Footprint) -> None:
        # the models in memory, and what each takes without files that others may map
        self.own: dict[Residency, Footprint] = {}
        self.taken = Footprint()  # bytes that they are charged for together
        self.staying = Tally()  # those that are not on their way out
        self.pinned = Tally()  # those of them that are never evicted
        self.shared: SharedBytes[Residency] = SharedBytes()
        self.order: Order[Residency] = Order(self._place)
        self._wanted: Counter[str] = Counter()  # names of models that are about to be leased together
        self._payers: dict[str, Reservation] = {}  # of files that no model maps yet
        self._entries = entries
        self._rules = rules
        self._budget = budget
        self.age = 0.0  # that of GreedyDual-Size-Frequency, now: the worth of what left for it; it only grows

    # -- what a plan asks ------------------------------------------------------------------------------------------

    def candidates(self, now: float, *, and_from_disk: bool = False) -> Iterator[eviction.Candidate]:
        free = (residency for residency in self.order.walk() if self._may_go(residency, now))
        residents = (self.candidate(residency, and_from_disk=and_from_disk) for residency in free)
        if and_from_disk and self._rules.policy is eviction.Policy.GDSF:
            return iter(sorted(residents, key=lambda each: eviction.worth(each, self._budget)))
        return residents

    def again_at(self, now: float) -> float:
        staying = (residency for residency in self.own if not residency.leaving)
        until = [kept for residency in staying if now < (kept := self._keep_until(residency)) < eviction.FOR_EVER]
        return min(until, default=0.0)

    def named(self, name: str) -> eviction.Candidate | None:
        entry = self._entries.get(name)
        residency = None if entry is None else entry.residency
        return None if residency is None or residency.leaving else self.candidate(residency)

    def candidate(self, residency: Residency, *, and_from_disk: bool = False) -> eviction.Candidate:
        """What a plan has to know of a model in memory."""
        files = self.shared.files(residency)
        return eviction.Candidate(
            residency.name,
            residency.footprint,
            residency.entry.last_used,
            residency.uses,
            (residency.entry.reload_ns + (residency.entry.download_ns if and_from_disk else 0)) / 1e9,
            residency.age,
            self._keep_until(residency),
            residency.leases > 0,
            residency.leaving,
            files,
            self.shared.charge(residency) if files else 0,
            self.shared.part(residency) if files else 0,
        )

    def evictable(self, residency: Residency) -> Footprint:
        """What comes back at most if it leaves now; nothing if it may not."""
        own = self.own.get(residency)
        if own is None or residency.leaving or not self._may_go(residency, time.monotonic()):
            return Footprint()
        return own + Footprint(sum(self.shared.files(residency).values()))

    # -- loads under way -------------------------------------------------------------------------------------------

    def counted(self, footprint: Footprint) -> Footprint:
        """What a model would be charged for: files that are mapped already, or about to be, cost nothing."""
        return Footprint(footprint.host + sum(self.unpaid(footprint.shared).values()), footprint.devices)

    def unpaid(self, files: Mapping[str, int]) -> dict[str, int]:
        """Those of them that no model maps, and no load under way has reserved."""
        new = {file: size for file, size in files.items() if file not in self._payers}
        return {file: size for file, size in new.items() if self.shared.beyond({file: size})}

    def reserved(self, payer: Reservation, files: Mapping[str, int]) -> None:
        """A load has reserved these; it is relieved of those that are paid for by now."""
        unpaid = self.unpaid(files)
        self._payers |= dict.fromkeys(unpaid, payer)
        payer.relieve(files.keys() - unpaid.keys())

    def released(self, payer: Reservation, files: Iterable[str]) -> None:
        """The reservation of a load is not for these any more."""
        for file in files:
            if self._payers.get(file) is payer:
                del self._payers[file]

    # -- models come and go ----------------------------------------------------------------------------------------

    def charge(self, residency: Residency, footprint: Footprint) -> None:
        for file in footprint.shared.keys() & self._payers.keys():
            self._payers.pop(file).relieve([file])
        self._own(residency, footprint, self.shared.map(residency, footprint.shared))

    def pin(self, residency: Residency, *, pinned: bool) -> None:
        """Whether it is never evicted from now on."""
        own = self.own.get(residency)
        if own is None or residency.pinned is pinned:
            residency.pinned = pinned
            return
        self._disown(residency)
        residency.pinned = pinned
        self._own(residency, own, self.shared.charge(residency))

    @contextmanager
    def wanting(self, names: Sequence[str]) -> Iterator[None]:
        """Models that are about to be leased together: all others leave first, whatever these were used before."""
        self._wanted.update(names)
        self._reorder_named(names)
        try:
            yield
        finally:
            self._wanted -= Counter(names)
            self._reorder_named(names)

    def _reorder_named(self, names: Sequence[str]) -> None:
        entries = [self._entries[name] for name in names if name in self._entries]
        self._reorder({entry.residency for entry in entries if entry.residency is not None})

    def arrived(self, residency: Residency) -> None:
        residency.age = self.age
        self.order.put(residency)

    def remeasured(self, residency: Residency, footprint: Footprint) -> None:
        """It takes this instead. Charges for files stay as they are, where those are the same."""
        beside = self._beside(residency)
        if self.shared.maps(residency, footprint.shared):
            self._disown(residency)
            self._own(residency, footprint, self.shared.charge(residency))
        else:
            self._discharge(residency)
            self.charge(residency, footprint)
        self._reorder({residency, *beside})

    def leaves(self, residency: Residency) -> None:
        """It is on its way out: what it takes comes back without an eviction."""
        self.order.remove(residency)
        self._disown(residency)  # while it is none that leaves
        residency.leaving = True

    def left(self, residency: Residency) -> None:
        """It is out of memory; for files that it was charged for and others map still, these are charged."""
        beside = self._beside(residency)
        self._discharge(residency)
        self._reorder(beside - {residency})

    def _discharge(self, residency: Residency) -> None:
        self._disown(residency)
        self._set(residency, Footprint())
        del self.own[residency]
        for heir, size in self.shared.unmap(residency).items():
            self._set(heir, heir.footprint + Footprint(size))

    def _own(self, residency: Residency, footprint: Footprint, charge: int) -> None:
        own = self.own[residency] = Footprint(footprint.host, footprint.devices)
        for tally in self._tallies(residency):
            tally.add(own, self.shared.files(residency))
        self._set(residency, Footprint(own.host + charge, own.devices))

    def _disown(self, residency: Residency) -> None:
        for tally in self._tallies(residency):
            tally.remove(self.own[residency], self.shared.files(residency))

    def _tallies(self, residency: Residency) -> tuple[Tally, ...]:
        if residency.leaving:
            return ()
        return (self.staying, self.pinned) if residency.pinned else (self.staying,)

    def _set(self, residency: Residency, charge: Footprint) -> None:
        self.taken += charge - residency.footprint
        residency.footprint = charge

    # -- their order -----------------------------------------------------------------------------------------------

    def _beside(self, residency: Residency) -> set[Residency]:
        """The models that map files that it maps, where a larger part of these makes them worth less."""
        return self.shared.beside(residency) if self._rules.policy is eviction.Policy.GDSF else set()

    def _reorder(self, residencies: set[Residency]) -> None:
        for residency in residencies:
            if not residency.leaving:
                self.order.put(residency)

    def _place(self, residency: Residency) -> tuple[float, float]:
        policy = self._rules.policy
        if residency.name in self._wanted:
            return math.inf, residency.entry.last_used
        if policy is eviction.Policy.GDSF:
            return eviction.worth(self.candidate(residency), self._budget), residency.entry.last_used
        return (residency.uses if policy is eviction.Policy.LFU else 0), residency.entry.last_used

    def _may_go(self, residency: Residency, now: float) -> bool:
        return residency.leases == 0 and self._keep_until(residency) <= now

    def _keep_until(self, residency: Residency) -> float:
        if residency.pinned:
            return eviction.FOR_EVER
        if residency.entry.load is not None:  # it serves until its successor does
            return time.monotonic() + _REPLACED_SECONDS
        return residency.loaded_at + self._rules.min_residency
