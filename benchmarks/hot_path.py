"""What the path of one request costs: mme against a bare ONNX Runtime loop, or against another checkout, in one run.

    python -m benchmarks.hot_path [--seconds 4] [--repeats 3] [--only GROUP …]
    python -m benchmarks.hot_path --against CHECKOUT [--only GROUP …]

Serves a small MLP (where the server is the cost) and the MiniLM sentence encoder (where the model is), and compares
with `session.run` called in a loop in a process of its own, in turn, so that a machine whose speed drifts cheats both
alike. Reads as ratios; absolute figures belong to the machine. Needs wrk on the PATH; perf_analyzer is used if it is
there (`make bench` fetches it). What `--against` does is told in `benchmarks.against`.

    binary, json   the MLP over HTTP/1.1, by wrk with 1, 8 and 32 connections
    grpc           the same over gRPC, by perf_analyzer
    heads          binary requests to 1 model and to 50 in turn, each with a head of its own, as SageMaker sends them:
                   by one client, where heads are all that differs, and by 8, whose requests to one model share batches
    clients        binary requests by perf_analyzer; left out of `--against` unless named
    minilm         the encoder at saturation; with `--against` 8 clients
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import against, load
from benchmarks.servers import mme
from examples import minilm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.against import Row
    from benchmarks.load import Request, Result
    from benchmarks.servers import Server

_CONFIG = """\
max_batch_size: {batch}
dynamic_batching {{}}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""
_SEQUENCE = 32
_MLP_BATCH, _ENCODER_BATCH = 64, 32
_CONNECTIONS = (1, 8, 32)
_TARGETS = 50  # models like the MLP, but for
_TARGET_HIDDEN = 8  # so small that all of them stay in the processor's cache, as one does
_WINDOWS = 3  # of perf_analyzer in each measurement
GROUPS = ("binary", "json", "grpc", "heads", "minilm", "clients")


