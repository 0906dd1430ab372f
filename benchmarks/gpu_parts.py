"""The parts of `benchmarks.gpu_report`: each a function that notes figures, step by step, and what is missing.

A part runs in a process of its own: `python -m benchmarks.gpu_parts NAME FILE [--rehearse]`. FILE is written after each
step, so what was found is there whatever comes after. A step that fails is noted, and the next one runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock
from xml.etree import ElementTree as ET

import numpy as np
import psutil

from benchmarks import load
from container import is_compiled
from model_handlers.system import devices, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.server import Server
    from tests.gpu.heavy import Crowd

MIB = 1 << 20
ROOT = Path(__file__).parents[1]
_BACK_WITHIN = 1.0  # seconds, in which what was unloaded is to be back
_SMI = ("name", "uuid", "memory.total", "memory.used", "utilization.gpu", "power.draw", "power.limit", "driver_version")
_PACKAGES = (
    "torch",
    "onnxruntime-gpu",
    "onnxruntime",
    "onnx",
    "numpy",
    "nvidia-ml-py",
    "cuda-bindings",
    "tensorrt",
    "mme",
)


class Missing(Exception):  # noqa: N818 - nothing went wrong
    """What a part or a step needs, and is not here."""


class Notes:
    """What a part has found so far, in a file.

    Args:
        path: of the file; rehearse: whether the CPU and the host's memory stand for the device and its own.
    """

    def __init__(self, path: Path, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.kind = "CPU" if rehearse else "GPU"
        self._path = path
        self._found: dict[str, Any] = {"figures": {}, "missing": [], "failures": {}}
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Keep a figure, or a dictionary of them."""
        self._found["figures"][name] = value
        self._write()

    def missing(self, what: str) -> None:
        """Say what is missing."""
        self._found["missing"].append(what)
        self._write()

    def step(self, name: str, do: Callable[[], Any]) -> None:
        """Do it and keep what it returns; one that fails, or lacks something, leaves the rest alone."""
        try:
            found = do()
        except Missing as missing:
            self.missing(f"{name}: {missing}")
        except ImportError as error:
            self.missing(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            traceback.print_exc()
            self._found["failures"][name] = f"{type(error).__name__}: {error}"[:1000]
            self._write()
        else:
            if found is not None:
                self.figure(name, found)

    def _write(self) -> None:
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._found, default=str))
        beside.replace(self._path)


# what parts share


def _needs_gpu(notes: Notes) -> None:
    if not notes.rehearse and not devices.gpus():
        raise Missing(f"there is no GPU: {devices.complaint() or 'NVML shows none'}")


def _onnx_for_gpus(notes: Notes) -> None:
    from model_handlers.onnx.handler import RUNTIME  # noqa: PLC0415 - what it needs may be missing, which is then told

    if not notes.rehearse and not RUNTIME.gpu_capable():
        raise Missing("the installed ONNX Runtime has no CUDA provider: onnxruntime-gpu has it")


def _torch(notes: Notes) -> Any:
    import torch  # noqa: PLC0415 - as above

    if not notes.rehearse and not torch.cuda.is_available():
        raise Missing("PyTorch sees no GPU")
    return torch


def _backend(notes: Notes, backend: str) -> None:
    _torch(notes) if backend == "pytorch" else _onnx_for_gpus(notes)


def _smi(*words: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        raise Missing("the command is not there") from None
    return done.stdout.strip()


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="part-"))  # within the report's own, which goes as a whole


@contextlib.contextmanager
def _server(notes: Notes, environ: dict[str, str]) -> Iterator[Server]:
    """A server on the first GPU, its log printed; how it ends is looked at by tests, not here."""
    from tests.contract.server import Server  # noqa: PLC0415 - as above

    device = {} if notes.rehearse else {"MME_REQUIRE_GPU": "true", "CUDA_VISIBLE_DEVICES": devices.gpus()[0].uuid}
    folder = _folder()
    device["CUDA_CACHE_PATH"] = str(folder / "cuda")
    server = Server(folder, {"MME_WEIGHTS": "plain", **device, **environ})
    with contextlib.ExitStack() as stack:
        server.__enter__()
        stack.callback(lambda: print(server.log[-20000:]))
        stack.callback(lambda: notes.step("the server's end", lambda: _ended(server)))
        yield server


def _ended(server: Server) -> None:
    if code := server.stop():
        raise RuntimeError(f"its exit code is {code}")


def _used(notes: Notes, server: Server) -> int:
    """Bytes on the device by all processes, by the driver; rehearsed, those that the server's have alone."""
    if not notes.rehearse:
        return devices.gpus()[0].used
    process, total = psutil.Process(server.process.pid), 0  # type: ignore[union-attr] - it runs
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError):
            total += memory.private_memory(each.pid)
    return total


def _crowd(notes: Notes, server: Server) -> Crowd:
    from tests.gpu.heavy import Crowd  # noqa: PLC0415 - as above

    return Crowd(server, "host" if notes.rehearse else "device", lambda: _used(notes, server))


def _budget(notes: Notes, size: int) -> dict[str, str]:
    return {"MME_MEMORY_BUDGET" if notes.rehearse else "MME_GPU_MEMORY_BUDGET": str(size)}


def _lay_out(notes: Notes, folder: Path, megabytes: int, **more: Any) -> Path:
    from tests.gpu.heavy import lay_out  # noqa: PLC0415 - as above

    lay_out(folder, megabytes, kind=notes.kind, **more)
    return folder


