"""PyTorch models in processes of their own, forked from one that has imported PyTorch."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

from model_handlers.base import CPU, Device, Placement
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, LostProcessError, MmeError
from model_handlers.pytorch import CodeHandler, TorchHandler
from model_handlers.pytorch.programs import load_program
from model_handlers.pytorch.runtime import PRELOAD, pytorch, to_tensor
from model_handlers.tensor import FP32, TensorSpec
from model_handlers.worker.fork_client import FORKS, forks_with
from model_handlers.worker.start import start_isolated
from tests.frameworks import framework

torch = framework("torch")
pytestmark = pytest.mark.slow
_MEGABYTES = 16
X, Y = TensorSpec("x", FP32, (2,)), TensorSpec("y", FP32, (2,))


class Noise(torch.nn.Module):
    """Answers with random numbers."""

    def forward(self, x):
        return torch.rand_like(x)


class Current:
    """Two GPUs, as far as PyTorch's own count of them and the calling thread's choice go: no machine of the tests has one.

    Attributes:
        gpu: the one that is current; gpus: each that was made so.
        noted: which was, when what `noting` returned was called.
    """

    def __init__(self):
        self.gpu = 0
        self.gpus = []
        self.noted = []

    @contextlib.contextmanager
    def device(self, device):
        """In place of `torch.cuda.device`."""
        before, self.gpu = self.gpu, device.index
        self.gpus.append(self.gpu)
        try:
            yield
        finally:
            self.gpu = before

    def noting(self, call, **instead):
        """`call`, on the CPU and noted."""

        def noted(*given):
            self.noted.append(self.gpu)
            names = inspect.signature(call).parameters
            return call(**{**dict(zip(names, given, strict=True)), **instead})

        return noted


@pytest.fixture
def current(monkeypatch):
    """See `Current`."""
    current = Current()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", current.device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return current


@pytest.fixture(scope="module", autouse=True)
def fork_servers():
    """They live as long as the process that serves: they are no leak of a test."""
    servers = (FORKS, forks_with(PRELOAD))
    for server in servers:
        server.ensure_running()
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def wide(save):
    """A model of so many megabytes, and its file."""
    module = torch.nn.Linear(1024, _MEGABYTES * 256)
    return module, save(module)


@pytest.fixture
def start(specs, home):
    """Starts a file in a process; whatever a test leaves is closed."""
    started = []

    def start(path, width=1024, *, shared=None):
        config = ModelConfig(
            "m", max_batch_size=8, inputs=specs(x=("FP32", [width])), outputs=specs(y=("FP32", [_MEGABYTES * 256]))
        )
        started.append(start_isolated(TorchHandler, config, path, CPU, f"m_{len(started)}", shared=shared))
        return started[-1]

    yield start
    for handler in started:
        handler.close()


def test_models_have_processes_by_default():
    """PyTorch holds the GIL while it loads: the serving process does not load it, unless it is told to."""
    assert TorchHandler.traits(ModelConfig("m"), Path("1/model.pt")).placement is Placement.PROCESS


@pytest.mark.parametrize(
    ("parameters", "shares"),
    [
        ({}, True),
        ({"DISABLE_CUDNN": "false", "INTER_OP_THREAD_COUNT": "0"}, True),
        ({"INFERENCE_MODE": "false", "ENABLE_CACHE_CLEANING": "true", "NUM_THREADS": "2"}, True),
        ({"DISABLE_CUDNN": "true"}, False),
        ({"INTER_OP_THREAD_COUNT": "2"}, False),
        ({"NUM_INTEROP_THREADS": "2"}, False),
        ({"ENABLE_JIT_PROFILING": "true"}, False),
        ({"ENABLE_TENSOR_FUSER": "false"}, False),
    ],
    ids=str,
)
def test_models_that_set_what_a_process_has_are_alone_in_one(wide, parameters, shares):
    """On a GPU too: others would execute with what they set."""
    assert TorchHandler.traits(ModelConfig("m", parameters=parameters), wide[1]).gpu_shared is shares


def test_code_is_alone_in_a_process(tmp_path):
    """On a GPU too: its modules would be those of another model's code that are called the same."""
    (tmp_path / "model.py").touch()
    torch.save({"shift": torch.tensor([0.5])}, tmp_path / "model.pt")

    assert not CodeHandler.traits(ModelConfig("m"), tmp_path / "model.py").gpu_shared
    assert not TorchHandler.traits(ModelConfig("m"), tmp_path / "model.pt").gpu_shared


