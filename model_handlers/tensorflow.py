"""TensorFlow's SavedModels and frozen graphs, on CPU or GPU, in the one module that imports it.

It holds the GIL while it loads, can't give back what it took, and brings half a gigabyte: each instance has a process
of its own, forked from one that has imported it. Where it is not installed and OpenVINO is, that reads the same files.
TensorFlow 2 hands each call to a thread of its own and waits. A session whose graph runs in the thread that calls
spares both wake-ups and most of the Python on the way: half a millisecond a call, a tenth of a model of five. It reads
an array where it lies, if that is at a multiple of 64 bytes, and its results are TensorFlow's memory. What the serving
process asks, `built_for_cuda`, imports nothing.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import platform
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler, Placement, Runtime, Traits
from model_handlers.config.autocomplete import SignatureTensor, complete, given_to
from model_handlers.config.model_config import ModelConfig, all_outputs, integer, warn_of_unknown, warn_once
from model_handlers.errors import TENSORFLOW, Kind, MmeError, RefusedError, invalid_model, unavailable, unsupported
from model_handlers.openvino import OpenvinoHandler, core
from model_handlers.system.importing import file_of, import_without, is_installed, variable
from model_handlers.system.threads import processors
from model_handlers.tensor import BF16, BY_DTYPE_NAME, BYTES, FP16, Array, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


PRELOAD = "model_handlers.tensorflow:preload"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_WORDS = 600  # characters of an exception, behind which it shows the graph


def built_for_cuda() -> bool:
    """Whether the installed TensorFlow was built for CUDA; False where there is none."""
    return "('is_cuda_build', True)" in file_of("tensorflow", "python/platform/build_info.py")


@functools.cache
def tensorflow() -> Any:
    """The framework, imported when the first model needs it. Raises UNSUPPORTED where it is not installed."""
    os.environ.setdefault(_LOG_LEVEL, "3")  # errors come as exceptions, and warnings fill CloudWatch
    try:
        # Keras is half of the import's time and memory, and writes into the home directory; models need none of it.
        # TensorFlow has an older one inside, which can't be left out.
        with variable("KERAS_HOME", os.devnull):
            tf = import_without("tensorflow", "keras")
    except ImportError as error:
        raise unsupported(
            "TensorFlow's models need TensorFlow, which is not installed; run `pip install 'mme[tensorflow]'`, or "
            "`pip install 'mme[openvino]'`, which reads most of them"
        ) from error
    tf.get_logger().setLevel("ERROR")
    return tf


def preload() -> None:
    """Import the framework where standard error is not in use: it says there what it was built with."""
    ours = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        tensorflow()
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(nowhere)


def translated(error: Exception, model: str, *, loading: bool) -> MmeError:
    """TensorFlow's errors have codes; what else it raises is Python's."""
    words = " ".join((getattr(error, "message", "") or str(error)).split())[:_WORDS]
    is_full = isinstance(error, tensorflow().errors.ResourceExhaustedError)
    return TENSORFLOW.error(error, model, words, loading=loading, is_full=is_full)


SIGNATURE, TAG = "TF_SIGNATURE_DEF", "TF_GRAPH_TAG"
DEFAULT_SIGNATURE = "serving_default"
_WITHIN, _BETWEEN, _INIT = "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS", "TF_INIT_OPS_FILE"
_WITHOUT_EFFECT = {
    "TF_USE_PER_SESSION_THREADS": "a model has a process of its own, and so threads of its own",
    "MAX_SESSION_SHARE_COUNT": "instances in one process share a model anyhow, and others can't",
}
_THREADS = range(1025)
_CALLER = -1  # the thread that calls runs the operators, one after the other


def signature_key(config: ModelConfig) -> str:
    return config.parameters.get(SIGNATURE, "").strip() or DEFAULT_SIGNATURE


def tag(config: ModelConfig) -> str:
    return config.parameters.get(TAG, "").strip() or "serve"


def check(config: ModelConfig) -> None:
    warn_of_unknown(
        config, (SIGNATURE, TAG, _WITHIN, _BETWEEN, _INIT), "TensorFlow models", "mme.tensorflow", _WITHOUT_EFFECT
    )
    names = ", ".join(each.name for each in config.gpu_accelerators)
    if names:
        sentence = f"gpu_execution_accelerator {names} changes nothing: TensorFlow computes by itself here"
        warn_once("mme.tensorflow", sentence, config.name)
    if _INIT in config.parameters:
        raise RefusedError(
            f"model '{config.name}': parameter '{_INIT}' is not honoured: freeze the graph, so that nothing is to be "
            "initialised, or export it as a SavedModel"
        )


def session_config(tf: Any, config: ModelConfig, device: Device) -> Any:
    """How a session computes, and what it sees of GPUs. The first one of a process settles both for all of it."""
    between = integer(config, _BETWEEN, 0, _THREADS) or 1
    settled = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=integer(config, _WITHIN, 0, _THREADS) or processors(),
        inter_op_parallelism_threads=between if between > 1 else _CALLER,
        allow_soft_placement=True,  # what has no form for a GPU runs on the CPU
    )
    if device.kind == "cpu":
        settled.device_count["GPU"] = 0
    else:
        _check_seen(tf, device)
        settled.gpu_options.visible_device_list = str(device.index)
        settled.gpu_options.allow_growth = True  # else the first model would take all of its memory
    return settled


def _check_seen(tf: Any, device: Device) -> None:
    if device.index >= len(tf.config.list_physical_devices("GPU")):
        raise unavailable(
            f"a model was to run on {device}, but TensorFlow does not see that GPU; check that the driver, CUDA and "
            "cuDNN fit it"
        )


def device_name(device: Device) -> str:
    return "/CPU:0" if device.kind == "cpu" else "/GPU:0"


_WORD_COUNT = 16  # 32 bits each, more than the environment of any of these has
# The word of the environment that controls vectors, and the bits that say so: of results, on x86 of operands too.
_FLUSHING = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_Environment = ctypes.c_uint32 * _WORD_COUNT


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Count denormals as zero meanwhile, in this thread. On an unknown processor all stays as it is."""
    known = _FLUSHING.get(platform.machine())
    if known is None:
        yield
        return
    before, library = _Environment(), _library()
    library.fegetenv(before)
    word, bits = known
    flushing = _Environment(*before)
    flushing[word] |= bits
    library.fesetenv(flushing)
    try:
        yield
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> Any:
    return ctypes.PyDLL("libm.so.6")