def _unload(server: Server, model: str) -> None:
    server.ask("POST", f"/v2/repository/models/{model}/unload", {})


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    found = {
        name: round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) for name, share in at.items()
    }
    return {**found, "max_ms": round(1e3 * ordered[-1], 3), "requests": len(ordered)}


def _mib(size: float) -> float:
    return round(size / MIB, 1)


def _settled(used: Callable[[], int], goal: float, seconds: float = _BACK_WITHIN) -> tuple[int, float]:
    """Wait until no more than `goal` is in use, so long at most; what is in use, and the milliseconds it took."""
    began = time.monotonic()
    while (now := used()) > goal and time.monotonic() - began < seconds:
        time.sleep(0.01)
    return now, round(1e3 * (time.monotonic() - began), 1)


# the parts


def versions(notes: Notes) -> None:
    notes.figure("machine", f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    notes.figure("mme compiled", is_compiled())
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    notes.figure("packages", found)
    notes.step("nvidia-smi", lambda: _smi(f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"))
    notes.step("NVML", lambda: _listed(notes))
    notes.step("ONNX Runtime", lambda: _onnx_starts(notes))
    notes.step("PyTorch", lambda: _torch_starts(notes))


def _listed(notes: Notes) -> Any:
    _needs_gpu(notes)
    return [f"{gpu.index}: {gpu.name}, {gpu.uuid}, {_mib(gpu.total)} MiB, {gpu.capability}" for gpu in devices.gpus()]


def _onnx_starts(notes: Notes) -> dict[str, Any]:
    import onnxruntime  # noqa: PLC0415 - as above

    from model_handlers.base import CPU, Device  # noqa: PLC0415
    from model_handlers.config.model_config import ModelConfig  # noqa: PLC0415
    from model_handlers.onnx import OnnxHandler  # noqa: PLC0415

    notes.figure("ONNX Runtime's providers", {onnxruntime.__version__: onnxruntime.get_available_providers()})
    _onnx_for_gpus(notes)
    folder = _lay_out(notes, _folder() / "m", 1)
    device = CPU if notes.rehearse else Device("gpu", 0)
    handler = OnnxHandler.load(ModelConfig("m"), folder / "1" / "model.onnx", device)
    (found,) = handler.execute({"x": np.ones((1, 1024), np.float32)}, ["y"])
    handler.close()
    return {"device": str(device), "sums up 1024 ones to": float(found.ravel()[0])}


def _torch_starts(notes: Notes) -> dict[str, Any]:
    torch = _torch(notes)
    found = {
        "version": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }
    if not notes.rehearse:
        found["device"] = torch.cuda.get_device_name(0)
    return found


def device_tests(notes: Notes) -> None:
    """Their outcomes; a test's own time and memory are its business."""
    results = _folder() / "results.xml"
    # Of plugins that the machine has, none but the one that our options are for.
    words = ["-v", "-m", "gpu", "-p", "xdist.plugin", "-p", "no:cacheprovider", f"--junitxml={results}", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", *words]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode  # what it says is the part's log
    if not results.exists():
        raise RuntimeError(f"pytest ended with {code}")
    outcomes: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
    for case in ET.parse(results).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        worst = next((each for each in case if each.tag in outcomes), None)
        said = "" if worst is None else f": {worst.get('message', '')[:300]}"
        outcomes["passed" if worst is None else worst.tag].append(f"{case.get('name')}{said}")
    counts = {name: len(each) for name, each in outcomes.items()}
    if counts != {"passed": 0, "failure": 0, "error": 0, "skipped": counts["skipped"]}:
        notes.figure("counts", counts)
    for said in outcomes.pop("skipped"):
        notes.missing(said)
    for name, each in outcomes.items():
        if each:
            notes.figure(name, each)
    if outcomes["failure"] or outcomes["error"]:
        raise RuntimeError("tests failed: see the figures")


_PLACEMENTS = {"inline": "inline", "shared": "", "process": "process"}


def pytorch(notes: Notes) -> None:
    """Against the library's own answers on the CPU; where the weights are is told by the driver's count."""
    _needs_gpu(notes)
    torch = _torch(notes)
    width = 256 if notes.rehearse else 4096
    rows = np.random.default_rng(4).normal(size=(8, width)).astype(np.float32)
    repository, expected = _folder(), {}
    for form, (name, placement) in itertools.product(("script", "pt2"), _PLACEMENTS.items()):
        folder = repository / f"{form}_{name}"
        expected[folder.name] = _layer(torch, form, folder, width, rows, notes.kind, placement)
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "none"}
    with _server(notes, environ) as server:
        for name, answer in expected.items():
            notes.step(name, lambda name=name, answer=answer: _compared(notes, server, name, rows, answer))


def _layer(torch: Any, form: str, folder: Path, width: int, rows: Any, kind: str, placement: str) -> Any:
    """A layer of random weights, as a model of a form; what it answers to the rows."""
    (folder / "1").mkdir(parents=True)

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    module = Layer().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        if form == "script":
            torch.jit.trace(module, torch.from_numpy(rows)).save(str(folder / "1" / "model.pt"))
        else:
            size = ({0: torch.export.Dim("batch")},)
            exported = torch.export.export(module, (torch.from_numpy(rows),), dynamic_shapes=size)
            torch.export.save(exported, folder / "1" / "model.pt2")
    tensors = f"""
        input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: {width} }}
        output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: {width} }}
    """
    placed = f'parameters {{ key: "MME_PLACEMENT" value: {{ string_value: "{placement}" }} }}' if placement else ""
    platform_of = 'backend: "pytorch"' if form == "script" else 'platform: "torch_aoti"'
    (folder / "config.pbtxt").write_text(
        f"{platform_of} max_batch_size: 8 instance_group {{ kind: KIND_{kind} count: 1 }} {placed} {tensors}"
    )
    return module(torch.from_numpy(rows)).detach().numpy()


def _compared(notes: Notes, server: Server, name: str, rows: Any, expected: Any) -> dict[str, Any]:
    before = _used(notes, server)
    began = time.perf_counter()
    loaded = server.ask("POST", f"/v2/repository/models/{name}/load", {})
    if loaded.status != 200:
        raise RuntimeError(f"loading was answered with {loaded.status}: {loaded.body[:500]!r}")
    took, taken = time.perf_counter() - began, _used(notes, server) - before
    tensor = {"name": "INPUT__0", "shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}
    answer = server.ask("POST", f"/v2/models/{name}/infer", {"inputs": [tensor]})
    if answer.status != 200:
        raise RuntimeError(f"it was answered with {answer.status}: {answer.body[:500]!r}")
    found = np.reshape(answer.json["outputs"][0]["data"], expected.shape)
    return {
        "largest difference to the library": float(np.abs(found - expected).max()),
        "load_ms": round(1e3 * took, 1),
        "MiB taken": _mib(taken),
        "models' processes": sorted(set(server.processes.values())),
        "processes": len(server.processes),
    }


_ON_DEVICE = """
import numpy as np, os, torch
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        on_gpu = args["model_instance_kind"] == "GPU"
        self.device = torch.device("cuda", int(args["model_instance_device_id"])) if on_gpu else torch.device("cpu")
        self.weights = torch.eye(64, device=self.device) * 2

    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x")
            x = torch.from_dlpack(given.to_dlpack()).to(self.device)
            if float(x[0, 0]) == 666:
                self.lose()
            y = (x @ self.weights).contiguous()
            told = pb_utils.Tensor.from_dlpack("y", y)
            back = torch.from_dlpack(told.to_dlpack())
            same = [int(back.data_ptr() == y.data_ptr()), int(told.is_cpu()), os.getpid(), int(back.is_cuda)]
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor.from_dlpack("y", y), pb_utils.Tensor("facts", np.array([same], np.int64))]))
        return answers

    def lose(self):
        if self.device.type == "cpu":
            os.abort()
        source = 'extern "C" __global__ void wild(float *p) { *(volatile float *)16 = p[0]; }'
        kernel = torch.cuda._compile_kernel(source, "wild")
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[torch.ones(1, device=self.device)])
        torch.cuda.synchronize()
"""
_ON_DEVICE_CONFIG = """
backend: "python" max_batch_size: 8 instance_group {{ kind: KIND_{kind} count: 1 }}
input {{ name: "x" data_type: TYPE_FP32 dims: 64 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 64 }}
output {{ name: "facts" data_type: TYPE_INT64 dims: 4 }}
"""


def _python_model(notes: Notes, folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_ON_DEVICE)
    (folder / "config.pbtxt").write_text(_ON_DEVICE_CONFIG.format(kind=notes.kind))


def _ask_python(server: Server, model: str, value: float = 1.0) -> Any:
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [value] + [1.0] * 63}
    return server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})


def python_models(notes: Notes) -> None:
    _needs_gpu(notes)
    _torch(notes)
    repository = _folder()
    _python_model(notes, repository / "device")
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository)}) as server:
        notes.step("tensors", lambda: _python_facts(server))


