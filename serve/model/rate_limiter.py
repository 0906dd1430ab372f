"""Which instance executes next where instances of several models share resources.

A resource is a number that means nothing here: so many instances of so much each may execute at a time. It belongs to
each device, or to the server as a whole (global). Without a limit there is as much of it as the neediest instance
wants. An instance asks before each execution, gets all that it needs or waits, and returns it afterwards.

The instance that has executed least, in proportion to its priority, goes first: one of priority 2 has half the turns of
one of priority 1. What the first in line lacks is kept for it, so that small ones do not pass it for ever; an instance
that needs none of that may go. One that holds something finishes without asking for more: none waits for ever.
Instances that need the same pools wait in one queue, so that a grant looks at the first of each queue only.

`RateLimiter` has the rules and is pure. Models are loaded on threads and executed from the event loop, so a lock in
`ResourcePool` guards it; an instance whose turn comes later than it asked is told on the loop.
"""

from __future__ import annotations

import heapq
import logging
import threading
from bisect import bisect_left, insort
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from model_handlers.base import Device
    from model_handlers.config.model_config import InstanceGroup

    Pool = tuple[str, str]


GLOBAL = ""
T = TypeVar("T", bound="Hashable")
# What an instance has been served, a number that no other place has, and the instance: lists of these are sorted.
_Place = tuple[int, int, T]


