"""Watches an engine: a sample a second, and what the cache did last. On the event loop only.

Samples are taken whether anybody looks or not, so that whoever opens the page sees the minutes before. That costs a
reading of every model's counters once a second, about 0.2 ms for a thousand models, and nothing for any request.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from container.dashboard.history import History, Totals
from serve.cache.events import EventType

if TYPE_CHECKING:
    import asyncio

    from serve.cache.events import CacheEvent
    from serve.engine import Engine

_INTERVAL = 1.0  # seconds
_EVENTS = 60  # that are remembered


class Happening(NamedTuple):
    """An event, how often it happened in all, and when it did first: a load that fails is tried again and again."""

    event: CacheEvent
    times: int
    since: float


class Watcher:
    """The recent past of an engine.

    Attributes:
        history: a sample a second.
        happenings: loads, failed loads, evictions and unloads, newest first.
        ticks: samples taken so far.
    """

    def __init__(self, engine: Engine) -> None:
        self.history = History()
        self.happenings: deque[Happening] = deque(maxlen=_EVENTS)
        self.ticks = 0
        self._engine = engine
        self._leaving: set[str] = set()
        self._loads = 0
        self._evictions = 0
        self._timer: asyncio.TimerHandle | None = None
        engine.cache.events.listen(self._hear)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take samples until `close`."""
        self._tick(loop, loop.time())

    def close(self) -> None:
        """Take no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.sample()
        after = max(due + _INTERVAL, loop.time())  # a second that the loop stood still is not made up for
        self._timer = loop.call_at(after, self._tick, loop, after)

    def sample(self) -> None:
        """Add how things stand to the history."""
        self.history.add(self._totals())
        self.ticks += 1

    def _totals(self) -> Totals:
        """One pass over the counters of every model; written for speed, since the loop does nothing else meanwhile."""
        hits = misses = refused = cold = queued = resident = 0
        cache = self._engine.cache
        host, device = cache.room.reserved.host, cache.room.reserved.device
        for target in self._engine.registry.stats.values():
            hits += target.hits
            misses += target.misses
            refused += target.refused
        for entry in cache.entries.values():
            if entry.waiters:
                cold += len(entry.waiters)
            if entry.resident is not None:
                resident += 1
                host += entry.footprint.host
                device += entry.footprint.device
                for model in entry.resident.versions.values():
                    if model.outstanding:  # else nobody waits for its members either
                        queued += sum(each.queued for each in entry.resident.models())
                        break
        succeeded = total_ns = queue_ns = 0
        failed = refused  # whose model could not be loaded
        targets = self._engine.registry.stats
        for (name, _), stats in self._engine.stats.copy().items():  # loads add to it, on their threads
            if name in targets:  # its members' requests are steps of its own
                succeeded += stats.success.count
                total_ns += stats.success.ns
                queue_ns += stats.queue.ns
                failed += stats.fail.count
        counted = (hits, misses, succeeded, failed, total_ns, queue_ns, self._evictions, self._loads)
        return Totals(*counted, queued, cold, resident, host, device)

    def _hear(self, event: CacheEvent) -> None:
        if event.type is EventType.WAITED:
            return
        if event.type is EventType.EVICTED:
            self._evictions += 1
            self._leaving.add(event.name)
        elif event.type is EventType.LOADED:
            self._loads += 1
        elif event.type is EventType.UNLOADED and event.name in self._leaving:
            self._leaving.remove(event.name)  # its eviction has been told
            return
        self._remember(event)

    def _remember(self, event: CacheEvent) -> None:
        times, since = 1, event.at
        for happening in self.happenings:
            before = happening.event
            if event.type is EventType.FAILED and (before.type, before.name, before.why) == (
                EventType.FAILED,
                event.name,
                event.why,
            ):
                times, since = happening.times + 1, happening.since
                self.happenings.remove(happening)
                break
        self.happenings.appendleft(Happening(event, times, since))
