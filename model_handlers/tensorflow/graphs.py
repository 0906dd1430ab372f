"""SavedModels and frozen graphs: what they take and give, and the graphs in which that is computed.

Called on load threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_handlers.config.autocomplete import given_to
from model_handlers.config.model_config import all_outputs
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.tensor import BY_DTYPE_NAME, BYTES, FP16, TensorSpec
from model_handlers.tensorflow.options import SIGNATURE, TAG, signature_key, tag
from model_handlers.tensorflow.runtime import tensorflow, translated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from model_handlers.config.autocomplete import GraphTensor
    from model_handlers.config.model_config import ModelConfig

_TYPES = {**BY_DTYPE_NAME, "half": FP16, "string": BYTES}
_INTERNAL = "__saved_model"  # a signature whose name begins so is nobody's to call


@dataclass(frozen=True, slots=True)
class Graph:
    """What a model computes.

    Attributes:
        inputs, outputs: what it takes and gives.
        feeds, fetches: the names of these tensors in the graph.
    """

    inputs: list[GraphTensor]
    outputs: list[GraphTensor]
    feeds: dict[str, str]
    fetches: dict[str, str]


def saved_signature(config: ModelConfig, folder: Path) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """The inputs and outputs of a SavedModel's signature, told from its description alone.

    Raises:
        MmeError: INVALID_MODEL where it is no SavedModel, or has no such signature; UNSUPPORTED without TensorFlow.
    """
    signature = _described(config, folder)
    dtypes = tensorflow().dtypes

    def tensors(described: Any) -> list[GraphTensor]:
        return [
            _tensor(config, name, dtypes.as_dtype(info.dtype).name, _dims(info.tensor_shape))
            for name, info in sorted(described.items())
        ]

    return tensors(signature.inputs), tensors(signature.outputs)


def _described(config: ModelConfig, folder: Path) -> Any:
    tensorflow()  # who looks at a model without the framework is told so
    from tensorflow.core.protobuf import saved_model_pb2  # noqa: PLC0415 - a part of the framework

    name, file = config.name, folder / "saved_model.pb"
    if not file.is_file():
        raise invalid_model(
            f"model '{name}': '{folder.name}' has no saved_model.pb and is no SavedModel; write it with "
            "tf.saved_model.save or Keras' export"
        )
    described = saved_model_pb2.SavedModel()
    try:
        described.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's DecodeError
        raise invalid_model(f"model '{name}': '{folder.name}/saved_model.pb' is no SavedModel: {error}") from error
    graphs = {tuple(sorted(graph.meta_info_def.tags)): graph for graph in described.meta_graphs}
    graph = next((graph for tags, graph in graphs.items() if tag(config) in tags), None)
    if graph is None:
        shown = ", ".join("+".join(tags) for tags in graphs) or "none"
        raise invalid_model(
            f"model '{name}': its SavedModel has no graph with the tag '{tag(config)}': found {shown}; set {TAG}"
        )
    signatures = sorted(key for key in graph.signature_def if not key.startswith(_INTERNAL))
    if signature_key(config) not in signatures:
        raise invalid_model(
            f"model '{name}': its SavedModel has no signature '{signature_key(config)}': found "
            f"{', '.join(signatures) or 'none'}; name one in {SIGNATURE}, or save the model with signatures=…"
        )
    return graph.signature_def[signature_key(config)]


def load_saved(config: ModelConfig, folder: Path, session: Any) -> Graph:
    """Read a SavedModel into a session, variables and tables included.

    Raises:
        MmeError: INVALID_MODEL, OUT_OF_MEMORY.
    """
    inputs, outputs = saved_signature(config, folder)
    try:
        # Deprecated for as long as TensorFlow 2 is there, whose own reader knows no sessions.
        loaded = tensorflow().compat.v1.saved_model.load(session, [tag(config)], str(folder))
    except Exception as error:  # tf.errors, and Python's own
        raise translated(error, config.name, loading=True) from error
    signature = loaded.signature_def[signature_key(config)]
    return Graph(inputs, outputs, _places(signature.inputs), _places(signature.outputs))


def _places(described: Any) -> dict[str, str]:
    return {name: info.name for name, info in described.items()}


def load_frozen(config: ModelConfig, file: Path, nodes: Any) -> Graph:
    """Read a frozen graph into an empty one; its model is what is between the tensors that the configuration names.

    Raises:
        MmeError: INVALID_MODEL where the file is no graph, or has no such tensors; OUT_OF_MEMORY.
    """
    tf = tensorflow()
    if not (config.inputs and config.outputs):
        raise invalid_model(
            f"model '{config.name}': a graph does not say which of its tensors are inputs and outputs: declare both in "
            "config.pbtxt, by the names of the graph's nodes"
        )
    graph_def = tf.compat.v1.GraphDef()
    try:
        graph_def.ParseFromString(file.read_bytes())
        with nodes.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except Exception as error:  # protobuf's DecodeError, ValueError, tf.errors
        raise translated(error, config.name, loading=True) from error
    feeds = {spec.name: _node(nodes, "input", spec, config) for spec in given_to(config)}
    fetches = {spec.name: _node(nodes, "output", spec, config) for spec in all_outputs(config)}
    return Graph(_facts(config, feeds), _facts(config, fetches), _names(feeds), _names(fetches))


def _names(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: tensor.name for name, tensor in tensors.items()}


def _node(graph: Any, what: str, spec: TensorSpec, config: ModelConfig) -> Any:
    name = spec.name if ":" in spec.name else f"{spec.name}:0"
    try:
        return graph.get_tensor_by_name(name)
    except (KeyError, ValueError):
        kind = "Placeholder" if what == "input" else None
        names = [op.name for op in graph.get_operations() if kind is None or op.type == kind]
        shown = ", ".join(names[-8:])
        raise invalid_model(
            f"unable to load model '{config.name}', unexpected inference {what} '{spec.name}', "
            f"allowed {what}s are: {shown}"
        ) from None


def _facts(config: ModelConfig, tensors: Mapping[str, Any]) -> list[GraphTensor]:
    return [
        _tensor(
            config, name, tensor.dtype.base_dtype.name, None if tensor.shape.rank is None else tensor.shape.as_list()
        )
        for name, tensor in tensors.items()
    ]


def _dims(shape: Any) -> list[int] | None:
    return None if shape.unknown_rank else [dim.size for dim in shape.dim]


def _tensor(config: ModelConfig, name: str, type_name: str, dims: list[int | None] | list[int] | None) -> GraphTensor:
    """A tensor as the model declares it; the shape of one whose rank nobody knows is what the configuration says."""
    if type_name not in _TYPES:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': tensor '{name}' has TensorFlow's type {type_name}, which can't be sent over the "
            "protocol; export the model with another type",
        )
    if dims is None:
        spec = config.input(name) or config.output(name)
        spec = spec or TensorSpec(name, _TYPES[type_name], (-1,))
        shape = spec.model_shape(config.max_batch_size)
    else:
        shape = tuple(-1 if dim is None else dim for dim in dims)
    return name, _TYPES[type_name], shape
