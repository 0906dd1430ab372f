"""Watches an engine: a sample a second, and what the cache did last. On the event loop only.

Samples are taken whether anybody looks or not, so that whoever opens the page sees the minutes before. That costs a
reading of every model's counters once a second, and nothing for any request.
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
        """A pass over the counters of every model, one sum at a time: the event loop does nothing else meanwhile."""
        engine = self._engine
        cache, targets = engine.cache, engine.registry.stats
        counted = targets.values()
        refused = sum([each.refused for each in counted])  # those whose model could not be loaded
        busy = [entry for entry in cache.entries.values() if entry.leases or entry.waiters]
        # loads add to it, on their threads; of an archive's members it has requests that are steps of its own
        stats = [each for (name, _), each in engine.stats.copy().items() if name in targets]
        used = cache.room.used()
        return Totals(
            hits=sum([each.hits for each in counted]),
            misses=sum([each.misses for each in counted]),
            succeeded=sum([each.success.count for each in stats]),
            failed=refused + sum([each.fail.count for each in stats]),
            total_ns=sum([each.success.ns for each in stats]),
            queue_ns=sum([each.queue.ns for each in stats]),
            evictions=self._evictions,
            loads=self._loads,
            queued=sum([each.queued for entry in busy if entry.resident for each in entry.resident.models()]),
            cold=sum([len(entry.waiters) for entry in busy]),
            resident=cache.resident_count,
            host=used.host,
            device=used.device,
        )

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
