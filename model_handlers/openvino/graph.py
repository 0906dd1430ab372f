"""The graph of a model before it is compiled: its shapes as the configuration wants them, and what it takes and gives.

Called on load threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_handlers.config.parameters import choice, integer, switch, warn_of_unknown
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.openvino.runtime import openvino, read_model
from model_handlers.tensor import BY_NAME, BYTES, DataType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.config.autocomplete import GraphTensor
    from model_handlers.config.model_config import ModelConfig


DEVICE = "TARGET_DEVICE"
_PRECISIONS = ("f32", "bf16", "f16")
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT", "UNDEFINED")
_AUTO = "AUTO"
_PARAMETERS = frozenset(
    (
        DEVICE,
        "PERFORMANCE_HINT",
        "INFERENCE_PRECISION_HINT",
        "HINT_BF16",
        "INFERENCE_NUM_THREADS",
        "NUM_STREAMS",
        "CPU_EXTENSION_PATH",
        "SKIP_OV_DYNAMIC_BATCHSIZE",
        "ENABLE_BATCH_PADDING",
        "RESHAPE_IO_LAYERS",
    )
)
_HARMLESS = {"COMPILATION_NUM_THREADS": "a model is compiled by the thread that loads it"}


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is done to the shapes of a graph.

    Attributes:
        keeps_batch: the batch dimension stays as it is, though the configuration batches.
        pads: batches smaller than that are filled up.
        as_configured: inputs take the dimensions of the configuration.
    """

    keeps_batch: bool = False
    pads: bool = False
    as_configured: bool = False


def shaping(config: ModelConfig) -> Shaping:
    """What the configuration says about shapes."""
    return Shaping(
        switch(config, "SKIP_OV_DYNAMIC_BATCHSIZE", default=False),
        switch(config, "ENABLE_BATCH_PADDING", default=False),
        switch(config, "RESHAPE_IO_LAYERS", default=False),
    )


def device(config: ModelConfig, available: Sequence[str]) -> str:
    """The device's name to OpenVINO: the CPU, unless the configuration names one that is there.

    Raises:
        MmeError: UNAVAILABLE for one that is not.
    """
    name = config.parameters.get(DEVICE, "CPU").strip()
    if name not in (*available, _AUTO):
        raise MmeError(
            Kind.UNAVAILABLE,
            f"model '{config.name}': parameter '{DEVICE}' is '{name}', but the devices that OpenVINO finds here are "
            f"{', '.join(available)}",
        )
    return name


def properties(config: ModelConfig, threads: int) -> dict[str, object]:
    """What the model is compiled with, to compute on `threads` threads unless the configuration says more.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be, UNSUPPORTED for a library.
    """
    warn_of_unknown(config, _PARAMETERS, "OpenVINO's models", "mme.openvino", _HARMLESS)
    if config.parameters.get("CPU_EXTENSION_PATH"):
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': parameter 'CPU_EXTENSION_PATH' is not honoured: libraries of custom operations "
            "are not loaded",
        )
    streams = _streams(config)
    of_all = integer(config, "INFERENCE_NUM_THREADS", 0, range(1025))
    half = switch(config, "HINT_BF16", default=False)
    found: dict[str, object] = {
        "INFERENCE_PRECISION_HINT": choice(config, "INFERENCE_PRECISION_HINT", "bf16" if half else "f32", _PRECISIONS),
        "ENABLE_CPU_PINNING": False,  # hundreds of models would pin their threads to the same cores
    }
    if "PERFORMANCE_HINT" in config.parameters:
        found["PERFORMANCE_HINT"] = choice(config, "PERFORMANCE_HINT", "", _HINTS)
    elif isinstance(streams, int):  # each has a thread at least, or there are fewer of them
        threads = max(threads, streams)
    if "PERFORMANCE_HINT" not in config.parameters or "NUM_STREAMS" in config.parameters:
        found["NUM_STREAMS"] = streams
    return {**found, "INFERENCE_NUM_THREADS": of_all or threads}


def _streams(config: ModelConfig) -> int | str:
    """How many executions go on at a time: one an instance, unless the configuration says."""
    if config.parameters.get("NUM_STREAMS", "").strip().upper() == _AUTO:
        return _AUTO
    instances = sum(group.count for group in config.instance_group) or 1
    return integer(config, "NUM_STREAMS", instances, range(1, 257))


_TYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
    "string": "BYTES",
}


def open_graph(config: ModelConfig, path: Path, shaping: Shaping) -> Any:
    """Read a file and shape the graph: where the configuration batches, its batch dimension takes any size.

    Raises:
        MmeError: INVALID_MODEL when the file is no model, or can't be shaped so.
    """
    graph = read_model(path, config.name)
    if shaping.as_configured:
        _reshape(graph, config, {index: _configured(config, port) for index, port in enumerate(graph.inputs)})
    elif config.max_batch_size > 0 and not shaping.keeps_batch:
        free = {
            index: openvino().PartialShape([-1, *list(port.partial_shape)[1:]])
            for index, port in enumerate(graph.inputs)
            if _dimensions(port)[:1] not in {(), (-1,)}
        }
        _reshape(graph, config, free)
    return graph


def _configured(config: ModelConfig, port: Any) -> Any:
    spec = config.input(name_of(port, config))
    if spec is None:
        return port.partial_shape
    return openvino().PartialShape(list(spec.model_shape(config.max_batch_size)))


def _reshape(graph: Any, config: ModelConfig, shapes: dict[int, Any]) -> None:
    if not shapes:
        return
    try:
        graph.reshape(shapes)
    except RuntimeError as error:
        raise invalid_model(
            f"model '{config.name}': OpenVINO can't give its inputs the shapes "
            f"{', '.join(str(shape) for shape in shapes.values())}; set max_batch_size to 0, or the parameter "
            "SKIP_OV_DYNAMIC_BATCHSIZE to 'YES' where the model has a batch dimension of that one size"
        ) from error


def fixed_batch(config: ModelConfig, graph: Any, shaping: Shaping) -> int:
    """The one batch size that the graph takes, 0 where it takes any or does not batch.

    Raises:
        MmeError: INVALID_MODEL where that is not the configured one.
    """
    if config.max_batch_size == 0 or not shaping.keeps_batch:
        return 0
    firsts = {_dimensions(port)[:1] for port in graph.inputs}
    if firsts == {(-1,)}:
        return 0
    if firsts != {(config.max_batch_size,)}:
        raise invalid_model(
            f"model '{config.name}': max_batch_size is {config.max_batch_size} and SKIP_OV_DYNAMIC_BATCHSIZE keeps the "
            f"model's own batch dimension, which is {', '.join(str(list(first)) for first in sorted(firsts))}; "
            "make them equal"
        )
    return config.max_batch_size


def signature(graph: Any, config: ModelConfig, batch: int) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """The inputs and outputs of a graph; a first dimension of just `batch` is shown as one of any size.

    Raises:
        MmeError: UNSUPPORTED for one that the protocol can't carry.
    """
    inputs, outputs = (
        [_graph_tensor(port, config, batch) for port in ports] for ports in (graph.inputs, graph.outputs)
    )
    return inputs, outputs


def name_of(port: Any, config: ModelConfig) -> str:
    """Of the names of an input or output the one that the configuration declares, else the first by the alphabet.

    In a graph of TensorFlow's `x:0` is the first result of node x, which its users call x.
    """
    names: list[str] = sorted({alias for name in port.get_names() for alias in (name, name.removesuffix(":0"))})
    declared = (name for name in names if config.input(name) or config.output(name))
    return next(declared, names[0] if names else str(port.node.friendly_name))


def _graph_tensor(port: Any, config: ModelConfig, batch: int) -> GraphTensor:
    name, type_name = name_of(port, config), port.element_type.get_type_name()
    if type_name not in _TYPES:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': tensor '{name}' has OpenVINO's type {type_name}, which can't be sent over the "
            "protocol; convert the model with inputs and outputs of another type",
        )
    data_type: DataType = BY_NAME[_TYPES[type_name]]
    shape = _dimensions(port)
    if batch and shape[:1] == (batch,):
        shape = (-1, *shape[1:])
    return name, data_type, shape


def _dimensions(port: Any) -> tuple[int, ...]:
    """Its shape, -1 for a dimension of any size; one of which not even the rank is known looks like a scalar's."""
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return ()
    return tuple(dim.get_length() if dim.is_static else -1 for dim in shape)


def takes_text(tensors: list[GraphTensor]) -> list[str]:
    """The names of those that hold strings."""
    return [name for name, data_type, _ in tensors if data_type is BYTES]
