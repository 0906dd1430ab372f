"""What the process of a model tells that it has counted, where it arrives: see `model_handlers.metrics`.

None of it is trusted: names are those that Prometheus can read, counters never fall, and neither metrics nor what waits
for its predecessors can grow without bounds.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Any

from model_handlers.errors import MmeError, invalid_argument
from model_handlers.metrics import METRICS, MetricKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.metrics import Metric, Metrics


_metrics_log = logging.getLogger("mme.metrics")
_MOST_SHOWN = 1000  # metrics of one process
_MOST_KNOWN = 20_000  # twice as many as a process makes
_MOST_EARLY = 100  # tellings
_MOST_WARNINGS = 10


class Counted:
    """The metrics of one process. Any thread may take what it tells.

    What comes with the answers to batches may be far ahead of what is still to be read between them: who takes the
    former, and can wait, waits for the latter where too much has come early.

    Args:
        metrics: where they come together with those of others.
        model: whose process it is, for the log.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._changed = threading.Condition()
        self._known: dict[int, Metric | None] = {}  # None: refused
        self._early: dict[int, Any] = {}  # tellings whose predecessor is still to come
        self._last = 0
        self._warnings = 0

    def take(self, telling: Any) -> None:
        """Add what it tells, see `Metrics.changes`.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: no process of ours tells so.
        """
        number, changes = telling
        with self._changed:
            if number <= self._last or (number > self._last + 1 and self.crowded):
                raise ValueError(f"metrics out of turn: told {str(number)[:50]} behind {self._last}")
            self._early[int(number)] = changes
            while self._last + 1 in self._early:
                self._last += 1
                self._apply(self._early.pop(self._last))
            self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """Whether so much came early that nothing more is taken before what it waits for."""
        return len(self._early) >= _MOST_EARLY

    def await_room(self, seconds: float) -> None:
        """Wait, for so many seconds at most, while it is crowded."""
        with self._changed:
            self._changed.wait_for(lambda: not self.crowded, seconds)

    def close(self) -> None:
        """It tells no more."""
        self._metrics.release(self)

    def _apply(self, changes: Any) -> None:
        for number, what, *values in changes:
            if what == "new":
                if len(self._known) >= _MOST_KNOWN:
                    raise ValueError(f"more than {_MOST_KNOWN} metrics")
                self._known[int(number)] = self._met(*values)
                continue
            metric = self._known[number]
            if metric is not None:
                _DEEDS[what](metric, self, *values)

    def _met(self, name: Any, description: Any, kind: Any, labels: Any, buckets: Any) -> Metric | None:
        try:
            if len(self._known) >= _MOST_SHOWN:
                raise invalid_argument(f"'{name}' is one too many: {_MOST_SHOWN} metrics of a process are shown")
            family = self._metrics.family(name, description, MetricKind(kind))
            return self._metrics.metric(family, dict(labels), tuple(map(float, buckets)), self)
        except MmeError as error:
            self._warnings += 1
            if self._warnings <= _MOST_WARNINGS:
                _metrics_log.warning("a metric is not shown: %s", error, extra={"target_model": self._model})
            return None


def _add(metric: Metric, owner: Counted, value: Any) -> None:
    number, kind = float(value), metric.family.kind
    if kind is MetricKind.HISTOGRAM or (kind is MetricKind.COUNTER and not 0 <= number < math.inf):
        raise ValueError(f"{str(value)[:50]} to add to a {kind.value}")
    metric.add(number, owner)


def _set(metric: Metric, _: Counted, value: Any) -> None:
    if metric.family.kind is not MetricKind.GAUGE:
        raise ValueError(f"a {metric.family.kind.value} to set")
    metric.set(float(value))


def _observe(metric: Metric, _: Counted, counts: Any, total: Any) -> None:
    if metric.family.kind is not MetricKind.HISTOGRAM or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError(f"observations of a {metric.family.kind.value}: {str(counts)[:200]}")
    metric.merge(counts, float(total))


_DEEDS: dict[str, Callable[..., None]] = {"add": _add, "set": _set, "observe": _observe}