def _python_facts(server: Server) -> dict[str, Any]:
    answer = _ask_python(server, "device")
    if answer.status != 200:
        raise RuntimeError(f"it was answered with {answer.status}: {answer.body[:500]!r}")
    outputs = {each["name"]: each["data"] for each in answer.json["outputs"]}
    same, on_host, _, cuda = outputs["facts"]
    return {
        "answer is right": outputs["y"] == [2.0] * 64,
        "DLPack there and back is the same memory": bool(same),
        "the tensor says that it is on the host": bool(on_host),
        "it was on a CUDA device": bool(cuda),
    }


def footprints(notes: Notes) -> None:
    _needs_gpu(notes)
    for backend, megabytes in itertools.product(
        ("onnxruntime", "pytorch"), (4, 16) if notes.rehearse else (64, 512, 1536)
    ):
        notes.step(f"{backend}, {megabytes} MiB", lambda b=backend, m=megabytes: _footprint(notes, b, m))


def _footprint(notes: Notes, backend: str, megabytes: int) -> dict[str, Any]:
    """Of one model in a server that has executed a small one, whose context and handles are there."""
    _backend(notes, backend)
    repository = _folder()
    _lay_out(notes, repository / "first", 1, backend=backend)
    _lay_out(notes, repository / "model", megabytes, backend=backend)
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "first"}) as server:
        crowd = _crowd(notes, server)
        crowd.ask("first")
        before = crowd.used()
        server.ask("POST", "/v2/repository/models/model/load", {})
        loaded = crowd.used() - before
        status = crowd.ask("model")
        asked, charged = crowd.used() - before, crowd.bytes_of("model")
        _unload(server, "model")
        left = _settled(crowd.used, before)[0] - before
    found = {
        "status": status,
        "charged MiB": _mib(charged),
        "driver MiB, loaded": _mib(loaded),
        "driver MiB, asked": _mib(asked),
        "left after the unload, MiB": _mib(left),
        "error against the driver, %": round(100 * (charged / asked - 1), 1) if asked > 0 else None,
        "error against the weights, %": round(100 * (charged / (megabytes * MIB) - 1), 1),
    }
    if backend == "pytorch":
        found |= _by_allocator(notes, repository / "model" / "1" / "model.pt", charged)
    return found


