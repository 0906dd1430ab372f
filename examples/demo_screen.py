"""What the demo shows: tables that grow as requests are answered, sentences, digits, and the sums.

On a terminal a table is redrawn in place and holds the newest rows that fit; anywhere else (a pipe, a log) each row is
one plain line. Knows answers, and nothing of how they were got.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from rich.console import Console

    from examples.demo_client import Answer

LEFT = ("target model", "wire", "cache", "evicted", "sent", "came back")
WRAPPED = ("sent", "came back")  # on a narrow terminal
REQUEST_WIDTHS = {
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
CALL_WIDTHS = {"target model": 24, "sent": 38, "came back": 34, "ms": 8}
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


class GrowingTable:
    """Rows as they come; a context manager, so that the terminal is given back whatever happens.

    Args:
        console: where it is shown.
        widths: the columns, and how wide each is where rows are plain lines.
    """

    def __init__(self, console: Console, widths: Mapping[str, int]) -> None:
        self._widths = widths
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None
        self._rows: deque[tuple[Mapping[str, str], str]] = deque(maxlen=max(5, console.height - LINES_AROUND_TABLE))

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        else:
            self._print({column: column for column in self._widths})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def grow(self, row: Mapping[str, str], *, style: str = "", caption: str = "") -> None:
        """Show another row, a text for each column. The caption below the table is the newest row's."""
        if self._live:
            self._rows.append((row, style))
            self._live.update(self._table(caption))
        else:
            self._print(row)

    def _table(self, caption: str) -> Table:
        table = Table(caption=caption)
        for column in self._widths:
            table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column not in WRAPPED)
        for row, style in self._rows:
            table.add_row(*row.values(), style=style)
        return table

    def _print(self, row: Mapping[str, str]) -> None:
        cells = [
            row[column].ljust(width) if column in LEFT else row[column].rjust(width)
            for column, width in self._widths.items()
        ]
        print("  ".join(cells).rstrip(), flush=True)


class RequestTable(GrowingTable):
    """What each request cost, and what it did to the cache."""

    def __init__(self, console: Console, tally: Tally) -> None:
        super().__init__(console, REQUEST_WIDTHS)
        self._tally = tally

    def add(self, answer: Answer, loaded_models: int) -> None:
        """Count an answer and show it. `loaded_models` is how many are in memory after it."""
        self._tally.answers.append(answer)
        caption = f"{len(self._tally.answers)} requests, {self._tally.evictions} evictions"
        self.grow(self._row(answer, loaded_models), style="green" if answer.hit else "yellow", caption=caption)

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


class CallTable(GrowingTable):
    """What was sent to a model, what came back, and how long after the call that was."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, CALL_WIDTHS)

    def add(self, target: str, sent: str, came_back: str, milliseconds: float, *, loads: bool = False) -> None:
        """Show one call, or one part of what it answered, and whether it had to wait for a load."""
        row = {"target model": target, "sent": sent, "came back": came_back, "ms": f"{milliseconds:.1f}"}
        self.grow(row, style="yellow" if loads else "green")


def show_check(console: Console, sentence: str) -> None:
    """What was found to be right."""
    console.print(f"\n  \u2713 {sentence}", style="green", highlight=False, soft_wrap=True)


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


def _pixels(line: NDArray[Any]) -> str:
    shades = [SHADES[int(value) * (len(SHADES) - 1) // 16] for value in line]
    return "".join(shade * 2 for shade in shades).ljust(DIGIT_WIDTH)  # a character is half as wide as high
