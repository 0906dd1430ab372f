"""Clients that put load on a server, and the processor time that the server spent: what every benchmark here needs.

wrk costs little itself and shows what the server can do; perf_analyzer is what Triton's users measure with, and costs
40 to 50 µs of processor time a request, so on a small machine it shows itself. Neither is needed to serve.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_LUA = """
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
wrk.headers["Content-Type"] = "{content_type}"
{more}
done = function(summary, latency, requests)
  io.write(string.format("RESULT %d %d %d %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), summary.errors.status + summary.errors.read
    + summary.errors.write + summary.errors.timeout + summary.errors.connect))
end
"""


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


def processor_seconds(pid: int) -> float:
    """Processor time that a process and its children have used."""
    process = psutil.Process(pid)
    times = [process.cpu_times(), *(child.cpu_times() for child in process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def wrk(url: str, request: Request, pid: int, *, connections: int, seconds: int) -> Result:
    """Load by wrk, on one thread.

    Raises:
        RuntimeError: a request was not answered with 200.
    """
    more = ""
    if request.header_length is not None:
        more = f'wrk.headers["Inference-Header-Content-Length"] = "{request.header_length}"'
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "body"), Path(folder, "post.lua")
        body.write_bytes(request.body)
        script.write_text(_LUA.format(body=body, content_type=request.content_type, more=more))
        before = processor_seconds(pid)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "-s", str(script)]
        output = subprocess.run([*command, url + request.path], capture_output=True, text=True, check=True).stdout
        spent = processor_seconds(pid) - before
    match = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+)", output)
    if match is None or int(match[5]):
        raise RuntimeError(f"wrk did not get its answers:\n{output}")
    count, micros, p50, p99 = (int(group) for group in match.groups()[:4])
    return Result(count / micros * 1e6, p50 / 1e3, p99 / 1e3, spent / count * 1e6)


def find_perf_analyzer() -> str | None:
    """perf_analyzer's path: $PERF_ANALYZER, or on $PATH."""
    return os.environ.get("PERF_ANALYZER") or shutil.which("perf_analyzer")


def perf_analyzer(  # noqa: D417 - the rest is perf_analyzer's own
    program: str, address: str, model: str, data: Path, pid: int, *, concurrency: int, seconds: int
) -> Result:
    """Load by perf_analyzer with binary tensors.

    Args:
        data: its --input-data file. Its own random bytes are NaN and denormal floats, which slow some models.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        command = [program, "-m", model, "-u", address, "--input-data", str(data), "-f", str(report), "-a"]
        command += ["--concurrency-range", str(concurrency), "-p", str(seconds * 1000), "-s", "999", "-r", "3"]
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
        import json  # noqa: PLC0415
        from urllib.request import urlopen  # noqa: PLC0415

        with urlopen(f"http://{self._address}/v2/models/{self._model}/stats") as answer:
            stats = json.load(answer)["model_stats"][0]
        return int(stats["inference_stats"]["success"]["count"])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait for /v2/health/ready.

    Raises:
        RuntimeError: the server ended, or took too long.
    """
    from urllib.error import URLError  # noqa: PLC0415
    from urllib.request import urlopen  # noqa: PLC0415

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/v2/health/ready") as answer:
                if answer.status == 200:
                    return
        except (URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError("the server did not get ready")
