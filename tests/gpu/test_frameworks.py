"""Models on a real GPU: the answers are those of the CPU, by each way there is to compute them.

Never yet run on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from container.cli import main
from model_handlers.base import CPU, Device
from model_handlers.config.model_config import Accelerator, InstanceGroup, InstanceKind, ModelConfig
from model_handlers.onnx import OnnxHandler
from model_handlers.system import devices
from model_handlers.tensorrt import TensorrtHandler
from model_handlers.tensorrt.engine import installed, tensorrt
from tests.gpu.heavy import BUILT_FOR_GPUS

GPU = Device("gpu", 0)
ROWS = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
TENSORRT = pytest.mark.skipif(not installed("TensorRT"), reason="TensorRT is not installed")
# What takes a path of its own: computed on the device, told by the host, and never on a device at all.
KINDS = {
    "y": (TensorProto.FLOAT16, np.float16),
    "positive": (TensorProto.BOOL, np.bool_),
    "shape": (TensorProto.INT64, np.int64),
}

ON_THE_SECOND = """
import json, sys, threading
from pathlib import Path
import numpy as np
from model_handlers import devices
from model_handlers.base import Device
from model_handlers.config.model_config import ModelConfig
from model_handlers.onnx import OnnxHandler

rows = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
before, found = devices.device_memory_used(), []
handler = OnnxHandler.load(ModelConfig("m"), Path(sys.argv[1]), Device("gpu", 1))
thread = threading.Thread(target=lambda: found.extend(handler.execute({"x": rows}, ["y"])))
thread.start()
thread.join()
after = devices.device_memory_used()
taken = [now - then for now, then in zip(after, before)]
print(json.dumps({"found": found[0].tolist(), "taken": taken[:2]}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A layer, relu(x @ w)."""
    weights = np.random.default_rng(3).normal(size=(64, 16)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    tensors = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])] for name, size in (("x", 64), ("y", 16))
    ]
    graph = helper.make_graph(nodes, "g", *tensors, [numpy_helper.from_array(weights, "w")])
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def expected(model):
    """What ONNX Runtime answers on the CPU."""
    handler = OnnxHandler.load(ModelConfig("m"), model, CPU)
    (found,) = handler.execute({"x": ROWS}, ["y"])
    handler.close()
    return found


@BUILT_FOR_GPUS
@pytest.mark.parametrize(
    "config",
    [
        ModelConfig("m"),
        ModelConfig("m", parameters={"gpu_mem_limit": str(1 << 28)}),
        ModelConfig("m", parameters={"memory.enable_memory_arena_shrinkage": "gpu:0"}),
    ],
    ids=["plain", "limit", "shrinkage"],
)
def test_onnx_by_cuda(model, expected, config):
    """By the CUDA provider, at one row, at all and between."""
    handler = OnnxHandler.load(config, model, GPU)

    for rows in (slice(0, 1), slice(None), slice(2, 5)):
        (found,) = handler.execute({"x": ROWS[rows]}, ["y"])
        np.testing.assert_allclose(found, expected[rows], rtol=1e-2, atol=1e-2)
    handler.close()


@BUILT_FOR_GPUS
@pytest.mark.skipif(len(devices.gpus()) < 2, reason="there is one GPU alone")
def test_a_model_on_the_second_gpu_takes_none_of_the_first(model, expected):
    """In a process that has used neither, where a thread of its own executes: not even CUDA's context is on the first."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = [sys.executable, "-c", ON_THE_SECOND, str(model)]
    done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    told = json.loads(done.stdout)
    np.testing.assert_allclose(told["found"], expected, rtol=1e-2, atol=1e-2)
    first, second = told["taken"]
    assert first < 32 << 20 < second


@BUILT_FOR_GPUS
def test_types_that_are_computed_in_several_places(tmp_path):
    """Half precision and booleans of the device, a shape of the host, and strings that no device takes."""
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16),
        helper.make_node("Greater", ["x", "zero"], ["positive"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Identity", ["text"], ["echo"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64]),
        helper.make_tensor_value_info("text", TensorProto.STRING, ["n"]),
    ]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, (kind, _) in KINDS.items()]
    outputs.append(helper.make_tensor_value_info("echo", TensorProto.STRING, ["n"]))
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(np.float32(0), "zero")])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")
    handler = OnnxHandler.load(ModelConfig("m"), tmp_path / "model.onnx", GPU)
    texts = np.array([f"é{row}".encode() for row in range(len(ROWS))], dtype=np.object_)

    *found, echo = handler.execute({"x": ROWS, "text": texts}, [*KINDS, "echo"])
    for array, wanted, (_, dtype) in zip(found, (ROWS, ROWS > 0, ROWS.shape), KINDS.values(), strict=True):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, np.asarray(wanted).astype(dtype))
    assert echo.tolist() == texts.tolist()
    handler.close()


@BUILT_FOR_GPUS
@TENSORRT
def test_onnx_by_the_tensorrt_provider(model, expected):
    """As an accelerator, in FP16."""
    if not tensorrt("TensorRT").__version__.startswith("10."):
        pytest.skip("ONNX Runtime 1.31 wants TensorRT 10")
    config = ModelConfig("m", gpu_accelerators=(Accelerator("tensorrt", {"precision_mode": "FP16"}),))
    handler = OnnxHandler.load(config, model, GPU)

    np.testing.assert_allclose(handler.execute({"x": ROWS}, ["y"])[0], expected, rtol=5e-2, atol=5e-2)
    handler.close()


@TENSORRT
def test_an_engine_that_was_built_here(model, expected, tmp_path):
    """`mme build-engine`, then two instances that share the engine."""
    plan = tmp_path / "model.plan"
    shapes = ("--min", "x:1x64", "--opt", "x:4x64", "--max", "x:8x64")
    assert main.main(["build-engine", str(model), "-o", str(plan), *shapes]) == 0
    config = ModelConfig("m", "tensorrt", instance_group=(InstanceGroup("g", InstanceKind.GPU, 2),))
    handler = TensorrtHandler.load(config, plan, GPU)

    assert handler.config.max_batch_size == 8
    for rows in (slice(0, 1), slice(None), slice(2, 5)):
        np.testing.assert_allclose(handler.execute({"x": ROWS[rows]}, ["y"])[0], expected[rows], rtol=1e-2, atol=1e-2)
    handler.close()
