"""Plots of what was measured, for docs/benchmarks.md.

    python -m benchmarks.plots docs/plots --cache cache.json --python-models python.json --streams streams.json
    python -m benchmarks.plots docs/plots --growth growth.json

The files are those that `benchmarks.cache`, `benchmarks.python_models` and `benchmarks.streams` write by --json, and
`benchmarks.growth` by --save. Needs matplotlib, which nothing else does: pip install matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.growth import read, slope

_OURS, _THEIRS, _AIM = "#2f6f9f", "#c9a24b", "#a03030"
_LINES = (_OURS, _THEIRS, _AIM, "#5d8a4a")
_TITLES = {
    "threads": "threads of the server",
    "memory": "memory",
    "idle": "an idle server",
    "scrape": "GET /metrics",
    "load": "a cold load, and an unload",
    "sigterm": "SIGTERM to the end",
    "list": "GET /models",
    "post": "POST /models, DELETE",
    "archive": "an archive of 1,000 files",
    "limiter": "the rate limiter",
    "workers": "a model's process",
}
_NUMBER = re.compile(r"\d+(\.\d+)?")


def plot_ratios(rows: list[dict[str, Any]], path: Path) -> None:
    """Each ratio as a bar, with its aim as a line: left of a "≤", right of a "≥"."""
    shown = [row for row in rows if row["ratio"] is not None and row["target"]][::-1]
    figure, axes = plt.subplots(figsize=(8.6, 0.42 * len(shown) + 0.9), layout="constrained")
    axes.barh(range(len(shown)), [row["ratio"] for row in shown], height=0.62, color=_OURS)
    for index, row in enumerate(shown):
        aim = float(_NUMBER.search(row["target"])[0])  # type: ignore[index]  # every aim has one
        axes.plot([aim, aim], [index - 0.42, index + 0.42], color=_AIM, linewidth=2)
        axes.annotate(
            f" {row['ratio']:.2f}, aim {row['target']}", (max(row["ratio"], aim), index), va="center", fontsize=8
        )
    axes.set_yticks(range(len(shown)), [f"{row['part']}: {row['what'].split(' (')[0]}" for row in shown], fontsize=8)
    axes.set_xlim(0, 1.45 * max(row["ratio"] for row in shown))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def plot_python_models(rows: list[dict[str, Any]], path: Path) -> None:
    """Answers a second of ours and of the peer's, by clients: batched, not batched, and over gRPC."""
    panels = {"adding_batched": "dynamic batching", "adding": "no batching", "adding_batched over gRPC": "over gRPC"}
    _plot_rates(
        {
            title: [row for row in rows if row["what"] == "answers/s" and row["part"].startswith(f"{model}, ")]
            for model, title in panels.items()
        },
        "answers a second",
        path,
    )


def plot_streams(rows: list[dict[str, Any]], path: Path) -> None:
    """Responses a second of ours and of the peer's, by clients, each way of streaming."""
    _plot_rates(
        {
            way: [row for row in rows if row["what"] == "responses/s" and row["part"].startswith(f"{way}, ")]
            for way in ("generate_stream", "gRPC stream")
        },
        "responses a second",
        path,
    )


def _plot_rates(panels: dict[str, list[dict[str, Any]]], unit: str, path: Path) -> None:
    """Rates of ours and of the peer's side by side, by clients; a panel without rows is left out."""
    shown = {title: rows for title, rows in panels.items() if rows}
    figure, all_axes = plt.subplots(1, len(shown), figsize=(8.6, 3), sharey=True, squeeze=False, layout="constrained")
    for axes, (title, rows) in zip(all_axes[0], shown.items(), strict=True):
        clients = [_NUMBER.search(row["part"])[0] for row in rows]  # type: ignore[index]  # "adding, 8 at a time"
        for server, color, shift in (("mme", _OURS, -0.2), ("Triton", _THEIRS, 0.2)):
            heights = [row["median"][server] for row in rows]
            bars = axes.bar([index + shift for index in range(len(rows))], heights, 0.38, color=color, label=server)
            axes.bar_label(bars, [f"{height / 1000:.1f}k" for height in heights], fontsize=7)
        axes.set_xticks(range(len(rows)), clients)
        axes.set_xlabel("clients")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel(unit)
    all_axes[0][0].legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def plot_growth(saved: dict[str, dict[str, dict[int, float]]], path: Path) -> None:
    """Each part on log-log axes, its curves with their slopes; of a second checkout dashed."""
    parts = list(dict.fromkeys(curve.partition(": ")[0] for curves in saved.values() for curve in curves))
    rows = -(-len(parts) // 3)
    figure, all_axes = plt.subplots(rows, 3, figsize=(10, 2.7 * rows), squeeze=False, layout="constrained")
    for axes in all_axes.flat[len(parts) :]:
        axes.set_visible(False)
    for part, axes in zip(parts, all_axes.flat, strict=False):
        for curves, style in zip(saved.values(), ("-", "--", ":"), strict=False):
            for (curve, points), color in zip(_of_part(curves, part), _LINES, strict=False):
                label = f"{curve} (slope {slope(points):.2f})"
                axes.plot(
                    list(points), list(points.values()), style, color=color, marker="o", markersize=3, label=label
                )
        axes.set(xscale="log", yscale="log")
        axes.set_title(_TITLES[part], fontsize=9)
        axes.tick_params(labelsize=7, which="both")
        low, high = axes.get_ylim()
        axes.set_ylim(
            low / 1.3, high * 8
        )  # slopes are read as angles only where axes span decades; room for the legend
        axes.legend(frameon=False, fontsize=7, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _of_part(curves: dict[str, dict[int, float]], part: str) -> list[tuple[str, dict[int, float]]]:
    return [(curve.partition(": ")[2], points) for curve, points in curves.items() if curve.startswith(f"{part}: ")]


def _rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where the plots go")
    parser.add_argument("--cache", type=Path, help="what benchmarks.cache wrote")
    parser.add_argument("--python-models", type=Path, help="what benchmarks.python_models wrote")
    parser.add_argument("--streams", type=Path, help="what benchmarks.streams wrote")
    parser.add_argument("--growth", type=Path, help="what benchmarks.growth wrote")
    arguments = parser.parse_args()
    mpl.rcParams |= {"svg.hashsalt": "mme", "svg.fonttype": "none", "font.family": "sans-serif"}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.cache:
        plot_ratios(json.loads(arguments.cache.read_text()), arguments.folder / "cache.svg")
    if arguments.python_models:
        plot_python_models(_rows(arguments.python_models), arguments.folder / "python_models.svg")
    if arguments.streams:
        plot_streams(_rows(arguments.streams), arguments.folder / "streams.svg")
    if arguments.growth:
        plot_growth(read(arguments.growth), arguments.folder / "growth.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
