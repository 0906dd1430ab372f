"""Models by OpenVINO on the CPU: its own format (model.xml beside model.bin), ONNX, and what else it reads.

Compiling and inferring release the GIL, so these models live in the serving process. One compiled model serves all
instances; each execution takes an inference request of its own out of a pool, because a request holds the buffers that
it computes in. Weights are mapped from the file, and held once more in the processor's own layout. A file is given to
the reader of its format: OpenVINO's own search has all readers write their opinion of a bad file to standard error.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler, Runtime, Traits
from model_handlers.config.autocomplete import SignatureTensor, complete
from model_handlers.config.model_config import ModelConfig, choice, integer, switch, warn_of_unknown
from model_handlers.errors import (
    OPENVINO,
    MmeError,
    RefusedError,
    invalid_argument,
    invalid_model,
    unavailable,
    unsupported,
)
from model_handlers.system.importing import import_without
from model_handlers.system.threads import default_threads, prove_room
from model_handlers.tensor import BY_NAME, BYTES, Array, DataType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


_READERS = {".xml": "ir", ".onnx": "onnx", ".tflite": "tflite", ".pdmodel": "paddle"}
_TENSORFLOW = "tf"  # a SavedModel is a folder, of any name
_IR_VERSIONS = (10, 11)
_IR_VERSION = re.compile(rb"<net\b[^>]*\bversion=\"(\d+)\"")
_HEAD = 4096
_NOISE = re.compile(r"^(Exception from |Check '.*' failed at |FrontEnd API failed|While validating )")
_MAX_CHARACTERS = 300


@functools.cache
def openvino() -> Any:
    """The framework, imported when the first model needs it. Raises UNSUPPORTED where it is not installed."""
    try:
        # With it importing OpenVINO reports to its maker, and leaves files in the home directory.
        return import_without("openvino", "openvino_telemetry")
    except ImportError as error:
        raise unsupported(
            "this model needs OpenVINO, which is not installed; run `pip install 'mme[openvino]'`"
        ) from error


@functools.cache
def core() -> Any:
    """What knows the devices and compiles for them: one for all models."""
    made = openvino().Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # which loads the device's library
    return made


def read_model(path: Path, model: str) -> Any:
    framework = openvino()
    if path.suffix == ".xml":
        _check_version(path, model, framework.__version__.partition("-")[0])
    reader = _TENSORFLOW if path.is_dir() else _READERS.get(path.suffix.lower(), _TENSORFLOW)
    try:
        frontend = framework.frontend.FrontEndManager().load_by_framework(reader)
        graph = frontend.convert(frontend.load(str(path)))
    except Exception as error:  # plain RuntimeError, and the readers' own
        raise translated(error, model, loading=True) from error
    if not graph.inputs or not graph.outputs:
        raise invalid_model(f"model '{model}': '{path.name}' has no inputs or no outputs: there is nothing to compute")
    return graph


def _check_version(path: Path, model: str, ours: str) -> None:
    with path.open("rb") as file:
        found = _IR_VERSION.search(file.read(_HEAD))
    if found and int(found[1]) not in _IR_VERSIONS:
        raise invalid_model(
            f"model '{model}': '{path.name}' is in version {int(found[1])} of OpenVINO's format, and OpenVINO {ours}, "
            f"which is installed here, reads {' and '.join(map(str, _IR_VERSIONS))}: convert the model anew"
        )


def translated(error: Exception, model: str, *, loading: bool) -> MmeError:
    """OpenVINO's exceptions have no kinds, but for memory that the C++ library does not get."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = " ".join(line for line in lines if line and not _NOISE.match(line)) or " ".join(lines)
    return OPENVINO.error(error, model, words[:_MAX_CHARACTERS], loading=loading)


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
    """What is done to the shapes of a graph."""

    keeps_batch: bool = False  # the batch dimension stays as it is, though the configuration batches
    pads: bool = False  # batches smaller than that are filled up
    as_configured: bool = False  # inputs take the dimensions of the configuration


