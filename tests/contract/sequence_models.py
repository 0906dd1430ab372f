"""Models of sequences that tests serve: an ONNX accumulator with controls and an implicit state, and Python models."""

from __future__ import annotations

from onnx import TensorProto, helper

CONTROLS = """
  control_input [
    { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } },
    { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } },
    { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } },
    { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: %s } }
  ]
"""
IMPLICIT = """
  state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ] %s }
"""
ONE = """
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
TENSORS = f"""{ONE}
output {{ name: "TOLD" data_type: TYPE_INT64 dims: [ 4 ] }}
"""
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.heard = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        told = [pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("START", "READY", "END", "ID")]
        name = request.correlation_id()
        assert told[3][0][0].decode() == name
        start = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        assert bool(told[0][0][0]) == bool(request.flags() & start)
        if request.flags() & start:
            self.heard[name] = 0.0
        self.heard[name] += float(x[0][0])
        told = np.array([[t[0][0] for t in told[:3]] + [len(requests_of(self))]], np.int64)
        y = np.array([[self.heard[name]]], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), pb_utils.Tensor("TOLD", told)])


def requests_of(model):
    return model.heard
"""

# The same; the model says itself what it takes, and how much it batches.
COMPLETES = PYTHON.replace(
    "class TritonPythonModel:",
    """class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "TOLD", "data_type": "TYPE_INT64", "dims": [4]})
        config.set_max_batch_size(4)
        return config
""",
)


ITERATIVE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}
        self.decoupled = "decoupled" in args["model_name"]

    def execute(self, requests):
        answers = [self.step(request) for request in requests]
        return None if self.decoupled else answers

    def step(self, request):
        name = request.correlation_id()
        start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        if start:
            self.left[name] = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0, 0])
        self.left[name] -= 1
        again = self.left[name] > 0
        told = [[int(bool(start)), self.left[name], int(name > 2**62), len(self.left)]]
        y = pb_utils.Tensor("Y", np.array([[self.left[name]]], np.float32))
        response = pb_utils.InferenceResponse([y, pb_utils.Tensor("TOLD", np.array(told, np.int64))])
        if again:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            del self.left[name]
        if not self.decoupled:
            return None if again else response
        final = 0 if again else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        request.get_response_sender().send(response, final)
"""


# Says that what is behind it belongs to another sequence.
NAMING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        told = {"sequence_id": 1000 + requests[0].correlation_id(), "sequence_start": True, "sequence_end": True}
        if x[0, 0] < 0:
            told["sequence_end"] = "yes"
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)], parameters=told)]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 1
input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "TOLD" data_type: TYPE_INT64 dims: [ 4 ] }}
ensemble_scheduling {{
  {first}
  step {{ model_name: "sums" input_map {{ key: "X" value: "{x}" }}
         output_map [ {{ key: "Y" value: "Y" }}, {{ key: "TOLD" value: "TOLD" }} ] }}
}}
"""
FIRST = """step { model_name: "naming" input_map { key: "X" value: "X" } output_map { key: "Y" value: "named" } }"""


def accumulator() -> bytes:
    """X, SUM_IN and controls → Y = SUM_OUT = X + SUM_IN, TOLD = [START, READY, END, ID]; rows of nobody add nothing."""
    float_, number = TensorProto.FLOAT, TensorProto.INT64
    casts = [helper.make_node("Cast", [name], [f"{name}_n"], to=number) for name in ("START", "READY", "END", "ID")]
    nodes = [
        helper.make_node("Add", ["X", "SUM_IN"], ["SUM_OUT"]),
        helper.make_node("Identity", ["SUM_OUT"], ["Y"]),
        *casts,
        helper.make_node("Concat", ["START_n", "READY_n", "END_n", "ID_n"], ["TOLD"], axis=1),
    ]
    inputs = {"X": float_, "SUM_IN": float_, "START": float_, "READY": TensorProto.BOOL, "END": TensorProto.INT32}
    inputs["ID"] = TensorProto.UINT64
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, ["N", 1]) for name, kind in inputs.items()],
        [
            helper.make_tensor_value_info("Y", float_, ["N", 1]),
            helper.make_tensor_value_info("SUM_OUT", float_, ["N", 1]),
            helper.make_tensor_value_info("TOLD", number, ["N", 4]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
