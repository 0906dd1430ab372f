"""Who may execute next where instances share resources. PURE: asks and returns in, grants out.

A resource is a number that means nothing here: so many instances of so much each may execute at a time. It belongs to
each device, or to the server as a whole (global). Where nobody limits it, there is as much of it as the neediest
instance wants. An instance asks before each execution, gets all that it needs or waits, and returns it afterwards.

Who has executed least, in proportion to its priority, goes first: one of priority 2 has half the turns of one of
priority 1. What the first in line lacks is kept for it, so that nobody small passes it for ever; who needs none of
that may go. Whoever holds something finishes without asking for more: nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    # A resource's name in lower case and the device that it belongs to, "" for the server.
    Pool = tuple[str, str]

GLOBAL = ""
T = TypeVar("T", bound="Hashable")


@dataclass(slots=True)
class _Member:
    """An instance: what each execution needs, and how many it has had.

    Attributes:
        since: when it began to wait, by the number of the ask; 0 when it does not.
    """

    needs: Mapping[Pool, int]
    priority: int
    turns: float = 0
    since: int = 0
    holds: bool = False

    @property
    def rank(self) -> tuple[float, int]:
        return self.turns * self.priority, self.since


class RateLimiter(Generic[T]):
    """The resources of one server, and the instances that share them.

    Args:
        limits: what there is of a resource on a device; on `GLOBAL`, on any device that is not named, and of the
            server's.
    """

    def __init__(self, limits: Mapping[Pool, int] | None = None) -> None:
        self._limits = limits or {}
        self._members: dict[T, _Member] = {}
        self._used: dict[Pool, int] = {}
        self._asks = 0

    def __repr__(self) -> str:
        waiting = sum(member.since > 0 for member in self._members.values())
        holding = sum(member.holds for member in self._members.values())
        return f"<RateLimiter: {holding} of {len(self._members)} instances execute, {waiting} wait>"

    def capacity(self, pool: Pool) -> int:
        """What there is of a resource."""
        limit = self._limit(pool)
        needs = (member.needs.get(pool, 0) for member in self._members.values())
        return max(needs, default=0) if limit is None else limit

    def _limit(self, pool: Pool) -> int | None:
        name, device = pool
        limits = self._limits
        if device == GLOBAL:  # whichever device a limit names, a resource of the server's has none
            return max((count for (limited, _), count in limits.items() if limited == name), default=None)
        return limits.get(pool, limits.get((name, GLOBAL)))

    def join(self, instance: T, needs: Mapping[Pool, int], priority: int = 1) -> list[T]:
        """Let an instance take part; what it needs may be more than there was before, which others may profit by.

        Raises:
            MmeError: INVALID_MODEL when it could never execute, or means another kind of resource by a name.
        """
        for pool, count in needs.items():
            self._check_kind(pool, needs)
            self._check_count(pool, count)
        share = min((member.turns * member.priority for member in self._members.values()), default=0)
        weight = max(priority, 1)
        self._members[instance] = _Member(needs, weight, turns=share / weight)  # nobody catches up with the past
        return self._grant()

    def _check_kind(self, pool: Pool, needs: Mapping[Pool, int]) -> None:
        name, device = pool
        for known in (needs, *(member.needs for member in self._members.values())):
            if any(other == name and (at == GLOBAL) != (device == GLOBAL) for other, at in known):
                raise invalid_model(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )

    def _check_count(self, pool: Pool, count: int) -> None:
        name, limit = pool[0], self._limit(pool)
        if limit is not None and count > limit:
            raise invalid_model(
                f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {count}"
            )

    def leave(self, instance: T) -> list[T]:
        """Let an instance go, with what it holds; whom that gives a turn."""
        self._put_back(self._members[instance])
        del self._members[instance]
        return self._grant()

    def ask(self, instance: T) -> list[T]:
        """An instance wants to execute: it waits from now on, if it does not already; whose turn it is."""
        self._wait(self._members[instance])
        return self._grant()

    def _wait(self, member: _Member) -> None:
        if not member.holds and not member.since:
            self._asks += 1
            member.since = self._asks

    def holds(self, instance: T) -> bool:
        """Whether it is an instance's turn, which it has not returned."""
        member = self._members.get(instance)
        return member is not None and member.holds

    def withdraw(self, instance: T) -> list[T]:
        """An instance does not want to execute any more: it waits for nothing, and a turn it has not used is none."""
        member = self._members[instance]
        member.since = 0
        if member.holds:
            member.turns -= 1
            self._put_back(member)
        return self._grant()

    def done(self, instance: T, *, again: bool = False) -> list[T]:
        """An instance has executed, and wants to `again` or not; whose turn it is, which may be its own."""
        member = self._members[instance]
        self._put_back(member)
        if again:
            self._wait(member)
        return self._grant()

    def _put_back(self, member: _Member) -> None:
        if member.holds:
            member.holds = False
            for pool, count in member.needs.items():
                self._used[pool] -= count

    def _grant(self) -> list[T]:
        waiting = [(instance, member) for instance, member in self._members.items() if member.since]
        kept: set[Pool] = set()
        granted = []
        for instance, member in sorted(waiting, key=lambda each: each[1].rank):
            if kept.isdisjoint(member.needs) and self._fits(member.needs.items()):
                for pool, count in member.needs.items():
                    self._used[pool] = self._used.get(pool, 0) + count
                member.holds, member.since, member.turns = True, 0, member.turns + 1
                granted.append(instance)
            else:
                kept |= member.needs.keys()
        return granted

    def _fits(self, needs: Iterable[tuple[Pool, int]]) -> bool:
        return all(self._used.get(pool, 0) + count <= self.capacity(pool) for pool, count in needs)