def _by_allocator(notes: Notes, path: Path, charged: float) -> dict[str, Any]:
    if notes.rehearse:
        return {"allocator": "PyTorch counts none on the CPU"}
    torch = _torch(notes)
    torch.zeros(1, device="cuda:0")
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    module = torch.jit.load(str(path), map_location="cuda:0")
    taken = torch.cuda.memory_allocated(0) - before[0], torch.cuda.memory_reserved(0) - before[1]
    del module
    torch.cuda.empty_cache()
    return {
        "allocated MiB by the library alone": _mib(taken[0]),
        "reserved MiB by the library alone": _mib(taken[1]),
        "error against the allocator, %": round(100 * (charged / taken[1] - 1), 1),
    }


_MODELS = [f"m{number}" for number in range(6)]
_TRACE = [0, 1, 2, 3, 4, 5, 2, 0, 5, 1, 3, 3, 4, 0]


def evictions(notes: Notes) -> None:
    _needs_gpu(notes)
    for backend in ("onnxruntime", "pytorch"):
        notes.step(backend, lambda b=backend: _evicted(notes, b))


def _size(notes: Notes) -> int:
    return 24 if notes.rehearse else 1024  # MiB


def _heavy_server(
    notes: Notes, repository: Path, backend: str, share: float
) -> contextlib.AbstractContextManager[Server]:
    """A server of six models, whose budget holds so many of them."""
    for name in _MODELS:
        _lay_out(notes, repository / name, _size(notes), backend=backend)
    _lay_out(notes, repository / "first", 1, backend=backend)
    environ = {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "first"}
    return _server(notes, environ | _budget(notes, int(share * _size(notes)) * MIB))


def _evicted(notes: Notes, backend: str) -> dict[str, Any]:
    _backend(notes, backend)
    # On the CPU what processes take beside the weights counts, too: ten MiB and more a model of PyTorch.
    share = 4.9 if not notes.rehearse else 5.4 if backend == "onnxruntime" else 11
    with _heavy_server(notes, _folder(), backend, share) as server:
        crowd = _crowd(notes, server)
        crowd.ask("first")
        for name in _MODELS:  # what each takes is known from now on
            crowd.ask(name)
        for name in _MODELS:
            _unload(server, name)
        time.sleep(_BACK_WITHIN)
        empty = crowd.used()
        trace = []
        for number in _TRACE:
            began, status = time.perf_counter(), crowd.ask(_MODELS[number])
            took = round(1e3 * (time.perf_counter() - began))
            there = " ".join(crowd.resident(_MODELS))
            trace.append(f"{_MODELS[number]}: {status}, {took} ms; there: {there}; {_mib(crowd.used() - empty)} MiB")
        found: dict[str, Any] = {"budget MiB": round(share * _size(notes)), "before the trace MiB": _mib(empty)}
        found["trace"] = trace
        found["each unload"] = {name: _given_back(crowd, name) for name in crowd.resident(_MODELS)}
        found["left in the end MiB"] = _mib(crowd.used() - empty)
        found["two loads at once"] = _at_once(crowd, _MODELS[:2])
    return found


def _given_back(crowd: Crowd, name: str) -> dict[str, Any]:
    """Bytes before and after an unload, and whether the model's are back in a second: to 1 % or 16 MiB."""
    before, footprint = crowd.used(), crowd.bytes_of(name)
    slack = max(0.01 * footprint, 16 * MIB)
    _unload(crowd.server, name)
    after, took = _settled(crowd.used, before - footprint + slack)
    return {
        "before MiB": _mib(before),
        "after MiB": _mib(after),
        "footprint MiB": _mib(footprint),
        "back in time": after <= before - footprint + slack,
        "ms": took,
    }


def _at_once(crowd: Crowd, models: list[str]) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    most, before = [0], crowd.used()
    threads = [threading.Thread(target=lambda m=model: statuses.update({m: crowd.ask(m)})) for model in models]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most[0] = max(most[0], crowd.used() - before)
        time.sleep(0.005)
    return {"statuses": statuses, "most MiB meanwhile": _mib(most[0]), "MiB after": _mib(crowd.used() - before)}


def refusals(notes: Notes) -> None:
    """As SageMaker's platform loads: POST /models until there is no room, which is 507, and again after a DELETE."""
    _needs_gpu(notes)
    for backend in ("onnxruntime", "pytorch"):
        notes.step(backend, lambda b=backend: _refused(notes, b))


