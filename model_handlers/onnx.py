"""ONNX models by ONNX Runtime, on CPU or by its CUDA provider.

`session.run` releases the GIL while it computes, and so does creating a session, so these models live in the serving
process. One session serves all instances on a device: sessions may be called by several threads at once, and the
weights are held once. Threads of a session never spin while they wait: with hundreds of sessions they would fight for
the cores with those that have work.

Called by load threads (`autocomplete`, `load`, `close`) and by instance threads or the event loop (`execute`).
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler
from model_handlers.config import DynamicBatching, ModelConfig
from model_handlers.config_checks import normalise
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model, out_of_memory
from model_handlers.tensor import BY_NAME, BYTES, DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.tensor import Array

DEFAULT_MAX_BATCH_SIZE = 4  # what Triton gives a batching model whose configuration names no batch size

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
# optimization.graph.level and the parameter `level` use the same numbers.
_GRAPH_LEVELS = {-1: "ORT_DISABLE_ALL", 1: "ORT_ENABLE_BASIC", 2: "ORT_ENABLE_EXTENDED", 0: "ORT_ENABLE_ALL"}
_log = logging.getLogger("mme.onnx")
_PARAMETERS = frozenset(
    (
        "intra_op_thread_count",
        "inter_op_thread_count",
        "execution_mode",
        "level",
        "enable_mem_arena",
        "enable_mem_pattern",
    )
)
_SMALL_MODEL = 1 << 20  # bytes of the model file
_FATAL = 4  # ONNX Runtime's number for it
_MEMORY_WORDS = ("bad_alloc", "allocate memory", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY")


@functools.cache
def _onnxruntime() -> Any:
    # From 1.29 on, the official builds report sessions to their maker, from a database in the home directory, unless
    # this is set before the import.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime  # noqa: PLC0415 - optional: only a machine that serves ONNX models has it
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            "ONNX models need ONNX Runtime, which is not installed; run `pip install onnxruntime` "
            "(or `onnxruntime-gpu[cuda,cudnn]` on a machine with a GPU, never both)",
        ) from error
    # Fatal ones only: errors come as exceptions, warnings fill CloudWatch, and either would be lines that are no JSON.
    onnxruntime.set_default_logger_severity(_FATAL)
    return onnxruntime


@functools.cache
def _preload_cuda(runtime: Any) -> None:
    """CUDA and cuDNN may lie in wheels, where the loader does not look; what is loaded already, the provider finds."""
    runtime.preload_dlls()


class OnnxHandler(Handler):
    """One ONNX Runtime session on one device."""

    backend: ClassVar[str] = "onnxruntime"
    platform: ClassVar[str] = "onnxruntime_onnx"
    default_filename: ClassVar[str] = "model.onnx"
    estimate_factor: ClassVar[float] = 1.3
    inline: ClassVar[bool] = True

    def __init__(self, session: Any, config: ModelConfig) -> None:
        super().__init__(_complete(config, *_signature(session, config.name)))
        self._session = session
        self._run = session.run
        self._texts = [spec.name for spec in self.config.inputs if spec.data_type is BYTES]
        self._answers_text = any(spec.data_type is BYTES for spec in self.config.outputs)

    @classmethod
    def gpu_capable(cls) -> bool:
        """Whether the CUDA provider is built in (it may still fail to start)."""
        return "CUDAExecutionProvider" in _onnxruntime().get_available_providers()

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Inputs, outputs and the batch dimension from the graph; what the configuration says must agree with it."""
        session = _signature_session(model_file, config.name)
        return _complete(config, *_signature(session, config.name))

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> OnnxHandler:  # noqa: ARG003 - shared by lanes
        """Create the session; parameters are named as Triton's ONNX Runtime backend names them."""
        runtime = _onnxruntime()
        options = _session_options(runtime, config, _default_threads(model_file))
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.kind == "gpu":
            _preload_cuda(runtime)
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": str(device.index)}))
        try:
            session = runtime.InferenceSession(
                str(_onnx_path(model_file)), options, providers=providers, enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises a dozen unrelated classes, some of them plain RuntimeError
            raise _translated(error, config.name, loading=True) from error
        if device.kind == "gpu" and session.get_providers()[0] != "CUDAExecutionProvider":
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{config.name}' was to run on {device}, but ONNX Runtime's CUDA provider did not start; "
                "check that the driver, CUDA and cuDNN fit the installed onnxruntime-gpu",
            )
        return cls(session, config)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run the session once. Elements of BYTES must be UTF-8, as strings in ONNX are."""
        if self._texts:
            inputs = {**inputs, **{n: _text(inputs[n], n, self.config.name) for n in self._texts if n in inputs}}
        try:
            result: list[Array] = self._run(outputs, inputs)
        except Exception as error:  # see load
            raise _translated(error, self.config.name, loading=False) from error
        return (
            [_bytes(array) if array.dtype == np.object_ else array for array in result]
            if self._answers_text
            else result
        )

    def close(self) -> None:
        """Drop the session: ONNX Runtime frees weights and arena in its destructor."""
        del self._run
        del self._session


def _text(array: Array, name: str, model: str) -> Array:
    """The elements as `str`: of `bytes` ONNX Runtime would take the printed form, b'' and all."""
    text = np.empty(array.shape, dtype=np.object_)
    try:
        text.ravel()[:] = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise invalid_argument(
            f"input '{name}' for model '{model}' must hold UTF-8 text, as strings in ONNX are: {error}"
        ) from None
    return text


def _bytes(array: Array) -> Array:
    """The elements that ONNX Runtime returns as `str` as `bytes`, which is what BYTES holds everywhere else."""
    encoded = np.empty(array.shape, dtype=np.object_)
    encoded.ravel()[:] = [element.encode() for element in array.ravel().tolist()]
    return encoded


def _onnx_path(model_file: Path) -> Path:
    """A model with external data may be a directory that holds model.onnx beside its data."""
    return model_file / "model.onnx" if model_file.is_dir() else model_file


def _default_threads(model_file: Path) -> int:
    """One thread for a small model: splitting its operators costs more than it gains, and a pool costs threads."""
    small = model_file.is_file() and model_file.stat().st_size < _SMALL_MODEL
    return 1 if small else len(os.sched_getaffinity(0))


def _session_options(runtime: Any, config: ModelConfig, default_threads: int) -> Any:
    unknown = ", ".join(f"'{key}'" for key in config.parameters if key not in _PARAMETERS)
    if unknown:
        _log.warning("parameters without effect on ONNX models: %s", unknown, extra={"target_model": config.name})
    options = runtime.SessionOptions()
    options.log_severity_level = _FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.intra_op_num_threads = _integer(config, "intra_op_thread_count", 0, range(1025)) or default_threads
    parallel = bool(_integer(config, "execution_mode", 0, range(2)))
    # With one thread between operators ONNX Runtime would run them one after the other, whatever the mode.
    default_between = len(os.sched_getaffinity(0)) if parallel else 1
    options.inter_op_num_threads = _integer(config, "inter_op_thread_count", 0, range(1025)) or default_between
    if parallel:
        options.execution_mode = runtime.ExecutionMode.ORT_PARALLEL
    level = _integer(config, "level", config.optimization_level, range(-1, 3))
    if level not in _GRAPH_LEVELS:
        raise invalid_model(f"model '{config.name}': optimization.graph.level must be -1, 0, 1 or 2, got {level}")
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _GRAPH_LEVELS[level])
    options.enable_cpu_mem_arena = bool(_integer(config, "enable_mem_arena", 1, range(2)))
    options.enable_mem_pattern = bool(_integer(config, "enable_mem_pattern", 1, range(2)))
    return options


def _integer(config: ModelConfig, key: str, default: int, allowed: range) -> int:
    text = config.parameters.get(key)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = allowed.stop
    if value not in allowed:
        raise invalid_model(
            f"model '{config.name}': parameter '{key}' must be an integer from {allowed.start} to {allowed[-1]}, "
            f"got '{text}'"
        )
    return value


def _translated(error: Exception, model: str, *, loading: bool) -> MmeError:
    """ONNX Runtime's exceptions carry a status class but no code for memory: its allocator's words are all there is."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(word in words for word in _MEMORY_WORDS):
        return out_of_memory(f"model '{model}' ran out of memory: {words}")
    if loading:
        return invalid_model(f"ONNX Runtime can't load model '{model}': {words}")
    return MmeError(Kind.EXECUTION_FAILED, f"ONNX Runtime failed while running model '{model}': {words}")


