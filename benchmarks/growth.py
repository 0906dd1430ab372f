"""What grows with what is there: a load, threads, memory, a stop and more, over 10 to 3,000 models in memory.

    python -m benchmarks.growth [--only PART …] [--sizes 10 100 300 1000 3000] [--save FILE] [--against CHECKOUT]

Draw what was saved by `python -m benchmarks.plots docs/plots --growth FILE`. Each curve has its slope on log-log axes:
0 is a figure that does not depend on how many models there are, 1 one that grows as they do. The models are ONNX,
0.2 MB each, no two alike, and answer once when they are loaded.

    threads  of all processes of the server                      ┐
    memory   what a model adds to the server while it is idle    │ a store of archives, so many of which
    idle     processor time a second that an idle server takes   │ are in memory; a server of its own for
    scrape   GET /metrics, and how long others wait beside it    │ each size
    load     the first request to a model that is not in memory  │
    sigterm  from SIGTERM until the server has ended             ┘
    list     GET /models, the first page                         ┐ as SageMaker runs it, so many
    post     POST /models and DELETE of one more model           ┘ registered
    archive  a load from an archive of 1,000 files, beside so many archives on disk
    waiting  GET /models beside so many POST /models (--waiting) of models whose code does not come back
    limiter  the rate limiter's grant, over so many instances
    workers  a Python model's process: until it runs the model's code, until it has loaded, and its end, over so many
             processes (--workers)

The server is that of the Python that runs this, compiled or not: `CHECKOUT/.venv/bin/python -m benchmarks.growth`
measures CHECKOUT. --against runs the same parts on a second checkout afterwards. Everything goes through HTTP, but for
`limiter`: see `grants`. --save adds to what is in FILE, so that parts and sizes can be measured one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import io
import itertools
import json
import math
import multiprocessing
import os
import select
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks import load, servers
from benchmarks.hot_path import build_mlp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from http.client import HTTPConnection

    from benchmarks.servers import Server

    Figures = dict[str, float]
    Curves = dict[str, dict[int, float]]
    Probe = Callable[["Run", Server, int], Figures]

SIZES, QUICK_SIZES = (10, 100, 300, 1000, 3000), (10, 100)
WORKERS, QUICK_WORKERS = (1, 10, 30, 100, 300), (1, 3)
WAITING, QUICK_WAITING = (1, 10, 100, 300), (1, 3)
_HIDDEN = 192  # of an MLP of 0.2 MB
_CLIENTS = 2  # that fill a server
_DRAIN = {"MME_DRAIN_SECONDS": "300"}  # a stop is measured to its end: by default the server is killed after 28 s
_MIB = 1 << 20
_SETTLE_SECONDS = 1
_PAUSE_SECONDS = 0.1  # before and behind a scrape
_STOP_SECONDS = 400
_CONFIG = "max_batch_size: 32\n"
_IDENTITY = b"""\
# %d
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
_PYTHON_CONFIG = """\
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "BEGAN" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }
"""
_PYTHON_MODEL = """\
import os
import time

BEGAN = time.monotonic_ns()

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = [pb_utils.Tensor("BEGAN", np.array([BEGAN])), pb_utils.Tensor("PID", np.array([os.getpid()]))]
        return [pb_utils.InferenceResponse(said) for _ in requests]
"""
_STUCK = (
    _PYTHON_MODEL
    + """
    def initialize(self, args):
        while True:
            time.sleep(60)
"""
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each thing is done whose median counts.

    Attributes:
        loads, changes, scrapes, lives, archives: loads, POST and DELETE, scrapes and lists, processes, large archives.
        files: in a large archive.
        idle: seconds for which a server is left alone.
    """

    loads: int
    changes: int
    scrapes: int
    lives: int
    archives: int
    files: int
    idle: float


FULL = Effort(loads=200, changes=50, scrapes=10, lives=10, archives=5, files=1000, idle=3)
QUICK = Effort(loads=5, changes=3, scrapes=3, lives=2, archives=1, files=50, idle=0.2)


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be measured, and where it is written down.

    Attributes:
        sizes, workers, waiting: how many models, processes of models, and loads under way.
        effort: how often.
        folder: where models lie.
        file, name: where figures are saved, and under which name.
    """

    sizes: Sequence[int]
    workers: Sequence[int]
    waiting: Sequence[int]
    effort: Effort
    folder: Path
    file: Path
    name: str

    def add(self, part: str, size: int, figures: Figures) -> None:
        """Save figures at once, and print them."""
        saved = read(self.file)
        for what, value in figures.items():
            saved.setdefault(self.name, {}).setdefault(f"{part}: {what}", {})[size] = value
            print(f"{part:8} {size:6} {what:45} {value:12.4g}", flush=True)
        self.file.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")


def slope(points: dict[int, float]) -> float:
    """Of the straight line through a curve on log-log axes, by least squares; 0 of fewer than two points there."""
    shown = [(math.log(size), math.log(value)) for size, value in points.items() if value > 0]
    return statistics.linear_regression(*zip(*shown, strict=True)).slope if len(shown) > 1 else 0.0


# -- models --------------------------------------------------------------------------------------------------------


def model_folder(run: Run, number: int) -> Path:
    """A model of its own weights, unpacked; built once."""
    folder = run.folder / "models" / f"m{number}"
    if not folder.exists():
        (folder / "1").mkdir(parents=True)
        build_mlp(folder / "1" / "model.onnx", _HIDDEN, seed=number)
        (folder / "config.pbtxt").write_text(_CONFIG)
    return folder


def build_archives(run: Run, numbers: range) -> Path:
    """A store with the archives of models; each packed once."""
    store = run.folder / "archives"
    store.mkdir(exist_ok=True)
    for number in numbers:
        if not (store / f"m{number}.tar.gz").exists():
            _pack(store / f"m{number}.tar.gz", model_folder(run, number), {})
    return store


def _pack(path: Path, folder: Path | None, files: dict[str, bytes]) -> None:
    """An archive of a folder and of files beside it; in its place when it is complete."""
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wb", 1) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        if folder is not None:
            tar.add(folder, "model")
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    partial.rename(path)


def infer(path: str) -> load.Request:
    """One row for a model."""
    request = load.binary_request("", {"INPUT": np.zeros((1, 64), np.float32)})
    return replace(request, path=path)


def invoke(number: int) -> load.Request:
    """The same, as SageMaker asks for a model of a store."""
    return infer(f"/models/m{number}.tar.gz/invoke")


# -- talking to the server -------------------------------------------------------------------------------------------


def control(server: Server, name: str, what: str) -> float:
    """Seconds that the load or unload of a model takes."""
    return server.ask("POST", f"/v2/repository/models/{name}/{what}", b"{}")[0]


def fill(asks: Iterable[Callable[[], object]]) -> None:
    """Do all of it, two at a time."""
    with ThreadPoolExecutor(_CLIENTS) as pool:
        for done in [pool.submit(ask) for ask in asks]:
            done.result()


def tree(server: Server) -> list[psutil.Process]:
    """The processes of a server."""
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


def kill(server: Server) -> None:
    """End a server whose end is not measured."""
    for process in tree(server):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def timed(server: Server, act: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds that a request takes, and those of the server's processor time meanwhile."""
    before = load.processor_seconds(server.pid)
    took = act()
    return took * 1e3, (load.processor_seconds(server.pid) - before) * 1e3


def medians(rows: list[tuple[float, ...]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


# -- over models in memory -------------------------------------------------------------------------------------------


def count_threads(_run: Run, server: Server, _size: int) -> Figures:
    """See the module."""
    return {"threads": sum(process.num_threads() for process in tree(server))}


def idle_time(run: Run, server: Server, _size: int) -> Figures:
    """See the module."""
    time.sleep(_SETTLE_SECONDS)
    before = load.processor_seconds(server.pid)
    time.sleep(run.effort.idle)
    return {"processor time, ms/s": (load.processor_seconds(server.pid) - before) / run.effort.idle * 1e3}


def scrape(run: Run, server: Server, _size: int) -> Figures:
    """See the module. Others: one client that sends small requests without a pause, in a process of its own.

    Its longest wait beside a scrape is set against that in a window as long in which there is none.
    """
    beside, without = [], []
    with asking(server, invoke(0)) as asked:
        for _ in range(run.effort.scrapes):
            time.sleep(_PAUSE_SECONDS)
            began = time.monotonic()
            server.ask("GET", "/metrics")
            ended = time.monotonic()
            beside.append((began, ended))
            time.sleep(_PAUSE_SECONDS + ended - began)
            without.append((ended + _PAUSE_SECONDS, 2 * ended + _PAUSE_SECONDS - began))
    waited, usual = (statistics.median(longest(asked, *window) for window in windows) for windows in (beside, without))
    return {
        "time, ms": statistics.median(ended - began for began, ended in beside) * 1e3,
        "others' longest wait, ms": waited * 1e3,
        "their longest wait without it, ms": usual * 1e3,
        "delay, ms": (waited - usual) * 1e3,
    }


def longest(asked: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Seconds that the slowest of these took which were under way in a window; 0 of none."""
    return max((end - begin for begin, end in asked if end > began and begin < ended), default=0.0)


@contextlib.contextmanager
def asking(server: Server, request: load.Request) -> Iterator[list[tuple[float, float]]]:
    """While a process sends a request in a loop; behind the block are the begin and end of each."""
    asked: list[tuple[float, float]] = []
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_ask_on, args=(server.address, request, theirs), daemon=True)
    process.start()
    try:
        ours.recv()  # the first was answered
        yield asked
        ours.send(None)
        asked += ours.recv()
    finally:
        process.terminate()
        process.join()


def _ask_on(address: str, request: load.Request, pipe: Any) -> None:
    """Ask until there is a message in the pipe; answer it with the times."""
    gc.disable()  # a collection here would look like one there
    times: list[tuple[float, float]] = []
    with load.connect(address) as connection:
        while not pipe.poll():
            began = time.monotonic()
            load.ask(connection, "POST", request.path, request.body, request.headers)
            times.append((began, time.monotonic()))
            if len(times) == 1:
                pipe.send(None)
    pipe.recv()
    pipe.send(times)


_COLD = ("time, ms", "processor time, ms", "unload, ms", "unload, processor time, ms")


def cold_loads(run: Run, server: Server, size: int) -> Figures:
    """See the module; models that were never loaded before, each unloaded before the next one is asked for.

    A second server that has as few models as any is asked in turns, so that a machine that is busy for a while slows
    both: the ratios are medians of these pairs.
    """
    named = [*_COLD, *(f"{what.rpartition(', ')[0]}, times that of {min(run.sizes)}" for what in _COLD)]
    if size == min(run.sizes):
        alone = medians([cold_load(server, number) for number in unloaded(run)])
        return dict(zip(named, (*alone, 1, 1, 1, 1), strict=True))
    rows, ratios = [], []
    with servers.mme_store(str(run.folder / "archives"), _DRAIN) as least:
        fill(partial(least.post, invoke(number)) for number in range(min(run.sizes)))
        for number in unloaded(run):
            few, many = cold_load(least, number), cold_load(server, number)
            rows.append(many)
            ratios.append(tuple(more / less for more, less in zip(many, few, strict=True)))
        kill(least)
    return dict(zip(named, (*medians(rows), *medians(ratios)), strict=True))


def unloaded(run: Run) -> range:
    """Numbers of models that fill no server."""
    return range(max(run.sizes), max(run.sizes) + run.effort.loads)


def cold_load(server: Server, number: int) -> tuple[float, ...]:
    """A load and the unload after it: see `_COLD`."""
    took = timed(server, partial(server.post, invoke(number)))
    return (*took, *timed(server, partial(control, server, f"m{number}.tar.gz", "unload")))


def stop(_run: Run, server: Server, _size: int) -> Figures:
    """See the module."""
    began = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    psutil.Process(server.pid).wait(_STOP_SECONDS)
    return {"time, s": time.monotonic() - began}


OF_STORES: dict[str, Probe] = {
    "threads": count_threads,
    "idle": idle_time,
    "scrape": scrape,
    "load": cold_loads,
    "sigterm": stop,
}


def measure_stores(run: Run, parts: Sequence[str]) -> None:
    """The parts that need a server with a store and models in memory: a server for each size."""
    extra = run.effort.loads if "load" in parts else 0
    store = build_archives(run, range(max(run.sizes) + extra))
    for size in run.sizes:
        with servers.mme_store(str(store), _DRAIN) as server:
            server.post(invoke(0))
            empty = server.proportional_memory()
            fill(partial(server.post, invoke(number)) for number in range(1, size))
            print(f"{size} models are in memory", flush=True)
            if "memory" in parts:
                time.sleep(_SETTLE_SECONDS)
                added = server.proportional_memory() - empty
                run.add("memory", size, {"a model, MiB": added / max(size - 1, 1) / _MIB})
            for part, probe in OF_STORES.items():
                if part in parts:
                    run.add(part, size, probe(run, server, size))
            if "sigterm" not in parts:
                kill(server)


# -- as SageMaker runs it --------------------------------------------------------------------------------------------


def measure_platform(run: Run, parts: Sequence[str]) -> None:
    """The parts that need models which were posted: one server for all sizes."""
    with tempfile.TemporaryDirectory() as cache, servers.managed_mme({"MME_CACHE_DIR": cache}) as server:
        registered, fresh = 0, iter(range(max(run.sizes), max(run.sizes) + len(run.sizes) * run.effort.changes))
        for size in run.sizes:
            fill(partial(register, run, server, number) for number in range(registered, size))
            registered = size
            print(f"{size} models are registered", flush=True)
            if "list" in parts:
                times = [server.ask("GET", "/models")[0] * 1e3 for _ in range(run.effort.scrapes)]
                run.add("list", size, {"time, ms": statistics.median(times)})
            if "post" in parts:
                run.add("post", size, post_and_delete(run, server, fresh))
        kill(server)


def post_and_delete(run: Run, server: Server, fresh: Iterator[int]) -> Figures:
    """See the module; of models that the server has never seen."""
    rows: list[tuple[float, ...]] = []
    for number in itertools.islice(fresh, run.effort.changes):
        posted = timed(server, partial(register, run, server, number))
        rows.append((*posted, *timed(server, partial(delete, server, number))))
    named = ("POST, ms", "POST, processor time, ms", "DELETE, ms", "DELETE, processor time, ms")
    return dict(zip(named, medians(rows), strict=True))


def register(run: Run, server: Server, number: int) -> float:
    """Seconds that POST /models takes."""
    document = {"model_name": f"m{number}", "url": str(model_folder(run, number))}
    return server.ask("POST", "/models", json.dumps(document).encode())[0]


def delete(server: Server, number: int) -> float:
    """Seconds that DELETE /models/{name} takes."""
    return server.ask("DELETE", f"/models/m{number}")[0]


def measure_waiting(run: Run, _parts: Sequence[str]) -> None:
    """See the module. Each load has a connection of its own, which is closed with the server."""
    with tempfile.TemporaryDirectory() as cache, servers.managed_mme({"MME_CACHE_DIR": cache}) as server:
        with contextlib.ExitStack() as connections:
            under_way = 0
            for size in run.waiting:
                for number in range(under_way, size):
                    send_load(connections.enter_context(load.connect(server.address)), run, number)
                under_way = size
                time.sleep(_SETTLE_SECONDS)
                times = [server.ask("GET", "/models")[0] * 1e3 for _ in range(run.effort.scrapes)]
                figures = {"time, ms": statistics.median(times), "longest, ms": max(times)}
                run.add("waiting", size, figures | count_threads(run, server, size))
        kill(server)


def send_load(connection: HTTPConnection, run: Run, number: int) -> None:
    """Ask for a load that does not come back, and do not wait."""
    version = run.folder / "stuck" / f"s{number}" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(_STUCK)
    (version.parent / "config.pbtxt").write_text(_PYTHON_CONFIG)
    document = {"model_name": f"s{number}", "url": str(version.parent)}
    connection.request("POST", "/models", json.dumps(document).encode(), {"Content-Type": "application/json"})


# -- over archives on disk -------------------------------------------------------------------------------------------


def measure_archives(run: Run, _parts: Sequence[str]) -> None:
    """See the module. What is measured has a server of its own, which finds the others' archives on disk."""
    store = run.folder / "beside"
    store.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cache, there = Path(folder), 0
        for size in run.sizes:
            for number in range(there, size):
                _pack(store / f"m{number}.tar.gz", None, {"config.pbtxt": _IDENTITY % number})
            with servers.mme_store(str(store), {}, cache) as server:
                fill(partial(control, server, f"m{number}.tar.gz", "load") for number in range(there, size))
                kill(server)
            print(f"{size} archives are on disk", flush=True)
            there = size
            with servers.mme_store(str(store), {}, cache) as server:
                run.add("archive", size, large_archives(run, server, store, size))
                kill(server)


def large_archives(run: Run, server: Server, store: Path, size: int) -> Figures:
    """Loads from archives of many files, none of which is on disk."""
    rows: list[tuple[float, ...]] = []
    for number in range(run.effort.archives):
        name = f"large{number}-{size}"
        files = {f"model/files/{each}.txt": b"%d of %d" % (each, number) for each in range(run.effort.files)}
        _pack(store / f"{name}.tar.gz", model_folder(run, number), files)
        rows.append(timed(server, partial(server.post, infer(f"/models/{name}.tar.gz/invoke"))))
    return dict(zip(("time, ms", "processor time, ms"), medians(rows), strict=True))


# -- over instances, and over processes ------------------------------------------------------------------------------


def measure_limiter(run: Run, _parts: Sequence[str]) -> None:
    """See the module."""
    script = str(Path(__file__).with_name("grants.py"))
    command = [sys.executable, "-P", script, *(str(size) for size in run.sizes)]
    for size, value in json.loads(subprocess.run(command, capture_output=True, check=True).stdout).items():
        run.add("limiter", int(size), {"ask and return, µs": value})


def measure_workers(run: Run, _parts: Sequence[str]) -> None:
    """See the module."""
    repository = run.folder / "python"
    for number in range(max(run.workers) + run.effort.lives):
        version = repository / f"w{number}" / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.py").write_text(_PYTHON_MODEL)
        (version.parent / "config.pbtxt").write_text(_PYTHON_CONFIG)
    with (
        tempfile.TemporaryDirectory() as cache,
        servers.mme(repository, {"MME_LOAD_MODEL": "w0", "MME_CACHE_DIR": cache}) as server,
    ):
        there = 1
        for size in run.workers:
            fill(partial(work, server, f"w{number}") for number in range(there, size))
            there = size
            rows = [life(server, f"w{max(run.workers) + number}") for number in range(run.effort.lives)]
            named = ("until the model's code runs, ms", "until it has loaded, ms", "end, ms")
            run.add("workers", size, dict(zip(named, medians(rows), strict=True)))
        kill(server)


def work(server: Server, name: str) -> tuple[int, int]:
    """Ask a Python model: when its code began to run, in nanoseconds, and its process."""
    document = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [0]}]}
    _, body = server.ask("POST", f"/v2/models/{name}/infer", json.dumps(document).encode())
    said = {output["name"]: output["data"][0] for output in json.loads(body)["outputs"]}
    return said["BEGAN"], said["PID"]


def life(server: Server, name: str) -> tuple[float, ...]:
    """Milliseconds of a process's start, of its load from there, and of its end."""
    asked = time.monotonic_ns()
    control(server, name, "load")
    loaded = time.monotonic_ns()
    began, pid = work(server, name)
    process = os.pidfd_open(pid)
    try:
        leaving = time.monotonic_ns()
        control(server, name, "unload")
        if not select.select([process], [], [], 60)[0]:
            raise RuntimeError(f"the process of {name} did not end")
        ended = time.monotonic_ns()
    finally:
        os.close(process)
    return (began - asked) / 1e6, (loaded - began) / 1e6, (ended - leaving) / 1e6


# -- all of it -------------------------------------------------------------------------------------------------------

GROUPS: dict[Callable[[Run, Sequence[str]], None], tuple[str, ...]] = {
    measure_stores: ("memory", *OF_STORES),
    measure_platform: ("list", "post"),
    measure_waiting: ("waiting",),
    measure_archives: ("archive",),
    measure_limiter: ("limiter",),
    measure_workers: ("workers",),
}
PARTS = tuple(part for parts in GROUPS.values() for part in parts)


def checkout() -> str:
    """The commit whose servers are measured, and whether they are compiled."""
    code = "import container; print(container.is_compiled(), container.__file__)"
    asked = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    compiled, file = asked.stdout.split()
    git = ["git", "-C", str(Path(file).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    return f"{commit}, {'compiled' if compiled == 'True' else 'not compiled'}"


def read(file: Path) -> dict[str, Curves]:
    """What was saved: by checkout, the curves; nothing while there is no file."""
    saved = json.loads(file.read_text()) if file.exists() else {}
    return {
        name: {
            curve: {int(size): value for size, value in sorted(points.items(), key=lambda each: int(each[0]))}
            for curve, points in curves.items()
        }
        for name, curves in saved.items()
    }


def show(saved: dict[str, Curves]) -> None:
    """A table in Markdown: first and last value of each curve, their ratio, its slope as a whole and at the end."""
    for name, curves in saved.items():
        print(f"\n| {name} | fewest | most | ratio | slope | at the end |\n|---|---|---|---|---|---|")
        for curve, points in curves.items():
            (few, low), (many, high) = min(points.items()), max(points.items())
            slopes = f"{slope(points):.2f} | {slope(dict([*points.items()][-2:])):.2f}"
            ratio = f"{high / low:.2f}" if low > 0 else "-"
            print(f"| {curve} | {low:.3g} ({few}) | {high:.3g} ({many}) | {ratio} | {slopes} |")


def measure_other(other: Path, file: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Run the same with the Python of another checkout, and so with its server."""
    command = [str(other.resolve() / ".venv" / "bin" / "python"), "-m", "benchmarks.growth"]
    command += ["--save", str(file.resolve()), "--folder", str(folder.resolve()), "--only", *arguments.only]
    command += ["--quick"] if arguments.quick else []
    command += ["--sizes", *map(str, arguments.sizes)] if arguments.sizes else []
    command += ["--workers", *map(str, arguments.workers)] if arguments.workers else []
    command += ["--waiting", *map(str, arguments.waiting)] if arguments.waiting else []
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)


def main() -> int:
    """Measure what was asked for, print it, and write it down."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="these parts")
    parser.add_argument("--sizes", nargs="+", type=int, help=f"models, archives and instances (default {SIZES})")
    parser.add_argument("--workers", nargs="+", type=int, help=f"processes of models (default {WORKERS})")
    parser.add_argument("--waiting", nargs="+", type=int, help=f"loads under way (default {WAITING})")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: whether it works")
    parser.add_argument("--folder", type=Path, help="where models are built, and kept for the next time")
    parser.add_argument("--save", type=Path, help="a file to add the figures to, as JSON")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure the same of this one afterwards")
    arguments = parser.parse_args()
    sizes = arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES)
    workers = arguments.workers or (QUICK_WORKERS if arguments.quick else WORKERS)
    waiting = arguments.waiting or (QUICK_WAITING if arguments.quick else WAITING)
    name = checkout()
    print(f"{load.setting().rpartition(',')[0]}; mme: {name}\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder, file = arguments.folder or Path(temporary), arguments.save or Path(temporary, "growth.json")
        folder.mkdir(parents=True, exist_ok=True)
        effort = QUICK if arguments.quick else FULL
        run = Run(sorted(sizes), sorted(workers), sorted(waiting), effort, folder.resolve(), file, name)
        for measure, parts in GROUPS.items():
            if chosen := [part for part in parts if part in arguments.only]:
                measure(run, chosen)
        if arguments.against:
            measure_other(arguments.against, file, folder, arguments)  # which shows both
        else:
            show(read(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