def test_predictions_in_a_process(wide, start):
    """The answers are PyTorch's own, at batch 1 and at the largest."""
    module, path = wide
    handler = start(path)
    for rows in (1, 8):
        x = np.random.default_rng(7).standard_normal((rows, 1024), "f4")
        (answer,) = handler.execute({"x": x}, ["y"])

        np.testing.assert_allclose(answer, module(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_processes_draw_different_numbers(save, start):
    """Though all are forked from one that has imported PyTorch."""
    path = save(Noise())
    x = np.ones((1, _MEGABYTES * 256), "f4")
    draws = [start(path, _MEGABYTES * 256).execute({"x": x}, ["y"])[0] for _ in range(2)]

    assert not np.array_equal(*draws)


def test_memory_comes_back_with_the_end_of_the_process(wide, start):
    """A model counts its weights and not the framework, and when it is closed its process is gone."""
    _, path = wide
    handler = start(path)
    process = psutil.Process(handler.child.pid)
    taken = handler.memory().host >> 20
    handler.close()

    assert _MEGABYTES <= taken < _MEGABYTES + 60
    assert not process.is_running()


def test_the_framework_is_imported_once(wide, start, fork_servers):
    """Processes begin with PyTorch imported, and share it; those of other models do not have it."""
    handler = start(wide[1])
    parent = psutil.Process(handler.child.pid).parent()
    plain, with_torch = fork_servers

    assert parent.pid == with_torch.pid != plain.pid
    assert "libtorch_cpu" in Path(f"/proc/{with_torch.pid}/maps").read_text()
    assert "libtorch_cpu" not in Path(f"/proc/{plain.pid}/maps").read_text()


def test_models_may_share_a_process(wide, start):
    """As they do on a GPU: one process, answers of their own, and what one held comes back while the other stays."""
    module, path = wide
    one, two = start(path, shared=True), start(path, shared=True)
    x = np.random.default_rng(7).standard_normal((3, 1024), "f4")
    wanted = module(torch.from_numpy(x)).detach().numpy()
    for handler in (one, two, one):
        np.testing.assert_allclose(handler.execute({"x": x}, ["y"])[0], wanted, rtol=1e-4, atol=1e-5)
    host = two.child.host
    both = host.private_memory()
    one.close()

    assert host.guests == 1
    assert two.memory().host >= _MEGABYTES << 20
    assert both - host.private_memory() >= _MEGABYTES << 20
    np.testing.assert_allclose(two.execute({"x": x}, ["y"])[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_load_that_fails_gives_the_device_s_memory_back(current, monkeypatch, save):
    """What it had loaded until then is gone before PyTorch is asked for what it keeps: the process is others' as well."""
    loaded, alive = [], []

    def fails(*_):
        program = torch.nn.Linear(2, 2)
        program.circle = [program]
        loaded.append(weakref.ref(program))
        raise MmeError(Kind.OUT_OF_MEMORY, "no room for the rest")

    monkeypatch.setattr("model_handlers.pytorch.handler.load_program", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(loaded[0]() is not None))
    path = save(torch.nn.Linear(2, 2))
    with pytest.raises(MmeError, match="no room for the rest") as caught:
        TorchHandler.load(ModelConfig("m"), path, Device("gpu", 0))

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert alive == [False]
    assert current.gpus == [0, 0]


def test_the_second_gpu_is_the_threads_own_while_it_is_used(current, monkeypatch, save):
    """Else CUDA takes memory of the first one for whatever it is asked: to load, to execute, to give back."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(current.gpu))
    monkeypatch.setattr("model_handlers.pytorch.handler.load_program", current.noting(load_program, device=None))
    monkeypatch.setattr("model_handlers.pytorch.handler.to_tensor", current.noting(to_tensor, device=None))
    module = torch.nn.Linear(2, 2)
    config = ModelConfig("m", max_batch_size=8, inputs=(X,), outputs=(Y,), parameters={"ENABLE_CACHE_CLEANING": "true"})
    handler = TorchHandler.load(config, save(module), Device("gpu", 1))
    rows = np.ones((3, 2), np.float32)

    (found,) = handler.execute({"x": rows}, ["y"])
    np.testing.assert_allclose(found, module(torch.from_numpy(rows)).detach().numpy(), rtol=1e-5)
    handler.close()
    assert current.noted == [1, 1]  # loaded, and given its input
    assert given_back == [1, 1]  # behind the execution, and at the end
    assert current.gpu == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Kind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Kind.EXECUTION_FAILED),
    ],
)
def test_an_input_that_does_not_get_to_the_gpu(error, kind, monkeypatch, save):
    """What a copy to the device says is the execution's error, and want of memory among it is told as such."""

    def fails(*_):
        raise error

    handler = TorchHandler.load(ModelConfig("m", inputs=(X,), outputs=(Y,)), save(torch.nn.Linear(2, 2)), CPU)
    monkeypatch.setattr("model_handlers.pytorch.handler.to_tensor", fails)
    with pytest.raises(MmeError, match=str(error)) as caught:
        handler.execute({"x": np.ones(2, np.float32)}, ["y"])

    assert caught.value.kind is kind


ASSERTED = "CUDA error: device-side assert triggered"


@pytest.fixture
def on_gpu(current, monkeypatch, save):
    """Loads a model that is on the second GPU, as far as its handler knows."""
    monkeypatch.setattr("model_handlers.pytorch.handler.load_program", current.noting(load_program, device=None))
    monkeypatch.setattr("model_handlers.pytorch.handler.to_tensor", current.noting(to_tensor, device=None))
    return lambda: TorchHandler.load(
        ModelConfig("m", inputs=(X,), outputs=(Y,)), save(torch.nn.Linear(2, 2)), Device("gpu", 1)
    )


@pytest.mark.parametrize("lost", [True, False])
def test_a_gpu_that_answers_nothing_but_errors_is_no_use_any_more(lost, on_gpu, current, monkeypatch):
    """What fails on a GPU has it asked whether it still answers: an assertion in a kernel ends that, a wrong shape does not."""

    def fails(*_):
        raise RuntimeError(ASSERTED)

    def load_failing(path, form, device, model):
        program = load_program(path, form, device, model)
        monkeypatch.setattr(program, "call", fails)
        return program

    asked = []
    monkeypatch.setattr("model_handlers.pytorch.handler.load_program", current.noting(load_failing, device=None))
    handler = on_gpu()
    monkeypatch.setattr(torch.cuda, "synchronize", fails if lost else asked.append)
    with pytest.raises(MmeError, match=ASSERTED) as caught:
        handler.execute({"x": np.ones(2, np.float32)}, ["y"])

    assert type(caught.value) is (LostProcessError if lost else MmeError)
    assert ("in this process the GPU answers nothing but errors now" in caught.value.message) == lost
    assert asked == ([] if lost else [torch.device("cuda", 1)])


def test_a_load_onto_a_gpu_that_is_lost_is_no_fault_of_the_model(on_gpu, monkeypatch):
    """Another model of the process has been there before: the file is as good as any."""

    def refuses(*_):
        raise MmeError(Kind.INVALID_MODEL, f"PyTorch can't load model 'm': {ASSERTED}")

    def fails(*_):
        raise RuntimeError(ASSERTED)

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr("model_handlers.pytorch.handler.load_program", refuses)
    with pytest.raises(LostProcessError, match="answers nothing but errors now") as caught:
        on_gpu()

    assert caught.value.kind is Kind.UNAVAILABLE


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use a GPU here")
def test_a_gpu_that_pytorch_can_not_use_is_no_fault_of_the_model(save):
    """A build for the CPU, a driver that is missing or too old: UNAVAILABLE, in PyTorch's words. By the real PyTorch."""
    sentence = r"model 'm' was to run on gpu:0, but PyTorch can't use that GPU \(.+\); check that the driver fits"
    with pytest.raises(MmeError, match=sentence) as caught:
        TorchHandler.load(ModelConfig("m"), save(torch.nn.Linear(2, 2)), Device("gpu", 0))

    assert caught.value.kind is Kind.UNAVAILABLE


def test_a_gpu_that_pytorch_does_not_see(current, save):
    """With how many it does see."""
    with pytest.raises(MmeError, match=r"gpu:2, but PyTorch can't use that GPU \(it sees 2 of them\)") as caught:
        TorchHandler.load(ModelConfig("m"), save(torch.nn.Linear(2, 2)), Device("gpu", 2))

    assert caught.value.kind is Kind.UNAVAILABLE


def test_a_bad_file_in_a_process(tmp_path, start):
    """The refusal is the same sentence as in this process, and nothing stays behind."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(MmeError, match=r"'model.pt' of model 'm' is a pickle \(torch.save\)") as caught:
        start(path)

    assert caught.value.kind is Kind.INVALID_MODEL


def test_without_the_framework(monkeypatch):
    """Where PyTorch is not installed the sentence says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    pytorch.cache_clear()
    with pytest.raises(MmeError, match=r"which is not installed; run `pip install 'mme\[torch\]'`") as caught:
        TorchHandler.traits(ModelConfig("m"), Path("model.pt")).runtime.provide()
    pytorch.cache_clear()

    assert caught.value.kind is Kind.UNSUPPORTED


def test_the_serving_process_does_not_import_the_framework():
    """Whether PyTorch can use a GPU is known without it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from model_handlers.config.model_config import ModelConfig\n"
        "from model_handlers.pytorch import TorchHandler\n"
        "runtime = TorchHandler.traits(ModelConfig('m'), Path('model.pt')).runtime\n"
        f"assert runtime.gpu_capable() is {torch.backends.cuda.is_built()}\n"
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
