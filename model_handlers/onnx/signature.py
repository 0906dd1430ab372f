"""What a graph takes and gives. PURE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import BY_NAME

if TYPE_CHECKING:
    from model_handlers.config.autocomplete import GraphTensor

_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def signature(session: Any, model: str) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """The inputs and outputs of a session. ONNX Runtime shows a tensor whose rank nobody knows like a scalar.

    Raises:
        MmeError: UNSUPPORTED for one that the protocol can't carry.
    """
    return (
        [_graph_tensor(node, model) for node in session.get_inputs()],
        [_graph_tensor(node, model) for node in session.get_outputs()],
    )


def firsts(session: Any) -> dict[str, str]:
    """The tensors of a session whose first dimension has a name."""
    nodes = (*session.get_inputs(), *session.get_outputs())
    return {node.name: node.shape[0] for node in nodes if node.shape and isinstance(node.shape[0], str)}


def _graph_tensor(node: Any, model: str) -> GraphTensor:
    type_name = _TYPES.get(node.type)
    if type_name is None:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{model}': tensor '{node.name}' has ONNX type {node.type}, which can't be sent over the protocol; "
            "export the model with plain tensors (with skl2onnx: zipmap=False)",
        )
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else -1 for dim in node.shape)
    return (node.name, BY_NAME[type_name], shape)
