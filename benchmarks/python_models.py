"""What a Python model costs: mme against Triton's own Python backend, in one run.

    python -m benchmarks.python_models [--peer FOLDER] [--seconds 2] [--repeats 5] [--json FILE]
    python -m benchmarks.python_models --against CHECKOUT [--only PART]

Both servers get the same repository, run the same Python with the same numpy, and are measured in turn, so that a
machine whose speed drifts cheats both alike; what is printed is the median of each, and the median of the ratios of
each turn. The peer is unpacked into FOLDER on first use (see `fetch_triton`); without one, ours is measured alone.
Needs perf_analyzer for the first part: `python -m benchmarks.fetch_perf_analyzer FOLDER` prints its path, to be put
into PERF_ANALYZER. With `--against` the other server is one of another checkout: see `benchmarks.against`.

    adding    numpy's sum and difference of two FP32[16], by perf_analyzer with binary tensors over HTTP: batched, and
              without (as in Triton's example, which says nothing of batches); and as steps of sequences, 20 each
    grpc      the batched one over gRPC
    stream    the batched one, and steps of sequences, on a stream of gRPC for each client
    large     16 MiB in and out of a model that returns its input, one client; a copy's worth is what copying them
              once takes in memory
    loading   from the request for a light model until its answer; the first, which starts the fork server, is left out
    memory    what a light model adds to the private memory of all processes together, after its first answer
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import against, load, servers
from benchmarks.against import Row
from benchmarks.fetch_triton import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from benchmarks.fetch_triton import Triton
    from benchmarks.servers import Server

_ADDING = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
"""
_IDENTITY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
_BATCHED = "max_batch_size: 64\ndynamic_batching {}\n"
_SEQUENCES = """\
max_batch_size: 64
sequence_batching {
  oldest { max_candidate_sequences: 64 }
  control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }]
}
"""
_STEPS = 20  # of each sequence, then a client begins another one
_LARGE = 16 << 20
_MORE = 4  # times as many turns where one takes little: of large tensors and loads
_CONCURRENCIES = (1, 8, 32)
_NONE = ("", "", "")
_AIMS = {  # by wire and model: at each concurrency
    "": {"adding_batched": ("≥ 1.2", "≥ 1.3", "≥ 1.3"), "adding": _NONE, "adding_sequences": _NONE},
    " over gRPC": {"adding_batched": _NONE},
    " on gRPC streams": {"adding_batched": _NONE, "adding_sequences": _NONE},
}


