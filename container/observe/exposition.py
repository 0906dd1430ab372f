"""Prometheus's text format: what it writes of a family, of a sample, and of numbers that take several samples. PURE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_number: Callable[[float], str] = floatToGoString  # typed


def family_head(name: str, text: str, kind: str) -> str:
    """Return how a family of samples begins, of a kind that the format knows."""
    described = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {described}\n# TYPE {name} {kind}\n"


def labels_of(labels: Mapping[str, str]) -> str:
    """Return labels as a sample has them, by name."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def sample(name: str, labels: str, value: float) -> str:
    """Return one sample, with labels as `labels_of` writes them."""
    number = _number(value) if value else "0.0"
    return f"{name}{{{labels}}} {number}\n" if labels else f"{name} {number}\n"


def samples(name: str, labels: str, values: Iterable[tuple[str, float]]) -> str:
    """Return a sample of each value, which has further labels."""
    before = f"{labels}," if labels else ""
    return "".join([sample(name, before + more, value) for more, value in values])


def histogram(name: str, labels: str, counted: tuple[Sequence[float], Sequence[int], float]) -> str:
    """Return a histogram's samples.

    Args:
        name: its family's.
        labels: as of `sample`.
        counted: its bounds, ascending; how many are up to each bound and over the one before it, the last of them those
            over all; and their sum.
    """
    bounds, counts, total = counted
    before, reached, lines = f"{labels}," if labels else "", 0, []
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        reached += count
        lines.append(sample(f"{name}_bucket", f'{before}le="{_number(bound)}"', reached))
    return "".join([*lines, sample(f"{name}_count", labels, reached), sample(f"{name}_sum", labels, total)])


def summary(name: str, labels: str, counted: tuple[Iterable[tuple[float, float]], int, float]) -> str:
    """Return a summary's samples: of the value of each quantile, of how many there are, and of their sum."""
    quantiles, count, total = counted
    lines = samples(name, labels, [(f'quantile="{quantile:g}"', value) for quantile, value in quantiles])
    return lines + sample(f"{name}_count", labels, count) + sample(f"{name}_sum", labels, total)
