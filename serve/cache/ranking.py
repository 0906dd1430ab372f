"""The models in memory as the eviction plan has to see them, and the age that GreedyDual-Size-Frequency goes by.

Nothing is noted when a model is used but what its lease and its statistics note anyway: the age at a model's last use
is worked out when the age next changes, for those used since it last did. On the event loop only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from serve.cache import eviction
from serve.cache.lifecycle import State

if TYPE_CHECKING:
    from serve.cache.cache_entry import Entry
    from serve.cache.charges import Charges


_REPLACED_SECONDS = 1.0  # until it is looked at again whether a model that is being replaced may leave for others


class Ranking:
    """Who is in memory, in terms of an eviction plan.

    Args:
        charges: what those in memory are charged for.
        rules: what the operator decided.
    """

    def __init__(self, charges: Charges, rules: eviction.Rules) -> None:
        self._charges = charges
        self._rules = rules
        self._age = 0.0
        self._aged_at = 0.0

    def residents(self, *, and_from_disk: bool = False) -> list[eviction.Resident]:
        """Everybody in memory. Who leaves the disk as well costs a download too when it comes back."""
        shared = self._charges.shared
        return [
            eviction.Resident(
                entry.name,
                entry.footprint,
                entry.last_used,
                entry.uses,
                (entry.reload_ns + (entry.download_ns if and_from_disk else 0)) / 1e9,
                self._age_at_last_use(entry),
                self._keep_until(entry),
                entry.leases + entry.keepers > 0,
                entry.state is State.UNLOADING,
                *shared.jointly(entry),
            )
            for entry in self._charges.charged
        ]

    def grows_to(self, age: float) -> None:
        """Victims of that worth are about to go."""
        if age <= self._age:
            return
        for entry in self._charges.charged:
            entry.age = self._age_at_last_use(entry)
        self._age, self._aged_at = age, time.monotonic()

    def _age_at_last_use(self, entry: Entry[Any]) -> float:
        return self._age if entry.last_used > self._aged_at else entry.age

    def _keep_until(self, entry: Entry[Any]) -> float:
        if entry.pinned:
            return eviction.FOR_EVER
        if entry.successor is not None:  # it serves until that one does
            return time.monotonic() + _REPLACED_SECONDS
        return entry.loaded_at + self._rules.min_residency
