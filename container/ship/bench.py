"""`mme bench`: how many requests a server answers, and how long they take, by the number of clients.

A client is a thread that asks again when it was answered. Python's own work limits what they send to some thousands of
requests a second in all: what is measured is the server as a Python client sees it. Each level begins with a moment
that is not counted. Where the server tells whether a model was in memory, the loads are counted.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import math
import random
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli.command import Command, number
from container.ship.invoke import add_request, add_sender
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from container.ship.client import Sender
    from container.ship.requests import Request


_EXAMPLES = """\
examples:
  mme bench http://localhost:8080 --target bert-0.tar.gz --json request.json
  mme bench my-endpoint --target 'bert-{0..49}.tar.gz' --zipf 1.1 --npy input=image.npy --concurrency 1,8,32
      fifty models, some asked for more than others
  mme bench --local http://localhost:8080 --target bert-0.tar.gz --json request.json --seconds 30 --report bench.json
"""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST = 100_000


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", nargs="?", metavar="URL|ENDPOINT", help="a server or `mme local`, or boto3 on AWS")
    add_sender(parser)
    text = "a model; repeatable, and bert-{0..49}.tar.gz names fifty"
    parser.add_argument("--target", metavar="NAME", action="append", help=text)
    add_request(parser)
    parser.add_argument("--concurrency", default="1,2,4,8,16", metavar="N,N...", help="clients; default 1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="for each of them; default 5")
    text = "ask for some models more than for others, with this exponent; by default for all alike"
    parser.add_argument("--zipf", type=number(0, 100), default=0.0, metavar="S", help=text)
    parser.add_argument("--png", type=Path, metavar="FILE", help="without effect, until 0.3")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures as JSON")


@dataclass(frozen=True, slots=True)
class Level:
    """What so many clients saw. Times are milliseconds of an answer; `loads` is None where the server does not tell."""

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
        return "clients   answers/s    p50 ms    p90 ms    p99 ms    max ms   errors   loads"

    def row(self) -> str:
        times = "".join(f"{value:10.2f}" for value in (self.p50, self.p90, self.p99, self.worst))
        loads = "-" if self.loads is None else str(self.loads)
        return f"{self.clients:7}{self.rate:12.1f}{times}{self.errors:9}{loads:>8}"


def expanded(text: str) -> list[str]:
    """The names that `bert-{0..49}.tar.gz` stands for."""
    found = _RANGE.search(text)
    if not found:
        return [text]
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < _MOST:
        raise invalid_argument(f"--target '{text}': {found[0]} is no range such as {{0..49}}")
    return [f"{text[: found.start()]}{number}{text[found.end() :]}" for number in range(first, last + 1)]


def levels(text: str) -> list[int]:
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
    """The figures of one level."""
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


_WARM_UP = 0.1  # of a level's time
_SEED = 7


def run(arguments: argparse.Namespace) -> int:
    from container.ship.client import sender_of  # noqa: PLC0415 - heavy
    from container.ship.requests import request_of  # noqa: PLC0415 - numpy

    request = request_of(arguments)
    clients = levels(arguments.concurrency)
    targets = [target for text in arguments.target or [""] for target in expanded(text)]
    if not 0 < arguments.seconds <= 3600:
        raise invalid_argument(f"--seconds {arguments.seconds:g} is not between 0 and 3600")
    if arguments.png:
        print("bench: --png is without effect, and goes in 0.3: --report has the figures", file=sys.stderr)
    _place(arguments)
    send = sender_of(arguments, max(clients))
    send(request, targets[0], "")  # what is wrong with every request is told by the first
    weights = chosen(len(targets), arguments.zipf)
    print(Level.titles(), flush=True)
    measured = []
    for count in clients:
        level = _measure(send, request, targets, weights, count, arguments.seconds)
        measured.append(level)
        print(level.row(), flush=True)
    if arguments.report:
        arguments.report.write_text(json.dumps([asdict(level) for level in measured], indent=2))
    return 0


def _place(arguments: argparse.Namespace) -> None:
    """URL or ENDPOINT, as the flags that say it more clearly."""
    where = arguments.where or ""
    arguments.endpoint = ""
    arguments.name = ""
    if where.startswith(("http://", "https://")):
        if arguments.url:
            raise invalid_argument(f"two servers: {where} and --url {arguments.url}")
        arguments.url = where
    else:
        arguments.name = where


def _measure(
    send: Sender, request: Request, targets: Sequence[str], weights: Sequence[float], count: int, seconds: float
) -> Level:
    """One level: so many clients, for so long."""
    began = time.perf_counter()
    counts_from, ends = began + seconds * _WARM_UP, began + seconds * (1 + _WARM_UP)
    found: list[list[tuple[float, str]]] = [[] for _ in range(count)]

    def client(number: int) -> None:
        chooser = random.Random(_SEED + number)  # noqa: S311 - the same models in the same order every time
        while (start := time.perf_counter()) < ends:
            target = chooser.choices(targets, weights)[0]
            what = _ask(send, request, target)
            if start >= counts_from:
                found[number].append((time.perf_counter() - start, what))

    threads = [threading.Thread(target=client, args=(number,), name=f"client {number}") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return level_of(count, [each for client in found for each in client], time.perf_counter() - counts_from)


def _ask(send: Sender, request: Request, target: str) -> str:
    """What came of a request: `hit`, `miss`, `answer` where the server tells neither, or `error`."""
    try:
        timing = send(request, target, "").headers.get("server-timing", "")
    except MmeError as error:
        if error.kind is Kind.INVALID_ARGUMENT:  # credentials that expire meanwhile and the like end nothing but this
            time.sleep(0.1)
        return "error"
    return next((what for what in ("hit", "miss") if f"cache;desc={what}" in timing), "answer")


COMMAND = Command(
    "bench", "measure a server or an endpoint: rates and latencies by concurrency", _EXAMPLES, _add_flags, run
)