def shaping_of(config: ModelConfig) -> Shaping:
    return Shaping(
        switch(config, "SKIP_OV_DYNAMIC_BATCHSIZE", default=False),
        switch(config, "ENABLE_BATCH_PADDING", default=False),
        switch(config, "RESHAPE_IO_LAYERS", default=False),
    )


def device_name(config: ModelConfig, available: Sequence[str]) -> str:
    name = config.parameters.get(DEVICE, "CPU").strip()
    if name not in (*available, _AUTO):
        raise unavailable(
            f"model '{config.name}': parameter '{DEVICE}' is '{name}', but the devices that OpenVINO finds here are "
            f"{', '.join(available)}"
        )
    return name


def properties(config: ModelConfig, threads: int) -> dict[str, object]:
    """What the model is compiled with, to compute on `threads` threads unless the configuration says more."""
    warn_of_unknown(config, _PARAMETERS, "OpenVINO's models", "mme.openvino", _HARMLESS)
    if config.parameters.get("CPU_EXTENSION_PATH"):
        raise RefusedError(
            f"model '{config.name}': parameter 'CPU_EXTENSION_PATH' is not honoured: libraries of custom operations "
            "are not loaded"
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
    """Read a file and shape the graph: where the configuration batches, its batch dimension takes any size."""
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
    """The one batch size that the graph takes, 0 where it takes any or does not batch."""
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


def signature(graph: Any, config: ModelConfig, batch: int) -> tuple[list[SignatureTensor], list[SignatureTensor]]:
    """The inputs and outputs of a graph; a first dimension of just `batch` is shown as one of any size."""
    inputs, outputs = (
        [_graph_tensor(port, config, batch) for port in ports] for ports in (graph.inputs, graph.outputs)
    )
    return inputs, outputs


def name_of(port: Any, config: ModelConfig) -> str:
    """Of a port's names the declared one, else the alphabet's first. TensorFlow's `x:0` is x to its users."""
    names: list[str] = sorted({alias for name in port.get_names() for alias in (name, name.removesuffix(":0"))})
    declared = (name for name in names if config.input(name) or config.output(name))
    return next(declared, names[0] if names else str(port.node.friendly_name))


def _graph_tensor(port: Any, config: ModelConfig, batch: int) -> SignatureTensor:
    name, type_name = name_of(port, config), port.element_type.get_type_name()
    if type_name not in _TYPES:
        raise RefusedError(
            f"model '{config.name}': tensor '{name}' has OpenVINO's type {type_name}, which can't be sent over the "
            "protocol; convert the model with inputs and outputs of another type"
        )
    data_type: DataType = BY_NAME[_TYPES[type_name]]
    shape = _dimensions(port)
    if batch and shape[:1] == (batch,):
        shape = (-1, *shape[1:])
    return name, data_type, shape


def _dimensions(port: Any) -> tuple[int, ...]:
    # One of which not even the rank is known looks like a scalar's.
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return ()
    return tuple(dim.get_length() if dim.is_static else -1 for dim in shape)


def takes_text(tensors: list[SignatureTensor]) -> list[str]:
    return [name for name, data_type, _ in tensors if data_type is BYTES]


class OpenvinoHandler(Handler):
    """One compiled model; `pads` says that batches too small for a graph of one batch size are filled up."""

    backend: ClassVar[str] = "openvino"
    default_filename: ClassVar[str] = "model.xml"

    def __init__(self, graph: Any, compiled: Any, config: ModelConfig, *, pads: bool = False) -> None:
        self._batch = fixed_batch(config, graph, shaping_of(config))
        inputs, outputs = signature(graph, config, self._batch)
        super().__init__(complete(config, inputs, outputs))
        self._pads = pads
        self._compiled = compiled
        self._idle: deque[Any] = deque()
        self._output_index = {name_of(port, config): index for index, port in enumerate(graph.outputs)}
        self._input_index = {name_of(port, config): index for index, port in enumerate(graph.inputs)}
        self._texts = takes_text(inputs)
        self._answers_text = set(takes_text(outputs))

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:  # noqa: ARG003 - of all models
        runtime = Runtime(packages=("openvino",), provide=core)
        return Traits(inline=True, memory_only=True, estimate_factor=1.6, runtime=runtime)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        wanted = shaping_of(config)
        graph = open_graph(config, model_file, wanted)
        return complete(config, *signature(graph, config, fixed_batch(config, graph, wanted)))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> OpenvinoHandler:  # noqa: ARG003 - the CPU's, shared by lanes
        wanted = shaping_of(config)
        options = properties(config, default_threads(_weights_file(model_file)))
        target = device_name(config, core().available_devices)
        graph = open_graph(config, model_file, wanted)
        lanes = sum(group.count for group in config.instance_group) or 1
        prove_room(lanes + 1, f"worker of '{config.name}'")  # OpenVINO would call the file bad
        try:
            compiled = core().compile_model(graph, target, options)
        except Exception as error:  # plain RuntimeError
            raise translated(error, config.name, loading=True) from error
        return cls(graph, compiled, config, pads=wanted.pads)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        size = self._check_batch(inputs) if self._batch else 0
        given: dict[int, Array] = {}
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            given = {self._input_index[name]: self._given(name, array, size) for name, array in inputs.items()}
            request.infer(given, share_inputs=True, share_outputs=not self._answers_text, decode_strings=False)
            results = [self._result(request, name) for name in outputs]
        except MmeError:
            raise
        except Exception as error:  # plain RuntimeError
            raise translated(error, self.config.name, loading=False) from error
        finally:
            # OpenVINO's wrapper keeps its inputs. Of those that are read only it made copies: the originals, which may
            # lie in shared memory, are let go.
            request._inputs_data = [array for array in given.values() if array.flags.writeable]  # noqa: SLF001
            self._idle.append(request)
        return [array[:size] for array in results] if size else results

    def _check_batch(self, inputs: Mapping[str, Array]) -> int:
        size = len(next(iter(inputs.values())))
        if size != self._batch and not self._pads:
            raise invalid_argument(
                f"model '{self.config.name}' takes batches of exactly {self._batch}, got {size}: set the parameter "
                "ENABLE_BATCH_PADDING to 'YES' to have smaller ones filled up"
            )
        return size

    def _given(self, name: str, array: Array, size: int) -> Array:
        if name in self._texts:
            array = _text(array, name, self.config.name)
        if size and size < self._batch:
            array = np.concatenate([array, np.repeat(array[-1:], self._batch - size, axis=0)])
        return np.ascontiguousarray(array)

    def _result(self, request: Any, name: str) -> Array:
        # A copy: the next execution of the request writes where the result lies.
        tensor = request.get_output_tensor(self._output_index[name])
        if name in self._answers_text:
            return np.array(tensor.bytes_data, dtype=np.object_)
        copy: Array = np.array(tensor.data)
        return copy

    def give_back(self, *, idle: bool) -> bool:
        """Drop the requests that nothing infers with, and the buffers that they hold."""
        if idle:
            self._idle.clear()
        return True

    def close(self) -> None:
        self._idle.clear()
        del self._compiled


def _weights_file(model_file: Path) -> Path:
    beside = model_file.with_suffix(".bin")
    return beside if beside.is_file() else model_file


def _text(array: Array, name: str, model: str) -> Array:
    # In numpy's arrays of bytes zeros at the end are no part of one.
    if any(element.endswith(b"\0") for element in array.ravel().tolist()):
        raise invalid_argument(
            f"input '{name}' for model '{model}' has a string that ends with a zero byte, which OpenVINO does not keep"
        )
    return array.astype(np.bytes_)
