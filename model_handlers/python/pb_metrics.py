"""`pb_utils.MetricFamily` and `Metric`: numbers that a model counts for operators, who see them in `/metrics`.

What is counted comes together in the server, see `model_handlers.metrics`: several instances of a model, and several
models, that use one name and the same labels count into one metric. `value` tells what this process has counted into
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import MmeError
from model_handlers.metrics import METRICS, MetricKind
from model_handlers.python.hosted import hosted
from model_handlers.python.pb_errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers import metrics


class Metric:
    """One metric of a family: the numbers of one set of labels. Made by `MetricFamily.Metric`."""

    __slots__ = ("_kind", "_metric", "_name", "_owner")

    def __init__(self, metric: metrics.Metric, owner: object) -> None:
        self._metric = metric
        self._owner = owner
        self._name = metric.family.name
        self._kind = metric.family.kind

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge; counters only grow."""
        doing = "increment metric value"
        self._check(doing, "Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and not 0 <= value < math.inf:
            what = "can only be incremented monotonically by non-negative values."
            raise TritonModelException(f"Failed to {doing}: {self._kind_name()} {what} Metric '{self._name}': {value}")
        self._metric.add(float(value), self._owner)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check("set metric value", "Set", MetricKind.GAUGE)
        self._metric.set(float(value))

    def observe(self, value: float) -> None:
        """Count a value into a histogram."""
        self._check("observe metric value", "Observe", MetricKind.HISTOGRAM)
        self._metric.observe(float(value))

    def value(self) -> float:
        """What a counter or a gauge stands at, as far as this process has counted."""
        self._check("get metric value", "Value", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._metric.value

    def _check(self, doing: str, method: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise TritonModelException(f"Failed to {doing}: {self._kind_name()} does not support {method}")

    def _kind_name(self) -> str:
        return f"TRITONSERVER_METRIC_KIND_{self._kind.name}"


class MetricFamily:
    """Metrics of one name, which differ in their labels.

    Raises:
        TritonModelException: for an unknown kind, for a name that is none or the server's own, and for one that is
            taken by a family of another kind.
    """

    COUNTER: ClassVar[int] = 0
    GAUGE: ClassVar[int] = 1
    HISTOGRAM: ClassVar[int] = 2

    def __init__(self, name: str, description: str, kind: int = COUNTER) -> None:
        if kind not in _KINDS:
            raise TritonModelException(f"metric family '{name}' has kind {kind!r}; use one of MetricFamily's constants")
        try:
            self._family = METRICS.family(name, description, _KINDS[kind])
        except MmeError as error:
            raise TritonModelException(error.message) from None

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802 - its interface
        """The metric of these labels: the same one each time. `buckets` are a histogram's upper bounds, ascending.

        Raises:
            TritonModelException: for labels or buckets that are none.
        """
        if labels is not None and not isinstance(labels, Mapping):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        bounds = self._bounds(buckets)
        try:
            owner = hosted()
            return Metric(METRICS.metric(self._family, labels or {}, bounds, owner), owner)
        except MmeError as error:
            raise TritonModelException(f"Failed to create metric. {error.message}") from None

    def _bounds(self, buckets: Sequence[float] | None) -> tuple[float, ...]:
        has_buckets = self._family.kind is MetricKind.HISTOGRAM
        if buckets is None:
            if has_buckets:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return ()
        if not isinstance(buckets, list | tuple):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if not has_buckets:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return tuple(map(float, buckets))


_KINDS = {
    MetricFamily.COUNTER: MetricKind.COUNTER,
    MetricFamily.GAUGE: MetricKind.GAUGE,
    MetricFamily.HISTOGRAM: MetricKind.HISTOGRAM,
}
