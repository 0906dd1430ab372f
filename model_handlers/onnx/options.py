"""How a session runs: threads, optimisation, memory; from a configuration's parameters, as Triton's backend names them.

Pure but for a look at the processors.
"""

from __future__ import annotations

import functools
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.parameters import integer, warn_of_unknown
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.onnx.runtime import CPU_PROVIDER, CUDA_PROVIDER, FATAL, GPU_LIMIT, onnx_runtime
from model_handlers.system.threads import processors, take_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import Accelerator, ModelConfig
    from model_handlers.system.threads import Threads

    Provider = tuple[str, dict[str, str]]


SHRINKAGE = "memory.enable_memory_arena_shrinkage"
USES_SHARED = "session.use_env_allocators"
_AS_REQUESTED = 1  # grow by what is asked for: doubling keeps what nothing uses
_DEFAULT = -1
# A model that returns its input, of one float: the smallest that can be executed.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


@functools.lru_cache(maxsize=1)  # the arena registered last is the one that sessions get
def share_arena(limit: int) -> None:
    """Have sessions made from now on in this process share an arena of at most `limit` bytes, their weights among them.

    Sessions ask for it by `USES_SHARED`.
    """
    onnx_runtime()
    from onnxruntime.capi import _pybind_state as runtime  # noqa: PLC0415 - see `onnx_runtime`

    memory = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
    arena = runtime.OrtArenaCfg(limit, _AS_REQUESTED, _DEFAULT, _DEFAULT)
    runtime.create_and_register_allocator(memory, arena)


def trim_arena() -> None:
    """Give back what the shared arena holds and no execution uses: ONNX Runtime does so at the end of an execution."""
    runtime: Any = onnx_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry(USES_SHARED, "1")
    session = runtime.InferenceSession(_IDENTITY, options, providers=[CPU_PROVIDER])
    shrinks = runtime.RunOptions()
    shrinks.add_run_config_entry(SHRINKAGE, "cpu:0")
    session.run(None, {"x": np.zeros(1, np.float32)}, shrinks)


TENSORRT_PROVIDER = "TensorrtExecutionProvider"
OPENVINO_PROVIDER = "OpenVINOExecutionProvider"
CUDA_PARAMETERS = ("cudnn_conv_algo_search", GPU_LIMIT, "arena_extend_strategy", "do_copy_in_default_stream")
_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_EXTENSIONS = ("kNextPowerOfTwo", "kSameAsRequested")
_PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_ON_GPU = ("tensorrt", "cuda", "gpu_io")
_GRAPHS = ("enable_cuda_graph", "trt_cuda_graph_enable")
_ADDRESSES = (
    "has_user_compute_stream",
    "user_compute_stream",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "trt_onnx_bytestream",
    "trt_onnx_bytestream_size",
    "trt_external_data_bytestream",
    "trt_external_data_bytestream_size",
)
_OFF = ("0", "false", "False")


def providers(config: ModelConfig, device: Device) -> list[Provider]:
    """Providers with their options, the most wanted first; what none of them can compute the last one does.

    Raises:
        MmeError: INVALID_MODEL for an accelerator or an option that does not exist.
    """
    if device.kind == "cpu":
        return [*(_on_cpu(each, config.name) for each in config.cpu_accelerators), (CPU_PROVIDER, {})]
    found: list[Provider] = []
    cuda = _cuda(config, device, {})
    for each in config.gpu_accelerators:
        if each.name not in _ON_GPU:
            raise _unknown("gpu_execution_accelerator", each.name, _ON_GPU, config.name)
        _check_parameters(each, config.name)
        if each.name == "tensorrt":
            found.append((TENSORRT_PROVIDER, _tensorrt(each, device, config.name)))
        elif each.name == "cuda":
            cuda = _cuda(config, device, each.parameters)
    return [*found, (CUDA_PROVIDER, cuda), (CPU_PROVIDER, {})]


def _on_cpu(accelerator: Accelerator, model: str) -> Provider:
    if accelerator.name != "openvino":
        raise _unknown("cpu_execution_accelerator", accelerator.name, ("openvino",), model)
    return OPENVINO_PROVIDER, {"device_type": "CPU", "precision": "FP32", **accelerator.parameters}


