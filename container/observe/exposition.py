"""Prometheus's text format, written by a thread that lets the event loop go on.

A thread that computes keeps Python's lock for 5 ms before another one gets it, and thousands of series take longer than
that. So it rests after each half of a millisecond: while it sleeps, the loop has the lock.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_number: Callable[[float], str] = floatToGoString  # typed
_PIECE_SECONDS = 0.0005
_REST_SECONDS = 0.0005


class Exposition:
    """The text of one scrape.

    Args:
        clock: seconds, as of `time.perf_counter`.
        rest: lets other threads go on for so many seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, rest: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._rest = rest
        self._lines: list[str] = []
        self._pieces: list[bytes] = []
        self._until = clock() + _PIECE_SECONDS

    def family(self, name: str, text: str, kind: str) -> None:
        """Begin a family of samples, of a kind that the format knows."""
        described = text.replace("\\", r"\\").replace("\n", r"\n")
        self._lines.append(f"# HELP {name} {described}\n# TYPE {name} {kind}\n")

    def sample(self, name: str, labels: str, value: float) -> None:
        """Add a sample, with labels as `labels_of` writes them."""
        number = _number(value) if value else "0.0"
        self._lines.append(f"{name}{{{labels}}} {number}\n" if labels else f"{name} {number}\n")
        if self._clock() >= self._until:
            self._pause()

    def one(self, name: str, text: str, kind: str, value: float) -> None:
        """Add a family of one sample without labels."""
        self.family(name, text, kind)
        self.sample(name, "", value)

    def histogram(self, name: str, labels: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add a histogram's samples.

        Args:
            name: its family's.
            labels: as of `sample`.
            bounds: ascending.
            counts: how many are up to each bound and over the one before it; the last is of those over all.
            total: their sum.
        """
        before = f"{labels}," if labels else ""
        reached = 0
        for bound, count in zip((*bounds, math.inf), counts, strict=True):
            reached += count
            self.sample(f"{name}_bucket", f'{before}le="{_number(bound)}"', reached)
        self.sample(f"{name}_count", labels, reached)
        self.sample(f"{name}_sum", labels, total)

    def text(self) -> list[bytes]:
        """Return all of it, in pieces."""
        self._encode()
        return self._pieces

    def _pause(self) -> None:
        self._encode()
        self._rest(_REST_SECONDS)
        self._until = self._clock() + _PIECE_SECONDS

    def _encode(self) -> None:
        self._pieces.append("".join(self._lines).encode())
        self._lines.clear()


def labels_of(labels: Mapping[str, str]) -> str:
    """Return labels as a sample has them, by name."""
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
