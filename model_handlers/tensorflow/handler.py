"""TensorFlow's SavedModels and frozen graphs, on CPU or GPU.

TensorFlow holds the GIL while it loads, can't give back what it took, and brings half a gigabyte: each instance has a
process of its own, forked from one that has imported it. Where TensorFlow is not installed and OpenVINO is, that reads
the same files.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Handler, Placement, Runtime, Traits
from model_handlers.config.autocomplete import complete, given_to
from model_handlers.config.model_config import all_outputs
from model_handlers.errors import Kind, MmeError, unsupported
from model_handlers.openvino import OpenvinoHandler, core
from model_handlers.system.importing import is_installed
from model_handlers.tensor import BF16, BYTES
from model_handlers.tensorflow.graphs import (
    DEFAULT_SIGNATURE,
    PRELOAD,
    SIGNATURE,
    Function,
    built_for_cuda,
    check,
    device_name,
    load_frozen,
    load_saved,
    saved_signature,
    session_config,
    signature_key,
    tensorflow,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array, TensorSpec
    from model_handlers.tensorflow.graphs import Graph


class TensorflowHandler(Handler):
    """One function of TensorFlow on one device."""

    backend: ClassVar[str] = "tensorflow"

    def __init__(self, graph: Graph, config: ModelConfig, session: Any) -> None:
        super().__init__(complete(config, graph.inputs, graph.outputs))
        self._inputs = {spec.name: spec for spec in given_to(self.config)}
        self._outputs = {spec.name: spec for spec in all_outputs(self.config)}
        fetches = {name: graph.fetches[name] for name in self._outputs}
        self._function: Function | None = Function(session, graph.feeds, fetches)

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        stands_in = not is_installed("tensorflow") and is_installed("openvino")
        traits = OpenvinoHandler.traits(config, model_file) if stands_in else Traits()
        runtime = Runtime(
            packages=("tensorflow", "tensorflow-cpu", "openvino"),
            provide=lambda: core() if _by_openvino(config) else tensorflow(),
            gpu_capable=built_for_cuda,
        )
        return replace(traits, placement=Placement.PROCESS, estimate_factor=1.5, runtime=runtime, preload=PRELOAD)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """What the model's description says of inputs and outputs; what the configuration says must agree with it."""
        check(config)
        if _by_openvino(config):
            return OpenvinoHandler.autocomplete(config, model_file)
        return complete(config, *cls.described(config, model_file))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> Handler:
        """Load the model; parameters are named as Triton's TensorFlow backend names them."""
        check(config)
        if _by_openvino(config):
            return OpenvinoHandler.load(config, model_file, device, lane)
        tf, nodes = tensorflow(), tensorflow().Graph()
        settled = session_config(tf, config, device)
        try:
            with nodes.as_default(), tf.device(device_name(device)):
                session = tf.compat.v1.Session(graph=nodes, config=settled)
                return cls(cls.graph(config, model_file, session), config, session)
        except tf.errors.OpError as error:  # of a device, or of what grappler makes of the graph
            raise translated(error, config.name, loading=True) from error

    @classmethod
    def described(cls, config: ModelConfig, model_file: Path) -> tuple[list[Any], list[Any]]:
        raise NotImplementedError

    @classmethod
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> Graph:
        raise NotImplementedError

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        assert self._function is not None  # noqa: S101 - it is not closed
        given = {name: _given(array, self._inputs[name]) for name, array in inputs.items()}
        try:
            results = self._function(given)
        except KeyError as missing:
            sentence = f"model '{self.config.name}' has to be given {missing}, which its configuration calls optional"
            raise MmeError(Kind.EXECUTION_FAILED, sentence) from None
        except Exception as error:  # tf.errors, and Python's own
            raise translated(error, self.config.name, loading=False) from error
        return [_array(results[name], self._outputs[name]) for name in outputs]

    def close(self) -> None:
        if self._function is not None:
            self._function.close()
        self._function = None
        gc.collect()  # graphs are full of circles


class SavedModelHandler(TensorflowHandler):
    """A signature of a SavedModel, which tells its inputs and outputs."""

    default_filename: ClassVar[str] = "model.savedmodel"

    @classmethod
    def described(cls, config: ModelConfig, model_file: Path) -> tuple[list[Any], list[Any]]:
        return saved_signature(config, model_file)

    @classmethod
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> Graph:
        return load_saved(config, model_file, session)


class GraphdefHandler(TensorflowHandler):
    """A frozen graph between the tensors that its configuration names."""

    default_filename: ClassVar[str] = "model.graphdef"

    @classmethod
    def described(cls, config: ModelConfig, model_file: Path) -> tuple[list[Any], list[Any]]:
        graph = load_frozen(config, model_file, tensorflow().Graph())
        return graph.inputs, graph.outputs

    @classmethod
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> Graph:
        return load_frozen(config, model_file, session.graph)


def _by_openvino(config: ModelConfig) -> bool:
    if is_installed("tensorflow") or not is_installed("openvino"):
        return False
    if signature_key(config) != DEFAULT_SIGNATURE:
        raise unsupported(
            f"model '{config.name}': parameter '{SIGNATURE}' needs TensorFlow, which is not installed (OpenVINO reads "
            f"'{DEFAULT_SIGNATURE}' alone); run `pip install 'mme[tensorflow]'`"
        )
    return True


def _given(array: Array, spec: TensorSpec) -> Array:
    return array.view(tensorflow().bfloat16.as_numpy_dtype) if spec.data_type is BF16 else array


def _array(result: Any, spec: TensorSpec) -> Array:
    if spec.data_type is BYTES:  # one string alone is no array
        return np.asarray(result, dtype=np.object_)
    array = np.asarray(result)
    return array.view(np.uint16) if spec.data_type is BF16 else array