def write_model(repository: Path, name: str, code: str, pairs: int, dims: list[int], config: str = "") -> None:
    """A Python model of `pairs` inputs and as many outputs, all of them FP32 of the same dims."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    tensors = "".join(
        f'{side} [{{ name: "{side.upper()}{index}" data_type: TYPE_FP32 dims: {dims} }}]\n'
        for side in ("input", "output")
        for index in range(pairs)
    )
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{config}{tensors}')


Start = dict[str, "Callable[[Path], AbstractContextManager[Server]]"]


def starters(
    commands: Mapping[str, Path], peer: Triton | None = None, *, empty: bool = False, grpc: bool = False
) -> Start:
    """How each server is started for a repository; `empty`: without its models, which are loaded on request."""

    def ours(where: Path, folder: Path) -> AbstractContextManager[Server]:
        return servers.managed_mme(commands=where) if empty else servers.mme(folder, grpc=grpc, commands=where)

    start: Start = {name: functools.partial(ours, where) for name, where in commands.items()}
    if peer is not None:
        start["Triton"] = functools.partial(servers.triton, peer, explicit=empty, grpc=grpc)
    return start


def measure_adding(start: Start, seconds: float, repeats: int, wire: str = "") -> Iterator[Row]:
    """Throughput, latency and processor time under load, over HTTP or as one of `_AIMS` says."""
    program = load.find_perf_analyzer()
    if program is None:
        print("(perf_analyzer is not there: what a small batch costs is left out)", file=sys.stderr)
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder / "models", "adding_batched", _ADDING, 2, [16], _BATCHED)
        write_model(folder / "models", "adding", _ADDING, 2, [16])
        write_model(folder / "models", "adding_sequences", _ADDING, 2, [16], _SEQUENCES)
        data = folder / "data.json"
        content = {"content": [index + 0.5 for index in range(16)], "shape": [16]}
        steps = [{"INPUT0": content, "INPUT1": content}] * _STEPS
        data.write_text(json.dumps({"data": [steps]}))
        running = {name: stack.enter_context(begin(folder / "models")) for name, begin in start.items()}
        for name in ("adding_batched", "adding"):
            for server in running.values():
                Client(server).time(_adding_request(name, batched=name != "adding"))  # it may have yet to be loaded
        for model, aims in _AIMS[wire].items():
            for concurrency, aim in zip(_CONCURRENCIES, aims, strict=True):
                rows = against.result_rows(f"{model}{wire}, {concurrency} at a time", aim)

                def measure(server: Server, model: str = model, concurrency: int = concurrency) -> load.Result:
                    return load.perf_analyzer(
                        program,
                        server.address,
                        model,
                        data,
                        server.pid,
                        concurrency=concurrency,
                        seconds=seconds,
                        grpc=server.grpc,
                        stream="streams" in wire,
                    )

                yield from against.measure_in_turns(running, repeats, rows, measure)


def _adding_request(model: str, *, batched: bool = False) -> load.Request:
    array = np.ones((1, 16) if batched else 16, np.float32)
    return load.binary_request(model, {"INPUT0": array, "INPUT1": array})


def measure_large(start: Start, repeats: int) -> Iterator[Row]:
    """A large tensor, there and back."""
    array = np.random.default_rng(0).normal(size=_LARGE // 4).astype(np.float32)
    request = load.binary_request("large", {"INPUT0": array})
    part = f"{_LARGE >> 20} MiB in and out"
    rows = Row(part, "time", "ms"), Row(part, "bytes both ways", "GB/s", "", "rate"), Row(part, "worth in copies", "")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder, "large", _IDENTITY, 1, [-1])
        running = {name: stack.enter_context(begin(folder)) for name, begin in start.items()}
        clients = {name: Client(server) for name, server in running.items()}
        for client in clients.values():
            client.time(request)
        for name in against.order(running, _MORE * repeats):
            took = clients[name].time(request)
            against.append(rows, name, (took * 1e3, 2 * _LARGE / took / 1e9, took / copying(array)))
    yield from rows


def copying(array: np.ndarray) -> float:
    """Seconds to copy an array onto memory that is there already."""
    target = np.zeros_like(array)
    began = time.perf_counter()
    np.copyto(target, array)
    return time.perf_counter() - began


def measure_loads(start: Start, repeats: int) -> Iterator[Row]:
    """The start of light models one after another, and the memory that each adds."""
    rows = (
        Row("light model", "from the request to load it to its answer", "ms", "< 60"),
        Row("light model", "private memory that it adds", "MiB", "< 15"),
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {name: stack.enter_context(begin(folder)) for name, begin in start.items()}
        clients = {name: Client(server) for name, server in running.items()}
        for turn in range(1 + _MORE * repeats):
            model = f"light{turn}"
            write_model(folder, model, _ADDING, 2, [16])
            for name in list(running)[:: -1 if turn % 2 else 1]:
                before = running[name].private_memory()
                took = clients[name].load(folder / model, managed=name != "Triton")
                clients[name].time(_adding_request(model))
                if turn:  # the first one starts what all have in common
                    added = running[name].private_memory() - before
                    against.append(rows, name, (took * 1e3, added / (1 << 20)))
    yield from rows


class Client:
    """One connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.address)
        self._buffer = bytearray(_LARGE + (1 << 20))

    def time(self, request: load.Request) -> float:
        """Seconds until the last byte of the answer."""
        return self._ask(request.path, request.body, request.headers)

    def load(self, folder: Path, *, managed: bool) -> float:
        """Seconds to load the model in a folder: as SageMaker does it, or by KServe's repository extension."""
        if managed:
            body = json.dumps({"model_name": folder.name, "url": str(folder)}).encode()
            return self._ask("/models", body, {"Content-Type": "application/json"})
        return self._ask(f"/v2/repository/models/{folder.name}/load", b"", {})

    def _ask(self, path: str, body: bytes, headers: dict[str, str]) -> float:
        began = time.perf_counter()
        self._connection.request("POST", path, body, headers)
        answer = self._connection.getresponse()
        view = memoryview(self._buffer)
        size = 0
        while count := answer.readinto(view[size:]):
            size += count
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {bytes(view[: min(size, 500)])!r}")
        return time.perf_counter() - began


