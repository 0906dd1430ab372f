"""What other clients wait while the server is attacked, and what memory the attack takes.

    python -m benchmarks.attacks [--only NAME ...] [--connections 1 200] [--seconds 5]

Each attack runs from a process of its own, over so many connections at once, against a server of its own; a neighbour
asks a small model once in five milliseconds over HTTP, on one connection. Printed are the neighbour's median and
longest wait, the errors that it got, and how much the server's memory grew at most. The first row is the neighbour
alone.

An attack is a generator of what one connection sends, piece by piece; it ends early where the server ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import psutil
import uvloop
from onnx import TensorProto, helper

from benchmarks import load
from benchmarks.servers import mme
from container.http2 import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.servers import Server

_PAUSE = 0.005
_TURN = 256 * 1024  # bytes that an attack writes at once
_WARM_SECONDS = 0.5
_BOTH = frames.END_HEADERS | frames.END_STREAM
_OPENING = frames.PREFACE + frames.settings({}) + frames.window_update(0, 1 << 30)


@dataclass(frozen=True, slots=True)
class Attack:
    """What is sent, to the port for gRPC or to that for HTTP; `holds`: the connection stays open behind it."""

    grpc: bool
    pieces: Callable[[], Iterator[bytes]]
    holds: bool = False


def _call(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b"te", b"trailers")]
    return frames.header_block([*fields, (b"content-type", b"application/grpc"), *more])


def _streams() -> Iterator[int]:
    return itertools.count(1, 2)


def _block(number: int, block: bytes) -> bytes:
    """A header block of any size."""
    parts = [block[at : at + (1 << 14)] for at in range(0, len(block), 1 << 14)]
    first = frames.frame(frames.HEADERS, frames.END_STREAM, number, parts[0])
    last = frames.frame(frames.CONTINUATION, frames.END_HEADERS, number, b"")
    return first + b"".join(frames.frame(frames.CONTINUATION, 0, number, part) for part in parts[1:]) + last


def table_updates() -> Iterator[bytes]:
    """33 header blocks of 250 KiB that resize the table."""
    yield _OPENING
    for number in itertools.islice(_streams(), 33):
        yield _block(number, b"\x20" * (250 << 10) + _call(b"/x"))


def many_fields() -> Iterator[bytes]:
    """200 header blocks of 7,000 fields."""
    yield _OPENING
    for number in itertools.islice(_streams(), 200):
        yield _block(number, _call(b"/x") + b"\x82" * 7000)


def huffman() -> Iterator[bytes]:
    """200 header blocks of 60 KiB in Huffman's code, which takes the longest to read."""
    yield _OPENING
    value = b"\x18\xc6\x31" * 20_000  # aaaa…
    coded = b"\0\1a\xff" + _varint(len(value) - 127) + value
    for number in itertools.islice(_streams(), 200):
        yield _block(number, _call(b"/x") + coded)


def _varint(size: int) -> bytes:
    found = bytearray()
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes((*found, size))


def server_resets() -> Iterator[bytes]:
    """80,000 streams that the server has to reset (CVE-2025-8671)."""
    yield _OPENING
    head = _call(b"/inference.GRPCInferenceService/ModelStreamInfer")
    for number in itertools.islice(_streams(), 80_000):
        yield frames.frame(frames.HEADERS, frames.END_HEADERS, number, head) + frames.window_update(number, 0)


def window_updates() -> Iterator[bytes]:
    """700,000 WINDOW_UPDATEs."""
    yield _OPENING + frames.frame(
        frames.HEADERS, frames.END_HEADERS, 1, _call(b"/inference.GRPCInferenceService/ModelStreamInfer")
    )
    for _ in range(700):
        yield frames.window_update(1, 1) * 1000


def honest_calls() -> Iterator[bytes]:
    """60,000 calls, as quickly as they can be sent."""
    yield _OPENING
    head = _call(b"/inference.GRPCInferenceService/ServerLive")
    for number in itertools.islice(_streams(), 60_000):
        yield frames.frame(frames.HEADERS, frames.END_HEADERS, number, head) + frames.frame(
            frames.DATA, frames.END_STREAM, number, bytes(5)
        )


def small_messages() -> Iterator[bytes]:
    """2 million empty messages on one stream."""
    yield _OPENING + frames.frame(
        frames.HEADERS, frames.END_HEADERS, 1, _call(b"/inference.GRPCInferenceService/ModelStreamInfer")
    )
    for _ in range(650):
        yield frames.frame(frames.DATA, 0, 1, bytes(5) * 3200)


def one_byte_chunks() -> Iterator[bytes]:
    """1.3 million chunks of one byte."""
    head = b"POST /v2/models/none/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(20):
        yield head + b"1\r\nx\r\n" * 65_000 + b"0\r\n\r\n"


def pipelined() -> Iterator[bytes]:
    """200,000 requests without waiting for an answer."""
    for _ in range(200):
        yield b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000


def half_sent() -> Iterator[bytes]:
    """A body of 60 MB but for its last byte."""
    yield b"POST /v2/models/sum/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000001\r\n\r\n"
    for _ in range(60):
        yield bytes(1_000_000)


