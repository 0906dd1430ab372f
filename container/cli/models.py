"""`mme models`: what a server knows of its models, as a table for people or as JSON for programs.

Asks any server that has KServe's repository index; the columns that only this one can fill stay empty for others. One
line a model; several versions share it. The server's own clock, from its Date header, says how long ago something was.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import shutil
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from container.cli import DEFAULT_URL, Command, add_identity, seconds
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    Row = Mapping[str, Any]

_EXAMPLES = """\
examples:
  mme models
  mme models --url http://localhost:9000 --stats     with requests, failures, batch sizes and times
  mme models --watch                                 again every two seconds, until interrupted
  mme models --json | jq '.[] | select(.state == "READY") | .name'
"""
_TITLES = ("MODEL", "VERSION", "STATE", "MEMORY", "GROWN", "LAST USE", "HITS", "MISSES", "WAITING")
_STATS_TITLES = ("REQUESTS", "FAILED", "BATCH", "QUEUE", "COMPUTE")
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H\x1b[?25l", "\x1b[K", "\x1b[J\x1b[?25h"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server; default {DEFAULT_URL}")
    parser.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS", help="default 10")
    add_identity(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stats", action="store_true", help="more columns: requests, failures, batches, mean times")
    how.add_argument("--json", action="store_true", help="the server's repository index as it comes")
    parser.add_argument(
        "--watch", type=seconds, nargs="?", const=2.0, metavar="SECONDS", help="print again and again; default 2"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the index once, or again and again until interrupted."""
    shown = _shown(arguments)
    if arguments.watch is None:
        print(shown)
        return 0
    terminal = sys.stdout.isatty()
    if terminal:
        print("\x1b[2J", end="")
    while True:
        print(_screen(shown) if terminal else shown, end="" if terminal else "\n", flush=True)
        time.sleep(arguments.watch)
        try:
            shown = _shown(arguments)
        except MmeError as error:  # it may come back
            shown = json.dumps({"error": error.message}) if arguments.json else error.message


def _screen(text: str) -> str:
    """As much text as fits over what the terminal shows, without clearing it first, which would flicker."""
    columns, rows = shutil.get_terminal_size()
    lines = (f"{line[:columns]}{_TO_LINE_END}\n" for line in text.splitlines()[: rows - 1])
    return _HOME + "".join(lines) + _TO_SCREEN_END


def _shown(arguments: argparse.Namespace) -> str:
    from container.ship.client import ask, checked_url, identity_of, local_endpoint  # noqa: PLC0415 - http.client

    url, identity = checked_url(arguments.url), identity_of(arguments)
    try:
        index, headers = ask(f"{url}/v2/repository/index", b"{}", arguments.timeout, identity)
    except MmeError:
        local = local_endpoint(url, arguments.timeout, identity)
        if local is None:
            raise
        print(f"{url} is `mme local`: its container is asked, {local.container}", file=sys.stderr)
        url = arguments.url = local.container  # the next time, too
        index, headers = ask(f"{url}/v2/repository/index", b"{}", arguments.timeout, identity)
    if arguments.json:
        return json.dumps(index, indent=None if arguments.watch else 2)
    stats: list[Row] = []
    if arguments.stats:
        stats = ask(f"{url}/v2/models/stats", None, arguments.timeout, identity)[0]["model_stats"]
    if not index:
        return f"no models at {url}: it has loaded none, and lists none that a request would load"
    return "\n".join(_lines(index, stats if arguments.stats else None, _date(headers)))


def _date(headers: Mapping[str, str]) -> datetime:
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - not for --help

    try:
        return parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)


