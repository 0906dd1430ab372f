"""What one client waits for the sentence encoder, over a bare `session.run` of it, in turns.

    python -m benchmarks.one_client [--calls 20] [--turns 15] [--warm 5] [MME_NAME=value …]

MiniLM, one sentence of 32 tokens, binary HTTP over one connection; the bare loop has a session of one thread, in the
client's process. A turn is so many calls of each. Prints the median of the turns' medians, the median of their ratios,
and where the server says that the time went.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnxruntime

from benchmarks import load
from benchmarks.hot_path import encoder_inputs
from benchmarks.servers import mme
from examples import minilm

if TYPE_CHECKING:
    from collections.abc import Callable

_CONFIG = """\
max_batch_size: 32
dynamic_batching {}
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def parts(address: str) -> list[int]:
    """Nanoseconds of all requests so far: in the queue, and of each part of executions."""
    counted = load.statistics_of(address, "minilm")["inference_stats"]
    return [counted[part]["ns"] for part in _PARTS]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=20, help="of each in a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warm", type=float, default=5, help="seconds of requests before the first turn")
    parser.add_argument("environment", nargs="*", help="NAME=value for the server")
    arguments = parser.parse_args()
    inputs = encoder_inputs(1)
    request = load.binary_request("minilm", inputs)
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder, "models", "minilm", "1")
        version.mkdir(parents=True)
        onnx.save(minilm.build_encoder("minilm", minilm.read_shape(), minilm.read_weights()), version / "model.onnx")
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(version / "model.onnx", options)
        bare, served, ratios, spent = [], [], [], []
        environment = {"MME_CACHE_DIR": str(Path(folder, "cache"))}  # in which nothing was tried before
        environment |= dict(each.split("=", 1) for each in arguments.environment)
        with mme(version.parents[1], environment) as server, load.connect(server.address) as connection:

            def ask() -> None:
                load.ask(connection, "POST", request.path, request.body, request.headers)

            ends = time.monotonic() + arguments.warm
            while time.monotonic() < ends:
                ask()
            for _ in range(arguments.turns):
                alone = _median(lambda: session.run(None, inputs), arguments.calls)
                before = parts(server.address)
                told = _median(ask, arguments.calls)
                spent.append(
                    [(b - a) / arguments.calls / 1e6 for a, b in zip(before, parts(server.address), strict=True)]
                )
                bare.append(alone)
                served.append(told)
                ratios.append(told / alone)
    print(
        f"bare {statistics.median(bare):.2f} ms, served {statistics.median(served):.2f} ms, "
        f"{statistics.median(ratios):.3f} times; of that (mean) "
        + ", ".join(
            f"{part} {statistics.median(ms):.2f}" for part, ms in zip(_PARTS, zip(*spent, strict=True), strict=True)
        )
    )


def _median(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