def _function(session: Any, feeds: Mapping[str, str], fetches: Iterable[str]) -> Callable[..., list[Any]]:
    """From tensors of `feeds`, in their order, to the tensors `fetches`; strings are bytes, a scalar is a number."""
    tf = tensorflow()
    from tensorflow.core.protobuf import config_pb2  # noqa: PLC0415 - a part of the framework

    with session.graph.as_default():
        # What is a tensor twice, or one that is given, can't be fetched as such.
        results = [tf.identity(session.graph.get_tensor_by_name(tensor)).name for tensor in fetches]
    options = config_pb2.CallableOptions(feed=list(feeds.values()), fetch=results)
    # The public `run` does the same, and looks all names up at each call: a quarter of a millisecond.
    made: Callable[..., list[Any]] = session._make_callable_from_options(options)  # noqa: SLF001
    return made


_TYPES = {**BY_DTYPE_NAME, "half": FP16, "string": BYTES}
_INTERNAL = "__saved_model"  # a signature whose name begins so is not for clients


@dataclass(frozen=True, slots=True)
class TensorflowGraph:
    """What a model computes."""

    # inputs, outputs: what it takes and gives
    inputs: list[SignatureTensor]
    outputs: list[SignatureTensor]
    # feeds, fetches: the names of these tensors in the graph
    feeds: dict[str, str]
    fetches: dict[str, str]


def saved_signature(config: ModelConfig, folder: Path) -> tuple[list[SignatureTensor], list[SignatureTensor]]:
    """The inputs and outputs of a SavedModel's signature, told from its description alone."""
    signature = _described(config, folder)
    dtypes = tensorflow().dtypes

    def tensors(described: Any) -> list[SignatureTensor]:
        return [
            _tensor(
                config,
                name,
                dtypes.as_dtype(info.dtype).name,
                None if shape.unknown_rank else [d.size for d in shape.dim],
            )
            for name, info, shape in ((name, info, info.tensor_shape) for name, info in sorted(described.items()))
        ]

    return tensors(signature.inputs), tensors(signature.outputs)


def _described(config: ModelConfig, folder: Path) -> Any:
    tensorflow()  # it says so where it is missing
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


