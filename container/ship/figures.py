"""The figures of a measurement: which models are asked for, how many clients ask, percentiles. PURE."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Level:
    """What so many clients saw.

    Attributes:
        clients: how many.
        rate: answers a second.
        p50, p90, p99, worst: milliseconds of an answer.
        answers, errors: how many.
        loads: answers that waited for a load; None where the server does not tell.
    """

    clients: int
    rate: float
    p50: float
    p90: float
    p99: float
    worst: float
    answers: int
    errors: int
    loads: int | None

    @staticmethod
    def titles() -> str:
        """The heading above rows."""
        return "clients   answers/s    p50 ms    p90 ms    p99 ms    max ms   errors   loads"

    def row(self) -> str:
        """A line of the table."""
        times = "".join(f"{value:10.2f}" for value in (self.p50, self.p90, self.p99, self.worst))
        loads = "-" if self.loads is None else str(self.loads)
        return f"{self.clients:7}{self.rate:12.1f}{times}{self.errors:9}{loads:>8}"


def expanded(text: str) -> list[str]:
    """The names that `bert-{0..49}.tar.gz` stands for.

    Raises:
        MmeError: INVALID_ARGUMENT when the range is none.
    """
    found = _RANGE.search(text)
    if not found:
        return [text]
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < _MOST:
        raise invalid_argument(f"--target '{text}': {found[0]} is no range such as {{0..49}}")
    return [f"{text[: found.start()]}{number}{text[found.end() :]}" for number in range(first, last + 1)]


def levels(text: str) -> list[int]:
    """The numbers of clients in `1,8,32`.

    Raises:
        MmeError: INVALID_ARGUMENT when they are none.
    """
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(0 < number <= 1024 for number in numbers):
        raise invalid_argument(f"--concurrency '{text}' is not a list of numbers up to 1024, such as 1,8,32")
    return numbers


def chosen(count: int, exponent: float) -> list[float]:
    """How often each of `count` models is asked for, relative to the others: by Zipf's law, or alike for 0."""
    return [1.0 / (rank**exponent) for rank in range(1, count + 1)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that so large a share of them does not exceed; 0 of none."""
    if not values:
        return 0.0
    return values[max(math.ceil(len(values) * share), 1) - 1]


def level_of(clients: int, found: Sequence[tuple[float, str]], seconds: float) -> Level:
    """The figures of one level.

    Args:
        clients: how many asked.
        found: of each request the seconds, and `hit`, `miss`, `answer` or `error`.
        seconds: how long it took in all.
    """
    times = sorted(took * 1000 for took, what in found if what != "error")
    kinds = [what for _, what in found]
    told = any(what in {"hit", "miss"} for what in kinds)
    return Level(
        clients=clients,
        rate=len(times) / seconds if seconds > 0 else 0.0,
        p50=percentile(times, 0.5),
        p90=percentile(times, 0.9),
        p99=percentile(times, 0.99),
        worst=times[-1] if times else 0.0,
        answers=len(times),
        errors=kinds.count("error"),
        loads=kinds.count("miss") if told else None,
    )