class _Stock:
    """What there is of a pool."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit  # None for as much as the neediest instance wants
        self.needs: Counter[int] = Counter()  # how many instances need each amount
        self.capacity = limit or 0
        self.used = 0

    def join(self, count: int) -> None:
        self.needs[count] += 1
        if self.limit is None:
            self.capacity = max(self.capacity, count)

    def leave(self, count: int) -> None:
        self.needs[count] -= 1
        if not self.needs[count]:
            del self.needs[count]
            if self.limit is None and count == self.capacity:
                self.capacity = max(self.needs, default=0)


@dataclass(slots=True, eq=False)
class _Member(Generic[T]):
    """An instance: what each execution needs, and how many it has had."""

    needs: dict[_Stock, int]
    pools: frozenset[Pool]
    priority: int
    served: int  # its executions, each of which counts as much as its priority
    # its place among all instances, by what it had been served when it was put there
    listed: _Place[T] = field(init=False)
    waits: _Place[T] | None = None  # its place in its queue; None while it does not wait
    holds: bool = False

    def fits(self) -> bool:
        return all(stock.used + count <= stock.capacity for stock, count in self.needs.items())

    def take(self) -> None:
        self.holds = True
        for stock, count in self.needs.items():
            stock.used += count

    def put_back(self) -> None:
        self.holds = False
        for stock, count in self.needs.items():
            stock.used -= count


class RateLimiter(Generic[T]):
    """The resources of one server, and the instances that share them. PURE: asks and returns in, grants out.

    Args:
        limits: what there is of a resource on a device; on `GLOBAL`, on any device that is not named, and of the
            server's.
    """

    def __init__(self, limits: Mapping[Pool, int] | None = None) -> None:
        self._limits = limits or {}
        self._stocks: dict[str, dict[str, _Stock]] = {}  # by name and device; only of pools that instances need
        self._members: dict[T, _Member[T]] = {}
        self._queues: dict[frozenset[Pool], list[_Place[T]]] = {}  # by the pools that are needed; none is empty
        self._listed: list[_Place[T]] = []  # one place for each instance, brought up to date once it is the first
        self._numbers = 0

    def __repr__(self) -> str:
        waiting = sum(map(len, self._queues.values()))
        holding = sum(member.holds for member in self._members.values())
        return f"<RateLimiter: {holding} of {len(self._members)} instances execute, {waiting} wait>"

    def capacity(self, pool: Pool) -> int:
        name, device = pool
        stock = self._stocks.get(name, {}).get(device)
        return stock.capacity if stock else self._limit(pool) or 0

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
        stocks = {self._stock(pool): count for pool, count in needs.items()}
        for stock, count in stocks.items():
            stock.join(count)
        served = self._least_served()  # an instance does not catch up with the past
        self._members[instance] = _Member(stocks, frozenset(needs), max(priority, 1), served)
        self._list(instance)
        return self._grant()

    def _check_kind(self, pool: Pool, needs: Mapping[Pool, int]) -> None:
        name = pool[0]
        devices = self._stocks.get(name, {}).keys() | {at for other, at in needs if other == name}
        if GLOBAL in devices and len(devices) > 1:
            raise invalid_model(
                f'Resource "{name}" is present as both global and device-specific resource in the model configuration.'
            )

    def _check_count(self, pool: Pool, count: int) -> None:
        name, limit = pool[0], self._limit(pool)
        if limit is not None and count > limit:
            raise invalid_model(
                f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {count}"
            )

    def _stock(self, pool: Pool) -> _Stock:
        name, device = pool
        devices = self._stocks.setdefault(name, {})
        return devices.get(device) or devices.setdefault(device, _Stock(self._limit(pool)))

    def _least_served(self) -> int:
        listed = self._listed
        while listed:
            served, _, instance = listed[0]
            if served == self._members[instance].served:
                return served
            del listed[0]  # it has executed since
            self._list(instance)
        return 0

    def _list(self, instance: T) -> None:
        member = self._members[instance]
        member.listed = self._place(instance)
        insort(self._listed, member.listed)

    def _place(self, instance: T) -> _Place[T]:
        self._numbers += 1
        return self._members[instance].served, self._numbers, instance

    def leave(self, instance: T) -> list[T]:
        """Let an instance go, with what it holds; which ones get a turn by that."""
        member = self._members.pop(instance)
        self._stop_waiting(member)
        if member.holds:
            member.put_back()
        _remove(self._listed, member.listed)
        for name, device in member.pools:
            self._leave_stock(member, name, device)
        return self._grant()

    def _leave_stock(self, member: _Member[T], name: str, device: str) -> None:
        devices = self._stocks[name]
        stock = devices[device]
        stock.leave(member.needs[stock])
        if not stock.needs:
            del devices[device]
        if not devices:
            del self._stocks[name]

    def ask(self, instance: T) -> list[T]:
        """An instance wants to execute: it waits from now on, if it does not already; which ones get a turn."""
        self._wait(instance)
        return self._grant()

    def _wait(self, instance: T) -> None:
        member = self._members[instance]
        if not member.holds and member.waits is None:
            member.waits = self._place(instance)
            insort(self._queues.setdefault(member.pools, []), member.waits)

    def _stop_waiting(self, member: _Member[T]) -> None:
        if member.waits is not None:
            queue = self._queues[member.pools]
            _remove(queue, member.waits)
            member.waits = None
            if not queue:
                del self._queues[member.pools]

    def holds(self, instance: T) -> bool:
        member = self._members.get(instance)
        return member is not None and member.holds

    def withdraw(self, instance: T) -> list[T]:
        """An instance does not want to execute any more: an unused turn is none."""
        member = self._members[instance]
        self._stop_waiting(member)
        if member.holds:
            member.put_back()
        return self._grant()

    def done(self, instance: T, *, again: bool = False) -> list[T]:
        """An instance has executed, and wants to `again` or not; which ones get a turn, it may be itself."""
        member = self._members[instance]
        if member.holds:
            member.put_back()
            member.served += member.priority
        if again:
            self._wait(instance)
        return self._grant()

    def _grant(self) -> list[T]:
        kept: set[_Stock] = set()
        granted = []
        first = [queue[0] for queue in self._queues.values()]
        heapq.heapify(first)
        while first:
            _, _, instance = heapq.heappop(first)
            member = self._members[instance]
            if not kept.isdisjoint(member.needs) or not member.fits():
                kept |= member.needs.keys()  # and so the rest of its queue can't go either
                continue
            self._stop_waiting(member)
            member.take()
            granted.append(instance)
            if queue := self._queues.get(member.pools):
                heapq.heappush(first, queue[0])
        return granted


def _remove(places: list[_Place[T]], place: _Place[T]) -> None:
    del places[bisect_left(places, place)]


_log = logging.getLogger("mme.model")


class LimitedInstance:
    """One instance that asks for its turn before each execution."""

    def __init__(self, model: LimitedInstances, number: int) -> None:
        self.model = model
        self.number = number
        self.has_turn = False
        self.busy = False


class ResourcePool:
    """The resources of a server.

    Args:
        counts: see `RateLimiter`; None where nothing is limited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, counts: Mapping[Pool, int] | None) -> None:
        self._loop = loop
        self._is_on = counts is not None
        self._limiter: RateLimiter[LimitedInstance] = RateLimiter(counts)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ResourcePool: {self._limiter!r}>"

    def instances(
        self, model: str, groups: Sequence[InstanceGroup], instances: Sequence[tuple[str, Device]]
    ) -> LimitedInstances | None:
        """The instances of a model, by name and device; None where none needs any resource. On any thread."""
        by_name = {group.name: group for group in groups}
        of_groups = [(by_name[name.rpartition("_")[0]], device) for name, device in instances] if by_name else []
        if not any(group.resources for group, _ in of_groups):
            return None
        if not self._is_on:
            _log.info("its rate_limiter changes nothing: rate limiting is off", extra={"target_model": model})
            return None
        joined = LimitedInstances(self)
        try:
            for group, device in of_groups:
                joined.instances.append(self._joined(joined, group, device))
        except BaseException:
            joined.close()
            raise
        return joined

    def _joined(self, model: LimitedInstances, group: InstanceGroup, device: Device) -> LimitedInstance:
        instance = LimitedInstance(model, len(model.instances))
        with self._lock:
            granted = self._limiter.join(instance, _needs(group, device), group.priority)
        self._tell_later(granted)
        return instance

    def leave(self, instances: Iterable[LimitedInstance]) -> None:
        """These take part no longer. On any thread; what follows is on the loop."""
        with self._lock:
            granted = [other for instance in instances for other in self._limiter.leave(instance)]
        self._tell_later(granted)

    def ask(self, instance: LimitedInstance) -> None:
        with self._lock:
            granted = self._limiter.ask(instance)
        _tell(granted, but=instance)

    def withdraw(self, instance: LimitedInstance) -> None:
        instance.has_turn = False
        with self._lock:
            granted = self._limiter.withdraw(instance)
        _tell(granted)

    def done(self, instance: LimitedInstance, *, again: bool) -> None:
        instance.has_turn = False
        with self._lock:
            granted = self._limiter.done(instance, again=again)
        _tell(granted)

    def _tell_later(self, granted: list[LimitedInstance]) -> None:
        if granted:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell_holders, granted)

    def _tell_holders(self, granted: list[LimitedInstance]) -> None:
        with self._lock:
            granted = [instance for instance in granted if self._limiter.holds(instance)]
        _tell(granted)


