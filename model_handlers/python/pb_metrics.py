"""`pb_utils.MetricFamily` and `Metric`: numbers that a model keeps about itself.

They are kept in the process of the model, where the model can read them; they do not reach `/metrics` yet.
Threads of the model may count at the same time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar

from model_handlers.python.pb_errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_lock = threading.Lock()


class Metric:
    """One metric of a family: the numbers of one set of labels. Made by `MetricFamily.Metric`."""

    def __init__(self, family: str, kind: int, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._family = family
        self._kind = kind
        self.labels = dict(labels)
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self._value = 0.0

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge; counters only grow."""
        self._check("increment", MetricFamily.COUNTER, MetricFamily.GAUGE)
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException(f"metric '{self._family}' is a counter and cannot be incremented by {value}")
        with _lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check("set", MetricFamily.GAUGE)
        self._value = value

    def observe(self, value: float) -> None:
        """Count a value into a histogram."""
        self._check("observe", MetricFamily.HISTOGRAM)
        with _lock:
            self.counts[bisect_left(self.buckets, value)] += 1
            self._value += value

    def value(self) -> float:
        """What a counter or a gauge stands at."""
        self._check("value", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return self._value

    def _check(self, method: str, *kinds: int) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"metric '{self._family}' is a {_NAMES[self._kind]} and has no '{method}'")


class MetricFamily:
    """Metrics of one name, which differ in their labels. Kept in this process; not shown in `/metrics` yet.

    Raises:
        TritonModelException: for an unknown kind, and for a name that is taken by a family of another kind.
    """

    COUNTER: ClassVar[int] = 0
    GAUGE: ClassVar[int] = 1
    HISTOGRAM: ClassVar[int] = 2

    def __init__(self, name: str, description: str, kind: int = COUNTER) -> None:
        if kind not in _NAMES:
            raise TritonModelException(f"metric family '{name}' has kind {kind!r}; use one of MetricFamily's constants")
        self.name = name
        self.description = description
        self.kind = kind
        with _lock:
            known, self._metrics = _families.setdefault(name, (kind, {}))
        if known != kind:
            raise TritonModelException(f"metric family '{name}' is a {_NAMES[known]} already")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802 - its interface
        """The metric of these labels: the same one each time. `buckets` are a histogram's upper bounds, ascending."""
        if (self.kind == self.HISTOGRAM) != bool(buckets):
            raise TritonModelException(f"metric '{self.name}': histograms need buckets, others have none")
        bounds = tuple(buckets or ())
        if list(bounds) != sorted(set(bounds)):
            raise TritonModelException(f"metric '{self.name}': buckets must ascend, got {list(bounds)}")
        key = tuple(sorted((labels or {}).items()))
        with _lock:
            return self._metrics.setdefault(key, Metric(self.name, self.kind, labels or {}, bounds))


_NAMES = {MetricFamily.COUNTER: "counter", MetricFamily.GAUGE: "gauge", MetricFamily.HISTOGRAM: "histogram"}
_families: dict[str, tuple[int, dict[tuple[tuple[str, str], ...], Metric]]] = {}
