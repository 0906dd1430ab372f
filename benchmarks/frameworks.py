"""What serving costs each framework: its own library alone against the same model behind a server, in one run.

    python -m benchmarks.frameworks [--only NAME ...] [--seconds 1] [--repeats 5] [--json FILE]

Each framework that is installed computes one model of 5 ms or more, always the same batch, on one thread. The library
alone runs in this process; the server is asked by four clients with binary tensors over HTTP, so that it always has a
request to go on with, and may not join their batches. Both are measured in turn; printed is the median of the ratios
of each turn. Where others use the machine, the processor time of a batch, alone and served, tells more.

After that the model is unloaded and loaded again: times as a client sees them, memory of all the server's processes,
what they share counted once. The framework itself is in memory by then: what is seen is the model's.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import load, servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.load import Request
    from benchmarks.servers import Server

    Array = np.ndarray[Any, np.dtype[Any]]
    Compute = Callable[[Array], Any]

_WIDTH, _LAYERS, _ROWS = 1024, 8, 64
_TREES, _FEATURES = 500, 30
_CLIENTS = 4
_PLAIN = {"MME_WEIGHTS": "plain"}  # nothing is made of weights beside what is measured
_COLUMNS = 130
_SETTLED = 0.5  # seconds, after which memory that was given back is seen to be


@dataclass(frozen=True, slots=True)
class Subject:
    """A framework and a model of it.

    Attributes:
        name: printed; module: without which it is left out.
        config: of config.pbtxt, beside batch size and instances; its model computes on one thread.
        input: the model's input; rows: the batch.
        make: writes the model into its version directory; returns the library's own way to compute it.
    """

    name: str
    module: str
    config: str
    input: str
    rows: Array
    make: Callable[[Path], Compute]


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, answers a second and bytes of one framework."""

    name: str
    batch_ms: float
    bare_rate: float
    served_rate: float
    ratio: float
    bare_cpu_ms: float
    served_cpu_ms: float
    load_ms: float
    unload_ms: float
    reload_ms: float
    taken: int
    left: int


def _weights() -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.03, (_WIDTH, _WIDTH)).astype(np.float32) for _ in range(_LAYERS)]