def _refused(notes: Notes, backend: str) -> dict[str, Any]:
    _backend(notes, backend)
    store = _folder()
    for name in _MODELS:
        _lay_out(notes, store / name / "model", _size(notes), backend=backend)
    share = 4.9 if not notes.rehearse else 5.4 if backend == "onnxruntime" else 11
    with _server(notes, {"SAGEMAKER_MULTI_MODEL": "true"} | _budget(notes, int(share * _size(notes)) * MIB)) as server:

        def loaded(name: str) -> int:
            return server.ask("POST", "/models", {"model_name": name, "url": str(store / name / "model")}).status

        statuses = {name: loaded(name) for name in _MODELS}
        refused = [name for name, status in statuses.items() if status == 507]
        found: dict[str, Any] = {"budget holds": round(share, 1), "statuses": statuses}
        if not notes.rehearse:
            found["four are loaded and two refused"] = list(statuses.values()) == [200] * 4 + [507] * 2
        if refused:
            found["after one leaves"] = {
                "DELETE": server.ask("DELETE", f"/models/{_MODELS[0]}").status,
                refused[0]: loaded(refused[0]),
            }
        found["charged MiB"] = {name: _mib(_crowd(notes, server).bytes_of(name)) for name in _MODELS}
    return found


_NEIGHBOUR = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
held = torch.empty(free - (int(sys.argv[1]) << 20), dtype=torch.uint8, device="cuda:0")
print("holds", held.numel(), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def _neighbour(leaves: int) -> Iterator[int]:
    """A process that takes all the device's memory but so many MiB; yields how many it took."""
    command = [sys.executable, "-c", _NEIGHBOUR, str(leaves)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin, process.stdout  # noqa: S101 - pipes are asked for
        try:
            words = process.stdout.readline().split()  # type: ignore[union-attr]
            if not words:
                raise RuntimeError("the neighbour found no memory to take")
            yield int(words[1]) // MIB
        finally:
            process.kill()


def out_of_memory(notes: Notes) -> None:
    _needs_gpu(notes)
    notes.step("while inferring", lambda: _oom_inferring(notes))
    for backend in ("onnxruntime", "pytorch"):
        notes.step(f"by a neighbour, {backend}", lambda b=backend: _oom_by_neighbour(notes, b))


def _oom_inferring(notes: Notes) -> dict[str, Any]:
    """A model that makes a tensor of the size that it is asked for."""
    import onnx  # noqa: PLC0415 - as above
    from onnx import TensorProto, helper  # noqa: PLC0415

    _onnx_for_gpus(notes)
    repository = _folder()
    (repository / "grows" / "1").mkdir(parents=True)
    nodes = [
        helper.make_node("ConstantOfShape", ["x"], ["wide"]),
        helper.make_node("ReduceSum", ["wide"], ["y"], keepdims=1),
    ]
    tensors = helper.make_tensor_value_info("x", TensorProto.INT64, [1]), helper.make_tensor_value_info("y", 1, [1])
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, repository / "grows" / "1" / "model.onnx")
    group = f"instance_group {{ kind: KIND_{notes.kind} count: 1 }}"
    (repository / "grows" / "config.pbtxt").write_text(f'backend: "onnxruntime" {group}')
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository)}) as server:
        found, sizes = {}, {"small": 10, "beyond any device": 1 << 46, "small again": 10}
        if not notes.rehearse:
            sizes |= {"half as much again as the device": 3 * devices.gpus()[0].total // 8, "small after that": 10}
        for name, size in sizes.items():
            tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [size]}
            answer = server.ask("POST", "/v2/models/grows/infer", {"inputs": [tensor]})
            found[name] = f"{answer.status} {answer.body.decode()[:200] if answer.status != 200 else ''}".strip()
    return found


def _oom_by_neighbour(notes: Notes, backend: str) -> dict[str, Any]:
    """It fills the device: what is there answers, what is not is refused; without it all is as before."""
    _backend(notes, backend)
    if notes.rehearse:
        raise Missing("a stand-in for a device that is full: the host's memory is not filled")
    _torch(notes)
    repository = _folder()
    for name, size in (("first", 1), ("small", 64), ("large", 1536)):
        _lay_out(notes, repository / name, size, backend=backend)
    found: dict[str, Any] = {}
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "first"}) as server:
        crowd = _crowd(notes, server)
        found["first, before"] = crowd.ask("first")
        with _neighbour(1024) as taken:
            found["neighbour took MiB"] = taken
            for name in ("first", "small"):
                found[f"{name}, beside it"] = crowd.ask(name)
            answer = server.ask("POST", "/v2/repository/models/large/load", {})
            found["large, beside it"] = f"{answer.status} {answer.body.decode()[:300]}"
            found["first, after the refusal"] = crowd.ask("first")
        for name in ("first", "small", "large"):
            found[f"{name}, without it"] = crowd.ask(name)
    return found


def lost_device(notes: Notes) -> None:
    """By a Python model's illegal access, and an assertion of PyTorch's; rehearsed, by a process that aborts."""
    _needs_gpu(notes)
    _torch(notes)
    repository = _folder()
    for name in ("bad", "good"):
        _python_model(notes, repository / name)
    _lay_out(notes, repository / "neighbour", 8, backend="pytorch")
    _table(notes, repository / "table")
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository)}) as server:
        crowd = _crowd(notes, server)
        notes.step(
            "a Python model", lambda: _lost(crowd, lambda bad: _ask_python(server, "bad", 666.0 if bad else 1.0))
        )
        notes.step("a Python model beside it", lambda: _ask_python(server, "good").status)
        notes.step("a TorchScript model", lambda: _lost(crowd, lambda bad: _ask_table(server, 99 if bad else 1)))