def _cuda(config: ModelConfig, device: Device, given: Mapping[str, str]) -> dict[str, str]:
    """Options of the CUDA provider. Memory grows by what is asked for: doubling it would waste what models share."""
    options = {
        "device_id": str(device.index),
        "arena_extend_strategy": _EXTENSIONS[integer(config, "arena_extend_strategy", 1, range(2))],
        "cudnn_conv_algo_search": _SEARCHES[integer(config, "cudnn_conv_algo_search", 0, range(3))],
        "do_copy_in_default_stream": str(integer(config, "do_copy_in_default_stream", 1, range(2))),
    }
    if GPU_LIMIT in config.parameters:
        options[GPU_LIMIT] = str(integer(config, GPU_LIMIT, 0, range(1, 1 << 62)))
    return {**options, **given}


def _check_parameters(accelerator: Accelerator, model: str) -> None:
    """Refuse what would end the process, answer a request with another's inputs, or go where nobody counts it."""
    for key, value in accelerator.parameters.items():
        if key == "device_id":
            reason = "which GPU is said by instance_group"
        elif key in _ADDRESSES:
            reason = "it is about an address in memory, which no configuration knows"
        elif key in _GRAPHS and value not in _OFF:
            reason = "a captured graph reads the memory that it was captured with, and each request has its own"
        else:
            continue
        raise invalid_model(
            f"model '{model}': accelerator '{accelerator.name}' can't have '{key}': {reason}; remove it"
        )


def _tensorrt(accelerator: Accelerator, device: Device, model: str) -> dict[str, str]:
    """Options of the TensorRT provider."""
    options = {"device_id": str(device.index)}
    for key, value in accelerator.parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise invalid_model(
                    f"model '{model}': precision_mode of accelerator 'tensorrt' must be one of "
                    f"{', '.join(_PRECISIONS)}, got '{value}'"
                )
            options |= _PRECISIONS[value]
        elif key in _TENSORRT_NAMES or key.startswith("trt_"):
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            known = ", ".join(("precision_mode", *_TENSORRT_NAMES))
            raise invalid_model(
                f"model '{model}': accelerator 'tensorrt' has no parameter '{key}'; it has {known}, and those of ONNX "
                "Runtime that begin with trt_"
            )
    return options


def _unknown(field: str, name: str, known: Sequence[str], model: str) -> MmeError:
    return invalid_model(
        f"model '{model}': '{field}' names '{name}', but the accelerators that there are for it are {', '.join(known)}"
    )


def check_available(wanted: Sequence[Provider], available: Sequence[str], model: str) -> None:
    """Refuse a provider that the installed ONNX Runtime was built without.

    Raises:
        MmeError: UNAVAILABLE, naming it.
    """
    for name, _ in wanted:
        if name not in available:
            raise MmeError(
                Kind.UNAVAILABLE,
                f"model '{model}' asks for ONNX Runtime's {name}, which the installed build does not have (it has "
                f"{', '.join(available)}); {_ADVICE.get(name, 'install onnxruntime-gpu')}",
            )


_ADVICE = {OPENVINO_PROVIDER: "serve the model by backend 'openvino', which reads ONNX, or remove the accelerator"}


def check_providers(
    wanted: Sequence[Provider], got: Sequence[str], model: str, device: Device, why: Callable[[str], str]
) -> None:
    """Refuse a session that computes without a provider it was to have; `why` tells what keeps one from being loaded.

    Raises:
        MmeError: UNAVAILABLE, naming it.
    """
    missing = next((name for name, _ in wanted if name not in got), "")
    if missing:
        reason = f" ({found})" if (found := why(missing)) else ""
        raise MmeError(
            Kind.UNAVAILABLE,
            f"model '{model}' was to run on {device}, but ONNX Runtime's {missing} did not start{reason}; check that "
            "the driver, CUDA, cuDNN and, for TensorRT, its version fit the installed onnxruntime-gpu",
        )


