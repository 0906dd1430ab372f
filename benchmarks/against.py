"""Two checkouts side by side: what the benchmarks' option `--against CHECKOUT` measures, decides and prints.

Three servers stay up and only one is under load at a time: one of the baseline, one of this checkout, and a second one
of the baseline. Each turn measures all three back to back, every other turn in reverse order, so that a machine whose
speed drifts slows all alike. The ratio of this checkout to the baseline is judged by its median; how far the baseline's
two servers are apart in the same turns says what the run can tell: a limit is missed when the median is beyond it by
more than that ratio's quartile range.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import load, servers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.servers import Server

BASE, THIS, AGAIN = "base", "this", "base again"
_REST = 0.03  # of a processor: servers at rest do not use more
_SETTLE_SECONDS = 30.0
_PACKAGES = ("container", "serve", "model_handlers")
_COLUMNS = ("", "figure", "baseline", "this", "this / baseline", "baseline / itself", "limit", "")


class Quartiles(NamedTuple):
    """The median of some values and the quartiles around it."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of values in any order, interpolated; of a single one itself."""
    if len(values) == 1:
        return Quartiles(*values * 3)
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Limit:
    """What the ratio of this checkout to the baseline may be: at most or at least so much."""

    most: bool
    ratio: float

    def __str__(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.ratio:g}"

    def verdict(self, ratios: Sequence[float], noise: Sequence[float]) -> str:
        """`ok`, `within noise` or `missed`, by the ratios to the baseline and those of the baseline to itself."""
        median, spread = quartiles(ratios).median, quartiles(noise)
        beyond = median - self.ratio if self.most else self.ratio - median
        if beyond <= 0:
            return "ok"
        return "within noise" if beyond <= spread.high - spread.low else "missed"


@dataclass
class Row:
    """One figure of one configuration.

    Attributes:
        aim: what its ratio to the peer is to be, in words.
        judged: how `--against` judges it: "cost" should be small, "rate" large, "" is shown alone.
        values: by server, one of each turn.
    """

    part: str
    what: str
    unit: str
    aim: str = ""
    judged: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)

    def median(self, server: str) -> float | None:
        """Of one server; None if it was not measured."""
        return statistics.median(self.values[server]) if self.values.get(server) else None

    def ratios(self, server: str, to: str) -> list[float]:
        """Of two servers, turn by turn; empty if one was not measured."""
        if not (self.values.get(server) and self.values.get(to)):
            return []
        return [ours / theirs for ours, theirs in zip(self.values[server], self.values[to], strict=True)]


def result_rows(part: str, aim: str = "") -> tuple[Row, ...]:
    """Rows for a configuration that is measured as a `load.Result`; `aim` is that of its rate."""
    return (
        Row(part, "answers/s", "", aim, "rate"),
        Row(part, "p50", "ms"),
        Row(part, "p99", "ms"),
        Row(part, "processor time an answer", "µs", "", "cost"),
    )


def append(rows: Iterable[Row], server: str, values: Iterable[float]) -> None:
    """What one turn measured of a server, a value for each row."""
    for row, value in zip(rows, values, strict=True):
        row.values.setdefault(server, []).append(value)


def order(names: Iterable[str], turns: int) -> Iterator[str]:
    """Whose turn it is: every other turn goes backwards."""
    forward = list(names)
    for turn in range(turns):
        yield from reversed(forward) if turn % 2 else forward


class _Use:
    """What servers use of a processor from now on."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._pids = [server.pid for server in servers]
        self._spent, self._began = self._total(), time.perf_counter()

    def share(self) -> float:
        """Of one processor."""
        return (self._total() - self._spent) / (time.perf_counter() - self._began)

    def _total(self) -> float:
        return sum(map(load.processor_seconds, self._pids))


def settle(running: Iterable[Server], seconds: float = 0.5) -> None:
    """Wait until servers are at rest for so long: until loads' background work and unfinished requests are done."""
    running = list(running)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        use = _Use(running)
        time.sleep(seconds)
        if use.share() < _REST:
            return


def in_turns(running: Mapping[str, Server], turns: int) -> Iterator[tuple[str, Server]]:
    """Each server by name, as in `order`; it is told when those at rest use the processor meanwhile."""
    for name in order(running, turns):
        use = _Use(server for other, server in running.items() if other != name)
        yield name, running[name]
        if (share := use.share()) > _REST:
            print(f"(beside {name!r} the servers at rest used {share:.0%} of a processor)", file=sys.stderr)
        settle([running[name]], 0.05)  # clients leave requests behind when they end


def measure_in_turns(
    running: Mapping[str, Server], turns: int, rows: tuple[Row, ...], measure: Callable[[Server], load.Result]
) -> tuple[Row, ...]:
    """Fill the rows of one configuration."""
    for name, server in in_turns(running, turns):
        result = measure(server)
        append(rows, name, (result.rate, result.p50, result.p99, result.cpu))
    return rows


