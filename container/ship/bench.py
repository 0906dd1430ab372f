"""`mme bench`: how many requests a server answers, and how long they take, by the number of clients.

A client is a thread that asks again when it was answered. Python's own work limits what they send to some thousands of
requests a second in all: what is measured is the server as a Python client sees it. Each level begins with a moment
that is not counted. Where the server tells whether a model was in memory, the loads are counted.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from container.ship.figures import Level, chosen, expanded, level_of, levels
from container.ship.plot import draw, drawing, lines
from container.ship.requests import request_of
from container.ship.senders import sender_of
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from container.ship.requests import Request
    from container.ship.senders import Sender

_WARM_UP = 0.1  # of a level's time
_SEED = 7


def run(arguments: argparse.Namespace) -> int:
    """Measure level by level, print a table, and draw it.

    Raises:
        MmeError: the arguments are wrong, or the first request fails.
    """
    request = request_of(arguments)
    clients = levels(arguments.concurrency)
    targets = [target for text in arguments.target or [""] for target in expanded(text)]
    if not 0 < arguments.seconds <= 3600:
        raise invalid_argument(f"--seconds {arguments.seconds:g} is not between 0 and 3600")
    if arguments.png:
        drawing()  # what is missing is told before minutes are spent on figures
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
    print()
    for line in lines(measured):
        print(line)
    if arguments.report:
        arguments.report.write_text(json.dumps([asdict(level) for level in measured], indent=2))
    if arguments.png:
        draw(measured, arguments.png)
        print(f"drawn into {arguments.png}", file=sys.stderr)
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
