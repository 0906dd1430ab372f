"""What a streamed response costs: mme against Triton's own Python backend, in one run.

    python -m benchmarks.streams [--peer FOLDER] [--repeats 5] [--only WAY] [--json FILE]
    python -m benchmarks.streams --against CHECKOUT [--only WAY]

A decoupled Python model sends 200 responses to each request, a text and a number each: what a language model's tokens
are to the server. It sends them as fast as it can, or one to every open request each 5 ms, as a model does that
computes the next token of all of them at once. Both servers are asked in turn by 1, 8 and 32 clients: by
`generate_stream` (server-sent events) and over a gRPC stream for each client; ours by `/invocations`, too (lines of
JSON), where the peer answers once. The peer is as in `benchmarks.python_models`; with `--against` it is another
checkout (see `benchmarks.against`). Clients share one thread, and the cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np

from benchmarks import against, load
from benchmarks.against import Row
from benchmarks.python_models import find_peer, show, starters
from container.grpc import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from benchmarks.servers import Server

    Ask = Callable[[Server, int, int], Coroutine[Any, Any, list[float]]]

_MODEL = """\
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0])


def response(index):
    token, score = np.array([b"token%d" % index], np.object_), np.array([index / 8], np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("TOKEN", token), pb_utils.Tensor("SCORE", score)])


