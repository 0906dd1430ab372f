"""Models by OpenVINO on the CPU: its own format (model.xml beside model.bin), ONNX, and what else it reads.

Compiling and inferring release the GIL, so these models live in the serving process. One compiled model serves all
instances; each execution takes an inference request of its own out of a pool, because a request holds the buffers that
it computes in. Weights are mapped from the file, and held once more in the processor's own layout.

Called by load threads (`load`, `close`) and by instance threads or the event loop (`execute`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Handler
from model_handlers.config.autocomplete import complete
from model_handlers.errors import MmeError, invalid_argument
from model_handlers.openvino.graph import (
    device,
    fixed_batch,
    name_of,
    open_graph,
    properties,
    shaping,
    signature,
    takes_text,
)
from model_handlers.openvino.runtime import core, translated
from model_handlers.system.system_limits import prove_room
from model_handlers.system.threads import default_threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array


class OpenvinoHandler(Handler):
    """One compiled model.

    Args:
        graph: its graph, shaped.
        compiled: that, compiled.
        config: the configuration.
        pads: whether batches that are too small for a graph of one batch size are filled up.
    """

    backend: ClassVar[str] = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("openvino",)
    default_filename: ClassVar[str] = "model.xml"
    memory_only: ClassVar[bool] = True
    estimate_factor: ClassVar[float] = 1.6
    inline: ClassVar[bool] = True

    def __init__(self, graph: Any, compiled: Any, config: ModelConfig, *, pads: bool = False) -> None:
        self._batch = fixed_batch(config, graph, shaping(config))
        inputs, outputs = signature(graph, config, self._batch)
        super().__init__(complete(config, inputs, outputs))
        self._pads = pads
        self._compiled = compiled
        self._idle: deque[Any] = deque()
        self._positions = {name_of(port, config): index for index, port in enumerate(graph.outputs)}
        self._ports = {name_of(port, config): index for index, port in enumerate(graph.inputs)}
        self._texts = takes_text(inputs)
        self._answers_text = set(takes_text(outputs))

    @classmethod
    def prepare(cls, config: ModelConfig, model_file: Path) -> None:  # noqa: ARG003 - of all models
        """Import the framework and have it load the device's library."""
        core()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Inputs, outputs and the batch dimension from the graph; what the configuration says must agree with it."""
        wanted = shaping(config)
        graph = open_graph(config, model_file, wanted)
        return complete(config, *signature(graph, config, fixed_batch(config, graph, wanted)))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> OpenvinoHandler:  # noqa: ARG003 - the CPU's, shared by lanes
        """Compile the model; parameters are named as Triton's OpenVINO backend names them."""
        wanted = shaping(config)
        options = properties(config, default_threads(_weights_file(model_file)))
        target = _target(config)
        graph = open_graph(config, model_file, wanted)
        lanes = sum(group.count for group in config.instance_group) or 1
        prove_room(lanes + 1, f"worker of '{config.name}'")  # it would call the file bad
        try:
            compiled = core().compile_model(graph, target, options)
        except Exception as error:  # plain RuntimeError
            raise translated(error, config.name, loading=True) from error
        return cls(graph, compiled, config, pads=wanted.pads)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Infer once."""
        size = self._check_batch(inputs) if self._batch else 0
        given: dict[int, Array] = {}
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            given = {self._ports[name]: self._given(name, array, size) for name, array in inputs.items()}
            request.infer(given, share_inputs=True, share_outputs=not self._answers_text, decode_strings=False)
            results = [self._result(request, name) for name in outputs]
        except MmeError:
            raise
        except Exception as error:  # plain RuntimeError
            raise translated(error, self.config.name, loading=False) from error
        finally:
            # OpenVINO's wrapper keeps all; what can't be written to is copied, and its memory is wanted elsewhere.
            request._inputs_data = [array for array in given.values() if array.flags.writeable]  # noqa: SLF001
            self._idle.append(request)
        return [array[:size] for array in results] if size else results

    def _check_batch(self, inputs: Mapping[str, Array]) -> int:
        """The size of a batch for a graph that takes just one."""
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
        """A copy: the next execution of the request writes where the result lies."""
        tensor = request.get_output_tensor(self._positions[name])
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
        """Drop the compiled model and its requests: OpenVINO frees them in their destructors."""
        self._idle.clear()
        del self._compiled


def _target(config: ModelConfig) -> str:
    return device(config, core().available_devices)


def _weights_file(model_file: Path) -> Path:
    """Where most of a model's bytes are."""
    beside = model_file.with_suffix(".bin")
    return beside if beside.is_file() else model_file


def _text(array: Array, name: str, model: str) -> Array:
    """Strings as OpenVINO takes them; in numpy's arrays of bytes zeros at the end are no part of one."""
    if any(element.endswith(b"\0") for element in array.ravel().tolist()):
        raise invalid_argument(
            f"input '{name}' for model '{model}' has a string that ends with a zero byte, which OpenVINO does not keep"
        )
    return array.astype(np.bytes_)
