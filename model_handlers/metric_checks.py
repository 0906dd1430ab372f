"""What metrics of models may be called, so that Prometheus can read them and the server's own stay its own. PURE."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """Refuse a name of a family that is none, or that is the server's.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
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
    """Refuse labels of a metric that are none.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
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
    """Refuse upper bounds of a histogram that are none, and those of another kind of metric.

    Raises:
        MmeError: INVALID_ARGUMENT.
    """
    if (kind is MetricKind.HISTOGRAM) != bool(buckets):
        raise invalid_argument(f"metric '{family}': histograms need buckets, others have none")
    if len(buckets) > _MOST_BUCKETS:
        raise invalid_argument(f"metric '{family}' has {len(buckets)} buckets, at most {_MOST_BUCKETS} are allowed")
    if not all(math.isfinite(bound) for bound in buckets) or list(buckets) != sorted(set(buckets)):
        raise invalid_argument(f"metric '{family}': buckets must ascend, got {list(buckets)}")


def _is_text(value: Any) -> bool:
    """Whether everybody can be told of it: halves of characters have no form anywhere."""
    try:
        return isinstance(value, str) and len(value) <= _LONGEST and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
