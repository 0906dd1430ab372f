"""What the page at /dashboard shows, as plain data: the engine's models, and its last minutes. On the event loop only.

`control.http` serves it. `templates/dashboard.html` is a frame without data. `static/dashboard.js` asks for the data
once a second and draws them; `static/draw.js` has the shapes and words. What a client can name (models, errors) becomes
text, never markup.

However many models there are, the document stays small: bars for the largest, a row for as many as a person reads,
and sums of the rest. Names are those that clients use.

The engine counts upwards and keeps sums; a sample is what two readings of the sums, a second apart, differ by. Samples
are taken whether a page is open or not, so that one that is opened shows the minutes before. That costs a reading of
every model's counters once a second, and nothing for any request.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter, deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from container.settings import Mode
from serve.index import DOWN, shown_as
from serve.model.batch_proof import Batching
from serve.statistics import EventType
from serve.threads import Slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from container.settings import Settings
    from model_handlers.base import Footprint
    from serve.cache.entry import Entry
    from serve.engine import Engine
    from serve.statistics import CacheEvent


_log = logging.getLogger("mme.dashboard")
SECONDS = 300  # what is kept
_INTERVAL = 1.0  # seconds
_EVENTS = 60  # that are remembered
_TOGETHER = 256  # models whose counters are read between two rests, in a tenth of a millisecond


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
    """The recent past of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.history = History()  # a sample a second
        self.happenings: deque[Happening] = deque(
            maxlen=_EVENTS
        )  # loads, failed ones, evictions, unloads, newest first
        self.ticks = 0  # samples taken so far
        self._engine = engine
        self._leaving: set[str] = set()
        self._loads = 0
        self._evictions = 0
        self._task: asyncio.Task[None] | None = None
        engine.cache.events.listen(self._hear)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample now and once a second."""
        self._task = loop.create_task(self._watch(loop))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """One that the loop stood still is not made up for."""
        due = loop.time()
        while True:
            try:
                await self.sample()
            except Exception:  # noqa: BLE001 - it is not awaited, and the next sample is as good
                _log.exception("a sample failed")
            due = max(due + _INTERVAL, loop.time())
            await asyncio.sleep(due - loop.time())

    async def sample(self) -> None:
        self.history.add(await self._totals(Slices()))
        self.ticks += 1

    async def _totals(self, slices: Slices) -> Totals:
        """A pass over the counters of every model, some models at a time; the event loop goes on between them."""
        engine = self._engine
        cache, targets = engine.cache, engine.registry.stats
        # loads add to it, on their threads; of an archive's members it has requests that are steps of its own
        stats = [each for (name, _), each in engine.stats.copy().items() if name in targets]
        # of requests that are refused the model could not be loaded
        hits, misses, refused = await _sums(list(targets.values()), ("hits", "misses", "refused"), slices)
        counters = ("success.count", "fail.count", "success.ns", "queue.ns")
        succeeded, failed, total_ns, queue_ns = await _sums(stats, counters, slices)
        busy = [entry for entry in cache.entries.values() if entry.leases or entry.waiting]
        used = cache.room.used()
        return Totals(
            hits=hits,
            misses=misses,
            succeeded=succeeded,
            failed=refused + failed,
            total_ns=total_ns,
            queue_ns=queue_ns,
            evictions=self._evictions,
            loads=self._loads,
            queued=sum([each.queued for entry in busy if entry.resident for each in entry.resident.models()]),
            cold=sum([entry.waiting for entry in busy]),
            resident=len(cache.ready.models),
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
        told = (event.type, event.name, event.why)
        times, since = 1, event.at
        if event.type is EventType.FAILED:
            for each in self.happenings:
                if (each.event.type, each.event.name, each.event.why) == told:
                    times, since = each.times + 1, each.since
                    self.happenings.remove(each)
                    break
        self.happenings.appendleft(Happening(event, times, since))


async def _sums(of: Sequence[Any], counters: Sequence[str], slices: Slices) -> list[int]:
    """Return the sum of each counter. Those of one model are read together, since means are made of them."""
    sums = [0] * len(counters)
    for start in range(0, len(of), _TOGETHER):
        await slices.rest()
        some = of[start : start + _TOGETHER]
        sums = [known + sum(map(attrgetter(name), some)) for known, name in zip(sums, counters, strict=True)]
    return sums


BARS = 60  # models with a bar of their own in a budget
ROWS = 50  # models with a row of their own
_FAILED_ROWS = 10  # of them for models that can't serve, before all others
_LOADS = 12  # loads under way that are listed
_LONGEST_REASON = 400  # characters of an error


class Documents:
    """Makes documents, each at most once a second, however many look at it."""

    def __init__(self, engine: Engine, settings: Settings, watcher: Watcher) -> None:
        self._engine = engine
        self._source = _source(settings)
        self._watcher = watcher
        self._began = time.monotonic()
        self._last: tuple[int, str, dict[str, Any]] | None = None

    def document(self, wanted: str = "") -> dict[str, Any]:
        """What the page shows, with rows for models whose name contains `wanted`."""
        ticks = self._watcher.ticks
        if self._last is None or self._last[:2] != (ticks, wanted):
            self._last = (ticks, wanted, self._made(wanted))
        return self._last[2]

    def _made(self, wanted: str) -> dict[str, Any]:
        now = time.monotonic()
        entries = list(self._engine.cache.entries.values())
        matching = [entry for entry in entries if not wanted or wanted.casefold() in entry.name.casefold()]
        shown = _shown(matching)
        failed = self._failed_requests()
        budgets = _sizes(self._engine.cache.room.budget)
        room = self._engine.origins.room  # of unpacked archives and what was made of them; None where there are none
        loads = sorted((entry.load for entry in entries if entry.load is not None), key=attrgetter("began"))
        return {
            "at": time.time(),
            "source": self._source,
            "uptime": now - self._began,
            "memory": [self._memory(kind, budget, entries, now) for kind, budget in budgets.items()],
            "disk": room and {each: getattr(room, each) for each in ("budget", "used", "archives", "evictions")},
            "counts": {
                "known": len(entries),
                "resident": len(self._engine.cache.ready.models),
                "matching": len(matching),
                "loading": len(loads),
                "failed": sum(_has_failed(entry) for entry in entries),
            },
            "models": [{**_row(entry, now), **self._lacking(entry), "failed": failed[entry.name]} for entry in shown],
            "rest": _rest(matching, shown),
            "loading": [
                {"name": load.name, "seconds": now - load.began, "waiting": len(load.waiters)}
                for load in loads[:_LOADS]
            ],
            "events": [_told(happening) for happening in self._watcher.happenings],
            "history": self._watcher.history.columns(),
        }

    def _lacking(self, entry: Entry) -> dict[str, str]:
        """What is shown otherwise of an ensemble that lacks a step."""
        if not self._engine.registry.lacks_parts(entry):
            return {}
        state, reason = shown_as(entry, lacks_parts=True)
        return {"state": state, "reason": reason[:_LONGEST_REASON]}

    def _failed_requests(self) -> Counter[str]:
        """Requests of each model that failed, those among them whose model could not be loaded."""
        failed: Counter[str] = Counter()
        for (name, _), stats in self._engine.stats.copy().items():  # loads add to it, on their threads
            failed[name] += stats.fail.count
        for name, target in self._engine.registry.stats.items():
            failed[name] += target.refused
        return failed

    def _memory(self, kind: str, budget: int, entries: Iterable[Entry], now: float) -> dict[str, Any]:
        """One budget and how much of it each model takes, the largest first."""
        holding = [(size, entry) for entry in entries if (size := _sizes(entry.footprint).get(kind, 0))]
        bars = heapq.nlargest(BARS, holding, key=lambda each: (each[0], each[1].name))
        held = sum(size for size, _ in holding)
        return {
            "kind": kind,
            "budget": budget,
            "held": held,
            "reserved": _sizes(self._engine.cache.room.reserved).get(kind, 0),
            "grown": _sizes(self._engine.grown()).get(kind, 0),
            "uncharged": _sizes(self._engine.cache.room.grown).get(kind, 0),
            "in_flight": self._engine.on_the_way() if kind == "host" else 0,
            "bars": [{**_bar(entry, now), "bytes": size} for size, entry in bars],
            "rest": {"models": len(holding) - len(bars), "bytes": held - sum(size for size, _ in bars)},
        }


def _sizes(footprint: Footprint) -> dict[str, int]:
    """Bytes of each kind of memory that there are any of: `host`, `gpu0`, `gpu1` and so on."""
    kinds = {"host": footprint.host, **{f"gpu{number}": size for number, size in enumerate(footprint.devices)}}
    return {kind: size for kind, size in kinds.items() if size}


def _source(settings: Settings) -> str:
    folders = list(map(str, settings.repositories))
    return {
        Mode.PLATFORM: "models as SageMaker loads them",
        Mode.SINGLE: f"one model in {settings.model_dir}",
        Mode.STORE: f"archives in {settings.model_store}",
        Mode.REPOSITORY: f"the {'repository' if len(folders) == 1 else 'repositories'} {', '.join(folders)}",
    }[settings.mode]


def _has_failed(entry: Entry) -> bool:
    """Whether requests for it are refused until it is mended: it did not load, or its process keeps dying."""
    if entry.resident is not None:
        return entry.resident.is_down()
    return entry.failure is not None and entry.load is None


def _shown(matching: list[Entry]) -> list[Entry]:
    """Those with a row: of those that have failed the most wanted, by name; then the rest by rank."""
    failed = heapq.nlargest(_FAILED_ROWS, filter(_has_failed, matching), key=lambda entry: entry.stats.misses)
    failed.sort(key=lambda entry: entry.name)
    first = set(map(id, failed))
    others = [entry for entry in matching if id(entry) not in first]
    return failed + heapq.nlargest(ROWS - len(failed), others, key=_rank)


def _rank(entry: Entry) -> tuple[bool, int, bool, float, str]:
    """In memory before the rest, there by size, which does not jump about; of the rest those used last."""
    size = entry.footprint.host + entry.footprint.device
    return entry.resident is not None, size, entry.load is not None, entry.last_used, entry.name


def _bar(entry: Entry, now: float) -> dict[str, Any]:
    since = now if entry.leases else entry.last_used
    state = "FAILED" if _has_failed(entry) else entry.state.shown
    return {"name": entry.name, "state": state, "idle": max(now - since, 0.0) if since else None}


def _row(entry: Entry, now: float) -> dict[str, Any]:
    resident = entry.resident
    queued = sum(model.queued for model in resident.models()) if resident is not None else 0
    return {
        **_bar(entry, now),
        "reason": _reason(entry)[:_LONGEST_REASON],
        "versions": sorted(resident.versions) if resident is not None else [],
        "pinned": entry.pinned,
        "held": _sizes(entry.footprint),
        "hits": entry.stats.hits,
        "misses": entry.stats.misses,
        "leases": entry.leases,
        "waiting": queued + entry.waiting,
    }


def _reason(entry: Entry) -> str:
    """Why it is not in memory, or what is wrong though it is."""
    if entry.resident is None:
        return entry.reason
    if entry.resident.is_down():
        return DOWN
    if entry.failure is not None:
        return f"could not be loaded anew: {entry.failure.message}"
    refuted = any(model.stats.batching == Batching.REFUTED.value for model in entry.resident.models())
    return "does not batch: requests are executed one by one; write max_batch_size: 0 to say so" if refuted else ""


def _rest(matching: list[Entry], shown: list[Entry]) -> dict[str, int]:
    listed = {entry.name for entry in shown}
    others = [entry.footprint for entry in matching if entry.name not in listed] if len(matching) > len(shown) else []
    return {
        "models": len(others),
        "host": sum(footprint.host for footprint in others),
        "device": sum(footprint.device for footprint in others),
    }


def _told(happening: Happening) -> dict[str, Any]:
    event = happening.event
    return {
        "at": event.at,
        "since": happening.since,
        "times": happening.times,
        "deed": event.type.value,
        "name": event.name,
        "why": event.why[:_LONGEST_REASON],
        "host": event.footprint.host,
        "device": event.footprint.device,
        "seconds": event.ns / 1e9,
        "download_seconds": event.download_ns / 1e9,
    }
