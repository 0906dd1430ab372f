"""The last minutes of a server, a sample a second. PURE: totals in, differences out.

The server counts upwards and keeps sums; a sample is what two readings of the sums, a second apart, differ by.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

SECONDS = 300  # what is kept
WINDOW = 30  # samples to a line of the table


class Totals(NamedTuple):
    """Sums since the start, and how things stand.

    Attributes:
        hits, misses: requests that found their model in memory, and that did not.
        succeeded, failed: requests answered; those among the failed whose model could not be loaded.
        total_ns, queue_ns: of those that succeeded: from being accepted to the answer; waiting for a lane.
        evictions, loads: of models.
        queued: requests that wait for a lane now.
        cold: requests that wait for their model now.
        resident: models in memory now.
        host, device: bytes that they take, those of loads under way included.
    """

    hits: int = 0
    misses: int = 0
    succeeded: int = 0
    failed: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    evictions: int = 0
    loads: int = 0
    queued: int = 0
    cold: int = 0
    resident: int = 0
    host: int = 0
    device: int = 0


class Sample(NamedTuple):
    """One second: its counts, mean times in milliseconds (None without a request), how things stood at its end."""

    hits: int
    misses: int
    succeeded: int
    failed: int
    queue_ms: float | None
    compute_ms: float | None
    evictions: int
    loads: int
    queued: int
    cold: int
    resident: int
    host: int
    device: int


def difference(before: Totals, after: Totals) -> Sample:
    """What happened between two readings. Counters of a model that was forgotten are no negative counts."""
    succeeded = max(after.succeeded - before.succeeded, 0)
    queue_ms = compute_ms = None
    if succeeded:
        queue_ms = round((after.queue_ns - before.queue_ns) / succeeded / 1e6, 3)
        compute_ms = round((after.total_ns - before.total_ns) / succeeded / 1e6 - queue_ms, 3)
    return Sample(
        max(after.hits - before.hits, 0),
        max(after.misses - before.misses, 0),
        succeeded,
        max(after.failed - before.failed, 0),
        queue_ms,
        compute_ms,
        after.evictions - before.evictions,
        after.loads - before.loads,
        *after[Totals._fields.index("queued") :],
    )


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
        """A list for each field of `Sample`, oldest first, all of one length."""
        if not self._samples:
            return {name: [] for name in Sample._fields}
        return dict(zip(Sample._fields, map(list, zip(*self._samples, strict=True)), strict=True))

    def windows(self) -> list[dict[str, Any]]:
        """The same as a short table: a row for every `WINDOW` seconds, newest first; times are means over requests."""
        samples = list(self._samples)[::-1]
        parts = [samples[start : start + WINDOW] for start in range(0, len(samples), WINDOW)]
        return [_window(number * WINDOW, part) for number, part in enumerate(parts)]


def _window(ago: int, samples: list[Sample]) -> dict[str, Any]:
    succeeded = sum(sample.succeeded for sample in samples)
    spent = sum(((s.queue_ms or 0.0) + (s.compute_ms or 0.0)) * s.succeeded for s in samples)
    return {
        "from": ago + len(samples),
        "to": ago,
        "requests": succeeded + sum(sample.failed for sample in samples),
        "failed": sum(sample.failed for sample in samples),
        "latency_ms": round(spent / succeeded, 3) if succeeded else None,
        "hits": sum(sample.hits for sample in samples),
        "misses": sum(sample.misses for sample in samples),
        "waiting": max(sample.queued + sample.cold for sample in samples),
        "evictions": sum(sample.evictions for sample in samples),
    }
