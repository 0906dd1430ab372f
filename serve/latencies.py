"""How long requests take, beyond sums: quantiles of the last minute, and what else of latencies is kept.

Nothing is kept unless it is asked for. Touched on the event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
# Triton's, of the time to a first response, where a model's configuration names no others. Milliseconds.
DEFAULT_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)
_WINDOW_SECONDS = 60.0
_MOST = 4096  # values remembered of that time


@dataclass(frozen=True, slots=True)
class Latencies:
    """What of latencies is kept and shown.

    Attributes:
        counters: whether their sums are among the metrics.
        summaries: whether quantiles are kept.
        histograms: whether the time to a first response is kept of models whose configuration does not ask for it.
        quantiles: which.
    """

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = DEFAULT_QUANTILES

    def __str__(self) -> str:
        switches = {"counter": self.counters, "summary": self.summaries, "histogram": self.histograms}
        said = [f"{name}_latencies={str(on).lower()}" for name, on in switches.items()]
        return ",".join((*said, "summary_quantiles=" + ",".join(f"{quantile}:0" for quantile in self.quantiles)))


DEFAULT_LATENCIES = Latencies()


class Summary:
    """Durations: how many, their sum, and quantiles of those of the last minute.

    Attributes:
        count, ns: of all that ever were.
    """

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_MOST)

    def add(self, ns: int, now: float) -> None:
        """Count one that ended at `now`, by `time.monotonic()`."""
        self.count += 1
        self.ns += ns
        self._forget(now)
        self._recent.append((now, ns))

    def quantiles(self, wanted: Sequence[float], now: float) -> list[float]:
        """Nanoseconds, of each quantile; not a number where there is none of the last minute."""
        self._forget(now)
        recent = sorted(ns for _, ns in self._recent)
        if not recent:
            return [float("nan")] * len(wanted)
        return [float(recent[min(int(quantile * len(recent)), len(recent) - 1)]) for quantile in wanted]

    def _forget(self, now: float) -> None:
        """What is of no minute that anybody asks for: it would add up, of hundreds of models."""
        recent = self._recent
        while recent and recent[0][0] < now - _WINDOW_SECONDS:
            recent.popleft()


@dataclass(slots=True)
class Summaries:
    """Those of one version of one model."""

    request: Summary = field(default_factory=Summary)
    queue: Summary = field(default_factory=Summary)
    compute_input: Summary = field(default_factory=Summary)
    compute_infer: Summary = field(default_factory=Summary)
    compute_output: Summary = field(default_factory=Summary)
    cache_hit: Summary = field(default_factory=Summary)
    cache_miss: Summary = field(default_factory=Summary)

    def executed(self, waited_ns: int, total_ns: int, computed_ns: tuple[int, int, int]) -> None:
        """One request succeeded: what it waited and took in all, and input, inference and output of its execution."""
        now = time.monotonic()
        self.request.add(total_ns, now)
        self.queue.add(waited_ns, now)
        for summary, ns in zip(self._computed(), computed_ns, strict=True):
            summary.add(ns, now)

    def hit(self, ns: int) -> None:
        """One request was answered out of the response cache."""
        now = time.monotonic()
        self.request.add(ns, now)
        self.queue.add(0, now)
        self.cache_hit.add(ns, now)

    def missed(self, ns: int) -> None:
        """One was looked for there in vain, and its response was kept."""
        self.cache_miss.add(ns, time.monotonic())

    def _computed(self) -> Iterator[Summary]:
        yield from (self.compute_input, self.compute_infer, self.compute_output)