def _lines(index: Iterable[Row], stats: Sequence[Row] | None, now: datetime) -> list[str]:
    """The table: models in memory first, each group by name."""
    models: dict[str, list[Row]] = {}
    for row in index:
        models.setdefault(str(row["name"]), []).append(row)
    ordered = sorted(models.items(), key=lambda item: (not _in_memory(item[1]), item[0]))
    table = [(*_TITLES, *(_STATS_TITLES if stats is not None else ()), "REASON")]
    for name, rows in ordered:
        cells = _cells(name, rows, now)
        if stats is not None:
            refused = int(rows[0].get("cache", {}).get("refused", 0))
            cells += _stats_cells([row for row in stats if row["name"] == name], refused)
        reason = next((str(row["reason"]) for row in rows if row.get("reason")), "")
        table.append((*cells, _one_line(" ".join(reason.split()))))
    return _columns(table)


def _in_memory(rows: Sequence[Row]) -> bool:
    return any(row.get("state") == "READY" for row in rows)


def _cells(name: str, rows: Sequence[Row], now: datetime) -> tuple[str, ...]:
    first = rows[0]
    cache: Row = first.get("cache", {})
    state = str(first.get("state", "not loaded"))
    versions = ",".join(str(row["version"]) for row in rows if row.get("version") and row.get("state") == state)
    if "loading_since" in cache:
        state = f"{state} {span_text(cache['loading_since'], now)}"
    queued = sum(int(row.get("queued", 0)) for row in rows)
    return (
        _one_line(name),
        versions,
        state,
        memory_text(cache),
        f"{cache['grown_bytes'] / 1e6:.1f} MB" if "grown_bytes" in cache else "",
        _last_use(cache, now),
        *(str(cache[key]) if key in cache else "" for key in ("hits", "misses")),
        str(queued) if any("queued" in row for row in rows) else "",
    )


def _one_line(text: str) -> str:
    """A name, or a reason with one in it, without a terminal's commands, which a client could have put there."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def memory_text(cache: Row) -> str:
    parts = [(cache.get("host_bytes", 0), "")]
    parts += [(size, f" GPU {number}") for number, size in enumerate(cache.get("gpu_bytes", []))]
    return " + ".join(f"{size / 1e6:.1f} MB{where}" for size, where in parts if size)


def _last_use(cache: Row, now: datetime) -> str:
    if cache.get("leases"):
        return "now"
    return f"{span_text(cache['last_used'], now)} ago" if "last_used" in cache else ""


def span_text(since: str, now: datetime) -> str:
    """How long ago something was, in the unit that a person would choose."""
    seconds = max((now - datetime.fromisoformat(since)).total_seconds(), 0.0)
    units = (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48))
    unit, length = next(((unit, length) for unit, length, most in units if seconds < length * most), ("d", 86400))
    return f"{seconds / length:.0f} {unit}"


def _stats_cells(rows: Sequence[Row], refused: int) -> tuple[str, ...]:
    """Requests of all versions; means are over successful requests. Refused ones found no model: it did not load."""
    if not rows:
        return ("", str(refused or ""), *[""] * (len(_STATS_TITLES) - 2))
    executions = sum(int(row.get("execution_count", 0)) for row in rows)
    inferences = sum(int(row.get("inference_count", 0)) for row in rows)
    batch = f"{inferences / executions:.1f}" if executions else ""
    succeeded, failed = (_summed(rows, key)[0] for key in ("success", "fail"))
    return (
        str(succeeded),
        str(failed + refused),
        batch,
        *(_mean_ms(*_summed(rows, key)) for key in ("queue", "compute_infer")),
    )


def _summed(rows: Sequence[Row], key: str) -> tuple[int, int]:
    durations = [row.get("inference_stats", {}).get(key, {}) for row in rows]
    return sum(int(each.get("count", 0)) for each in durations), sum(int(each.get("ns", 0)) for each in durations)


def _mean_ms(count: int, ns: int) -> str:
    return f"{ns / count / 1e6:.2f} ms" if count else ""


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Aligned; a column without anything in it but its title stays away."""
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*kept, strict=True)
    ]


COMMAND = Command("models", "list a server's models", _EXAMPLES, _add_flags, run)
