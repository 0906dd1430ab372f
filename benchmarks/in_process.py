"""What a request costs in one's own process, over a bare `session.run` of the same model.

    python -m benchmarks.in_process [--calls 2000] [--turns 7]

The MLP of `hot_path`, one row a request: bare, from a thread, and from a coroutine on the server's loop, in turns; the
medians of all calls, and what they are over the bare ones. Then four threads at once, and how many of their requests
an execution had.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import uvloop

import mme
from benchmarks.hot_path import build_mlp

if TYPE_CHECKING:
    from collections.abc import Callable

_THREADS = 4
_CONFIG = """\
max_batch_size: 64
dynamic_batching {}
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""
ROW = {"INPUT": np.ones((1, 64), np.float32)}


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return times


async def timed_on_loop(repository: Path, calls: int) -> list[float]:
    """Microseconds of each call, on a loop of its own."""
    async with mme.Server(repository) as server:
        model, times = server.model("mlp"), []
        for _ in range(calls // 10):
            await model.infer_async(ROW)
        for _ in range(calls):
            began = time.perf_counter_ns()
            await model.infer_async(ROW)
            times.append((time.perf_counter_ns() - began) / 1000)
    return times


def together(model: mme.Model, calls: int) -> float:
    """Answers a second of several threads."""

    def ask() -> None:
        for _ in range(calls):
            model.infer(ROW)

    threads = [threading.Thread(target=ask) for _ in range(_THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _THREADS * calls / (time.perf_counter() - began)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder, "mlp", "1")
        version.mkdir(parents=True)
        build_mlp(version / "model.onnx")
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(version / "model.onnx", options)
        bare, thread, loop = [], [], []
        with mme.Server(folder) as server:
            model = server.model("mlp")
            timed(lambda: model.infer(ROW), arguments.calls // 10)
            for _ in range(arguments.turns):
                bare.append(statistics.median(timed(lambda: session.run(None, ROW), arguments.calls)))
                thread.append(statistics.median(timed(lambda: model.infer(ROW), arguments.calls)))
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    loop.append(statistics.median(runner.run(timed_on_loop(Path(folder), arguments.calls))))
            rate = together(model, arguments.calls)
            (counted,) = [row for row in server.statistics() if row["name"] == "mlp"]
    print("| | median | over the bare call |\n|---|---|---|")
    for name, medians in (("bare", bare), ("a thread", thread), ("a coroutine", loop)):
        over = statistics.median(each - one for each, one in zip(medians, bare, strict=True))
        print(f"| {name} | {statistics.median(medians):.1f} µs | {over:.1f} µs |")
    alone = arguments.turns * arguments.calls + arguments.calls // 10
    executions = counted["execution_count"] - alone
    print(
        f"{_THREADS} threads: {rate:.0f} answers/s, {_THREADS * arguments.calls / executions:.1f} requests an execution"
    )


if __name__ == "__main__":
    main()
