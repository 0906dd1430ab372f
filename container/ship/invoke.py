"""`mme invoke`: a client for people, over plain HTTP or boto3; `mme bench`: many of them.

Sends what any client would send and shows what came back; the request is not checked here, so that the server's own
sentence is what one reads. Times come from the response's `Server-Timing` header.

A client of `mme bench` is a thread that asks again when it was answered. Python's own work limits what they send to
some thousands of requests a second in all: what is measured is the server as a Python client sees it. Each level begins
with a moment that is not counted. Where the server tells whether a model was in memory, the loads are counted.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli import DEFAULT_URL, Command, add_identity, add_region, number, seconds
from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from container.ship.client import HttpResponse, Sender
    from container.ship.requests import Request

_EXAMPLES = """\
examples:
  mme invoke my-endpoint --target bert-0.tar.gz --json request.json      boto3, on AWS
  mme invoke --local http://localhost:8080 --target bert-0.tar.gz --json -      boto3, against `mme local`
  mme invoke --target iris.tar.gz --json '{"inputs":[{"name":"X","shape":[1,4],"datatype":"FP32","data":[5,3,1,0]}]}'
  mme invoke --url http://localhost:9000 --target resnet.tar.gz --npy input=image.npy --output scores.npz
  mme invoke --target pipeline.tar.gz --text TEXT=sentences.txt     a line is an element of a tensor [lines, 1]
  mme invoke --target script.tar.gz --body rows.csv                  the content type is what its name tells
"""
_BENCH_EXAMPLES = """\
examples:
  mme bench http://localhost:8080 --target bert-0.tar.gz --json request.json
  mme bench my-endpoint --target 'bert-{0..49}.tar.gz' --zipf 1.1 --npy input=image.npy --concurrency 1,8,32
      fifty models, some asked for more than others
  mme bench --local http://localhost:8080 --target bert-0.tar.gz --json request.json --seconds 30 --report bench.json
