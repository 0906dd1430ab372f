"""What one client waits for the sentence encoder, over a bare `session.run` of it, in turns.

    python -m benchmarks.one_client [--calls 20] [--turns 15] [--warm 5] [MME_NAME=value …]

MiniLM, one sentence of 32 tokens, binary HTTP over one connection; the bare loop has a session of one thread, in the
client's process. The request is made once, and goes in one piece: what a client does itself is no part of the figure.
A turn is so many calls of each. Prints the median of the turns' medians, the median of their ratios, and where the
server says that the time went.
"""

from __future__ import annotations

import argparse
import re
import socket
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
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


def message(address: str, request: load.Request) -> bytes:
    """The request as it goes over the connection."""
    headers = {"Host": address, **request.headers, "Content-Length": len(request.body)}
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + request.body


def ask(connection: socket.socket, request: bytes) -> None:
    """Send a request, and wait for all of its answer. RuntimeError: that is no 200."""
    connection.sendall(request)
    head, _, body = connection.recv(1 << 20).partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if b" 200 " not in head[:13] or length is None:
        raise RuntimeError(head.decode())
    missing = int(length[1]) - len(body)
    while missing > 0:
        if not (part := connection.recv(missing)):
            raise RuntimeError(f"the server closed the connection, {missing} bytes before the end of its answer")
        missing -= len(part)


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
        with (
            mme(version.parents[1], environment) as server,
            socket.create_connection(load.place_of(server.address), timeout=400) as connection,
        ):
            request = message(server.address, load.binary_request("minilm", inputs))
            ends = time.monotonic() + arguments.warm
            while time.monotonic() < ends:
                ask(connection, request)
            for _ in range(arguments.turns):
                alone = _median(lambda: session.run(None, inputs), arguments.calls)
                before = parts(server.address)
                told = _median(lambda: ask(connection, request), arguments.calls)
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
