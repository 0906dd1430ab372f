"""What others wait for while somebody sends large requests: /ping, once a millisecond, beside each kind of them.

    python -m benchmarks.waits [--seconds 2] [--megabytes 38] [--only KIND ...]

The model adds up what it is sent, so that answers are small and what is measured is the way in. One client sends the
same request again and again, in a process of its own. Printed is how long /ping took (median, 99th percentile,
longest), and how long an answer to a large request took, or the status by which it is refused. The first row is /ping
alone.

    binary    a tensor as binary data
    flat      JSON: one list of numbers
    rows      JSON: lists of four
    texts     JSON: strings, many of them
    generate  JSON: a list as the value of a key
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import load
from benchmarks.servers import mme

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.servers import Server

_PAUSE = 0.001
_STATUS = 100  # from there on a number is a status, not seconds
_NUMBER = 19.27  # bytes of a random number between 0 and 1 as JSON, and its comma
_TEXT = 14.89  # the same of a text


def build_repository(folder: Path) -> Path:
    """Two models: the sum of numbers, and the number of texts."""
    for name, node, kind in (
        ("sum", helper.make_node("ReduceSum", ["X"], ["Y"], keepdims=1), TensorProto.FLOAT),
        ("count", helper.make_node("Shape", ["X"], ["Y"]), TensorProto.STRING),
    ):
        said = TensorProto.FLOAT if name == "sum" else TensorProto.INT64
        inputs = [helper.make_tensor_value_info("X", kind, ["n"])]
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("Y", said, [1])])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (folder / name / "1").mkdir(parents=True)
        onnx.save(model, folder / name / "1" / "model.onnx")
    return folder


def requests(megabytes: float) -> dict[str, load.Request]:
    """By kind, each with so much of a body."""
    count = int(megabytes * 1e6 / _NUMBER) // 4 * 4
    numbers = np.random.default_rng(0).random(count)
    texts = [f"text {number}" for number in range(int(megabytes * 1e6 / _TEXT))]

    def infer(model: str, datatype: str, shape: list[int], data: Any) -> load.Request:
        document = {"inputs": [{"name": "X", "datatype": datatype, "shape": shape, "data": data}]}
        text = json.dumps(document, separators=(",", ":")).encode()
        return load.Request(f"/v2/models/{model}/infer", text, "application/json")

    generate = json.dumps({"X": numbers.tolist()}, separators=(",", ":")).encode()
    return {
        "binary": load.binary_request("sum", {"X": np.zeros(int(megabytes * 1e6) // 4, np.float32)}),
        "flat": infer("sum", "FP32", [count], numbers.tolist()),
        "rows": infer("sum", "FP32", [count], numbers.reshape(-1, 4).tolist()),
        "texts": infer("count", "BYTES", [len(texts)], texts),
        "generate": load.Request("/v2/models/sum/generate", generate, "application/json"),
    }


def send(address: str, request: load.Request, times: Any) -> None:
    """Ask again and again, in a process of its own; the seconds that each answer took."""
    connection = http.client.HTTPConnection(address, timeout=60)
    while True:
        began = time.perf_counter()
        connection.request("POST", request.path, request.body, request.headers)
        answer = connection.getresponse()
        answer.read()
        times.put(time.perf_counter() - began if answer.status == 200 else answer.status)


@contextlib.contextmanager
def sending(server: Server, request: load.Request | None) -> Iterator[list[float]]:
    """While somebody sends a request; what `send` tells is there behind the block."""
    took: list[float] = []
    if request is None:
        yield took
        return
    times: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=send, args=(server.address, request, times), daemon=True)
    process.start()
    times.get()  # the first is not measured
    try:
        yield took
    finally:
        process.terminate()
        process.join()
        while not times.empty():
            took.append(times.get())


def ping(server: Server, seconds: float) -> list[float]:
    """The seconds that each took."""
    connection = http.client.HTTPConnection(server.address, timeout=60)
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.request("GET", "/ping")
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
        time.sleep(_PAUSE)
    return took


def main() -> int:
    """Measure every kind and print a row for each."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2, help="of each kind (default 2)")
    parser.add_argument("--megabytes", type=float, default=38, help="of a large request (default 38)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these kinds alone")
    arguments = parser.parse_args()
    kinds = requests(arguments.megabytes)
    print(f"{load.setting()}\n\n{'':10}{'ping, ms: p50':>16}{'p99':>10}{'longest':>10}{'large, ms: p50':>18}")
    with tempfile.TemporaryDirectory() as folder, mme(build_repository(Path(folder))) as server:
        for kind in ("alone", *(arguments.only or kinds)):
            with sending(server, kinds.get(kind)) as large:
                pings = ping(server, arguments.seconds)
            quantiles = statistics.quantiles(pings, n=100)
            figures = [1e3 * each for each in (quantiles[49], quantiles[98], max(pings))]
            middle = statistics.median_low(large) if large else None
            others = "" if middle is None else f"{1e3 * middle:18.0f}" if middle < _STATUS else f"{middle:>11} refused"
            print(f"{kind:10}{figures[0]:16.2f}{figures[1]:10.2f}{figures[2]:10.1f}{others}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