def _table(notes: Notes, folder: Path) -> None:
    torch = _torch(notes)
    (folder / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        torch.jit.script(torch.nn.Embedding(10, 4)).save(str(folder / "1" / "model.pt"))
    (folder / "config.pbtxt").write_text(
        f'backend: "pytorch" instance_group {{ kind: KIND_{notes.kind} count: 1 }}'
        'input { name: "ids" data_type: TYPE_INT64 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] }'
    )


def _ask_table(server: Server, row: int) -> Any:
    tensor = {"name": "ids", "shape": [1], "datatype": "INT64", "data": [row]}
    return server.ask("POST", "/v2/models/table/infer", {"inputs": [tensor]})


def _lost(crowd: Crowd, ask: Callable[[bool], Any]) -> dict[str, Any]:
    """What is answered before, by the request that goes wrong, and after it, until it is right again."""
    found: dict[str, Any] = {"before": ask(False).status, "beside it, before": crowd.ask("neighbour")}
    answer = ask(True)
    found["the request that goes wrong"] = f"{answer.status} {answer.body.decode()[:300]}"
    began, statuses = time.monotonic(), []
    while time.monotonic() - began < 30 and (status := ask(False).status) != 200:
        statuses.append(status)
        time.sleep(0.05)
    found["answers until it is right again"] = statuses[:5]
    found["right again after ms"] = round(1e3 * (time.monotonic() - began))
    found["beside it, after"] = crowd.ask("neighbour")
    return found


def buffers(notes: Notes) -> None:
    """By ONNX Runtime alone, which mme asks plainly, without binding: what binding and pinned buffers would change."""
    _needs_gpu(notes)
    for kilobytes in (4, 1024, 16384):
        notes.step(f"ONNX Runtime, {kilobytes} KiB in", lambda size=kilobytes: _bound(notes, size))
    notes.step("copies of 64 MiB to the device", lambda: _pinned(notes))


def _bound(notes: Notes, kilobytes: int) -> dict[str, Any]:
    import onnxruntime  # noqa: PLC0415 - as above

    _onnx_for_gpus(notes)
    folder = _lay_out(notes, _folder() / "m", 8)
    session = _session(notes, folder / "1" / "model.onnx")
    rows = np.ones((max(1, kilobytes // 4), 1024), np.float32)
    device = "cpu" if notes.rehearse else "cuda"
    binding = session.io_binding()

    def bound() -> None:
        binding.bind_cpu_input("x", rows)
        binding.bind_output("y", "cpu")
        session.run_with_iobinding(binding)

    there = onnxruntime.OrtValue.ortvalue_from_numpy(rows, device, 0)
    on_device = session.io_binding()
    on_device.bind_ortvalue_input("x", there)
    on_device.bind_output("y", "cpu")
    ways = {
        "plain": lambda: session.run(None, {"x": rows}),
        "bound on the host": bound,
        "input on the device already": lambda: session.run_with_iobinding(on_device),
    }
    return {name: _milliseconds(_timed(way, 1.0)) for name, way in ways.items()}


def _session(notes: Notes, path: Path) -> Any:
    import onnxruntime  # noqa: PLC0415 - as above

    if notes.rehearse:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    onnxruntime.preload_dlls()
    session = onnxruntime.InferenceSession(str(path), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("ONNX Runtime's CUDA provider did not start")
    return session


def _pinned(notes: Notes) -> dict[str, Any]:
    torch = _torch(notes)
    if notes.rehearse:
        raise Missing("pinned memory, which needs a device")
    pageable, found = torch.ones(64 * MIB // 4), {}
    for name, tensor in {"pageable": pageable, "pinned": pageable.pin_memory()}.items():

        def copy(source: Any = tensor) -> None:
            source.to("cuda:0", non_blocking=True)
            torch.cuda.synchronize()

        found[name] = _milliseconds(_timed(copy, 1.0))
    return found


def _timed(do: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call, after three that are not counted."""
    for _ in range(3):
        do()
    times, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        do()
        times.append(time.perf_counter() - began)
    return times


class _RandomWeights(dict[str, Any]):
    """Of the encoder, by its published names: computing with them takes as long as with the trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)

    def __missing__(self, name: str) -> Any:
        width, inner = 384, 1536
        first = {"word": 30522, "position": 512, "token_type": 2}
        rows = next((rows for kind, rows in first.items() if f"{kind}_embeddings" in name), 0)
        if "LayerNorm" in name:
            shape: tuple[int, ...] = (width,)
        elif rows:
            shape = (rows, width)
        else:
            out = inner if "intermediate" in name else width
            into = inner if name.endswith("output.dense.weight") and "attention" not in name else width
            shape = (out, into) if name.endswith(".weight") else (out,)
        self[name] = self._rng.normal(0, 0.02, shape).astype(np.float32)
        return self[name]


def _minilm(path: Path) -> None:
    import onnx  # noqa: PLC0415 - as above

    from examples import minilm  # noqa: PLC0415

    onnx.save(minilm.build_encoder("minilm", minilm.Shape(6, 12, 384, 1e-12), _RandomWeights()), path)


def _resnet(path: Path) -> None:
    """Eight blocks of two convolutions, as wide as ResNet-18's."""
    import onnx  # noqa: PLC0415 - as above
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    rng = np.random.default_rng(0)
    nodes, constants = [], []

    def convolved(x: str, into: int, out: int, size: int, stride: int) -> str:
        name = f"c{len(constants)}"
        weights = rng.normal(0, (into * size * size) ** -0.5, (out, into, size, size)).astype(np.float32)
        constants.append(numpy_helper.from_array(weights, f"{name}_w"))
        pads, strides = [size // 2] * 4, [stride] * 2
        nodes.append(helper.make_node("Conv", [x, f"{name}_w"], [name], pads=pads, strides=strides))
        return name

    def op(kind: str, *names: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(names), [f"n{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    x = op("Relu", convolved("x", 3, 64, 7, 2))
    x = op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    width = 64
    for out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        inner = convolved(op("Relu", convolved(x, width, out, 3, stride)), out, out, 3, 1)
        beside = x if width == out and stride == 1 else convolved(x, width, out, 1, stride)
        x, width = op("Relu", op("Add", inner, beside)), out
    constants.append(numpy_helper.from_array(rng.normal(0, 0.04, (512, 1000)).astype(np.float32), "w"))
    pooled = op("Flatten", op("GlobalAveragePool", x))
    nodes.append(helper.make_node("MatMul", [pooled, "w"], ["y"]))
    tensors = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 224, 224]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1000]),
    )
    graph = helper.make_graph(nodes, "resnet", tensors[:1], tensors[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def _rows_of(model: str) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    if model == "resnet":
        return {"x": rng.normal(size=(8, 3, 224, 224)).astype(np.float32)}
    ids = rng.integers(1000, 20000, (8, 64))
    return {"input_ids": ids.astype(np.int64), "attention_mask": np.ones((8, 64), np.int64)}


def _named_models(notes: Notes, repository: Path, *names: str) -> None:
    for name in names:
        (repository / name / "1").mkdir(parents=True)
        (_resnet if name == "resnet" else _minilm)(repository / name / "1" / "model.onnx")
        threads = 'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }' if notes.rehearse else ""
        (repository / name / "config.pbtxt").write_text(
            f'backend: "onnxruntime" max_batch_size: 8 instance_group {{ kind: KIND_{notes.kind} count: 1 }} {threads}'
        )


def latency(notes: Notes) -> None:
    """Batches of 8: the library in this process, the server asked by one client and by four, in turns of a second."""
    _needs_gpu(notes)
    _onnx_for_gpus(notes)
    repository = _folder()
    _named_models(notes, repository, "minilm", "resnet")
    notes.figure("setting", load.setting())
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository)}) as server:
        for name in ("minilm", "resnet"):
            notes.step(name, lambda name=name: _in_turns(notes, server, repository, name, 2 if notes.rehearse else 7))


def _in_turns(notes: Notes, server: Server, repository: Path, name: str, turns: int) -> dict[str, Any]:
    rows = _rows_of(name)
    session, request = _session(notes, repository / name / "1" / "model.onnx"), load.binary_request(name, rows)
    alone, served, rates = [], [], []
    _clients(server, request, 1, 0.5)
    for _ in range(turns):
        alone.append(_timed(lambda: session.run(None, rows), 1.0))
        served.append(_clients(server, request, 1, 1.0))
        rates.append(len(_clients(server, request, 4, 1.0)))
    medians = [statistics.median(one) / statistics.median(other) for one, other in zip(served, alone, strict=True)]
    shares = [rate / len(one) for rate, one in zip(rates, alone, strict=True)]
    return {
        "the library alone": _milliseconds([each for turn in alone for each in turn]),
        "served, one client": _milliseconds([each for turn in served for each in turn]),
        "latency, served to alone, median of the turns": round(statistics.median(medians), 3),
        "throughput of four clients, served to alone": round(statistics.median(shares), 3),
    }


def _clients(server: Server, request: load.Request, count: int, seconds: float) -> list[float]:
    times: list[list[float]] = [[] for _ in range(count)]

    def ask(mine: list[float]) -> None:
        until = time.perf_counter() + seconds
        with load.connect(server.address) as connection:
            while time.perf_counter() < until:
                mine.append(load.ask(connection, "POST", request.path, request.body, request.headers)[0])

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for mine in times for each in mine]


def hot_beside_loads(notes: Notes) -> None:
    _needs_gpu(notes)
    for backend in ("onnxruntime", "pytorch"):
        notes.step(f"beside models of {backend}", lambda b=backend: _hot(notes, b))


def _hot(notes: Notes, backend: str) -> dict[str, Any]:
    _onnx_for_gpus(notes)
    _backend(notes, backend)
    repository, seconds = _folder(), 3.0 if notes.rehearse else 15.0
    _named_models(notes, repository, "minilm")
    for name in _MODELS[:2]:
        _lay_out(notes, repository / name, _size(notes) // 2, backend=backend)
    request = load.binary_request("minilm", _rows_of("minilm"))
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "minilm"}) as server:
        crowd = _crowd(notes, server)
        _clients(server, request, 1, 1.0)
        quiet = _clients(server, request, 1, seconds)
        over, loads, statuses = threading.Event(), [0], set()

        def come_and_go() -> None:
            for name in itertools.cycle(_MODELS[:2]):
                if over.is_set():
                    return
                statuses.add(crowd.ask(name))
                _unload(server, name)
                loads[0] += 1

        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            beside = _clients(server, request, 1, seconds)
        finally:
            over.set()
            thread.join()
    found = {"quiet": _milliseconds(quiet), "beside loads": _milliseconds(beside)}
    return {**found, "loads meanwhile": loads[0], "their statuses": sorted(statuses)}


_CONTEXT = """
import sys
if sys.argv[1] == "torch":
    import torch
    held = torch.ones(1, device=sys.argv[3])
else:
    import onnxruntime
    if sys.argv[3] != "cpu":
        onnxruntime.preload_dlls()
    providers = ["CPUExecutionProvider" if sys.argv[3] == "cpu" else "CUDAExecutionProvider"]
    held = onnxruntime.InferenceSession(sys.argv[2], providers=providers)
print("holds", flush=True)
sys.stdin.readline()
"""


def contexts(notes: Notes) -> None:
    _needs_gpu(notes)
    for library in ("onnxruntime", "torch"):
        notes.step(f"MiB of each process with {library}", lambda each=library: _context(notes, each))
    for name, placement in (("models that share", ""), ("models in processes of their own", "process")):
        notes.step(name, lambda placement=placement: _shared(notes, placement))


def _context(notes: Notes, library: str) -> list[float]:
    """What two processes after each other take, of the driver's count."""
    _backend(notes, "pytorch" if library == "torch" else library)
    model = _lay_out(notes, _folder() / "m", 1) / "1" / "model.onnx"
    started, taken = [], []
    try:
        for _ in range(2):
            before = 0 if notes.rehearse else devices.gpus()[0].used
            command = [sys.executable, "-c", _CONTEXT, library, str(model), "cpu" if notes.rehearse else "cuda:0"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(process)
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the process found no device")
            held = memory.private_memory(process.pid) if notes.rehearse else devices.gpus()[0].used - before
            taken.append(_mib(held))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return taken


def _shared(notes: Notes, placement: str) -> dict[str, Any]:
    """Three models of PyTorch, asked one after another."""
    torch = _torch(notes)
    repository, rows = _folder(), np.ones((8, 64), np.float32)
    for name in _MODELS[:3]:
        _layer(torch, "script", repository / name, 64, rows, notes.kind, placement)
    found: dict[str, Any] = {}
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository), "MME_LOAD_MODEL": "none"}) as server:
        before = _used(notes, server)
        for name in _MODELS[:3]:
            server.ask("POST", f"/v2/repository/models/{name}/load", {})
            taken = _mib(_used(notes, server) - before)
            found[name] = {"processes below the server's": len(server.processes), "MiB so far": taken}
    return found