# optimization.graph.level and the parameter `level` use the same numbers.
_GRAPH_LEVELS = {-1: "ORT_DISABLE_ALL", 1: "ORT_ENABLE_BASIC", 2: "ORT_ENABLE_EXTENDED", 0: "ORT_ENABLE_ALL"}
_THREADS = _WITHIN, _BETWEEN, _MODE = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode")
_SHOWN = 200  # characters of a file name in a message
_BESIDE = "put the library beside the model or its config.pbtxt, and name it by its file name"
_PARAMETERS = frozenset(
    (
        *_THREADS,
        "level",
        "enable_mem_arena",
        "enable_mem_pattern",
        SHRINKAGE,
        *CUDA_PARAMETERS,
    )
)


def session_threads(config: ModelConfig, threads: int) -> Threads:
    """Threads for a session that computes on so many, or as its configuration says.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is no such number, UNAVAILABLE where there are not so many.
    """
    parameter = next((name for name in _THREADS if integer(config, name, 0, range(1025))), "")
    within = integer(config, _WITHIN, 0, range(1025)) or threads
    return take_threads(within + (_between(config) - 1 if parameter else 0), config.name, parameter)


def _between(config: ModelConfig) -> int:
    """On how many threads operators are executed side by side."""
    # With one thread between operators ONNX Runtime would run them one after the other, whatever the mode.
    usual = processors() if integer(config, _MODE, 0, range(2)) else 1
    return integer(config, _BETWEEN, 0, range(1025)) or usual


def session_options(config: ModelConfig, threads: int) -> Any:
    """The options of a session of this model, which computes on `threads` threads unless the configuration says more.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is no such number.
    """
    runtime = onnx_runtime()
    warn_of_unknown(config, _PARAMETERS, "ONNX models", "mme.onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.intra_op_num_threads = integer(config, _WITHIN, 0, range(1025)) or threads
    options.inter_op_num_threads = _between(config)
    if integer(config, _MODE, 0, range(2)):
        options.execution_mode = runtime.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, graph_level(config))
    options.enable_cpu_mem_arena = bool(integer(config, "enable_mem_arena", 1, range(2)))
    if options.enable_cpu_mem_arena:  # where none is shared, it has its own
        options.add_session_config_entry(USES_SHARED, "1")
    options.enable_mem_pattern = bool(integer(config, "enable_mem_pattern", 1, range(2)))
    return options


def register_operations(options: Any, config: ModelConfig, model_file: Path) -> None:
    """Register the libraries of custom operations that the configuration names with a session's options.

    A library is code: only files of the model's own folder are loaded, beside the model or its configuration, never a
    path elsewhere or a name that the system would search for.

    Raises:
        MmeError: INVALID_MODEL for a name outside of the folder, a file that is not there, or no such library.
    """
    for name in config.op_libraries:
        subject = f"model '{config.name}': model_operations.op_library_filename '{name[:_SHOWN]}'"
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise invalid_model(f"{subject} is outside of the model's folder: {_BESIDE}")
        places = (model_file.parent / name, model_file.parent.parent / name)
        library = next((place for place in places if place.is_file()), None)
        if library is None:
            raise invalid_model(f"{subject} is not there: {_BESIDE}")
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # of any of a dozen classes, as for sessions
            words = " ".join(str(error).split())
            raise invalid_model(f"{subject} is no library of ONNX Runtime operations: {words}") from error


def graph_level(config: ModelConfig) -> str:
    """How far the graph is optimised, by ONNX Runtime's name for it.

    Raises:
        MmeError: INVALID_MODEL for a level that does not exist.
    """
    level = integer(config, "level", config.optimization_level, range(-1, 3))
    if level not in _GRAPH_LEVELS:
        raise invalid_model(f"model '{config.name}': optimization.graph.level must be -1, 0, 1 or 2, got {level}")
    return _GRAPH_LEVELS[level]


def run_options(config: ModelConfig) -> Any:
    """The options of each execution: None, or that the named arenas give back what they hold when it is done."""
    arenas = config.parameters.get(SHRINKAGE)
    if not arenas:
        return None
    options = onnx_runtime().RunOptions()
    options.add_run_config_entry(SHRINKAGE, arenas)
    return options
