"""Numbers that the code of models counts for operators: families by name, metrics of a family by their labels.

As in Triton equal names and labels mean one metric, across all models' processes: counters and histograms add up; a
gauge stands where it was set last, raised by all that raised it since. Counters and histograms live as long as the
server, so that nothing makes them fall; a gauge until the last process that told of it has ended. Threads may count at
the same time, in the middle of counting too: a collection of garbage runs code of models.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Standing = list[Any]


_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# How the names of the server's own families begin, and those of Triton that it may come to have.
_RESERVED = (
    "mme_",
    "nv_inference_",
    "nv_cache_",
    "nv_model_",
    "nv_gpu_",
    "nv_cpu_",
    "nv_energy_",
    "nv_pinned_",
    "nv_trt_",
)
_LONGEST = 1000  # characters of a name, a description or a label's value
_MOST_LABELS = 32
_MOST_BUCKETS = 200


class MetricKind(Enum):
    """What a family's metrics are."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def check_family(name: Any, description: Any) -> None:
    """Refuse a name of a family that is none, or that is the server's. Raises MmeError: INVALID_ARGUMENT."""
    if not _is_text(name) or not _is_text(description):
        raise invalid_argument(
            f"name and description of a metric family must be texts of at most {_LONGEST} characters, got "
            f"{str(name)[:100]!r}"
        )
    if not _NAME.fullmatch(name):
        raise invalid_argument(f"metric family '{name}': a name is made of letters, digits, '_' and ':'")
    if name.startswith(_RESERVED):
        raise invalid_argument(
            f"metric family '{name}': names that begin with {', '.join(_RESERVED)} are the server's own"
        )


def check_labels(family: str, kind: MetricKind, labels: Mapping[str, str]) -> None:
    """Refuse labels of a metric that are none. Raises as `check_family`."""
    if len(labels) > _MOST_LABELS:
        raise invalid_argument(f"metric '{family}' has {len(labels)} labels, at most {_MOST_LABELS} are allowed")
    for name, value in labels.items():
        if not _is_text(name) or not _is_text(value):
            raise invalid_argument(
                f"metric '{family}': labels and their values must be texts of at most {_LONGEST} characters, got "
                f"{str(name)[:100]!r}: {str(value)[:100]!r}"
            )
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise invalid_argument(
                f"metric '{family}' has label '{name}': a label is made of letters, digits and '_', and does not "
                "begin with a digit or '__'"
            )
        if name == "le" and kind is MetricKind.HISTOGRAM:
            raise invalid_argument(f"metric '{family}': label 'le' is that of a histogram's buckets")


def check_buckets(family: str, kind: MetricKind, buckets: Sequence[float]) -> None:
    """Refuse upper bounds of a histogram that are none, or of another kind of metric. Raises as `check_family`."""
    if (kind is MetricKind.HISTOGRAM) != bool(buckets):
        raise invalid_argument(f"metric '{family}': histograms need buckets, others have none")
    if len(buckets) > _MOST_BUCKETS:
        raise invalid_argument(f"metric '{family}' has {len(buckets)} buckets, at most {_MOST_BUCKETS} are allowed")
    if not all(math.isfinite(bound) for bound in buckets) or list(buckets) != sorted(set(buckets)):
        raise invalid_argument(f"metric '{family}': buckets must ascend, got {list(buckets)}")


def _is_text(value: Any) -> bool:
    """Whether it can be told: halves of characters have no form anywhere."""
    try:
        return isinstance(value, str) and len(value) <= _LONGEST and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


_MOST_METRICS = 10_000  # of a process, all families together


