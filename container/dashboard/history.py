"""The last minutes of an engine: a sample a second, and what its cache did last. On the event loop only.

The engine counts upwards and keeps sums; a sample is what two readings of the sums, a second apart, differ by. Samples
are taken whether a page is open or not, so that one that is opened shows the minutes before. That costs a reading of
every model's counters once a second, and nothing for any request.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from serve.cache.events import EventType

if TYPE_CHECKING:
    import asyncio

    from serve.cache.events import CacheEvent
    from serve.engine import Engine

SECONDS = 300  # what is kept
_INTERVAL = 1.0  # seconds
_EVENTS = 60  # that are remembered


class Totals(NamedTuple):
    """Sums since the start, and how things stand."""

    hits: int = 0
    misses: int = 0  # requests that did not find their model in memory
    succeeded: int = 0
    failed: int = 0  # those among them whose model could not be loaded
    total_ns: int = 0  # of those that succeeded, from being accepted to the answer
    queue_ns: int = 0  # of that, waiting for a lane
    evictions: int = 0
    loads: int = 0
    queued: int = 0  # requests that wait for a lane now
    cold: int = 0  # requests that wait for their model now
    resident: int = 0  # models in memory now
    host: int = 0  # bytes that they take, those of loads under way included
    device: int = 0


_COUNTS, _STATES = Totals._fields[:4] + Totals._fields[6:8], Totals._fields[8:]
COLUMNS = (*Totals._fields[:4], "queue_ms", "compute_ms", *Totals._fields[6:])
Sample = dict[str, float | None]  # one second, by the names in `COLUMNS`


def difference(before: Totals, after: Totals) -> Sample:
    """What happened between two readings: counts, mean times (None without a request), how things stood at its end.

    Counters of a model that was forgotten are no negative counts.
    """
    sample: Sample = {name: max(getattr(after, name) - getattr(before, name), 0) for name in _COUNTS}
    sample |= {name: getattr(after, name) for name in _STATES}
    sample["queue_ms"] = sample["compute_ms"] = None
    if succeeded := sample["succeeded"]:
        queue_ms = sample["queue_ms"] = round((after.queue_ns - before.queue_ns) / succeeded / 1e6, 3)
        sample["compute_ms"] = round((after.total_ns - before.total_ns) / succeeded / 1e6 - queue_ms, 3)
    return sample


class History:
    """The samples of the last `SECONDS`."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SECONDS)
        self._last: Totals | None = None

    def add(self, totals: Totals) -> None:
        """Take a reading; the first one is where counting begins."""
        if self._last is not None:
            self._samples.append(difference(self._last, totals))
        self._last = totals

    def columns(self) -> dict[str, list[Any]]:
        """A list for each of `COLUMNS`, oldest first, all of one length."""
        return {name: [sample[name] for sample in self._samples] for name in COLUMNS}


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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.sample()
        after = max(due + _INTERVAL, loop.time())  # a second that the loop stood still is not made up for
        self._timer = loop.call_at(after, self._tick, loop, after)

    def sample(self) -> None:
        self.history.add(self._totals())
        self.ticks += 1

    def _totals(self) -> Totals:
        """A pass over the counters of every model, one sum at a time: the event loop does nothing else meanwhile."""
        engine = self._engine
        cache, targets = engine.cache, engine.registry.stats
        counted = targets.values()
        refused = sum([each.refused for each in counted])  # those whose model could not be loaded
        busy = [entry for entry in cache.entries.values() if entry.leases or entry.waiting]
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
            cold=sum([entry.waiting for entry in busy]),
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
