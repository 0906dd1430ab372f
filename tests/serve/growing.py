"""ONNX models of a few hundred bytes whose executions take several times their input, and an engine of them."""

import asyncio
import gc

import numpy as np
from onnx import TensorProto, helper

from model_handlers.base import Footprint
from model_handlers.errors import MmeError
from model_handlers.system import memory
from model_handlers.tensor import FP32
from serve.request import InferenceRequest, Layout
from tests.serve import engines

MB = 10**6
_CONFIG = """
backend: "onnxruntime"
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}
"""


def write_growing(repository, name, *, threads=0):
    """A model that adds the product of sine and cosine: three arrays of the input's size at a time."""
    x, y = (helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n"]) for each in "xy")
    nodes = [
        helper.make_node("Sin", ["x"], ["s"]),
        helper.make_node("Cos", ["x"], ["c"]),
        helper.make_node("Mul", ["s", "c"], ["p"]),
        helper.make_node("Add", ["p", "x"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(model.SerializeToString())
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(threads=threads))


def engine_of(folder, megabytes, **options):
    """An engine of the models in `folder / "models"`; closed and audited afterwards."""
    return engines.engine_of(folder, Footprint(megabytes * MB), repository=folder / "models", **options)


async def ask(engine, name, size):
    """Have a request of so many bytes answered."""
    given = np.zeros(size // 4, np.float32)
    answer = asyncio.get_running_loop().create_future()
    layout = Layout((("x", FP32, given.shape),), ())
    request = InferenceRequest(layout, [given], lambda _, result: answer.set_result(result))
    if not engine.submit(name, None, request):
        await engine.submit_cold(name, None, request)
    response = await answer
    if isinstance(response, MmeError):
        raise response
    assert response.outputs[0][2].shape == given.shape


def private():
    """Bytes that this process takes for itself, without garbage and what the C library keeps of freed memory."""
    gc.collect()
    memory.trim()
    return memory.private_memory()
