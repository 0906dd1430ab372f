"""Metrics as Prometheus reads them: under the names that they are written with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_BARE_COUNTER = re.compile(r"^(# TYPE \S+(?<!_total)) counter$", re.MULTILINE)


def families_of(text: str) -> list[Metric]:
    """The families of a text; the library's parser would add `_total` to counters whose names lack it."""
    return list(text_string_to_metric_families(_BARE_COUNTER.sub(r"\1 untyped", text)))