"""
_JSON = "application/json"
_JSON_LINES = "application/jsonlines"  # the answer of a decoupled model: a document each response
_TIMING = re.compile(r'([\w-]+)((?:\s*;\s*\w+=(?:"[^"]*"|[^;,"]*))*)')
_PARAMETER = re.compile(r';\s*(\w+)=(?:"([^"]*)"|([^;,"]*))')
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_TARGETS = 100_000
_TITLES = "clients   answers/s    p50 ms    p90 ms    p99 ms    max ms   errors   loads"
_ROW = "{clients:7}{rate:12.1f}{p50:10.2f}{p90:10.2f}{p99:10.2f}{worst:10.2f}{errors:9}{loads:>8}"


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="ENDPOINT", help="call this SageMaker endpoint through boto3")
    add_sender(parser)
    parser.add_argument("--endpoint", metavar="NAME", help="the same as ENDPOINT")
    parser.add_argument("--target", metavar="NAME", help="the model: TargetModel, such as bert-0.tar.gz")
    add_request(parser)
    parser.add_argument("--inference-id", metavar="ID", help="an id that the server logs")
    text = "write the answer here, as it came; its tensors as arrays where the name ends in .npz"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)


def add_sender(parser: argparse.ArgumentParser) -> None:
    text = f"a server over plain HTTP, or `mme local`, which is asked through boto3; default {DEFAULT_URL}"
    parser.add_argument("--url", help=text)
    parser.add_argument("--local", metavar="URL", help="boto3 against this server, whatever it is")
    parser.add_argument("--timeout", type=seconds, default=70.0, metavar="SECONDS", help="default 70")
    add_identity(parser)
    add_region(parser)


def add_request(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", metavar="FILE", help="a KServe v2 request: a file, - for standard input, or the JSON")
    text = "an input tensor out of a .npy file; may be repeated"
    what.add_argument("--npy", metavar="INPUT=FILE", action="append", help=text)
    text = "an input tensor of a text's lines, or without INPUT= the text as it is; may be repeated"
    what.add_argument("--text", metavar="[INPUT=]FILE", action="append", help=text)
    what.add_argument("--body", metavar="FILE", help="any body, for models that read them: CSV, images, ...")
    parser.add_argument("--content-type", metavar="TYPE", help="of --body and --text; else by the name of --body")
    parser.add_argument("--accept", metavar="TYPE", help="the content type that is wanted back")


def run(arguments: argparse.Namespace) -> int:
    from container.ship.client import sender_of  # noqa: PLC0415 - heavy
    from container.ship.requests import request_of  # noqa: PLC0415 - numpy

    request = request_of(arguments)
    send = sender_of(arguments)
    began = time.perf_counter()
    answer = send(request, arguments.target or "", arguments.inference_id or "")
    took = (time.perf_counter() - began) * 1000
    _show(answer, arguments.output)
    timings = [f"{what} {value}" for what, value in server_timing(answer.headers.get("server-timing", ""))]
    print(" · ".join([*timings, f"round trip {took:.1f} ms"]), file=sys.stderr)
    return 0


def server_timing(header: str) -> list[tuple[str, str]]:
    """The entries of a Server-Timing header, in order: the metric, and its description or milliseconds as text."""
    found = []
    for name, parameters in _TIMING.findall(header):
        values = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(parameters)}
        value = values.get("desc", "")
        if "dur" in values:
            value = f"{value} {values['dur']} ms".strip()
        found.append((name, value))
    return found


def _show(answer: HttpResponse, output: Path | None) -> None:
    """The answer in a file, as it came or as arrays, or on standard output, each document of JSON indented."""
    if output and output.suffix == ".npz":
        from container.ship.requests import write_arrays  # noqa: PLC0415 - numpy

        write_arrays(output, answer)
        return
    if output:
        output.write_bytes(answer.body)
        return
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    if media_type in {_JSON, _JSON_LINES}:
        for document in answer.body.splitlines() if media_type == _JSON_LINES else (answer.body,):
            print(json.dumps(json.loads(document), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        content_type = answer.headers.get("content-type", "no content type")
        raise invalid_argument(f"the answer is {len(answer.body)} bytes of {content_type}: give --output FILE")
    sys.stdout.buffer.write(answer.body)


def _add_bench_flags(parser: argparse.ArgumentParser) -> None:
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


def expanded(text: str) -> list[str]:
    """The names that `bert-{0..49}.tar.gz` stands for."""
    found = _RANGE.search(text)
    if not found:
        return [text]
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < _MOST_TARGETS:
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


def run_bench(arguments: argparse.Namespace) -> int:
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
    print(_TITLES, flush=True)
    measured = []
    for count in clients:
        level = _measure(send, request, targets, weights, count, arguments.seconds)
        measured.append(asdict(level))
        print(_ROW.format_map(asdict(level) | ({"loads": "-"} if level.loads is None else {})), flush=True)
    if arguments.report:
        arguments.report.write_text(json.dumps(measured, indent=2))
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
    began = time.perf_counter()
    counts_from, ends = began + seconds * _WARM_UP, began + seconds * (1 + _WARM_UP)

    def client(number: int) -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        chooser = random.Random(_SEED + number)  # noqa: S311 - the same models in the same order every time
        while (start := time.perf_counter()) < ends:
            target = chooser.choices(targets, weights)[0]
            what = _ask(send, request, target)
            if start >= counts_from:
                found.append((time.perf_counter() - start, what))
        return found

    with ThreadPoolExecutor(count, "client") as clients:
        found = [each for answers in clients.map(client, range(count)) for each in answers]
    return level_of(count, found, time.perf_counter() - counts_from)


def _ask(send: Sender, request: Request, target: str) -> str:
    """What came of a request: `hit`, `miss`, `answer` where the server tells neither, or `error`."""
    try:
        timing = send(request, target, "").headers.get("server-timing", "")
    except MmeError as error:
        if error.kind is Kind.INVALID_ARGUMENT:  # credentials that expire meanwhile and the like end nothing but this
            time.sleep(0.1)
        return "error"
    return next((what for what in ("hit", "miss") if f"cache;desc={what}" in timing), "answer")


COMMANDS = (
    Command("invoke", "send one request and print the answer", _EXAMPLES, _add_flags, run),
    Command(
        "bench",
        "measure a server or an endpoint: rates and latencies by concurrency",
        _BENCH_EXAMPLES,
        _add_bench_flags,
        run_bench,
    ),
)
