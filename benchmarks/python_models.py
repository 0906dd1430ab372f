"""What a Python model costs: mme against Triton's own Python backend, in one run.

    python -m benchmarks.python_models [--peer FOLDER] [--seconds 2] [--repeats 5] [--json FILE]

Both servers get the same repository, run the same Python with the same numpy, and are measured in turn, so that a
machine whose speed drifts cheats both alike; what is printed is the median of each, and the median of the ratios of
each turn. The peer is unpacked into FOLDER on first use (see `fetch_triton`); without one, ours is measured alone.
Needs perf_analyzer for the first part: `python -m benchmarks.fetch_perf_analyzer FOLDER` prints its path, to be put
into PERF_ANALYZER.

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
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import load, servers
from benchmarks.fetch_triton import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
_LOADS = {"mme": 20, "Triton": 5}  # after the first; the peer takes a second and a half for each
_CONCURRENCIES = (1, 8, 32)
_NONE = ("", "", "")
_AIMS = {  # by wire and model: at each concurrency
    "": {"adding_batched": ("≥ 1.2", "≥ 1.3", "≥ 1.3"), "adding": _NONE, "adding_sequences": _NONE},
    " over gRPC": {"adding_batched": _NONE},
    " on gRPC streams": {"adding_batched": _NONE, "adding_sequences": _NONE},
}


@dataclass
class Row:
    """One thing measured: the values of each turn, ours and the peer's, and what ours is to be."""

    part: str
    what: str
    unit: str
    aim: str = ""
    values: dict[str, list[float]] = field(default_factory=lambda: {"mme": [], "Triton": []})

    def median(self, server: str) -> float | None:
        """Of one server; None if it was not measured."""
        return statistics.median(self.values[server]) if self.values[server] else None

    def ratio(self) -> float | None:
        """Ours to the peer's: of each turn where they took turns, else of the medians."""
        ours, theirs = self.values["mme"], self.values["Triton"]
        if not theirs:
            return None
        if len(ours) != len(theirs):
            return statistics.median(ours) / statistics.median(theirs)
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


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


def starters(peer: Triton | None, *, empty: bool = False, grpc: bool = False) -> Start:
    """How each server is started for a repository; `empty`: without its models, which are loaded on request."""
    ours: Start = {"mme": lambda folder: servers.managed_mme() if empty else servers.mme(folder, grpc=grpc)}
    if peer is None:
        return ours
    return {**ours, "Triton": lambda repository: servers.triton(peer, repository, explicit=empty, grpc=grpc)}


def measure_adding(start: Start, seconds: int, repeats: int, wire: str = "") -> Iterator[Row]:
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
                part = f"{model}{wire}, {concurrency} at a time"
                rows = (
                    Row(part, "infer/s", "", aim),
                    Row(part, "p50", "ms"),
                    Row(part, "p99", "ms"),
                    Row(part, "processor time an answer", "µs"),
                )
                for name, server in list(running.items()) * repeats:
                    result = load.perf_analyzer(
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
                    _append(rows, name, (result.rate, result.p50, result.p99, result.cpu))
                yield from rows


def _adding_request(model: str, *, batched: bool = False) -> load.Request:
    array = np.ones((1, 16) if batched else 16, np.float32)
    return load.binary_request(model, {"INPUT0": array, "INPUT1": array})


def measure_large(start: Start, repeats: int) -> Iterator[Row]:
    """A large tensor, there and back."""
    array = np.random.default_rng(0).normal(size=_LARGE // 4).astype(np.float32)
    request = load.binary_request("large", {"INPUT0": array})
    part = f"{_LARGE >> 20} MiB in and out"
    rows = Row(part, "time", "ms"), Row(part, "bytes both ways", "GB/s"), Row(part, "worth in copies", "")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder, "large", _IDENTITY, 1, [-1])
        clients = {name: Client(stack.enter_context(begin(folder))) for name, begin in start.items()}
        for client in clients.values():
            client.time(request)
        for name, client in list(clients.items()) * 4 * repeats:
            took = client.time(request)
            _append(rows, name, (took * 1e3, 2 * _LARGE / took / 1e9, took / copying(array)))
    yield from rows


def _append(rows: tuple[Row, ...], server: str, values: tuple[float, ...]) -> None:
    for row, value in zip(rows, values, strict=True):
        row.values[server].append(value)


def copying(array: np.ndarray) -> float:
    """Seconds to copy an array onto memory that is there already."""
    target = np.zeros_like(array)
    began = time.perf_counter()
    np.copyto(target, array)
    return time.perf_counter() - began


def measure_loads(start: Start) -> Iterator[Row]:
    """The start of light models one after another, and the memory of all of them."""
    loading = Row("light model", "from the request to load it to its answer", "ms", "< 60")
    memory = Row("light model", "private memory that it adds", "MiB", "< 15")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"light{index}" for index in range(1 + max(_LOADS.values()))]
        for name in names:
            write_model(Path(folder), name, _ADDING, 2, [16])
        for name, begin in start.items():
            with begin(Path(folder)) as server:
                client = Client(server)
                first, *others = names[: 1 + _LOADS[name]]
                client.load(Path(folder, first), managed=name == "mme")
                client.time(_adding_request(first))
                before = server.private_memory()
                for each in others:
                    loading.values[name].append(client.load(Path(folder, each), managed=name == "mme") * 1e3)
                    client.time(_adding_request(each))
                memory.values[name].append((server.private_memory() - before) / len(others) / (1 << 20))
    yield from (loading, memory)


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
        ratio = row.ratio()
        shown = [_number(row.median(name)) for name in ("mme", "Triton")]
        table.add_row(
            row.part if row.part != part else "", row.what, row.unit, *shown, f"{ratio:.2f}" if ratio else "", row.aim
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
    document = [
        {**asdict(row), "median": median, "ratio": row.ratio()} for row, median in zip(rows, medians, strict=True)
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
    parser.add_argument("--seconds", type=int, default=2, help="of each of perf_analyzer's windows (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every turn's figures")
    parser.add_argument("--only", choices=("adding", "grpc", "stream", "large", "light"), help="one part")
    arguments = parser.parse_args()
    peer = find_peer(arguments.peer)
    by_grpc = starters(peer, grpc=True)
    parts = {
        "adding": lambda: measure_adding(starters(peer), arguments.seconds, arguments.repeats),
        "grpc": lambda: measure_adding(by_grpc, arguments.seconds, arguments.repeats, " over gRPC"),
        "stream": lambda: measure_adding(by_grpc, arguments.seconds, arguments.repeats, " on gRPC streams"),
        "large": lambda: measure_large(starters(peer), arguments.repeats),
        "light": lambda: measure_loads(starters(peer, empty=True)),
    }
    show((row for name, part in parts.items() if arguments.only in {None, name} for row in part()), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
