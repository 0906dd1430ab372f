"""What the model cache costs and saves: loads, reloads, copies, neighbours, a fleet under Zipf's law, starts.

    python -m benchmarks.cache [--only PART …] [--seconds 4] [--repeats 3] [--json FILE]
    python -m benchmarks.cache --against CHECKOUT [--only PART …] [--pairs 15]

Everything is a ratio to something measured in the same run: to a bare ONNX Runtime session, to the model alone, to
what a perfect LRU would have hit. Needs wrk; models are built from MiniLM's weights (90 MB) on first use. With
`--against` (see `benchmarks.against`) each turn runs the whole part for each checkout, and what is compared is each
part's own figures: what a model, a start or a miss takes, not the ratios.

    loading   the encoder's first request, its archive on disk already, and its first request after an eviction, each
              against creating a bare InferenceSession and running it once
    copies    the memory that ten archives of the encoder add together, against what one bare session adds
    beside    p99 of a hot model while another one loads and unloads in a loop, against its p99 alone: with 4 clients,
              and at 1,000 requests a second where perf_analyzer is there; and while a server of its own loads and
              unloads that one, which shares nothing with the hot model's but the machine: what no server can avoid
    zipf      1,000 small models of three sizes, weights of their own, requests by Zipf's law, room for a tenth: hits
              against a perfect LRU's, and p50 of hits and mean of misses, by policy, against two servers that are asked
              in turns with them: one of three models alone, one with room for all
    start     a server without models: until it is ready, and the processor time for that, against a bare Python that
              imports Flask and NumPy
    fleet     500 light models: from the start until the first answer, and all of them in memory at once
    cold      an archive of 400 MB in S3 until its first answer, against downloading and gunzipping it, each alone
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
from cachetools import LRUCache
from rich.console import Console
from rich.table import Table

from benchmarks import against, load, servers
from benchmarks.against import Row
from benchmarks.hot_path import build_mlp, encoder_inputs
from examples import demo_servers, minilm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.servers import Server

PARTS = ("loading", "copies", "beside", "zipf", "start", "fleet", "cold")
_MIB = 1 << 20
_RATE = 1000  # requests a second
_KEYS = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}  # moto looks at neither
_SLOW = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(5)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
_SLOW_CONFIG = """backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""


class Report:
    """Rows of what was measured, as a table and as JSON.

    Attributes:
        own: what two checkouts are compared by: the figures that are mme's own, in numbers.
        quiet: whether nothing is printed yet.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.own: list[tuple[Row, float]] = []
        self.quiet = quiet

    def add(
        self,
        part: str,
        what: str,
        value: str,
        ratio: float | None = None,
        target: str = "",
        own: tuple[float, str] | None = None,
    ) -> None:
        """One row, printed at once; `own` is its number and unit where it is mme's own figure."""
        self.rows.append({"part": part, "what": what, "value": value, "ratio": ratio, "target": target})
        if own is not None:
            number, unit = own
            judged = "rate" if target.startswith("≥") else "cost"
            self.own.append((Row(part, what, unit, judged=judged), number))
        if self.quiet:
            return
        shown = "" if ratio is None else f"{ratio:.2f}x"
        print(f"{part:8} {what:60} {value:>24} {shown:>8} {target}", flush=True)

    def print(self) -> None:
        """All of them."""
        table = Table("part", "what", "measured", "ratio", "target")
        for row in self.rows:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            table.add_row(row["part"], row["what"], row["value"], ratio, row["target"])
        Console(width=150).print(table)


# -- models ----------------------------------------------------------------------------------------------------------


def encoder_file(folder: Path) -> Path:
    """The encoder, built once."""
    path = folder / "encoder.onnx"
    if not path.exists():
        onnx.save(minilm.build_encoder("minilm", minilm.read_shape(), minilm.read_weights()), path)
    return path


def lay_out(repository: Path, name: str, model: Path) -> None:
    """A model directory around a file of its own."""
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(model, version / "model.onnx")
    (version.parent / "config.pbtxt").write_text("max_batch_size: 32\n")


