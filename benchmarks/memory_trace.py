"""Memory of a server against its budget, while clients ask models that grow.

    python -m benchmarks.memory_trace [--minutes 60] [--budget-mib 1024] [--clients 4] [--group FOLDER] [--save FILE]
                                      [--picture FILE]

Sixty models: ONNX with dynamic shapes, trees, and Python models, of which two keep what they are sent. Clients draw
them by Zipf's law, and sizes that vary by 1,000 times; every answer is compared with what it has to be. The memory of
all processes of the server is read twice a second, and twice a minute while the clients pause, so that nothing
executes. It passes if no answer was wrong or lost, and if no reading of a pause was over the budget, and what the
server has without models, by more than `--slack-mib`: what it may take for itself, and what leaks between two
measurements of its own. In the control group of `--group`, whose limit is yours to set, the kernel may kill no process
either.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import shutil
import tarfile
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightgbm
import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper

from benchmarks.servers import COMMANDS, mme_store
from model_handlers.worker.process import read_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.servers import Server

    Made = Callable[[int], np.ndarray]
    Answer = Callable[[np.ndarray], np.ndarray]
    Model = tuple[str, Made, Answer]

_LOOK_SECONDS = 0.5
_PAUSE_EVERY = 60  # looks
_SMALLEST, _TIMES = 4096, 1000  # bytes of an input, and how much larger the largest is
_FEATURES = 16
_LEAKS = (1, 4)  # ranks of the models that keep what they are sent
_PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if {leaks}:
                self.kept.append(x.copy())
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]))
        return answers
"""
_VECTORS = """
backend: "{backend}"
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
"""
_TREES = 'backend: "fil"\nparameters { key: "model_type" value { string_value: "lightgbm" } }\n'