class ModelMetric:
    """The numbers of one set of labels."""

    def __init__(
        self, metrics: ModelMetrics, family: ModelMetricFamily, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._metrics = metrics
        self.family = family
        self.labels = dict(labels)
        self.buckets = tuple(buckets)  # a histogram's upper bounds, ascending; () for others
        # observations up to each bound and over the one before it; the last is of those over all
        self.counts = [0] * (len(self.buckets) + 1)
        self._value = 0.0  # of a counter; where a gauge was set last; the sum of a histogram's observations
        self._sets = 0  # how often a gauge was set
        self.shares: dict[object, float] = {}  # a gauge's owners, and by how much each raised it since it was set
        self._number = 0  # what the other side calls it, 0 while it does not know it

    @property
    def value(self) -> float:
        """Where a counter or gauge stands; the sum of a histogram's observations."""
        with self._metrics.lock:
            return self._value + sum(self.shares.values())

    def add(self, value: float, owner: object = None, counts: Sequence[int] = ()) -> None:
        """Raise it: a gauge for as long as the owner is there, if it has that one, a histogram by `counts`, too."""
        with self._metrics.lock:
            if owner in self.shares:
                self.shares[owner] += value
            else:
                self._value += value
            if counts:
                self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
            self._metrics.changed(self)

    def set(self, value: float) -> None:
        with self._metrics.lock:
            self._value = value
            self._sets += 1
            self.shares = dict.fromkeys(self.shares, 0.0)
            self._metrics.changed(self)

    def observe(self, value: float) -> None:
        with self._metrics.lock:
            self.counts[bisect_left(self.buckets, value)] += 1
            self._value += value
            self._metrics.changed(self)

    def read(self) -> MetricReading:
        with self._metrics.lock:
            return MetricReading(self.labels, self.value, self.buckets, tuple(self.counts))

    def standing(self, number: int) -> Standing:
        """Where it stands, to be told; `number` is what it is called from the first time on, when it is described."""
        family, value = self.family, self.value
        more = list(self.counts) if family.kind is MetricKind.HISTOGRAM else self._sets
        told: Standing = [self._number or number, value if math.isfinite(value) else str(value), more]
        if self._number:
            return told
        self._number = number
        return [*told, [family.name, family.description, family.kind.value, self.labels, self.buckets]]


@dataclass(slots=True)
class ModelMetricFamily:
    """Metrics of one name, by their labels, sorted; the first to make it says what it is."""

    name: str
    description: str
    kind: MetricKind
    metrics: dict[tuple[tuple[str, str], ...], ModelMetric]

    def series(self) -> set[str]:
        if self.kind is MetricKind.HISTOGRAM:
            return {f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count"}
        return {self.name}


@dataclass(frozen=True, slots=True)
class MetricReading:
    """What a metric stood at when it was looked at; fields as `ModelMetric`'s."""

    labels: dict[str, str]
    value: float
    buckets: tuple[float, ...]
    counts: tuple[int, ...]


class ModelMetrics:
    """All families of one process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._families: dict[str, ModelMetricFamily] = {}
        self._series: dict[str, str] = {}  # a sample's name → its family's
        self._count = 0
        self._dirty: dict[ModelMetric, None] = {}
        self._numbers = 0
        self._when_dirty: Callable[[], None] | None = None
        self._gauges: dict[object, set[ModelMetric]] = {}

    def family(self, name: str, description: str, kind: MetricKind) -> ModelMetricFamily:
        """The family of a name, a new one if there is none. INVALID_ARGUMENT: no name, the server's, or another's."""
        check_family(name, description)
        with self.lock:
            known = self._families.get(name)
            if known is None:
                return self._new_family(ModelMetricFamily(name, description, kind, {}))
        if known.kind is not kind:
            raise invalid_argument(f"metric family '{name}' is a {known.kind.value} already")
        return known

    def _new_family(self, family: ModelMetricFamily) -> ModelMetricFamily:
        for series in family.series():
            if series in self._series:
                raise invalid_argument(
                    f"metric family '{family.name}' would show '{series}', which family '{self._series[series]}' has"
                )
        self._check_room()
        self._series.update(dict.fromkeys(family.series(), family.name))
        self._families[family.name] = family
        self._count += 1
        return family

    def metric(
        self, family: ModelMetricFamily, labels: Mapping[str, str], buckets: Sequence[float] = (), owner: object = None
    ) -> ModelMetric:
        """The metric of these labels: the same one each time. A gauge ends with its `owner`. Raises as `family`."""
        check_labels(family.name, family.kind, labels)
        check_buckets(family.name, family.kind, buckets)
        key = _key(labels)
        with self.lock:
            metric = family.metrics.get(key)
            if metric is None:
                self._check_room()
                metric = family.metrics[key] = ModelMetric(self, family, labels, buckets)
                self._count += 1
            if owner is not None and family.kind is MetricKind.GAUGE:
                self._gauges.setdefault(owner, set()).add(metric)
                metric.shares.setdefault(owner, 0.0)
        if metric.buckets != tuple(buckets):
            raise invalid_argument(f"metric '{family.name}' has buckets {list(metric.buckets)} already")
        return metric

    def _check_room(self) -> None:
        if self._count >= _MOST_METRICS:
            raise invalid_argument(
                f"there are {self._count} metrics already: labels are for a few values, not for each request's"
            )

    def release(self, owner: object) -> None:
        """An owner of gauges has ended: those go that have no other."""
        with self.lock:
            for metric in self._gauges.pop(owner, ()):
                del metric.shares[owner]
                if not metric.shares:
                    del metric.family.metrics[_key(metric.labels)]
                    self._dirty.pop(metric, None)  # changes are not asked for where metrics of others come together
                    self._count -= 1

    # -- what has changed ----------------------------------------------------------------------------------------

    def when_dirty(self, tell: Callable[[], None]) -> None:
        """Have `tell` called whenever there are changes again, on any thread, in the middle of anything."""
        self._when_dirty = tell
        if self._dirty:
            tell()

    def changed(self, metric: ModelMetric) -> None:
        """The metric has changed. Under the lock."""
        first = not self._dirty
        self._dirty[metric] = None
        if first and self._when_dirty is not None:
            self._when_dirty()

    # [[7, 2.0, 0, [name, description, kind, labels, buckets]], [9, 1.5, 3], [4, 12.0, [1, 0, 5]], …]
    #
    # Metrics go by numbers that the process gave them. Behind a number there is where the metric stands, and how often
    # a gauge was set, or what a histogram counted; `worker.channel.MetricReceiver` takes it.
    def changes(self) -> list[Standing]:
        """Where those stand that have changed since this was last called."""
        found: list[Standing] = []
        with self.lock:
            dirty, self._dirty = self._dirty, {}
            for metric in dirty:
                self._numbers += 1
                found.append(metric.standing(self._numbers))
        return found

    # -- what there is -------------------------------------------------------------------------------------------

    def read(self) -> Iterator[tuple[ModelMetricFamily, Iterator[MetricReading]]]:
        """Return families by name, and metrics by labels, each as it stands when the iterator comes to it."""
        with self.lock:
            found = [(family, list(family.metrics.items())) for _, family in sorted(self._families.items())]
        return ((family, (metric.read() for _, metric in sorted(metrics))) for family, metrics in found if metrics)


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


METRICS = ModelMetrics()  # one a process