class TritonPythonModel:
    def initialize(self, args):
        self.paced, self.came = [], threading.Condition()
        threading.Thread(target=self.step, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            count, sender = number(request, "COUNT"), request.get_response_sender()
            if number(request, "PACE"):
                with self.came:
                    self.paced.append([sender, 0, count])
                    self.came.notify()
                continue
            for index in range(count):
                sender.send(response(index))
            sender.send(flags=FINAL)

    def step(self):
        while True:
            with self.came:
                self.came.wait_for(lambda: self.paced)
                paced = list(self.paced)
            for each in paced:
                sender, index, count = each
                sender.send(response(index))
                each[1] += 1
                if each[1] == count:
                    sender.send(flags=FINAL)
                    with self.came:
                        self.paced.remove(each)
            time.sleep(0.005)
"""
_CONFIG = """\
name: "tokens"
backend: "python"
model_transaction_policy { decoupled: true }
input [{ name: "COUNT" data_type: TYPE_INT32 dims: [1] }, { name: "PACE" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "TOKEN" data_type: TYPE_STRING dims: [1] }, { name: "SCORE" data_type: TYPE_FP32 dims: [1] }]
"""
_COUNT = 200  # responses to a request
_MANY = 3200  # responses of a turn, at least, that come as fast as they can
_CONCURRENCIES = (1, 8, 32)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


async def by_events(server: Server, count: int, pace: int) -> list[float]:
    """When each response came, in seconds from the request, by `generate_stream`."""
    body = json.dumps({"COUNT": count, "PACE": pace}).encode()
    return await _by_http(server, "/v2/models/tokens/generate_stream", body, b"data: {", count)


async def by_lines(server: Server, count: int, pace: int) -> list[float]:
    """The same by `/invocations`."""
    inputs = [
        {"name": name, "shape": [1], "datatype": "INT32", "data": [value]}
        for name, value in (("COUNT", count), ("PACE", pace))
    ]
    return await _by_http(server, "/invocations", json.dumps({"inputs": inputs}).encode(), b"}\n", count)


async def _by_http(server: Server, path: str, body: bytes, mark: bytes, count: int) -> list[float]:
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.perf_counter()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"X-Amzn-SageMaker-Target-Model: tokens\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    times: list[float] = []
    end = b""
    while not end.endswith(_LAST_CHUNK):
        data = await reader.read(1 << 16)
        if not data:
            break
        came = (end[-len(mark) + 1 :] + data).count(mark)
        times += [time.perf_counter() - began] * came
        end = (end + data)[-len(_LAST_CHUNK) :]
    writer.close()
    return _checked(times, count, server)


async def by_grpc(server: Server, count: int, pace: int) -> list[float]:
    """The same over a gRPC stream."""
    inputs = [pb.ModelInferRequest.InferInputTensor(name=n, datatype="INT32", shape=[1]) for n in ("COUNT", "PACE")]
    raw = [np.array([value], np.int32).tobytes() for value in (count, pace)]
    request = pb.ModelInferRequest(model_name="tokens", inputs=inputs, raw_input_contents=raw)
    times: list[float] = []
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        await channel.channel_ready()
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        began = time.perf_counter()
        await call.write(request.SerializeToString())
        while len(times) < count:
            answer = await call.read()
            if answer is grpc.aio.EOF or pb.ModelStreamInferResponse.FromString(answer).error_message:
                raise RuntimeError(f"{server.grpc} sent {answer!r}")
            times.append(time.perf_counter() - began)
        call.cancel()
    return times


def _checked(times: list[float], count: int, server: Server) -> list[float]:
    if len(times) < count:  # the peer's last event may be an empty one
        raise RuntimeError(f"{server.url} sent {len(times)} responses of {count}")
    return times[:count]


def measure(start: dict[str, Any], repeats: int, only: str | None = None) -> Iterator[Row]:
    """Every way, pace, and number of clients."""
    ways: dict[str, Ask] = {"generate_stream": by_events, "gRPC stream": by_grpc, "invocations": by_lines}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tokens" / "1").mkdir(parents=True)
        (folder / "tokens" / "1" / "model.py").write_text(_MODEL)
        (folder / "tokens" / "config.pbtxt").write_text(_CONFIG)
        running = {name: stack.enter_context(begin(folder)) for name, begin in start.items()}
        for way, ask in ways.items():
            if only not in {None, way}:
                continue
            asked = {name: server for name, server in running.items() if name != "Triton" or way != "invocations"}
            for server in asked.values():
                asyncio.run(ask(server, 1, 0))  # it may have yet to be loaded
            for clients in _CONCURRENCIES:
                yield from _fast(asked, f"{way}, {clients} at a time", ask, clients, repeats)
                yield from _paced(asked, f"{way}, one each 5 ms, {clients} at a time", ask, clients, repeats)


def _fast(servers: dict[str, Server], part: str, ask: Ask, clients: int, repeats: int) -> tuple[Row, ...]:
    rate = Row(part, "responses/s", "", judged="rate")
    cost = Row(part, "processor time a response", "µs", judged="cost")
    requests = max(_MANY // _COUNT // clients, 1)
    for name, server in against.in_turns(servers, repeats):
        took, spent, _ = asyncio.run(_asked(server, ask, clients, requests, 0))
        responses = clients * requests * _COUNT
        against.append((rate, cost), name, (responses / took, spent / responses * 1e6))
    return rate, cost


def _paced(servers: dict[str, Server], part: str, ask: Ask, clients: int, repeats: int) -> tuple[Row, ...]:
    cost = Row(part, "processor time a response", "µs", judged="cost")
    first = Row(part, "p50 until the first", "ms")
    gap = Row(part, "p99 between two", "ms")
    for name, server in against.in_turns(servers, repeats):
        _, spent, times = asyncio.run(_asked(server, ask, clients, 1 + (clients == 1), 5))
        gaps = np.concatenate([np.diff(each) for each in times])
        until_first = statistics.median(each[0] for each in times)
        longest = float(np.percentile(gaps, 99))
        values = spent / len(times) / _COUNT * 1e6, until_first * 1e3, longest * 1e3
        against.append((cost, first, gap), name, values)
    return cost, first, gap


async def _asked(
    server: Server, ask: Ask, clients: int, requests: int, pace: int
) -> tuple[float, float, list[list[float]]]:
    """Seconds that clients took who ask so often, processor seconds of the server, and when responses came."""

    async def one() -> list[list[float]]:
        return [await ask(server, _COUNT, pace) for _ in range(requests)]

    spent, began = load.processor_seconds(server.pid), time.perf_counter()
    times = await asyncio.gather(*[one() for _ in range(clients)])
    took = time.perf_counter() - began
    return took, load.processor_seconds(server.pid) - spent, [each for found in times for each in found]


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="where Triton is, or is to be unpacked")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--only", choices=("generate_stream", "gRPC stream", "invocations"), help="one way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every turn's figures")
    against.add_arguments(parser)
    arguments = parser.parse_args()
    commands = against.environments(arguments)
    peer = None if arguments.against else find_peer(arguments.peer)
    repeats = arguments.pairs if arguments.against else arguments.repeats
    measured = measure(starters(commands, peer, grpc=True), repeats, arguments.only)
    if arguments.against:
        return against.report(measured, arguments, arguments.json)
    show(measured, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