def slow_python_model(repository: Path, name: str) -> None:
    """A Python model that takes five seconds to begin."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_SLOW)
    (version.parent / "config.pbtxt").write_text(_SLOW_CONFIG)


# -- talking to the server ---------------------------------------------------------------------------------------------


def post(server: Server, request: load.Request) -> float:
    """Seconds until a request is answered with 200."""
    return server.post(request)


def control(server: Server, model: str, what: str) -> None:
    """Load or unload a model."""
    post(server, load.Request(f"/v2/repository/models/{model}/{what}", b"{}", "application/json"))


def encode(model: str) -> load.Request:
    """One sentence for an encoder."""
    return load.binary_request(model, encoder_inputs(1))


def mlp(model: str) -> load.Request:
    """One row for a small model."""
    return load.binary_request(model, {"INPUT": np.zeros((1, 64), np.float32)})


def pss(pid: int) -> int:
    """Bytes of a process tree, shared pages counted once."""
    total = 0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


# -- bare ONNX Runtime, in processes of its own -----------------------------------------------------------------------


def bare_session(path: str) -> ort.InferenceSession:
    """A session as anybody would make it."""
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def _bare(path: str, results: Any) -> None:
    before = pss(os.getpid())
    began = time.perf_counter()
    session = bare_session(path)
    session.run(None, encoder_inputs(1))
    results.put((time.perf_counter() - began, pss(os.getpid()) - before))


def bare(path: Path) -> tuple[float, int]:
    """Seconds to create a session and run it once, and the bytes that this adds to its process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_bare, args=(str(path), results))
    process.start()
    measured: tuple[float, int] = results.get()
    process.join()
    return measured


# -- the parts -------------------------------------------------------------------------------------------------------