def _onnx_file(path: Path) -> None:
    import onnx  # noqa: PLC0415 - each framework is imported when it is measured
    from onnx import helper, numpy_helper  # noqa: PLC0415

    nodes, last = [], "x"
    for index in range(_LAYERS):
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"]))
        last = "y" if index == _LAYERS - 1 else f"a{index}"
        nodes.append(helper.make_node("Relu", [f"h{index}"], [last]))
    tensors = [[helper.make_tensor_value_info(name, 1, ["n", _WIDTH])] for name in ("x", "y")]
    constants = [numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(_weights())]
    graph = helper.make_graph(nodes, "g", *tensors, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def _onnx(folder: Path) -> Compute:
    import onnxruntime  # noqa: PLC0415

    _onnx_file(folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda rows: session.run(None, {"x": rows})


def _openvino(folder: Path) -> Compute:
    from model_handlers.openvino import core, openvino, read_model  # noqa: PLC0415

    _onnx_file(folder / "source.onnx")
    openvino().save_model(read_model(folder / "source.onnx", "bare"), folder / "model.xml", compress_to_fp16=False)
    (folder / "source.onnx").unlink()
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    request = core().compile_model(folder / "model.xml", "CPU", properties).create_infer_request()
    return lambda rows: request.infer({0: rows})


def _torch(folder: Path) -> Compute:
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    layers: list[Any] = []
    for array in _weights():
        layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        layer.weight.data = torch.from_numpy(array.T.copy())
        layers += [layer, torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).eval()
    scripted = torch.jit.trace(model, torch.zeros(1, _WIDTH))
    scripted.save(str(folder / "model.pt"))

    def compute(rows: Array) -> Any:
        with torch.inference_mode():
            return scripted(torch.from_numpy(rows)).numpy()

    return compute


def _tensorflow(folder: Path) -> Compute:
    import tensorflow as tf  # noqa: PLC0415

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    module = tf.Module()
    module.weights = [tf.Variable(array) for array in _weights()]

    @tf.function(input_signature=[tf.TensorSpec([None, _WIDTH], tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def serve(x: Any) -> dict[str, Any]:
        for array in module.weights:
            x = tf.nn.relu(tf.linalg.matmul(x, array))
        return {"y": x}

    tf.saved_model.save(module, str(folder / "model.savedmodel"), signatures=serve)
    return lambda rows: serve(tf.constant(rows))["y"].numpy()


def _training() -> tuple[Array, Array]:
    rows = np.random.default_rng(1).normal(size=(3000, _FEATURES)).astype(np.float32)
    return rows, (rows[:, 0] * rows[:, 1] + rows[:, 2] > 0).astype(np.int32)


def _xgboost_model() -> Any:
    import xgboost  # noqa: PLC0415

    options = {"max_depth": 8, "objective": "binary:logistic"}
    booster = xgboost.train(options, xgboost.DMatrix(*_training()), _TREES)
    booster.set_param({"nthread": 1})
    return booster


def _xgboost(folder: Path) -> Compute:
    booster = _xgboost_model()
    booster.save_model(folder / "xgboost.ubj")
    compute: Compute = booster.inplace_predict
    return compute


def _lightgbm(folder: Path) -> Compute:
    import lightgbm  # noqa: PLC0415

    options = {"objective": "binary", "num_leaves": 127, "verbose": -1}
    booster = lightgbm.train(options, lightgbm.Dataset(*_training()), _TREES)
    booster.save_model(folder / "model.txt")
    return lambda rows: booster.predict(rows, num_threads=1)


def _treelite(folder: Path) -> Compute:
    import treelite  # noqa: PLC0415

    model = treelite.frontend.from_xgboost(_xgboost_model())
    model.serialize(folder / "checkpoint.tl")
    return lambda rows: treelite.gtil.predict(model, rows, nthread=1)


def _parameters(**values: str) -> str:
    return "\n".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in values.items()
    )


def _subjects() -> list[Subject]:
    rng = np.random.default_rng(2)
    dense = rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32)
    many, few = (rng.normal(size=(rows, _FEATURES)).astype(np.float32) for rows in (2048, 512))
    fil = 'backend: "fil"\n' + _parameters(cpu_nthread="1")
    torch_tensors = (
        f'input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: {_WIDTH} }}\n'
        f'output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: {_WIDTH} }}\n'
    )
    onnx = 'backend: "onnxruntime"\n' + _parameters(intra_op_thread_count="1")
    openvino = 'backend: "openvino"\n' + _parameters(INFERENCE_NUM_THREADS="1")
    torch = 'backend: "pytorch"\n' + torch_tensors + _parameters(INTRA_OP_THREAD_COUNT="1")
    tensorflow = 'platform: "tensorflow_savedmodel"\n' + _parameters(TF_NUM_INTRA_THREADS="1", TF_NUM_INTER_THREADS="1")
    return [
        Subject("ONNX Runtime", "onnxruntime", onnx, "x", dense, _onnx),
        Subject("OpenVINO", "openvino", openvino, "x", dense, _openvino),
        Subject("PyTorch (TorchScript)", "torch", torch, "INPUT__0", dense, _torch),
        Subject("TensorFlow (SavedModel)", "tensorflow", tensorflow, "x", dense, _tensorflow),
        Subject("XGBoost", "xgboost", fil, "input__0", many, _xgboost),
        Subject("LightGBM", "lightgbm", fil, "input__0", few, _lightgbm),
        Subject("treelite (GTIL)", "treelite", fil, "input__0", few, _treelite),
    ]


def main() -> None:
    """Measure what is installed and print a table."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="names, or what they begin with")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for subject in _subjects():
        wanted = not arguments.only or any(subject.name.lower().startswith(name.lower()) for name in arguments.only)
        if not wanted:
            continue
        if importlib.util.find_spec(subject.module) is None:
            print(f"{subject.name}: {subject.module} is not installed", file=sys.stderr)
            continue
        found.append(_measure(subject, arguments.seconds, arguments.repeats))
    _print(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(measured) for measured in found], indent=1))


def _measure(subject: Subject, seconds: float, repeats: int) -> Measured:
    """One framework, with a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        (repository / "model" / "1").mkdir(parents=True)
        compute = subject.make(repository / "model" / "1")
        config = (
            f"{subject.config}\nmax_batch_size: {len(subject.rows)}\ninstance_group {{ kind: KIND_CPU count: 1 }}\n"
        )
        (repository / "model" / "config.pbtxt").write_text(config)
        request = load.binary_request("model", {subject.input: subject.rows})
        with servers.mme(repository, _PLAIN) as server:
            _ask(server, request)
            turns = [
                (*_rate(lambda: compute(subject.rows), seconds), *_served_rate(server, request, seconds))
                for _ in range(repeats)
            ]
            times = _come_and_go(server, request)
    bare, bare_cpu, served, served_cpu = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(turn[2] / turn[0] for turn in turns)
    return Measured(subject.name, 1e3 / bare, bare, served, ratio, bare_cpu, served_cpu, *times)


def _rate(compute: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Calls a second, and milliseconds of processor time that each takes."""
    compute()
    began, spent, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        compute()
        count += 1
    return count / (time.perf_counter() - began), (time.process_time() - spent) * 1e3 / count


def _served_rate(server: Server, request: Request, seconds: float) -> tuple[float, float]:
    """Answers a second to clients that ask again at once, and what each costs the server."""
    spent = load.processor_seconds(server.pid)
    until = time.perf_counter() + seconds
    counts = [0] * _CLIENTS

    def ask(client: int) -> None:
        with _connection(server) as connection:
            while time.perf_counter() < until:
                _exchange(connection, request)
                counts[client] += 1

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(_CLIENTS)]
    began = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took = time.perf_counter() - began
    return sum(counts) / took, (load.processor_seconds(server.pid) - spent) * 1e3 / sum(counts)


def _come_and_go(server: Server, request: Request) -> tuple[float, float, float, int, int]:
    """Milliseconds to load, unload and load again, bytes that the model takes, and that stay without it."""
    _control(server, "unload")
    empty = _memory(server)
    load_ms = _control(server, "load")
    _ask(server, request)
    taken = _memory(server) - empty
    unload_ms = _control(server, "unload")
    left = _memory(server) - empty
    reload_ms = _control(server, "load")
    return load_ms, unload_ms, reload_ms, taken, left


def _memory(server: Server) -> int:
    time.sleep(_SETTLED)
    return server.proportional_memory()


def _control(server: Server, verb: str) -> float:
    """Load or unload; milliseconds."""
    began = time.perf_counter()
    with _connection(server) as connection:
        connection.request("POST", f"/v2/repository/models/model/{verb}", b"{}")
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{verb} was answered with {answer.status}: {said[:300]!r}")
    return (time.perf_counter() - began) * 1e3


def _ask(server: Server, request: Request) -> None:
    with _connection(server) as connection:
        _exchange(connection, request)


def _exchange(connection: http.client.HTTPConnection, request: Request) -> None:
    connection.request("POST", request.path, request.body, request.headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"a request was answered with {answer.status}: {body[:300]!r}")


@contextlib.contextmanager
def _connection(server: Server) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def _print(found: list[Measured]) -> None:
    columns = ("alone", "served", "ratio", "processor", "load", "unload", "reload", "takes", "stays")
    table = Table("framework", *columns)
    for row in found:
        table.add_row(
            row.name,
            f"{row.bare_rate:.1f}/s",
            f"{row.served_rate:.1f}/s",
            f"{row.ratio:.2f}",
            f"{row.bare_cpu_ms:.1f} / {row.served_cpu_ms:.1f} ms",
            *(f"{ms:.0f} ms" for ms in (row.load_ms, row.unload_ms, row.reload_ms)),
            *(f"{size / 2**20:.1f} MiB" for size in (row.taken, row.left)),
        )
    console = Console()
    Console(width=max(console.width, _COLUMNS)).print(table)


if __name__ == "__main__":
    main()