def load_saved(config: ModelConfig, folder: Path, session: Any) -> TensorflowGraph:
    """Read a SavedModel into a session, variables and tables included. Raises INVALID_MODEL, OUT_OF_MEMORY."""
    inputs, outputs = saved_signature(config, folder)
    try:
        # Deprecated for as long as TensorFlow 2 is there, whose own reader knows no sessions.
        loaded = tensorflow().compat.v1.saved_model.load(session, [tag(config)], str(folder))
    except Exception as error:  # tf.errors, and Python's own
        raise translated(error, config.name, loading=True) from error
    signature = loaded.signature_def[signature_key(config)]
    return TensorflowGraph(inputs, outputs, _places(signature.inputs), _places(signature.outputs))


def _places(described: Any) -> dict[str, str]:
    return {name: info.name for name, info in described.items()}


def load_frozen(config: ModelConfig, file: Path, nodes: Any) -> TensorflowGraph:
    """Read a frozen graph into an empty one; its model lies between the tensors that the configuration names."""
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
    return TensorflowGraph(_facts(config, feeds), _facts(config, fetches), _names(feeds), _names(fetches))


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


def _facts(config: ModelConfig, tensors: Mapping[str, Any]) -> list[SignatureTensor]:
    return [
        _tensor(
            config, name, tensor.dtype.base_dtype.name, None if tensor.shape.rank is None else tensor.shape.as_list()
        )
        for name, tensor in tensors.items()
    ]


def _tensor(
    config: ModelConfig, name: str, type_name: str, dims: list[int | None] | list[int] | None
) -> SignatureTensor:
    # The shape of one whose rank is unknown is what the configuration says.
    if type_name not in _TYPES:
        raise RefusedError(
            f"model '{config.name}': tensor '{name}' has TensorFlow's type {type_name}, which can't be sent over the "
            "protocol; export the model with another type"
        )
    if dims is None:
        spec = config.input(name) or config.output(name)
        spec = spec or TensorSpec(name, _TYPES[type_name], (-1,))
        shape = spec.model_shape(config.max_batch_size)
    else:
        shape = tuple(-1 if dim is None else dim for dim in dims)
    return name, _TYPES[type_name], shape


class TensorflowHandler(Handler):
    """One function of TensorFlow on one device."""

    backend: ClassVar[str] = "tensorflow"

    def __init__(self, graph: TensorflowGraph, config: ModelConfig, session: Any) -> None:
        super().__init__(complete(config, graph.inputs, graph.outputs))
        self._inputs = {spec.name: spec for spec in given_to(self.config)}
        self._outputs = {spec.name: spec for spec in all_outputs(self.config)}
        self._feeds = tuple(graph.feeds)
        self._session = session
        self._function: Any = _function(session, graph.feeds, [graph.fetches[name] for name in self._outputs])

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
        check(config)
        if _by_openvino(config):
            return OpenvinoHandler.autocomplete(config, model_file)
        return complete(config, *cls.described(config, model_file))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> Handler:
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
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> TensorflowGraph:
        raise NotImplementedError

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        given = {name: _given(array, self._inputs[name]) for name, array in inputs.items()}
        try:
            values = [given[name] for name in self._feeds]
            with flushed_denormals():
                found = self._function(*values)
        except KeyError as missing:
            sentence = f"model '{self.config.name}' has to be given {missing}, which its configuration calls optional"
            raise MmeError(Kind.EXECUTION_FAILED, sentence) from None
        except Exception as error:  # tf.errors, and Python's own
            raise translated(error, self.config.name, loading=False) from error
        results = dict(zip(self._outputs, found, strict=True))
        return [_array(results[name], self._outputs[name]) for name in outputs]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._function = None
        gc.collect()  # graphs are full of circles


class SavedModelHandler(TensorflowHandler):
    """A signature of a SavedModel, which tells its inputs and outputs."""

    default_filename: ClassVar[str] = "model.savedmodel"

    @classmethod
    def described(cls, config: ModelConfig, model_file: Path) -> tuple[list[Any], list[Any]]:
        return saved_signature(config, model_file)

    @classmethod
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> TensorflowGraph:
        return load_saved(config, model_file, session)


class GraphdefHandler(TensorflowHandler):
    """A frozen graph between the tensors that its configuration names."""

    default_filename: ClassVar[str] = "model.graphdef"

    @classmethod
    def described(cls, config: ModelConfig, model_file: Path) -> tuple[list[Any], list[Any]]:
        graph = load_frozen(config, model_file, tensorflow().Graph())
        return graph.inputs, graph.outputs

    @classmethod
    def graph(cls, config: ModelConfig, model_file: Path, session: Any) -> TensorflowGraph:
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