def measure_loading(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    model = encoder_file(folder)
    firsts, agains, bares = [], [], []
    for turn in range(arguments.repeats):
        with _repository(folder) as repository:
            lay_out(repository, "encoder", model)
            _touch(repository, turn)
            with _serving(repository, arguments) as server:
                post(server, load.Request("/v2/repository/index", b"{}", "application/json"))
                bares.append(bare(model)[0])
                firsts.append(post(server, encode("encoder")))
                for _ in range(3):
                    time.sleep(3)  # whatever is prepared in the background
                    control(server, "encoder", "unload")
                    agains.append(post(server, encode("encoder")))
    alone = statistics.median(bares)
    first, again = statistics.median(firsts), statistics.median(agains)
    report.add("loading", "bare session, created and run once", f"{alone * 1e3:.0f} ms")
    for what, took, target in (
        ("first request, files on disk", first, "≤ 1.2x"),
        ("first request after an eviction", again, "≤ 0.2x"),
    ):
        report.add("loading", what, f"{took * 1e3:.0f} ms", took / alone, target, (took * 1e3, "ms"))


def measure_copies(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    model = encoder_file(folder)
    _, alone = bare(model)
    with _repository(folder) as repository:
        for number in range(10):
            lay_out(repository, f"encoder-{number}", model)
        with _serving(repository, arguments) as server:
            before = pss(server.pid)
            for number in range(10):
                post(server, encode(f"encoder-{number}"))
            time.sleep(10)
            for number in range(10):
                post(server, encode(f"encoder-{number}"))
            added = pss(server.pid) - before
    report.add("copies", "one bare session adds", f"{alone / _MIB:.0f} MiB")
    size = added / _MIB
    report.add("copies", "ten archives, all answering, add", f"{size:.0f} MiB", added / alone, "≤ 1.0x", (size, "MiB"))


def measure_beside(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    with _repository(folder) as repository:
        build_mlp(folder / "mlp.onnx")
        lay_out(repository, "hot", folder / "mlp.onnx")
        lay_out(repository, "encoder", encoder_file(folder))
        slow_python_model(repository, "slow")
        with _serving(repository, arguments) as server, _serving(repository, arguments) as elsewhere:
            post(server, mlp("hot"))
            loads = {"4 clients": _by_clients} | (
                {f"{_RATE} a second": _at_a_rate} if load.find_perf_analyzer() else {}
            )
            for other in ("encoder", "slow"):
                for how, hot in loads.items():
                    _compare(server, elsewhere, report, other, how, hot, arguments)


def _compare(
    server: Server,
    elsewhere: Server,
    report: Report,
    other: str,
    how: str,
    hot: Callable[[Server, int], load.Result],
    arguments: Any,
) -> None:
    """The hot model's p99 beside another one that loads and unloads, here and elsewhere, against its p99 alone."""
    seconds = max(arguments.seconds, 8 if other == "slow" else 0)
    p99s = []
    for _ in range(arguments.repeats):
        turn = [hot(server, arguments.seconds).p99]
        for loading in (server, elsewhere):
            with _loading(loading, other):
                turn.append(hot(server, seconds).p99)
        p99s.append(turn)
    alone, *beside = (statistics.median(column) for column in zip(*p99s, strict=True))
    ratios = [statistics.median(turn[place] / turn[0] for turn in p99s) for place in (1, 2)]
    for where, p99, ratio, target in zip(("", ", elsewhere"), beside, ratios, ("≤ 1.3x", ""), strict=True):
        what = f"hot model, {how}, beside '{other}' that loads and unloads{where}"
        own = None if where else (p99, "ms, p99")
        report.add("beside", what, f"p99 {alone:.2f} → {p99:.2f} ms", ratio, target, own)


def _by_clients(server: Server, seconds: int) -> load.Result:
    """As fast as four clients can, which leaves no processor time for anybody else on two cores."""
    return load.wrk(server.url, mlp("hot"), server.pid, connections=4, seconds=seconds)


def _at_a_rate(server: Server, seconds: int) -> load.Result:
    """At a rate that leaves processor time."""
    program = load.find_perf_analyzer() or ""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as data:
        json.dump({"data": [{"INPUT": {"content": [0.5] * 64, "shape": [64]}}]}, data)
        data.flush()
        return load.perf_analyzer(
            program, server.address, "hot", Path(data.name), server.pid, rate=_RATE, seconds=seconds
        )


@contextlib.contextmanager
def _loading(server: Server, model: str) -> Iterator[list[float]]:
    """Load and unload a model again and again; when each load was done."""
    done: list[float] = []
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            control(server, model, "load")
            done.append(time.monotonic())
            control(server, model, "unload")

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def measure_zipf(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    count, requests = 1000, 10_000
    sizes = [128, 256, 512]
    dice = random.Random(1)
    weights = [1 / rank for rank in range(1, count + 1)]
    trace = dice.choices(range(count), weights, k=requests)
    with _repository(folder) as repository:
        for number in range(count):
            build_mlp(folder / "mlp-of-its-own.onnx", sizes[number % 3], seed=number)
            lay_out(repository, f"m{number}", folder / "mlp-of-its-own.onnx")
        with _serving(repository, arguments) as server:
            footprints = [_footprint(server, f"m{number}") for number in range(3)]
        budget = int(sum(footprints[number % 3] for number in range(count)) / 10)
        perfect = _perfect_hits(trace, [footprints[number % 3] for number in range(count)], budget)
        limits = [{"MME_MEMORY_BUDGET": str(budget), "MME_EVICTION": policy} for policy in ("lru", "gdsf")]
        with contextlib.ExitStack() as stack:
            few, roomy, *limited = [
                stack.enter_context(_serving(repository, arguments, each)) for each in ({}, {}, *limits)
            ]
            for number in range(count):
                post(roomy, mlp(f"m{number}"))
            everywhere = [(server, trace) for server in (roomy, *limited)]
            of_few, of_all, *times = _in_turns([(few, [number % 3 for number in trace]), *everywhere])
            hits = [_hits(server) for server in limited]
    p50s = statistics.median(of_few), statistics.median(of_all)
    for policy, took, hit in zip(("lru", "gdsf"), times, hits, strict=True):
        _report_zipf(report, policy, took, p50s, hit, perfect)


def _in_turns(asked: list[tuple[Server, list[int]]]) -> list[list[float]]:
    """Seconds that each server took for each request of its trace: all get one, each time another server the first."""
    times: list[list[float]] = [[] for _ in asked]
    for turn in range(len(asked[0][1])):
        for place in range(len(asked)):
            which = (turn + place) % len(asked)
            server, trace = asked[which]
            times[which].append(post(server, mlp(f"m{trace[turn]}")))
    return times


def _report_zipf(
    report: Report, policy: str, times: list[float], p50s: tuple[float, float], hits: int, perfect: int
) -> None:
    """What a policy made of the trace; p50s are the seconds of three models alone, and of all of them in memory."""
    of_few, of_all = p50s
    what = f"{policy}: hits of {len(times)}, against a perfect LRU's {perfect}"
    report.add("zipf", what, f"{hits}", hits / perfect, "≥ 1.0x", (hits, ""))
    added = (statistics.mean(times) - of_all) * 1e3
    what = f"{policy}: mean that misses add to p50 with room for all"
    report.add("zipf", what, f"{added:.2f} ms", own=(added, "ms"))
    of_hits = sorted(times)[hits // 2]  # misses are the slowest
    what = f"{policy}: p50 of hits, against that of three models alone ({of_few * 1e3:.2f} ms)"
    report.add("zipf", what, f"{of_hits * 1e3:.2f} ms", of_hits / of_few, "≤ 1.05x", (of_hits * 1e3, "ms"))


def _perfect_hits(trace: list[int], footprints: list[float], budget: float) -> int:
    """What a cache would hit that always has exactly the most recently used in memory."""
    cache: LRUCache[int, int] = LRUCache(budget, getsizeof=lambda number: footprints[number])
    hits = 0
    for number in trace:
        hits += number in cache
        cache[number] = cache.get(number, number)
    return hits


def _footprint(server: Server, model: str) -> float:
    post(server, mlp(model))
    return _metric(server, "mme_model_memory_bytes", f'model="{model}"')


def _hits(server: Server) -> int:
    return int(_metric(server, "mme_model_cache_hits_total", ""))


def _metric(server: Server, name: str, label: str) -> float:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def measure_start(_folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    bare, taken, used = [], [], []
    for _ in range(arguments.repeats):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import flask, numpy"], check=True)
        after = os.times()
        bare.append(sum(after[2:4]) - sum(before[2:4]))
        began = time.perf_counter()
        with servers.managed_mme(commands=arguments.commands) as server:
            taken.append(time.perf_counter() - began)
            used.append(load.processor_seconds(server.pid))
    ready, own, imports = (statistics.median(each) * 1e3 for each in (taken, used, bare))
    report.add("start", "a bare Python that imports Flask and NumPy, processor time", f"{imports:.0f} ms")
    report.add("start", "a server without models, until it is ready", f"{ready:.0f} ms", own=(ready, "ms"))
    what = "processor time for that, against the bare Python"
    report.add("start", what, f"{own:.0f} ms", own / imports, own=(own, "ms"))


def measure_fleet(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    count = 500
    build_mlp(folder / "mlp.onnx")
    with _repository(folder) as repository:
        for number in range(count):
            lay_out(repository, f"m{number}", folder / "mlp.onnx")
        began = time.perf_counter()
        with _serving(repository, arguments) as server:
            post(server, mlp("m0"))
            started = time.perf_counter() - began
            what = f"start with {count} models to offer, to the first answer"
            report.add("fleet", what, f"{started:.2f} s", None, "≤ 5 s", (started, "s"))
            before = pss(server.pid)
            began = time.perf_counter()
            for number in range(count):
                post(server, mlp(f"m{number}"))
            took = time.perf_counter() - began
            for number in range(count):
                post(server, mlp(f"m{number}"))
            resident = _metric(server, "mme_loaded_models", "")
            added = pss(server.pid) - before
    each, size = took / count * 1e3, added / count / 1024
    what = f"{count} loaded one after the other"
    report.add("fleet", what, f"{took:.1f} s, {each:.1f} ms each", own=(each, "ms each"))
    report.add("fleet", "in memory at once", f"{resident:.0f}, {size:.0f} KiB each", None, "500", (size, "KiB each"))


def measure_cold(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """See the module."""
    archive = _large_archive(folder)
    ratios, rows, peaks = [], [], []
    with demo_servers.s3_server() as s3_url:
        client = _s3(s3_url)
        client.create_bucket(Bucket="models")
        client.upload_file(str(archive), "models", "large.tar.gz")
        for _ in range(arguments.repeats):
            download, unzip = _download(client, folder), _gunzip(archive)
            with _serving_store(s3_url, arguments) as server:
                cold = post(
                    server,
                    load.Request(
                        "/models/large.tar.gz/invoke", mlp("x").body, "application/octet-stream", mlp("x").header_length
                    ),
                )
                peaks.append(_peak_over_now(server.pid))
            ratios.append(cold / max(download, unzip))
            rows.append((download, unzip, cold))
    download, unzip, cold = (statistics.median(column) for column in zip(*rows, strict=True))
    size = archive.stat().st_size / 1e6
    report.add("cold", f"{size:.0f} MB from S3, downloaded by boto3", f"{download:.2f} s")
    report.add("cold", "gunzipped, without writing", f"{unzip:.2f} s")
    what = "until the first answer, against the slower of them"
    report.add("cold", what, f"{cold:.2f} s", statistics.median(ratios), "≤ 1.25x", (cold, "s"))
    peak = statistics.median(peaks) / 1e6
    what = "memory on the way, over what is left in the end"
    report.add("cold", what, f"{peak:.0f} MB", None, "≤ 64 MB", (peak, "MB"))


def _peak_over_now(pid: int) -> int:
    """Bytes by which a server's processes were larger than they are."""
    over = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = {
            line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "VmRSS"))
        }
        over += sizes["VmHWM"] - sizes["VmRSS"]
    return over


def _large_archive(folder: Path) -> Path:
    path = folder / "large.tar.gz"
    if not path.exists():
        build_mlp(folder / "mlp.onnx")
        with _repository(folder) as repository:
            lay_out(repository, "large", folder / "mlp.onnx")
            noise = np.random.default_rng(1).integers(0, 64, 520 * _MIB, np.uint8)  # 6 bits of 8: gzip finds a quarter
            (repository / "large" / "1" / "ballast.bin").write_bytes(noise.tobytes())
            with gzip.open(path, "wb", 1) as file, tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(repository / "large", "large")
    return path


def _download(client: Any, folder: Path) -> float:
    began = time.perf_counter()
    client.download_file("models", "large.tar.gz", str(folder / "copy"))
    return time.perf_counter() - began


def _gunzip(archive: Path) -> float:
    from isal import igzip  # noqa: PLC0415 - as the server does it

    began = time.perf_counter()
    with igzip.open(archive) as file:
        while file.read(_MIB):
            pass
    return time.perf_counter() - began


def _s3(url: str) -> Any:
    import boto3  # noqa: PLC0415 - one part needs it

    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", **_KEYS)


# -- servers ---------------------------------------------------------------------------------------------------------


def _serving(repository: Path, arguments: argparse.Namespace, environment: dict[str, str] | None = None) -> Any:
    """Ours over a repository, of which one small model is loaded at the start."""
    build_mlp(repository / "idle.onnx", 8)
    lay_out(repository, "idle", repository / "idle.onnx")
    return servers.mme(repository, {"MME_LOAD_MODEL": "idle", **(environment or {})}, commands=arguments.commands)


def _serving_store(s3_url: str, arguments: argparse.Namespace) -> Any:
    """Ours over a store in S3, its cache empty."""
    aws = {"AWS_ENDPOINT_URL_S3": s3_url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return servers.mme_store("s3://models", {**aws, "AWS_DEFAULT_REGION": "us-east-1"}, commands=arguments.commands)


@contextlib.contextmanager
def _repository(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as repository:
        yield Path(repository)


def _touch(repository: Path, turn: int) -> None:
    """Make the artifact one that was never seen."""
    for file in repository.rglob("config.pbtxt"):
        file.write_text(f"{file.read_text()}# {turn} {time.time()}\n")


MEASURES: dict[str, Callable[[Path, Report, argparse.Namespace], None]] = {
    "loading": measure_loading,
    "copies": measure_copies,
    "beside": measure_beside,
    "zipf": measure_zipf,
    "start": measure_start,
    "fleet": measure_fleet,
    "cold": measure_cold,
}


def compare(folder: Path, arguments: argparse.Namespace, commands: Mapping[str, Path]) -> Iterator[Row]:
    """Each part for each checkout in turn; its figures are matched by their places."""
    for part in arguments.only:
        rows: list[Row] = []
        for name in against.order(commands, arguments.pairs):
            report = Report(quiet=True)
            alone = argparse.Namespace(**{**vars(arguments), "repeats": 1, "commands": commands[name]})
            MEASURES[part](folder, report, alone)
            rows = rows or [row for row, _ in report.own]
            against.append(rows, name, [number for _, number in report.own])
        yield from rows


def main() -> int:
    """Measure what was asked for, print it, and write it down."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--seconds", type=int, default=4, help="length of one measurement under load")
    parser.add_argument("--repeats", type=int, default=3, help="measurements, whose median counts")
    parser.add_argument("--folder", type=Path, help="where models are built, and kept for the next time")
    parser.add_argument("--json", type=Path, help="a file to write the rows to")
    parser.set_defaults(commands=servers.COMMANDS)
    against.add_arguments(parser)
    arguments = parser.parse_args()
    commands = against.environments(arguments)
    report = Report()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.against:
            return against.report(compare(folder, arguments, commands), arguments, arguments.json)
        for part in arguments.only:
            MEASURES[part](folder, report, arguments)
    report.print()
    if arguments.json:
        arguments.json.write_text(json.dumps(report.rows, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
