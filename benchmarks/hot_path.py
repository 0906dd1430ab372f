"""What the path of one request costs: mme against a bare ONNX Runtime loop, in one run.

    python -m benchmarks.hot_path [--seconds 4] [--repeats 3]

Serves a small MLP (where the server is the cost) and the MiniLM sentence encoder (where the model is), and compares
with `session.run` called in a loop in a process of its own, in turn, so that a machine whose speed drifts cheats both
alike. Reads as ratios; absolute figures belong to the machine. Needs wrk on the PATH; perf_analyzer is used if it is
there (`make bench` fetches it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks import load
from benchmarks.servers import mme
from examples import minilm

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.load import Result
    from benchmarks.servers import Server

_CONFIG = """\
max_batch_size: {batch}
dynamic_batching {{}}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""
_SEQUENCE = 32
_MLP_BATCH, _ENCODER_BATCH = 64, 32


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
    """Both models, as a Triton model repository."""
    for name, batch in (("mlp", _MLP_BATCH), ("minilm", _ENCODER_BATCH)):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(batch=batch))
        if name == "mlp":
            build_mlp(version / "model.onnx")
        else:
            onnx.save(
                minilm.build_encoder("minilm", minilm.read_shape(), minilm.read_weights()), version / "model.onnx"
            )
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


def print_row(wire: str, client: str, connections: int, result: Result, bare_us: float) -> None:
    """One line of the table; the last column is what an answer costs in bare executions."""
    print(
        f"| {wire} | {client} | {connections} | {result.rate:,.0f} | {result.p50:.3f} | {result.p99:.2f} "
        f"| {result.cpu:.0f} | {result.cpu / bare_us:.1f} |",
        flush=True,
    )


def measure_mlp(server: Server, repository: Path, seconds: int, repeats: int) -> None:
    """The server's own cost, by both clients."""
    model_file = repository / "mlp/1/model.onnx"
    bare_us = 1e6 / statistics.median(bare(model_file, 1, seconds) for _ in range(repeats))
    print(f"MLP: bare session.run, batch 1, 1 thread: {bare_us:.1f} µs\n")
    print("| wire | client | connections | answers/s | p50 ms | p99 ms | server CPU µs/answer | in bare runs |")
    print("|---|---|---|---|---|---|---|---|")
    array = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    requests = {
        "binary": load.binary_request("mlp", {"INPUT": array}),
        "JSON": load.json_request("mlp", "INPUT", array),
    }
    for wire, request in requests.items():
        for connections in (1, 8, 32):
            result = median(
                lambda request=request, connections=connections: load.wrk(
                    server.url, request, server.pid, connections=connections, seconds=seconds
                ),
                repeats,
            )
            print_row(wire, "wrk", connections, result, bare_us)
    program = load.find_perf_analyzer()
    if program is None:
        print("\n(perf_analyzer is not on the PATH; its rows are left out)\n")
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as data:
        json.dump({"data": [{"INPUT": {"content": array.ravel().tolist(), "shape": [64]}}]}, data)
        data.flush()
        for concurrency in (1, 8, 32):
            result = median(
                lambda concurrency=concurrency: load.perf_analyzer(
                    program,
                    server.address,
                    "mlp",
                    Path(data.name),
                    server.pid,
                    concurrency=concurrency,
                    seconds=seconds,
                ),
                repeats,
            )
            print_row("binary", "perf_analyzer", concurrency, result, bare_us)


def measure_encoder(server: Server, repository: Path, seconds: int, repeats: int) -> None:
    """At saturation, in turn with the bare loop at the batch size that the server reached."""
    request = load.binary_request("minilm", encoder_inputs(1))
    load.wrk(server.url, request, server.pid, connections=1, seconds=1)  # it may have yet to be loaded
    ratios, rates, loops, batches = [], [], [], []
    for _ in range(repeats):
        before = server.metric("minilm")
        result = load.wrk(server.url, request, server.pid, connections=2 * _ENCODER_BATCH, seconds=seconds)
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


def main() -> int:
    """Run everything and print Markdown."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=4, help="of each measurement (default 4)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of which the median counts (default 3)")
    parser.add_argument("--only", choices=("mlp", "minilm"), help="one model")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        print("wrk is not on the PATH; install it (Debian: apt-get install wrk)", file=sys.stderr)
        return 1
    print(f"{load.setting()}, ONNX Runtime {onnxruntime.__version__}\n")
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(Path(folder))
        with mme(repository) as server:
            if arguments.only != "minilm":
                measure_mlp(server, repository, arguments.seconds, arguments.repeats)
            if arguments.only != "mlp":
                measure_encoder(server, repository, 2 * arguments.seconds, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