def _tell(granted: list[LimitedInstance], but: LimitedInstance | None = None) -> None:
    for instance in granted:
        instance.has_turn = True
        if instance is not but:
            instance.model.on_grant()


def _needs(group: InstanceGroup, device: Device) -> dict[Pool, int]:
    return {
        (resource.name.lower(), GLOBAL if resource.is_global else str(device.index)): resource.count
        for resource in group.resources
    }


class LimitedInstances:
    """The instances of one model. On the event loop."""

    def __init__(self, limits: ResourcePool) -> None:
        self.instances: list[LimitedInstance] = []
        # called when an instance has got the turn that it waited for; set by the model
        self.on_grant: Callable[[], None] = lambda: None
        self._limits = limits

    def free(self) -> list[int]:
        """The instances that are not being used, those first that hold what they need."""
        return [
            instance.number
            for instance in sorted(self.instances, key=lambda instance: not instance.has_turn)
            if not instance.busy
        ]

    def acquire(self, number: int) -> bool:
        """Whether a free instance may execute now; if not, it waits for its turn."""
        instance = self.instances[number]
        if not instance.has_turn:
            self._limits.ask(instance)
        instance.busy = instance.has_turn
        return instance.busy

    def give_back(self, number: int) -> None:
        """An instance that was taken has nothing to execute."""
        instance = self.instances[number]
        instance.busy = False
        self._limits.withdraw(instance)

    def done(self, number: int, *, again: bool) -> None:
        instance = self.instances[number]
        instance.busy = False
        self._limits.done(instance, again=again)

    def release_idle(self) -> None:
        """There is nothing to execute: no instance waits for a turn."""
        for instance in self.instances:
            if not instance.busy:
                self._limits.withdraw(instance)

    def close(self) -> None:
        instances, self.instances = self.instances, []
        self._limits.leave(instances)