# A tensor as the graph declares it: name, type, shape with -1 for symbolic dimensions. ONNX Runtime shows a tensor
# whose rank nobody knows like a scalar.
_GraphTensor = tuple[str, DataType, tuple[int, ...]]


def _signature_session(model_file: Path, model: str) -> Any:
    """A session that only tells inputs and outputs: no weight is transformed, few are touched."""
    runtime = _onnxruntime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return runtime.InferenceSession(
            str(_onnx_path(model_file)), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # see OnnxHandler.load
        raise _translated(error, model, loading=True) from error


def _signature(session: Any, model: str) -> tuple[list[_GraphTensor], list[_GraphTensor]]:
    return (
        [_graph_tensor(node, model) for node in session.get_inputs()],
        [_graph_tensor(node, model) for node in session.get_outputs()],
    )


def _graph_tensor(node: Any, model: str) -> _GraphTensor:
    type_name = _TYPES.get(node.type)
    if type_name is None:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{model}': tensor '{node.name}' has ONNX type {node.type}, which can't be sent over the protocol; "
            "export the model with plain tensors (with skl2onnx: zipmap=False)",
        )
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else -1 for dim in node.shape)
    return (node.name, BY_NAME[type_name], shape)


def _complete(config: ModelConfig, inputs: list[_GraphTensor], outputs: list[_GraphTensor]) -> ModelConfig:
    served = inputs + [tensor for tensor in outputs if not config.outputs or config.output(tensor[0])]
    fixed = [f"'{name}' {_brackets(shape)}" for name, _, shape in served if shape[:1] != (-1,)]
    max_batch_size = config.max_batch_size
    incomplete = not (config.inputs and config.outputs)
    if max_batch_size > 0 and fixed:
        raise invalid_model(
            f"autofill failed for model '{config.name}': model does not support batching while non-zero "
            f"max_batch_size is specified: {', '.join(fixed)} must have a variable first dimension"
        )
    if incomplete and not fixed and max_batch_size == 0:
        max_batch_size = DEFAULT_MAX_BATCH_SIZE
    batching = config.dynamic_batching
    if incomplete and max_batch_size > 1 and batching is None:
        batching = DynamicBatching(preferred_batch_sizes=(max_batch_size,))
    config = replace(config, max_batch_size=max_batch_size, dynamic_batching=batching)
    return normalise(
        replace(
            config,
            inputs=_merge("input", config.inputs, inputs, config),
            outputs=_merge("output", config.outputs, outputs, config),
        )
    )


