"""What a streamed response costs: mme against Triton's own Python backend, in one run.

    python -m benchmarks.streams [--peer FOLDER] [--repeats 5] [--json FILE]

A decoupled Python model sends as many responses of one INT32 as it is asked for, as fast as it can: what a language
model's tokens are to the server. Both servers are asked in turn, by `generate_stream` (server-sent events) and over a
gRPC stream, by one client and by eight at once; the peer as in `benchmarks.python_models`. The clients of gRPC are
tritonclient's, and cost more than either server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import queue
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc

from benchmarks import load
from benchmarks.python_models import Row, find_peer, show, starters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.servers import Server

    Ask = Callable[[Server, int], tuple[float, float]]

_MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """\
name: "count"
backend: "python"
model_transaction_policy { decoupled: true }
input [{ name: "COUNT" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "NUMBER" data_type: TYPE_INT32 dims: [1] }]
"""
_MANY = 2000
_ALONE = 50  # streams of one response each


def by_events(server: Server, count: int) -> tuple[float, float]:
    """Seconds until the first response and until the last, by `generate_stream`."""
    connection = http.client.HTTPConnection(server.address)
    began = time.perf_counter()
    connection.request(
        "POST", "/v2/models/count/generate_stream", json.dumps({"COUNT": count}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    times = [time.perf_counter() - began for line in answer if line.startswith(b"data:")]
    connection.close()
    _check(len(times), count, server)
    return times[0], times[-1]


def by_grpc(server: Server, count: int) -> tuple[float, float]:
    """The same over a gRPC stream."""
    found: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
    asked = tritonclient.grpc.InferInput("COUNT", [1], "INT32")
    asked.set_data_from_numpy(np.array([count], np.int32))
    times = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.put((time.perf_counter(), result, error)))
        began = time.perf_counter()
        client.async_stream_infer("count", [asked])
        while len(times) < count:
            at, _, error = found.get(timeout=60)
            if error is not None:
                raise error
            times.append(at - began)
        client.stop_stream()
    return times[0], times[-1]


def _check(got: int, count: int, server: Server) -> None:
    if got < count:  # the peer's last event may be an empty one
        raise RuntimeError(f"{server.url} sent {got} responses of {count}")


def measure(start: dict[str, Any], repeats: int) -> Iterator[Row]:
    """Many responses by one stream and by eight, and one response by each of several streams."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "count" / "1").mkdir(parents=True)
        (folder / "count" / "1" / "model.py").write_text(_MODEL)
        (folder / "count" / "config.pbtxt").write_text(_CONFIG)
        running = {name: stack.enter_context(begin(folder)) for name, begin in start.items()}
        ways: dict[str, Ask] = {"generate_stream": by_events, "gRPC stream": by_grpc}
        for way, ask in ways.items():
            for server in running.values():
                ask(server, 1)  # it may have yet to be loaded
            for clients in (1, 8):
                yield from _many(running, f"{way}, {clients} at a time", ask, clients, repeats)
            yield _one(running, way, ask, repeats)


def _many(running: dict[str, Server], part: str, ask: Ask, clients: int, repeats: int) -> tuple[Row, ...]:
    rate = Row(part, "responses/s", "")
    cost = Row(part, "processor time a response", "µs")
    each = _MANY // clients
    with ThreadPoolExecutor(clients) as pool:
        for name, server in list(running.items()) * repeats:
            spent, began = load.processor_seconds(server.pid), time.perf_counter()
            list(pool.map(lambda _, to=server: ask(to, each), range(clients)))
            rate.values[name].append(_MANY / (time.perf_counter() - began))
            cost.values[name].append((load.processor_seconds(server.pid) - spent) / _MANY * 1e6)
    return rate, cost


def _one(running: dict[str, Server], way: str, ask: Ask, repeats: int) -> Row:
    row = Row(f"{way}, one response", "p50 until it is there", "ms")
    for name, server in list(running.items()) * repeats:
        row.values[name].append(statistics.median(ask(server, 1)[0] for _ in range(_ALONE)) * 1e3)
    return row


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="where Triton is, or is to be unpacked")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every turn's figures")
    arguments = parser.parse_args()
    show(measure(starters(find_peer(arguments.peer), grpc=True), arguments.repeats), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