def build(store: Path, count: int) -> list[Model]:
    """The models, the most popular first: name, an input of about so many bytes, and the answer to one."""
    booster = _booster()

    def vector(size: int) -> np.ndarray:
        return np.random.default_rng(size).random(size // 4, np.float32)

    def rows(size: int) -> np.ndarray:
        return np.random.default_rng(size).random((max(size // 64 // _FEATURES, 1), _FEATURES), np.float32)

    kinds: dict[str, tuple[Made, Answer]] = {
        "onnx": (vector, lambda x: np.sin(x) * np.cos(x) + x),
        "trees": (rows, lambda x: booster.predict(x, num_threads=1)),
        "python": (vector, lambda x: x + 1),
        "leaks": (vector, lambda x: x + 1),
    }
    names = ["onnx"] * (count // 2) + ["trees"] * (count // 4)
    names += ["python"] * (count - len(names) - len(_LEAKS))
    random.Random(1).shuffle(names)
    for rank in _LEAKS:
        names.insert(rank, "leaks")
    models = []
    for number, kind in enumerate(names):
        folder = store / "unpacked" / f"{kind}-{number}"
        (folder / "1").mkdir(parents=True)
        if kind == "onnx":
            (folder / "1" / "model.onnx").write_bytes(_graph())
        elif kind == "trees":
            booster.save_model(folder / "1" / "model.txt")
        else:
            (folder / "1" / "model.py").write_text(_PYTHON.format(leaks=kind == "leaks"))
        backend = "onnxruntime" if kind == "onnx" else "python"
        (folder / "config.pbtxt").write_text(_TREES if kind == "trees" else _VECTORS.format(backend=backend))
        with tarfile.open(store / f"{folder.name}.tar.gz", "w:gz", compresslevel=1) as archive:
            archive.add(folder, folder.name)
        models.append((folder.name, *kinds[kind]))
    shutil.rmtree(store / "unpacked")
    return models


def _graph() -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    parts = (("Sin", ["x"], "s"), ("Cos", ["x"], "c"), ("Mul", ["s", "c"], "p"), ("Add", ["p", "x"], "y"))
    nodes = [helper.make_node(what, takes, [gives]) for what, takes, gives in parts]
    graph = helper.make_graph(nodes, "graph", [x], [y])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def _booster() -> lightgbm.Booster:
    numbers = np.random.default_rng(3)
    data = lightgbm.Dataset(numbers.random((4000, _FEATURES)), numbers.random(4000))
    return lightgbm.train({"num_leaves": 127, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 2}, data, 100)


class Client:
    """Asks until it is told to stop, and notes what it is answered."""

    def __init__(self, server: Server, models: list[Model], seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = server.address
        self._models = models
        self._random = random.Random(seed)
        self._weights = [1 / (rank + 1) for rank in range(len(models))]
        self._turn = threading.Lock()
        self._connection = http.client.HTTPConnection(self._address, timeout=120)

    def run(self, stop: threading.Event) -> None:
        """One request after the other."""
        while not stop.is_set():
            (model,) = self._random.choices(self._models, self._weights)
            size = int(_SMALLEST * _TIMES ** self._random.random()) // 4 * 4
            with self._turn:
                try:
                    self.outcomes[self.ask(model, size)] += 1
                except (OSError, http.client.HTTPException):
                    self.outcomes["lost"] += 1
                    self._connection.close()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ask nothing meanwhile; begins behind the answer that is waited for."""
        with self._turn:
            yield

    def ask(self, model: Model, size: int) -> str:
        """What becomes of one request: `right` or `wrong`, or the status of an error."""
        name, given, expected = model
        x = given(size)
        trees = x.ndim == 2
        row = {"name": "input__0" if trees else "x", "shape": list(x.shape), "datatype": "FP32"}
        row["parameters"] = {"binary_data_size": x.nbytes}
        header = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
        self._connection.request("POST", f"/v2/models/{name}/infer", header + x.tobytes(), headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            return str(answer.status)
        length = int(answer.headers["Inference-Header-Content-Length"])
        y = np.frombuffer(body[length:], np.float32)
        return "right" if np.allclose(y, expected(x).ravel(), rtol=1e-4, atol=1e-5) else "wrong"


def memory(server: Server) -> int:
    """Bytes of all processes that no file backs, those that several share counted once."""
    process, found = psutil.Process(server.pid), 0
    for each in (process, *process.children(recursive=True)):
        try:
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        found += sum(int(size) << 10 for size in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.MULTILINE))
    return found


def watch(server: Server, clients: list[Client], seconds: float) -> list[tuple[float, int, int, bool]]:
    """(seconds, bytes of all processes, bytes that count, whether nothing executed) twice a second."""
    began, readings = time.monotonic(), []
    while (now := time.monotonic() - began) < seconds:
        pauses = len(readings) % _PAUSE_EVERY == _PAUSE_EVERY - 1
        with contextlib.ExitStack() as paused:
            for client in clients if pauses else ():
                paused.enter_context(client.pause())
            text = server.ask("GET", "/metrics")[1].decode()
            readings.append((now, memory(server), _sample(text, "mme_memory_used_bytes"), pauses))
        time.sleep(_LOOK_SECONDS)
    return readings


def _sample(text: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))


def trace(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was seen."""
    with tempfile.TemporaryDirectory() as folder:
        models = build(Path(folder), arguments.models)
        environment = {"MME_MEMORY_BUDGET": f"{arguments.budget_mib}MiB"}
        with _commands(arguments.group) as commands, mme_store(folder, environment, commands=commands) as server:
            return {"budget": arguments.budget_mib << 20, **_ask_all(server, models, arguments)}


@contextlib.contextmanager
def _commands(group: Path | None) -> Iterator[Path]:
    """Where the server's command is; one that first joins the control group."""
    if group is None:
        yield COMMANDS
        return
    with tempfile.TemporaryDirectory() as folder:
        command = Path(folder, "mme")
        command.write_text(f'#!/bin/sh\necho 0 > "{group}/cgroup.procs" && exec "{COMMANDS}/mme" "$@"\n')
        command.chmod(0o700)
        yield command.parent


def kills(group: Path | None) -> int:
    """Processes of a control group that the kernel has killed for want of memory."""
    return read_count([group / "memory.events", group / "memory.oom_control"]) or 0 if group is not None else 0


def _without_models(server: Server, models: list[Model]) -> int:
    """Bytes of the server that has its frameworks by now, and no model."""
    client = Client(server, models, 0)
    kinds = {name.split("-")[0]: (name, *rest) for name, *rest in models}
    for model in kinds.values():
        client.ask(model, _SMALLEST)
        server.ask("POST", f"/v2/repository/models/{model[0]}/unload", b"{}")
    return memory(server)


def _ask_all(server: Server, models: list[Model], arguments: argparse.Namespace) -> dict[str, Any]:
    own, stop = _without_models(server, models), threading.Event()
    clients = [Client(server, models, seed) for seed in range(arguments.clients)]
    threads = [threading.Thread(target=client.run, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        readings = watch(server, clients, arguments.minutes * 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    text = server.ask("GET", "/metrics")[1].decode()
    outcomes: Counter[str] = sum((client.outcomes for client in clients), Counter())
    evictions = _sample(text, "mme_model_evictions_total")
    return {"own": own, "readings": readings, "outcomes": dict(outcomes), "evictions": evictions}


def draw(found: dict[str, Any], path: Path) -> None:
    """The picture: memory of all processes and what counts, against the budget."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only the picture needs it

    seconds, taken, counted, _ = zip(*found["readings"], strict=True)
    minutes = [each / 60 for each in seconds]
    figure, axes = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    axes.plot(minutes, [each / 2**20 for each in taken], color="#2f6f9f", linewidth=1, label="all processes")
    axes.plot(minutes, [each / 2**20 for each in counted], color="#c9a24b", linewidth=1, label="counted for models")
    limit = found["budget"] / 2**20
    axes.axhline(limit, color="#a03030", linewidth=1.5, label="budget")
    axes.axhline(
        limit + found["own"] / 2**20, color="#a03030", linewidth=1, linestyle=":", label="and the server without models"
    )
    axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, None))
    axes.legend(loc="lower right", ncols=2, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    """Trace, say what was seen, and draw it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--budget-mib", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--slack-mib", type=int, default=64)
    parser.add_argument("--group", type=Path, help="a control group's folder, which the server joins")
    parser.add_argument("--save", type=Path, help="write all readings to this file")
    parser.add_argument("--picture", type=Path, help="draw them into this file")
    arguments = parser.parse_args()
    killed = kills(arguments.group)
    found = trace(arguments)
    killed = kills(arguments.group) - killed
    if arguments.save:
        arguments.save.write_text(json.dumps(found))
    if arguments.picture:
        draw(found, arguments.picture)
    limit = found["budget"] + found["own"]
    over = [taken - limit for _, taken, _, _ in found["readings"]]
    quiet = [taken - limit for _, taken, _, pauses in found["readings"] if pauses]
    print(f"budget {found['budget'] >> 20} MiB, the server without models {found['own'] >> 20} MiB")
    print(f"most of all processes {(max(over) + limit) >> 20} MiB, {max(over) / 2**20:+.0f} MiB beyond both")
    print(f"over in {sum(each > 0 for each in over)} of {len(over)} readings; {found['evictions']} evictions")
    print(f"while nothing executes {max(quiet, default=0) / 2**20:+.0f} MiB at most, of {len(quiet)} readings")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(found["outcomes"].items())))
    if arguments.group:
        print(f"{killed} processes killed by the kernel")
    bad = killed + sum(found["outcomes"].get(each, 0) for each in ("wrong", "lost"))
    return 1 if bad or max(quiet, default=0) > arguments.slack_mib << 20 else 0


if __name__ == "__main__":
    raise SystemExit(main())