def _merge(
    what: str, declared: tuple[TensorSpec, ...], graph: list[_GraphTensor], config: ModelConfig
) -> tuple[TensorSpec, ...]:
    """The declared specs, checked, and the graph's for those not declared. All inputs must end up declared."""
    by_name = {name: (data_type, shape) for name, data_type, shape in graph}
    agreed = []
    for spec in declared:
        if spec.name not in by_name:
            raise invalid_model(
                f"unable to load model '{config.name}', unexpected inference {what} '{spec.name}', "
                f"allowed {what}s are: {', '.join(by_name)}"
            )
        agreed.append(_agreed(what, spec, *by_name[spec.name], config))
    names = {spec.name for spec in declared}
    if declared and what == "output":
        return tuple(agreed)
    return (*agreed, *(_spec(name, *by_name[name], config) for name in by_name if name not in names))


def _spec(name: str, data_type: DataType, shape: tuple[int, ...], config: ModelConfig) -> TensorSpec:
    dims = shape[1:] if config.max_batch_size > 0 else shape
    if not dims:  # the protocol has no scalars: one element outside, no dimension inside
        return TensorSpec(name, data_type, (1,), reshape=())
    return TensorSpec(name, data_type, dims)


def _agreed(
    what: str, spec: TensorSpec, data_type: DataType, shape: tuple[int, ...], config: ModelConfig
) -> TensorSpec:
    """The declared spec, if the graph can serve it. A dimension that the graph fixes can't be declared variable."""
    if spec.data_type is not data_type:
        raise invalid_model(
            f"unable to load model '{config.name}', configuration expects datatype {spec.data_type.config_name} for "
            f"{what} '{spec.name}', model provides {data_type.config_name}"
        )
    inner = spec.dims if spec.reshape is None else spec.reshape
    if not shape:
        return _agreed_scalar(spec, inner, config)
    full = (-1, *inner) if config.max_batch_size > 0 else inner
    if len(full) != len(shape) or any(has not in (-1, says) for says, has in zip(full, shape, strict=True)):
        batch = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
            f"making complete shape {_brackets(full)}"
        )
        raise invalid_model(
            f"model '{config.name}', tensor '{spec.name}': the model expects {len(shape)} dimensions "
            f"(shape {_brackets(shape)}) but the model configuration specifies {len(full)} dimensions "
            f"({batch if config.max_batch_size > 0 else f'shape {_brackets(full)}'})"
        )
    return spec


def _agreed_scalar(spec: TensorSpec, inner: tuple[int, ...], config: ModelConfig) -> TensorSpec:
    """Triton's configurations declare a scalar as `dims: [1]`: a model without a batch dimension may not reshape it."""
    if any(dim != 1 for dim in inner):
        raise invalid_model(
            f"unable to load model '{config.name}', scalar tensor '{spec.name}', should only provide 1 in the model "
            f"configuration when the model doesn't support batching. Model configuration provided: {_brackets(inner)}."
        )
    return replace(spec, reshape=())


def _brackets(shape: tuple[int, ...]) -> str:
    return f"[{','.join(str(dim) for dim in shape)}]"
