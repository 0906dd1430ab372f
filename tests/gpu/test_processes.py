"""PyTorch's and TensorFlow's models on a real GPU: the library's own answers, and memory that comes back.

Never yet run on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

from model_handlers.base import Device
from model_handlers.config.model_config import ModelConfig
from model_handlers.errors import Kind, MmeError
from model_handlers.python.preload import PYTORCH, TENSORFLOW
from model_handlers.pytorch import TorchHandler
from model_handlers.system import devices
from model_handlers.tensor import FP32, INT64, TensorSpec
from model_handlers.tensorflow import SavedModelHandler
from model_handlers.worker.fork_client import forks_with
from model_handlers.worker.start import start_isolated

GPU = Device("gpu", 0)
WIDTH = 4096
ROWS = np.random.default_rng(4).normal(size=(8, WIDTH)).astype(np.float32)
X, Y = TensorSpec("x", FP32, (WIDTH,)), TensorSpec("y", FP32, (WIDTH,))

LOSES = """
import torch
from model_handlers.system.devices import lost
from model_handlers.errors import Kind, MmeError

def asked():
    return lost(MmeError(Kind.EXECUTION_FAILED, "it failed"), 0)

print(type(asked()).__name__)
table = torch.nn.Embedding(10, 4).to("cuda:0")
table(torch.tensor([1], device="cuda:0")).cpu()
print(type(asked()).__name__)
try:
    table(torch.tensor([99], device="cuda:0")).cpu()
except RuntimeError:
    print(type(asked()).__name__, asked())
"""


@pytest.fixture
def fork_server(home):
    """It lives as long as the process that serves: it is no leak of a test."""

    def run(preload):
        servers.append(forks_with(preload))
        servers[-1].ensure_running()

    servers = []
    yield run
    for server in servers:
        server.stop()


def answers_and_goes(handler_class, path, expected):
    """Load it in a process on the GPU, compare, unload: NVML's figure is what it was."""
    before = sum(devices.device_memory_used())
    handler = start_isolated(
        handler_class, ModelConfig("m", max_batch_size=8, inputs=(X,), outputs=(Y,)), path, GPU, "m_0"
    )
    try:
        for rows in (slice(0, 1), slice(None), slice(2, 5)):
            np.testing.assert_allclose(
                handler.execute({"x": ROWS[rows]}, ["y"])[0], expected[rows], rtol=1e-2, atol=1e-1
            )
        assert handler.memory().device >= WIDTH * WIDTH * 4
    finally:
        handler.close()
    assert sum(devices.device_memory_used()) - before < 16 << 20


def test_torchscript_on_a_gpu(tmp_path, fork_server):
    """A layer of 64 MiB."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    module = torch.nn.Linear(WIDTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        torch.jit.script(module).save(tmp_path / "model.pt")
    fork_server(PYTORCH)

    answers_and_goes(TorchHandler, tmp_path / "model.pt", module(torch.from_numpy(ROWS)).detach().numpy())


def test_a_kernel_that_goes_wrong_ends_the_process_and_all_come_back(tmp_path, fork_server):
    """An index out of range is an assertion on a GPU, after which CUDA answers nothing but errors in that process."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    layer, table = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Embedding(10, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of torch.jit is deprecated
        for name, module in (("layer", layer), ("table", table)):
            torch.jit.script(module).save(tmp_path / f"{name}.pt")
    fork_server(PYTORCH)
    ids, found = TensorSpec("ids", INT64, (3,)), TensorSpec("found", FP32, (3, 4))
    configs = {"layer": ModelConfig("layer", inputs=(X,), outputs=(Y,), max_batch_size=8)}
    configs["table"] = ModelConfig("table", inputs=(ids,), outputs=(found,))
    good, bad = (
        start_isolated(TorchHandler, config, tmp_path / f"{name}.pt", GPU, f"{name}_0")
        for name, config in configs.items()
    )
    try:
        assert good.child.pid == bad.child.pid
        with pytest.raises(MmeError, match="device-side assert") as caught:
            bad.execute({"ids": np.array([1, 2, 99])}, ["found"])
        assert caught.value.kind is Kind.EXECUTION_FAILED

        expected = layer(torch.from_numpy(ROWS)).detach().numpy()
        np.testing.assert_allclose(good.execute({"x": ROWS}, ["y"])[0], expected, rtol=1e-2, atol=1e-1)
        expected = table(torch.tensor([1, 2, 9])).detach().numpy()
        np.testing.assert_allclose(bad.execute({"ids": np.array([1, 2, 9])}, ["found"])[0], expected, rtol=1e-5)
    finally:
        good.close()
        bad.close()


def test_a_gpu_that_is_lost_is_told_by_its_driver():
    """By the same assertion, in a process of its own: the driver has nothing to say before it, and names it afterwards."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    done = subprocess.run([sys.executable, "-c", LOSES], capture_output=True, text=True, timeout=120, check=False)

    told = done.stdout.splitlines()
    assert told[:2] == ["MmeError", "MmeError"], done.stderr  # before there is a context, and after
    assert told[2].startswith(
        "LostProcessError it failed; in this process the GPU answers nothing but errors now (CUDA"
    )


def test_a_saved_model_on_a_gpu(tmp_path, fork_server):
    """The same as a SavedModel."""
    tf = pytest.importorskip("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU")
    weights = np.random.default_rng(5).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    module = tf.Module()
    module.weights = tf.Variable(weights)
    module.call = tf.function(
        lambda x: {"y": x @ module.weights}, input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, "x")]
    )
    tf.saved_model.save(module, str(tmp_path / "model.savedmodel"), module.call)
    fork_server(TENSORFLOW)

    answers_and_goes(SavedModelHandler, tmp_path / "model.savedmodel", ROWS @ weights)