def gauges(notes: Notes) -> None:
    """/metrics and nvidia-smi, asked one after the other; rehearsed, NVML's readings against a made-up GPU's."""
    if notes.rehearse:
        from tests.fake_nvml import FakeGpu, FakeNvml  # noqa: PLC0415 - as above

        gpu = FakeGpu("GPU-1", total=80 << 30, used=5 << 30)
        with mock.patch.dict(sys.modules, {"pynvml": FakeNvml([gpu])}):
            (reading,) = devices.readings()
        notes.figure("memory in use", {"gauge": reading.used, "made up": gpu.used, "same": reading.used == gpu.used})
        notes.missing("nvidia-smi: a made-up NVML was asked")
        return
    _needs_gpu(notes)
    repository = _folder()
    _lay_out(notes, repository / "m", 512, backend="onnxruntime")
    with _server(notes, {"MME_MODEL_REPOSITORY": str(repository)}) as server:
        notes.step("each", lambda: _gauges(server))


def _gauges(server: Server) -> dict[str, Any]:
    uuid = devices.gpus()[0].uuid
    names = {
        "memory.total": ("nv_gpu_memory_total_bytes", MIB),
        "memory.used": ("nv_gpu_memory_used_bytes", MIB),
        "utilization.gpu": ("nv_gpu_utilization", 0.01),
        "power.draw": ("nv_gpu_power_usage", 1),
        "power.limit": ("nv_gpu_power_limit", 1),
    }
    told = _smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", f"--id={uuid}").split(", ")
    pairs = zip(names.items(), told, strict=True)
    return {
        name: {"nvidia-smi": said, "gauge": round(server.metric(gauge, gpu_uuid=uuid) / unit, 2)}
        for (name, (gauge, unit)), said in pairs
    }


