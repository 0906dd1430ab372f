"""ONNX models without a configuration: some batch by their first dimension, and some do anything else with it."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32 = TensorProto.FLOAT


def save(folder, nodes, inputs, outputs, *weights, kinds=None):
    """A model of a repository without a configuration, of tensors {name: shape}, FP32 but for those of other kinds."""
    kinds = kinds or {}
    values = [
        [helper.make_tensor_value_info(name, kinds.get(name, F32), shape) for name, shape in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *values, [numpy_helper.from_array(array, name) for name, array in weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = folder / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


def cumulative_sum(folder, first=None):
    """y[t] = x[0] + … + x[t], of [T, 4]."""
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"])]
    return save(folder, nodes, {"x": [first, 4]}, {"y": [first, 4]}, ("axis", np.array(0, np.int64)))


def recurrent(folder):
    """An RNN over the first dimension of [T, 1, 4], as PyTorch exports it for one sequence."""
    rng = np.random.default_rng(3)
    weights = [(name, rng.standard_normal(shape).astype("f4")) for name, shape in (("w", (1, 4, 4)), ("r", (1, 4, 4)))]
    nodes = [
        helper.make_node("RNN", ["x", "w", "r"], ["h", ""], hidden_size=4),
        helper.make_node("Squeeze", ["h", "axis"], ["y"]),
    ]
    return save(folder, nodes, {"x": [None, 1, 4]}, {"y": [None, 1, 4]}, *weights, ("axis", np.array([1], np.int64)))


def dense(folder, first=None):
    """Rows times a matrix: its first dimension is the batch, whatever it is called."""
    table = np.random.default_rng(5).standard_normal((4, 3)).astype("f4")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return save(folder, nodes, {"x": [first, 4]}, {"y": [first, 3]}, ("w", table))


def thinned(folder):
    """Every other row."""
    nodes = [helper.make_node("Slice", ["x", "from", "to", "axis", "step"], ["y"])]
    numbers = {"from": 0, "to": 1 << 30, "axis": 0, "step": 2}
    weights = [(name, np.array([number], np.int64)) for name, number in numbers.items()]
    return save(folder, nodes, {"x": [None, 4]}, {"y": [None, 4]}, *weights)


def one_row(folder):
    """A graph that takes one row, though its input says that it takes any number."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["row"]), helper.make_node("Add", ["x", "row"], ["y"])]
    return save(folder, nodes, {"x": [None, 4]}, {"y": [None, 4]}, ("shape", np.array([1, 4], np.int64)))


def swapped(folder):
    """["batch", 5, "time"] → ["time", "batch", 5]."""
    nodes = [helper.make_node("Transpose", ["x"], ["y"], perm=[2, 0, 1])]
    return save(folder, nodes, {"x": ["batch", 5, "time"]}, {"y": ["time", "batch", 5]})


def crossed(folder):
    """Every row of a with every row of b: two inputs whose first dimensions differ."""
    nodes = [helper.make_node("Transpose", ["b"], ["c"]), helper.make_node("MatMul", ["a", "c"], ["y"])]
    return save(folder, nodes, {"a": [None, 4], "b": [None, 4]}, {"y": [None, None]})


def scaled(folder):
    """A whole number without a dimension times x, of [2]."""
    kinds = {"x": TensorProto.FLOAT, "times": TensorProto.INT64}
    nodes = [helper.make_node("Cast", ["times"], ["t"], to=F32), helper.make_node("Mul", ["x", "t"], ["y"])]
    return save(folder, nodes, {"x": [2], "times": []}, {"y": [2]}, kinds=kinds)