def as_table(rows: list[Row]) -> Table:
    """What was measured, side by side."""
    table = Table("", "", "unit", title=None)
    for heading in ("mme", "Triton", "ratio", "aim"):
        table.add_column(heading, justify="right")
    part = ""
    for row in rows:
        if part and row.part != part:
            table.add_section()
        ratios = row.ratios("mme", "Triton")
        shown = [_number(row.median(name)) for name in ("mme", "Triton")]
        table.add_row(
            row.part if row.part != part else "",
            row.what,
            row.unit,
            *shown,
            f"{statistics.median(ratios):.2f}" if ratios else "",
            row.aim,
        )
        part = row.part
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_json(rows: list[Row]) -> str:
    """The same with the values of each turn."""
    medians = [{name: row.median(name) for name in row.values} for row in rows]
    ratios = [row.ratios("mme", "Triton") for row in rows]
    document = [
        {**asdict(row), "median": median, "ratio": statistics.median(ratio) if ratio else None}
        for row, median, ratio in zip(rows, medians, ratios, strict=True)
    ]
    return json.dumps({"cores": os.cpu_count(), "rows": document}, indent=2)


def show(measured: Iterable[Row], file: Path | None) -> None:
    """Measure, and print a table; write it all into a file, if one is named."""
    print(f"{load.setting()}\n")
    rows = list(measured)
    Console(width=None if sys.stdout.isatty() else 120).print(as_table(rows))
    if file is not None:
        file.write_text(as_json(rows))


def find_peer(folder: Path | None) -> Triton | None:
    """The peer, None where there is none; why is told."""
    if folder is None:
        print("(without --peer, mme is measured alone)", file=sys.stderr)
        return None
    try:
        return fetch(folder)
    except (RuntimeError, OSError) as error:
        print(f"(the peer can't be had, mme is measured alone: {error})", file=sys.stderr)
        return None


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="where Triton is, or is to be unpacked")
    parser.add_argument("--seconds", type=float, help="of each of perf_analyzer's windows (default 2, --against 0.33)")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every turn's figures")
    parser.add_argument("--only", choices=("adding", "grpc", "stream", "large", "light"), help="one part")
    against.add_arguments(parser)
    arguments = parser.parse_args()
    commands = against.environments(arguments)
    peer = None if arguments.against else find_peer(arguments.peer)
    seconds = arguments.seconds or (0.33 if arguments.against else 2)
    repeats = arguments.pairs if arguments.against else arguments.repeats
    by_http, by_grpc = starters(commands, peer), starters(commands, peer, grpc=True)
    parts = {
        "adding": lambda: measure_adding(by_http, seconds, repeats),
        "grpc": lambda: measure_adding(by_grpc, seconds, repeats, " over gRPC"),
        "stream": lambda: measure_adding(by_grpc, seconds, repeats, " on gRPC streams"),
        "large": lambda: measure_large(by_http, repeats),
        "light": lambda: measure_loads(starters(commands, peer, empty=True), repeats),
    }
    measured = (row for name, part in parts.items() if arguments.only in {None, name} for row in part())
    if arguments.against:
        return against.report(measured, arguments, arguments.json)
    show(measured, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
