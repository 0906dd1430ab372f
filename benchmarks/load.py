"""Clients that put load on a server, and the processor time that the server spent: what every benchmark here needs.

wrk costs little itself and shows what the server can do; perf_analyzer is what Triton's users measure with, and costs
40 to 50 µs of processor time a request, so on a small machine it shows itself. Neither is needed to serve.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from container import is_compiled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

_LUA = """
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
{headers}
done = function(summary, latency, requests)
  io.write(string.format("RESULT %d %d %d %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), summary.errors.status + summary.errors.read
    + summary.errors.write + summary.errors.timeout + summary.errors.connect))
end
"""


_ROTATING = """
local requests = {{}}
local turn = 0
init = function()
  for _, target in ipairs({{{targets}}}) do
    wrk.headers["X-Amzn-SageMaker-Target-Model"] = target
    requests[#requests + 1] = wrk.format(nil, "/models/" .. target .. "/invoke")
  end
end
request = function()
  turn = turn % #requests + 1
  return requests[turn]
end
"""


def setting() -> str:
    """What figures belong to: the machine, who else is at work on it, Python, and whether mme is compiled."""
    compiled = "compiled" if is_compiled() else "not compiled"
    load = f"{os.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}"
    return f"{load}, Python {platform.python_version()} ({platform.python_compiler()}), mme {compiled}"


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement.

    Attributes:
        rate: answers a second.
        p50, p99: milliseconds.
        cpu: microseconds of the server's processor time an answer, user and system.
    """

    rate: float
    p50: float
    p99: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Request:
    """What to send: the same body again and again."""

    path: str
    body: bytes
    content_type: str
    header_length: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        length = {} if self.header_length is None else {"Inference-Header-Content-Length": str(self.header_length)}
        return {"Content-Type": self.content_type, **length}


def binary_request(model: str, tensors: dict[str, np.ndarray]) -> Request:
    """A binary infer request that asks for binary outputs."""
    names = {"float32": "FP32", "int64": "INT64"}
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": names[str(array.dtype)],
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, array in tensors.items()
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    body = header + b"".join(array.tobytes() for array in tensors.values())
    return Request(f"/v2/models/{model}/infer", body, "application/octet-stream", len(header))


def json_request(model: str, name: str, array: np.ndarray) -> Request:
    """The same with JSON both ways."""
    data = [round(float(value), 4) for value in array.ravel()]
    document = {"inputs": [{"name": name, "shape": list(array.shape), "datatype": "FP32", "data": data}]}
    return Request(f"/v2/models/{model}/infer", json.dumps(document).encode(), "application/json")


def place_of(address: str) -> tuple[str, int]:
    """The host and the port of host:port."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def connect(address: str) -> closing[HTTPConnection]:
    """A connection to a server for a block, patient."""
    return closing(HTTPConnection(address, timeout=400))


def ask(
    connection: HTTPConnection, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[float, bytes]:
    """Send a request; the seconds until it was answered, the connection included if that is new, and the answer's body.

    Raises:
        RuntimeError: the answer is not a 200.
    """
    began = time.perf_counter()
    connection.request(method, path, body, headers or {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    took = time.perf_counter() - began
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
    return took, content


def processor_seconds(pid: int) -> float:
    """Processor time that a process and its children have used, those that have ended included.

    To the nanosecond where `cpu_times` has hundredths, which children that end are counted in.
    """
    process = psutil.Process(pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has just ended
            times = each.cpu_times()
            total += time.clock_gettime(~each.pid << 3 | 2)  # the clock of another process, as Linux numbers it
            total += times.children_user + times.children_system
    return total


def wrk(url: str, request: Request, pid: int, *, connections: int, seconds: int, targets: Sequence[str] = ()) -> Result:
    """Load by wrk, on one thread.

    Args:
        url: the server's.
        request: what is sent.
        pid: the server's process.
        connections: how many clients there are, each with one request at a time.
        seconds: how long they send.
        targets: models of a multi-model endpoint, for which the request is sent in turn as SageMaker sends it; without
            any, the request goes where it says.

    Raises:
        RuntimeError: a request was not answered with 200, or none was answered.
    """
    headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in request.headers.items())
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "post.lua")
        body.write_bytes(request.body)
        rotating = _ROTATING.format(targets=", ".join(f'"{name}"' for name in targets)) if targets else ""
        script.write_text(_LUA.format(body=body, headers=headers) + rotating)
        before = processor_seconds(pid)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "-s", str(script)]
        output = subprocess.run([*command, url + request.path], capture_output=True, text=True, check=True).stdout
        spent = processor_seconds(pid) - before
    match = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+)", output)
    if match is None or int(match[5]):
        raise RuntimeError(f"wrk did not get its answers:\n{output}")
    count, micros, p50, p99 = (int(group) for group in match.groups()[:4])
    if not count:
        raise RuntimeError(f"No request was answered within {seconds} s: measure for longer.")
    return Result(count / micros * 1e6, p50 / 1e3, p99 / 1e3, spent / count * 1e6)


def find_perf_analyzer() -> str | None:
    """perf_analyzer's path: $PERF_ANALYZER, or on $PATH."""
    return os.environ.get("PERF_ANALYZER") or shutil.which("perf_analyzer")


def perf_analyzer(  # noqa: D417 - the rest is perf_analyzer's own
    program: str,
    address: str,
    model: str,
    data: Path,
    pid: int,
    *,
    seconds: float,
    concurrency: int = 0,
    rate: int = 0,
    grpc: str = "",
    stream: bool = False,
) -> Result:
    """Load by perf_analyzer with binary tensors, by so many clients or at so many requests a second.

    Args:
        data: its --input-data file. Its own random bytes are NaN and denormal floats, which slow some models.
        grpc: where the server takes gRPC, if requests are to go there; `address` is asked for its counters alone then.
        stream: whether each client sends them on one stream of gRPC.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        command = [program, "-m", model, "-u", grpc or address, "--input-data", str(data), "-f", str(report)]
        command += ["-i", "grpc"] if grpc else []
        command += ["--streaming"] if stream else ["-a"]
        command += ["--request-rate-range", str(rate)] if rate else ["--concurrency-range", str(concurrency)]
        command += ["-p", str(round(seconds * 1000)), "-s", "999", "-r", "3"]
        counter = Window(pid, address, model)
        subprocess.run(command, capture_output=True, text=True, check=True)
        spent = counter.per_request()
        header, row = (line.split(",") for line in report.read_text().splitlines()[:2])
    values = dict(zip(header, row, strict=False))
    return Result(
        float(values["Inferences/Second"]),
        float(values["p50 latency"]) / 1e3,
        float(values["p99 latency"]) / 1e3,
        spent,
    )


class Window:
    """Processor time between now and later, over the answers that the server counted meanwhile."""

    def __init__(self, pid: int, address: str, model: str) -> None:
        self._pid = pid
        self._address = address
        self._model = model
        self._count = self._answers()
        self._spent = processor_seconds(pid)

    def per_request(self) -> float:
        """Microseconds an answer since the window opened."""
        spent = processor_seconds(self._pid) - self._spent
        return spent / max(self._answers() - self._count, 1) * 1e6

    def _answers(self) -> int:
        return int(statistics_of(self._address, self._model)["inference_stats"]["success"]["count"])


def statistics_of(address: str, model: str) -> dict[str, Any]:
    """What a server has counted for a model so far, in the words of KServe's statistics extension."""
    with urlopen(f"http://{address}/v2/models/{model}/stats") as answer:
        statistics: dict[str, Any] = json.load(answer)["model_stats"][0]
    return statistics


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait for /v2/health/ready.

    Raises:
        RuntimeError: the server ended, or took too long.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/v2/health/ready") as answer:
                if answer.status == 200:
                    return
        except (URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError("the server did not get ready")
