"""Small ONNX models that tests serve, and Triton repositories of them.

Each model tells by its answer that it was the one that was asked: `plus` adds a number of its own.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from container.cli import main
from tests.onnx_types import ONNX_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_OPSET = [helper.make_opsetid("", 17)]
VALUES: Mapping[str, np.ndarray] = {
    "BOOL": np.array([[True, False], [False, True]]),
    "UINT8": np.array([[0, 255], [1, 2]], np.uint8),
    "UINT16": np.array([[0, 65535], [1, 2]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1], [1, 2]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1], [1, 2]], np.uint64),
    "INT8": np.array([[-128, 127], [1, 2]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1], [1, 2]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1], [1, 2]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1], [1, 2]], np.int64),
    "FP16": np.array([[0.5, -65504], [1, 2]], np.float16),
    "FP32": np.array([[0.1, -3e38], [1, 2]], np.float32),
    "FP64": np.array([[0.1, -1e308], [1, 2]], np.float64),
    "BYTES": np.array([["grüße", ""], ["b", "☃" * 100]], np.object_),
}
# Triton's example of a model that answers as often as it is asked to.
REPEAT = """
backend: "repeat"
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""


def plus(number: float, megabytes: int = 0) -> bytes:
    """X [N, 4] → Y = X + number, beside weights of so many megabytes."""
    weights = np.zeros((megabytes, 250_000), np.float32)
    nodes = [
        helper.make_node("Add", ["X", "number"], ["sum"]),
        helper.make_node("ReduceMax", ["weights"], ["zero"], keepdims=0),
        helper.make_node("Add", ["sum", "zero"], ["Y"]),
    ]
    constants = {"number": np.array(number, np.float32), "weights": weights}
    if not megabytes:
        nodes, constants = [helper.make_node("Add", ["X", "number"], ["Y"])], {"number": constants["number"]}
    return _model(nodes, {"X": (TensorProto.FLOAT, ["N", 4])}, {"Y": (TensorProto.FLOAT, ["N", 4])}, constants)


def sequence() -> bytes:
    """X [N, 4] → Y, a sequence of tensors, which no protocol carries; classifiers of skl2onnx have one by default."""
    y = helper.make_tensor_sequence_value_info("Y", TensorProto.FLOAT, None)
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["X"], ["Y"])], "graph", [x], [y])
    return helper.make_model(graph, opset_imports=_OPSET, ir_version=9).SerializeToString()


def every_type() -> bytes:
    """One input `IN_<type>` and one output `OUT_<type>` [N, 2] of each type, handed through."""
    nodes = [helper.make_node("Identity", [f"IN_{name}"], [f"OUT_{name}"]) for name in ONNX_TYPES]
    inputs = {f"IN_{name}": (number, ["N", 2]) for name, number in ONNX_TYPES.items()}
    outputs = {f"OUT_{name}": (number, ["N", 2]) for name, number in ONNX_TYPES.items()}
    return _model(nodes, inputs, outputs)


def pick() -> bytes:
    """I [N] → O [N]: the elements of (10, 20, 30) at those places; any other place makes it fail."""
    table = {"table": np.array([10, 20, 30], np.float32)}
    node = helper.make_node("Gather", ["table", "I"], ["O"])
    return _model([node], {"I": (TensorProto.INT64, ["N"])}, {"O": (TensorProto.FLOAT, ["N"])}, table)


