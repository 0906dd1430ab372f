"""Models for servers in the test's own process."""

import numpy as np
import onnx
from onnx import TensorProto, helper

_TENSORS = """
input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}
"""
_PYTHON = """
import numpy as np
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, request, x):
        {answer}
"""


def write_doubling(repository, name, *, batch=0, factor=2.0):
    """An ONNX model that multiplies vectors of any length, or rows of three."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    shape = ["batch", 3] if batch else ["n"]
    x, y = (helper.make_tensor_value_info(each, TensorProto.FLOAT, shape) for each in "xy")
    by = onnx.numpy_helper.from_array(np.float32(factor), "by")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "by"], ["y"])], "graph", [x], [y], [by])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (version / "model.onnx").write_bytes(model.SerializeToString())
    config = 'backend: "onnxruntime"' + _TENSORS.format(dims=3 if batch else -1)
    if batch:
        config += f"max_batch_size: {batch}\ndynamic_batching {{ max_queue_delay_microseconds: 20000 }}\n"
    (version.parent / "config.pbtxt").write_text(config)


def write_python(repository, name, answer, *, more=""):
    """A Python model whose answer to the array `x` of a request is the given statement."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_PYTHON.format(answer=answer))
    (version.parent / "config.pbtxt").write_text('backend: "python"' + _TENSORS.format(dims=-1) + more)


def write_adding(repository, name):
    """A Python model that adds one."""
    write_python(repository, name, 'return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)])')


def write_counting(repository, name):
    """A decoupled model that answers once for each element of its input, with the element; a negative one fails."""
    write_python(
        repository,
        name,
        """sender = request.get_response_sender()
        for each in x:
            if each < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("a negative one")))
                continue
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(int(x[0]) + 1, each, np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None""",
        more="model_transaction_policy { decoupled: True }\n",
    )


def write_slow(repository, name):
    """A Python model that takes as many seconds as its input says."""
    write_python(
        repository, name, 'time.sleep(float(x[0])); return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])'
    )


def write_ensemble(repository, name, *steps):
    """An ensemble that sends `x` through models one after the other."""
    (repository / name / "1").mkdir(parents=True)
    names = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
    parts = [
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "{given}" }} '
        f'output_map {{ key: "y" value: "{made}" }} }}'
        for step, given, made in zip(steps, names[:-1], names[1:], strict=True)
    ]
    config = 'platform: "ensemble"' + _TENSORS.format(dims=-1) + "ensemble_scheduling {\n" + "\n".join(parts) + "\n}\n"
    (repository / name / "config.pbtxt").write_text(config)