def half_sent_messages() -> Iterator[bytes]:
    """A message of 60 MB but for its last byte."""
    yield _OPENING + frames.frame(
        frames.HEADERS, frames.END_HEADERS, 1, _call(b"/inference.GRPCInferenceService/ModelInfer")
    )
    yield frames.frame(frames.DATA, 0, 1, b"\0" + (60_000_001).to_bytes(4, "big"))
    for _ in range(600):
        yield frames.frame(frames.DATA, 0, 1, bytes(100_000))


ATTACKS = {
    "table-updates": Attack(True, table_updates),
    "many-fields": Attack(True, many_fields),
    "huffman": Attack(True, huffman),
    "server-resets": Attack(True, server_resets),
    "window-updates": Attack(True, window_updates),
    "honest-calls": Attack(True, honest_calls),
    "small-messages": Attack(True, small_messages),
    "one-byte-chunks": Attack(False, one_byte_chunks),
    "pipelined": Attack(False, pipelined),
    "half-sent": Attack(False, half_sent, holds=True),
    "half-sent-messages": Attack(True, half_sent_messages, holds=True),
}


def build_repository(folder: Path) -> Path:
    """One small model, of which the neighbour asks."""
    node = helper.make_node("ReduceSum", ["X"], ["Y"], keepdims=1)
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n"])]
    outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    (folder / "sum" / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "sum" / "1" / "model.onnx")
    return folder


def attack(name: str, address: str, connections: int, seconds: float) -> None:
    """Send an attack again and again over so many connections, in a process of its own."""
    uvloop.run(_attack(ATTACKS[name], address, connections, seconds))


async def _attack(attack: Attack, address: str, connections: int, seconds: float) -> None:
    place = load.place_of(address)
    sent = _joined(attack.pieces())
    ends = time.monotonic() + seconds
    await asyncio.gather(*(_one(*place, sent, ends, holds=attack.holds) for _ in range(connections)))


def _joined(pieces: Iterator[bytes]) -> list[bytes]:
    found, now = [], bytearray()
    for piece in pieces:
        now += piece
        if len(now) >= _TURN:
            found.append(bytes(now))
            now.clear()
    return [*found, bytes(now)]


async def _one(host: str, port: int, sent: list[bytes], ends: float, *, holds: bool) -> None:
    """One connection, and a new one when it is over."""
    while time.monotonic() < ends:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            reading = asyncio.create_task(_read(reader))
            try:
                for part in sent:
                    if reading.done() or time.monotonic() >= ends:
                        break
                    writer.write(part)
                    await asyncio.wait(
                        [asyncio.ensure_future(writer.drain()), reading],
                        return_when=asyncio.FIRST_COMPLETED,
                        timeout=ends - time.monotonic(),
                    )
                if holds:
                    await asyncio.wait([reading], timeout=max(ends - time.monotonic(), 0))
                writer.close()
            finally:
                reading.cancel()
        await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 18):
            pass


class Memory:
    """The most that a server's process had in memory, looked at now and then."""

    def __init__(self, pid: int) -> None:
        parent = psutil.Process(pid)
        self._processes = [parent, *parent.children(recursive=True)]
        self._first = self._now()
        self.most = self._first

    def _now(self) -> int:
        return sum(each.memory_info().rss for each in self._processes if each.is_running())

    def look(self) -> None:
        """Look."""
        self.most = max(self.most, self._now())

    @property
    def grown(self) -> int:
        """Bytes."""
        return self.most - self._first


def neighbour(server: Server, memory: Memory, seconds: float) -> tuple[list[float], int]:
    """The seconds that each answer took, and how many were errors."""
    request = load.binary_request("sum", {"X": np.zeros(8, np.float32)})
    connection = http.client.HTTPConnection(server.address, timeout=60)
    took, errors, end, looked = [], 0, time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        began = time.perf_counter()
        try:
            connection.request("POST", request.path, request.body, request.headers)
            answer = connection.getresponse()
            answer.read()
            errors += answer.status != 200
        except (OSError, http.client.HTTPException):
            errors += 1
            connection.close()
        took.append(time.perf_counter() - began)
        if began - looked > 0.1:
            looked = began
            memory.look()
        time.sleep(_PAUSE)
    return took, errors


def measure(name: str, connections: int, seconds: float, repository: Path) -> str:
    """One row."""
    with mme(repository, grpc=True) as server:
        neighbour(server, Memory(server.pid), _WARM_SECONDS)
        memory = Memory(server.pid)
        process = None
        if name:
            address = server.grpc if ATTACKS[name].grpc else server.address
            process = multiprocessing.Process(target=attack, args=(name, address, connections, seconds), daemon=True)
            process.start()
        took, errors = neighbour(server, memory, seconds)
        if process is not None:
            process.terminate()
            process.join()
    row = f"{name or 'alone':18} {connections if name else 0:11} {statistics.median(took) * 1e3:10.1f} "
    return row + f"{max(took) * 1e3:11.1f} {errors:7} {memory.grown / 1e6:10.0f}"


def main() -> None:
    """Measure, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 200])
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    print(load.setting())
    print(f"{'attack':18} connections  median ms  longest ms  errors  memory MB")
    with tempfile.TemporaryDirectory() as folder:
        repository = build_repository(Path(folder))
        print(measure("", 0, arguments.seconds, repository), flush=True)
        for name in arguments.only:
            for connections in arguments.connections:
                print(measure(name, connections, arguments.seconds, repository), flush=True)


if __name__ == "__main__":
    main()
