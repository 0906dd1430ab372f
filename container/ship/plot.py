"""Figures as pictures: bars on the terminal, and a PNG by matplotlib where that is installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from container.ship.figures import Level

_WIDTH = 50
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def lines(levels: Sequence[Level]) -> Iterator[str]:
    """A chart of rates and one of latencies, bar by bar; each level a line."""
    most = max((level.rate for level in levels), default=0.0)
    yield "answers a second"
    for level in levels:
        yield f"{level.clients:7} {_bar(level.rate, most)} {level.rate:.0f}"
    most = max((level.p99 for level in levels), default=0.0)
    yield ""
    yield "milliseconds: p50 █ and up to p99 ░"
    for level in levels:
        solid = _bar(level.p50, most)
        rest = round(level.p99 / most * _WIDTH) - len(solid) if most else 0
        yield f"{level.clients:7} {solid}{'░' * rest} {level.p50:.2f} … {level.p99:.2f}"


def _bar(value: float, most: float) -> str:
    eighths = round(value / most * _WIDTH * 8) if most else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def drawing() -> ModuleType:
    """What `draw` draws with.

    Raises:
        MmeError: UNSUPPORTED where matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        reason = "--png needs matplotlib: pip install 'mme[plot]'; the table and --report do without"
        raise MmeError(Kind.UNSUPPORTED, reason) from error


def draw(levels: Sequence[Level], path: Path) -> None:
    """The same into a PNG.

    Raises:
        MmeError: UNSUPPORTED where matplotlib is not installed.
    """
    figure = drawing().Figure(figsize=(9, 4), layout="constrained")
    rates, times = figure.subplots(1, 2)
    clients = [level.clients for level in levels]
    rates.plot(clients, [level.rate for level in levels], marker="o")
    rates.set_title("answers a second")
    for name in ("p50", "p90", "p99"):
        times.plot(clients, [getattr(level, name) for level in levels], marker="o", label=name)
    times.set_title("milliseconds")
    times.set_yscale("log")
    times.legend()
    for axes in (rates, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(each) for each in clients])
        axes.set_xlabel("clients")
        axes.grid(visible=True, alpha=0.3)
    rates.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)