# -- the option ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--against` and what belongs to it."""
    group = parser.add_argument_group("two checkouts side by side")
    group.add_argument("--against", type=Path, metavar="CHECKOUT", help="a baseline, installed in its own .venv")
    group.add_argument("--pairs", type=int, default=15, help="turns of both (default 15)")
    group.add_argument("--limit-cpu", type=float, default=1.03, help="what costs may grow to (default 1.03 times)")
    group.add_argument("--limit-rate", type=float, default=0.95, help="what rates may fall to (default 0.95 times)")
    group.add_argument("--uncompiled", action="store_true", help="compare though one of them is not compiled")


def environments(arguments: argparse.Namespace) -> dict[str, Path]:
    """The folder of commands that each server is started from, by the server's name; without --against ours alone.

    Raises:
        SystemExit: a checkout has no mme, or one that is not compiled, or not as its sources are now.
    """
    if arguments.against is None:
        return {"mme": servers.COMMANDS}
    base = arguments.against.absolute() / ".venv" / "bin"
    for commands in (base, servers.COMMANDS):
        if not (commands / "mme").exists():
            raise SystemExit(f"There is no {commands / 'mme'}: run `make install` in that checkout.")
        wrong = "" if arguments.uncompiled else unfit(commands)
        if wrong:
            raise SystemExit(f"{wrong}: run `make compiled` there, or compare as they are by --uncompiled.")
    return {BASE: base, THIS: servers.COMMANDS, AGAIN: base}


def unfit(commands: Path) -> str:
    """Why a checkout is not compiled as its sources are now; empty where it is."""
    checkout = commands.parents[1]
    if "compiled" not in version(commands):
        return f"{checkout} is not compiled"
    for library in (each for package in _PACKAGES for each in (checkout / package).rglob("*.so")):
        source = library.with_name(library.name.partition(".")[0]).with_suffix(".py")
        if source.exists() and source.stat().st_mtime > library.stat().st_mtime:
            return f"{source} was edited after it was compiled"
    return ""


def version(commands: Path) -> str:
    """What `mme --version` says."""
    command, env = [commands / "mme", "--version"], servers.own_environment()
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def commit(commands: Path) -> str:
    """The commit that a checkout is at; its folder's name where git knows none."""
    checkout = commands.parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or checkout.name


def report(measured: Iterable[Row], arguments: argparse.Namespace, file: Path | None = None) -> int:
    """Print each row as it is measured and what is missed; the exit status.

    Args:
        measured: the rows, which may still be measured while they are taken.
        arguments: what the command line said.
        file: where every turn's figures go as JSON.
    """
    began = time.monotonic()
    base, ours = arguments.against.absolute() / ".venv" / "bin", servers.COMMANDS
    limits = {
        "cost": Limit(most=True, ratio=arguments.limit_cpu),
        "rate": Limit(most=False, ratio=arguments.limit_rate),
    }
    print(f"Baseline {commit(base)} ({version(base)}), this {commit(ours)} ({version(ours)}); {load.setting()}\n")
    print(f"{_line(_COLUMNS)}\n|---|---|---|---|---|---|---|---|", flush=True)
    rows: list[Row] = []
    missed: list[str] = []
    for row in measured:
        limit = limits.get(row.judged)
        verdict = limit.verdict(row.ratios(THIS, BASE), row.ratios(AGAIN, BASE)) if limit else ""
        first = not rows or rows[-1].part != row.part
        print(_line(cells(row, limit, verdict, first=first)), flush=True)
        rows.append(row)
        missed += [f"{row.part}: {row.what}"] if verdict == "missed" else []
    print(
        f"\nMedians (quartiles) of {arguments.pairs} turns or more, in {(time.monotonic() - began) / 60:.1f} minutes. "
        f"Missed: {'; '.join(missed) or 'none'}."
    )
    if file is not None:
        file.write_text(json.dumps([vars(row) for row in rows], indent=1, ensure_ascii=False))
    return bool(missed)


def cells(row: Row, limit: Limit | None, verdict: str, *, first: bool) -> tuple[str, ...]:
    """A row of the table; its configuration is named in the `first` of several."""
    figures = [_shown(row.values[name], _number) for name in (BASE, THIS)]
    ratios = [_shown(row.ratios(name, BASE), "{:.3f}".format) for name in (THIS, AGAIN)]
    what = f"{row.what}, {row.unit}" if row.unit else row.what
    return row.part if first else "", what, *figures, *ratios, str(limit or ""), verdict


def _shown(values: list[float], number: Callable[[float], str]) -> str:
    low, median, high = map(number, quartiles(values))
    return f"{median} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(columns: Iterable[str]) -> str:
    return f"| {' | '.join(columns)} |"