def greedy() -> bytes:
    """SIZE [1] → SUM [1], which takes SIZE numbers of memory for a moment."""
    nodes = [
        helper.make_node("ConstantOfShape", ["SIZE"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
        helper.make_node("ReduceSum", ["ones"], ["SUM"]),
    ]
    constants = {"one": np.array(1, np.float32)}
    return _model(nodes, {"SIZE": (TensorProto.INT64, [1])}, {"SUM": (TensorProto.FLOAT, [1])}, constants)


def ragged() -> bytes:
    """X, a row of elements of several requests, and what was worked out of them → all that again, and DOUBLE = 2 X.

    COUNT, SUM, START, LARGEST [N, 1] and SHAPE [N, 1] are what the kinds of batch inputs say of each request.
    """
    nodes = [
        helper.make_node("Add", ["X", "X"], ["DOUBLE"]),
        helper.make_node("Unsqueeze", ["count", "one"], ["COUNT"]),
        helper.make_node("Unsqueeze", ["sum", "one"], ["SUM"]),
        helper.make_node("Slice", ["starts", "zero", "minus"], ["all_but_last"]),
        helper.make_node("Unsqueeze", ["all_but_last", "one"], ["START"]),
        helper.make_node("Shape", ["largest"], ["size"]),
        helper.make_node("Shape", ["COUNT"], ["column"]),
        helper.make_node("Cast", ["size"], ["size_as_float"], to=TensorProto.FLOAT),
        helper.make_node("Expand", ["size_as_float", "column"], ["LARGEST"]),
        helper.make_node("Unsqueeze", ["flat_shape", "one"], ["flat_column"]),
        helper.make_node("Add", ["shape", "flat_column"], ["SHAPE"]),
    ]
    row = (TensorProto.FLOAT, ["N"])
    names = ("X", "count", "sum", "starts", "largest", "flat_shape")
    inputs = {**dict.fromkeys(names, row), "shape": (TensorProto.FLOAT, ["N", "R"])}
    outputs = {
        "DOUBLE": (TensorProto.FLOAT, ["E"]),
        **dict.fromkeys(("COUNT", "SUM", "START", "LARGEST", "SHAPE"), (TensorProto.FLOAT, ["N", 1])),
    }
    constants = {name: np.array([value], np.int64) for name, value in {"zero": 0, "one": 1, "minus": -1}.items()}
    return _model(nodes, inputs, outputs, constants)


def _model(
    nodes: list[Any],
    inputs: Mapping[str, tuple[int, list]],
    outputs: Mapping[str, tuple[int, list]],
    constants: Mapping[str, np.ndarray] | None = None,
) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *what) for name, what in inputs.items()],
        [helper.make_tensor_value_info(name, *what) for name, what in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=_OPSET, ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def one_behind_the_other(first: str, second: str) -> str:
    """The configuration of an ensemble of two models of X [4] -> Y [4], for batches of up to 4."""
    return f"""
platform: "ensemble"
max_batch_size: 4
input {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }}
ensemble_scheduling {{ step {{
  model_name: "{first}" model_version: -1 input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "between" }}
}} step {{
  model_name: "{second}" model_version: -1 input_map {{ key: "X" value: "between" }} output_map {{ key: "Y" value: "Y" }}
}} }}
"""


def lay_out(folder: Path, model: bytes | str | None, config: str = "", *, version: int = 1, file: str = "") -> Path:
    """Write a Triton model directory of an ONNX model, of Python code, or of nothing but a configuration.

    Without a configuration the server completes it. `file` is the model's, if it is neither of these two.
    """
    (folder / str(version)).mkdir(parents=True)
    if model is not None:
        content = textwrap.dedent(model).encode() if isinstance(model, str) else model
        (folder / str(version) / (file or f"model.{'py' if isinstance(model, str) else 'onnx'}")).write_bytes(content)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


def pack(model_directory: Path, archive: Path) -> Path:
    """Pack a model directory by `mme pack`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main.main(["pack", str(model_directory), "-o", str(archive)])
    assert code == 0, said.getvalue()
    return archive


def x(*rows: list[float], output: dict | None = None) -> dict[str, Any]:
    """A KServe request for `plus` in JSON."""
    data = [number for row in rows for number in row]
    tensor = {"name": "X", "shape": [len(rows), 4], "datatype": "FP32", "data": data}
    return {"inputs": [tensor], **({"outputs": [output]} if output else {})}


ONE = x([1, 2, 3, 4])


def y(document: dict[str, Any]) -> list[float]:
    """The numbers in the answer of `plus`."""
    (output,) = document["outputs"]
    assert (output["name"], output["datatype"]) == ("Y", "FP32")
    return output["data"]
