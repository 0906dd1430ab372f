"""What the demo shows: a table of requests that grows as they are answered, sentences, digits, and the sums.

On a terminal the table is redrawn in place and holds the newest rows that fit; anywhere else (a pipe, a log) each
request is one plain line. Knows answers, and nothing of how they were got.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from rich.console import Console

    from examples.demo_client import Answer

LEFT = ("target model", "wire", "cache", "evicted")
WIDTHS = {
    "target model": 20,
    "wire": 6,
    "cache": 5,
    "download ms": 11,
    "load ms": 8,
    "infer ms": 8,
    "round trip ms": 13,
    "loaded": 6,
    "hit ratio": 9,
    "evicted": 0,
}
LINES_AROUND_TABLE = 8
DIGIT_WIDTH = 20
SHADES = " .:-=+*#%@"  # of a pixel, 0 to 16


@dataclass(slots=True)
class Tally:
    """What is counted over all requests."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def hits(self) -> list[Answer]:
        """Answers from models that were in memory."""
        return [answer for answer in self.answers if answer.hit]

    @property
    def misses(self) -> list[Answer]:
        """Answers that had to wait for a load."""
        return [answer for answer in self.answers if not answer.hit]

    @property
    def hit_ratio(self) -> float:
        """Share of requests whose model was in memory."""
        return len(self.hits) / len(self.answers) if self.answers else 0.0

    @property
    def evictions(self) -> int:
        """Models that had to leave memory."""
        return sum(len(answer.evicted) for answer in self.answers)


class RequestTable:
    """The growing table; a context manager, so that the terminal is given back whatever happens."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None
        self._rows: deque[dict[str, str]] = deque(maxlen=max(5, console.height - LINES_AROUND_TABLE))

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        else:
            print("  ".join(_align(column, column) for column in WIDTHS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def add(self, answer: Answer, loaded_models: int) -> None:
        """Count an answer and show it. `loaded_models` is how many are in memory after it."""
        self._tally.answers.append(answer)
        row = self._row(answer, loaded_models)
        if self._live:
            self._rows.append(row)
            self._live.update(self._table())
        else:
            print("  ".join(_align(column, row[column]) for column in WIDTHS).rstrip(), flush=True)

    def _row(self, answer: Answer, loaded_models: int) -> dict[str, str]:
        return {
            "target model": answer.target,
            "wire": answer.wire,
            "cache": "hit" if answer.hit else "miss",
            "download ms": _milliseconds(answer, "download"),
            "load ms": _milliseconds(answer, "load"),
            "infer ms": _milliseconds(answer, "infer"),
            "round trip ms": f"{answer.round_trip:.1f}",
            "loaded": str(loaded_models),
            "hit ratio": f"{self._tally.hit_ratio:.0%}",
            "evicted": ", ".join(answer.evicted),
        }

    def _table(self) -> Table:
        table = Table(caption=f"{len(self._tally.answers)} requests, {self._tally.evictions} evictions")
        for column in WIDTHS:
            table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row.values(), style="green" if row["cache"] == "hit" else "yellow")
        return table


def show_nearest(console: Console, query: str, nearest: Sequence[tuple[float, str, str]]) -> None:
    """A query and the sentences found for it, each with its cosine and its topic."""
    console.print(f"\n  {query}", style="bold", highlight=False)
    for cosine, topic, sentence in nearest:
        console.print(f"    {cosine:5.2f}  {topic:10s} {sentence}", highlight=False, soft_wrap=True)


def show_digits(console: Console, images: NDArray[Any], captions: Sequence[str]) -> None:
    """Images of 8 x 8 pixels (0 to 16) side by side, as many as fit, each with a caption of up to 18 characters."""
    fit = max(1, console.width // DIGIT_WIDTH)
    for line in range(8):
        console.print("".join(_pixels(image[line]) for image in images[:fit]), markup=False, highlight=False)
    console.print("".join(f"{caption:{DIGIT_WIDTH}s}" for caption in captions[:fit]), highlight=False)


def show_summary(console: Console, tally: Tally) -> None:
    """The sums, one line each."""
    console.print(f"  requests     {len(tally.answers)}, {tally.hit_ratio:.0%} of them hits", highlight=False)
    console.print(f"  loads        {len(tally.misses)}", highlight=False)
    console.print(f"  evictions    {tally.evictions}", highlight=False)
    console.print(f"  p50 of hits  {_p50(tally.hits)}", highlight=False)
    console.print(f"  p50 of loads {_p50(tally.misses)}", highlight=False)


def _p50(answers: Sequence[Answer]) -> str:
    return f"{median(answer.round_trip for answer in answers):.1f} ms round trip" if answers else "none"


def _milliseconds(answer: Answer, phase: str) -> str:
    return f"{answer.milliseconds[phase]:.1f}" if phase in answer.milliseconds else "-"


def _align(column: str, text: str) -> str:
    return text.ljust(WIDTHS[column]) if column in LEFT else text.rjust(WIDTHS[column])


def _pixels(line: NDArray[Any]) -> str:
    shades = [SHADES[int(value) * (len(SHADES) - 1) // 16] for value in line]
    return "".join(shade * 2 for shade in shades).ljust(DIGIT_WIDTH)  # a character is half as wide as high