def mig(notes: Notes) -> None:
    """Which GPUs or parts of them are shown; nothing is set."""
    if notes.rehearse:
        from tests.fake_nvml import FakeGpu, FakeNvml  # noqa: PLC0415 - as above

        whole, cut = FakeGpu("GPU-1"), FakeGpu("GPU-2", cut=True, bus=1, parts=(FakeGpu("MIG-1"),))
        with mock.patch.dict(sys.modules, {"pynvml": FakeNvml([whole, cut])}):
            notes.figure("made up: a whole one and one that is cut", [gpu.uuid for gpu in devices.gpus()])
        notes.missing("MIG of a real GPU")
        return
    notes.step("nvidia-smi's list", lambda: _smi("-L").splitlines())
    notes.step("modes", lambda: _smi("--query-gpu=uuid,mig.mode.current", "--format=csv,noheader").splitlines())
    notes.step("models may be on", lambda: _listed(notes))


_PARTS = SimpleNamespace(
    versions=versions, device_tests=device_tests, pytorch=pytorch, python_models=python_models, footprints=footprints,
    evictions=evictions, refusals=refusals, out_of_memory=out_of_memory, lost_device=lost_device, buffers=buffers,
    latency=latency, hot_beside_loads=hot_beside_loads, contexts=contexts, gauges=gauges, mig=mig,
)  # fmt: skip


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("part", choices=sorted(vars(_PARTS)))
    parser.add_argument("notes", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    notes = Notes(arguments.notes, rehearse=arguments.rehearse)
    notes.step("the part", lambda: getattr(_PARTS, arguments.part)(notes))


if __name__ == "__main__":
    main()