def build_mlp(path: Path, hidden: int = 256, seed: int = 0) -> None:
    """64→256→256→8 with ReLU, in ONNX; `hidden` for other sizes in the middle, `seed` for other weights."""
    random = np.random.default_rng(seed)
    sizes = [64, hidden, hidden, 8]
    nodes, weights, last = [], [], "INPUT"
    for index, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        final = index == len(sizes) - 2
        matrix = (random.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)
        weights += [
            numpy_helper.from_array(matrix, f"W{index}"),
            numpy_helper.from_array(np.zeros(columns, np.float32), f"b{index}"),
        ]
        sums = "OUTPUT" if final else f"s{index}"
        nodes.append(helper.make_node("Gemm", [last, f"W{index}", f"b{index}"], [sums]))
        if not final:
            nodes.append(helper.make_node("Relu", [sums], [f"h{index}"]))
            last = f"h{index}"
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("INPUT", 64), ("OUTPUT", 8))
    ]
    graph = helper.make_graph(nodes, "mlp", tensors[:1], tensors[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def build_repository(folder: Path) -> Path:
    """All models, as a Triton model repository."""
    for name in ("mlp", "minilm", *(f"target{index}" for index in range(_TARGETS))):
        version = folder / name / "1"
        version.mkdir(parents=True)
        batch = _ENCODER_BATCH if name == "minilm" else _MLP_BATCH
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(batch=batch))
        if name == "minilm":
            onnx.save(
                minilm.build_encoder("minilm", minilm.read_shape(), minilm.read_weights()), version / "model.onnx"
            )
        else:
            build_mlp(version / "model.onnx", *([] if name == "mlp" else [_TARGET_HIDDEN]))
    return folder


def encoder_inputs(batch: int) -> dict[str, np.ndarray]:
    """Token ids of `batch` sentences, all of them `_SEQUENCE` tokens long."""
    ids = np.random.default_rng(1).integers(1000, 20000, (batch, _SEQUENCE))
    return {"input_ids": ids.astype(np.int64), "attention_mask": np.ones((batch, _SEQUENCE), np.int64)}


_LOOP = """
import sys, time, numpy, onnxruntime
sys.path.insert(0, {root!r})
from benchmarks.hot_path import bare_loop
print(bare_loop({model!r}, {batch}, {seconds}))
"""


def bare_loop(path: str, batch: int, seconds: float) -> float:
    """Items a second of `session.run` in a loop, one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    inputs = (
        encoder_inputs(batch)
        if "minilm" in path
        else {"INPUT": np.random.default_rng(0).normal(size=(batch, 64)).astype(np.float32)}
    )
    session.run(names, inputs)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        session.run(names, inputs)
        count += batch
    return count / (time.perf_counter() - began)


def bare(path: Path, batch: int, seconds: float) -> float:
    """`bare_loop` in a process of its own."""
    code = _LOOP.format(root=str(Path(__file__).parents[1]), model=str(path), batch=batch, seconds=seconds)
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def median(measure: Callable[[], Result], repeats: int) -> Result:
    """The run whose rate is the middle one."""
    return sorted((measure() for _ in range(repeats)), key=lambda result: result.rate)[repeats // 2]


def print_row(case: Case, result: Result, bare_us: float) -> None:
    """One line of the table; the last column is what an answer costs in bare executions."""
    print(
        f"| {case.name} | {result.rate:,.0f} | {result.p50:.3f} | {result.p99:.2f} "
        f"| {result.cpu:.0f} | {result.cpu / bare_us:.1f} |",
        flush=True,
    )


@dataclass(frozen=True)
class Case:
    """One configuration that is measured: how, and in which group of `--only`."""

    group: str
    name: str
    measure: Callable[[Server], Result]


def list_cases(repository: Path, seconds: int, encoder_clients: int) -> list[Case]:
    """All of them; without perf_analyzer those that need it are left out."""
    array = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    binary = load.binary_request("mlp", {"INPUT": array})
    json_request = load.json_request("mlp", "INPUT", array)
    encoder = load.binary_request("minilm", encoder_inputs(1))

    def by_wrk(group: str, what: str, request: Request, connections: int, targets: Sequence[str] = ()) -> Case:
        def measure(server: Server) -> Result:
            length = 2 * seconds if group == "minilm" else seconds
            return load.wrk(server.url, request, server.pid, connections=connections, seconds=length, targets=targets)

        return Case(group, f"{what}, wrk, {_clients(connections)}", measure)

    cases = [by_wrk("binary", "binary", binary, count) for count in _CONNECTIONS]
    cases += [by_wrk("json", "JSON", json_request, count) for count in _CONNECTIONS]
    for clients, count in itertools.product((1, 8), (1, _TARGETS)):
        targets = [f"target{index}" for index in range(count)]
        cases.append(by_wrk("heads", f"binary, targets: {count}", binary, clients, targets))
    cases.append(by_wrk("minilm", "MiniLM, binary", encoder, encoder_clients))
    program = load.find_perf_analyzer()
    if program is None:
        print("(perf_analyzer is not on the PATH; what needs it is left out)\n", file=sys.stderr)
        return cases
    data = repository.with_suffix(".json")
    data.write_text(json.dumps({"data": [{"INPUT": {"content": array.ravel().tolist(), "shape": [64]}}]}))

    def by_perf_analyzer(group: str, what: str, count: int) -> Case:
        def measure(server: Server) -> Result:
            window = seconds / _WINDOWS
            grpc = server.grpc if group == "grpc" else ""
            return load.perf_analyzer(
                program, server.address, "mlp", data, server.pid, concurrency=count, seconds=window, grpc=grpc
            )

        return Case(group, f"{what}, perf_analyzer, {_clients(count)}", measure)

    cases += [by_perf_analyzer("grpc", "gRPC", count) for count in _CONNECTIONS]
    return cases + [by_perf_analyzer("clients", "binary", count) for count in _CONNECTIONS]


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def measure_mlp(server: Server, cases: list[Case], repository: Path, seconds: int, repeats: int) -> None:
    """The server's own cost, by both clients."""
    model_file = repository / "mlp/1/model.onnx"
    bare_us = 1e6 / statistics.median(bare(model_file, 1, seconds) for _ in range(repeats))
    print(f"MLP: bare session.run, batch 1, 1 thread: {bare_us:.1f} µs\n")
    print("| configuration | answers/s | p50 ms | p99 ms | server CPU µs/answer | in bare runs |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        print_row(case, median(functools.partial(case.measure, server), repeats), bare_us)


def measure_encoder(server: Server, case: Case, repository: Path, seconds: int, repeats: int) -> None:
    """At saturation, in turn with the bare loop at the batch size that the server reached."""
    case.measure(server)  # it may have yet to be loaded
    ratios, rates, loops, batches = [], [], [], []
    for _ in range(repeats):
        before = server.metric("minilm")
        result = case.measure(server)
        after = server.metric("minilm")
        batches.append((after[0] - before[0]) / (after[1] - before[1]))
        loop = bare(repository / "minilm/1/model.onnx", round(batches[-1]), seconds)
        rates.append(result.rate)
        loops.append(loop)
        ratios.append(result.rate / loop)
    print(
        f"\nMiniLM, sequence {_SEQUENCE}, 1 thread, {2 * _ENCODER_BATCH} connections: "
        f"{statistics.median(rates):.1f} items/s at a mean batch of {statistics.median(batches):.1f}; "
        f"bare session.run at that batch {statistics.median(loops):.1f} items/s; "
        f"ratio {statistics.median(ratios):.3f} (each run: {', '.join(f'{ratio:.3f}' for ratio in ratios)})"
    )


def compare(running: dict[str, Server], cases: list[Case], turns: int) -> Iterator[Row]:
    """Every case on each server in turn."""
    for case in cases:
        for server in running.values():
            case.measure(server)  # its models may have yet to be loaded
        against.settle(running.values())
        yield from against.measure_in_turns(running, turns, against.result_rows(case.name), case.measure)


def main() -> int:
    """Run everything and print Markdown."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, help="of each measurement (default 4, with --against 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the median counts (default 3)")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="these groups of configurations")
    against.add_arguments(parser)
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        print("wrk is not on the PATH; install it (Debian: apt-get install wrk)", file=sys.stderr)
        return 1
    seconds = arguments.seconds or (1 if arguments.against else 4)
    groups = arguments.only or [group for group in GROUPS if not (arguments.against and group == "clients")]
    encoder_clients = 8 if arguments.against else 2 * _ENCODER_BATCH  # a batch of 32 takes much of a short window
    commands = against.environments(arguments)
    with contextlib.ExitStack() as stack:
        repository = build_repository(Path(stack.enter_context(tempfile.TemporaryDirectory()), "models"))
        cases = [case for case in list_cases(repository, seconds, encoder_clients) if case.group in groups]
        running = {
            name: stack.enter_context(mme(repository, grpc=True, commands=each)) for name, each in commands.items()
        }
        against.settle(running.values())
        if arguments.against:
            return against.report(compare(running, cases, arguments.pairs), arguments)
        print(f"{load.setting()}, ONNX Runtime {onnxruntime.__version__}\n")
        of_mlp = [case for case in cases if case.group != "minilm"]
        if of_mlp:
            measure_mlp(running["mme"], of_mlp, repository, seconds, arguments.repeats)
        for case in cases:
            if case.group == "minilm":
                measure_encoder(running["mme"], case, repository, 2 * seconds, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
