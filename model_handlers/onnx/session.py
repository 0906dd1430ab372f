"""ONNX Runtime, in the one module that imports it: how a session is made and runs, and what its exceptions say.

Options are named as Triton's backend names them. Called on load threads; `translated` on any.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.config.model_config import Accelerator, ModelConfig, integer, warn_of_unknown
from model_handlers.errors import (
    ONNX_RUNTIME,
    Kind,
    MmeError,
    RefusedError,
    invalid_model,
    out_of_memory,
    unavailable,
    unsupported,
)
from model_handlers.system.threads import Threads, processors, prove_room, take_threads
from model_handlers.tensor import BY_NAME
from model_handlers.tensorrt.engine import tensorrt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from model_handlers.base import Device
    from model_handlers.config.autocomplete import SignatureTensor

    Provider = tuple[str, dict[str, str]]


FATAL = 4  # ONNX Runtime's number for it
CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
_LIMIT = re.compile(r"Available memory of (\d+) is smaller than requested bytes of (\d+)")  # of an arena
GPU_LIMIT = "gpu_mem_limit"
# It is wrapped in the place in the sources, the machine's name, and the option by which it was met.
_HOST_NAME = re.compile(r"hostname=[^;]*(; )?")
_CUDA_FAILURE = re.compile(r"CUDA failure \d+: [^;]*[^; ]")


@functools.cache
def onnx_runtime() -> Any:
    """The framework, imported when the first model needs it. Raises UNSUPPORTED where it is not installed."""
    # From 1.29 on, the official builds report sessions to their maker, from a database in the home directory, unless
    # this is set before the import.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime  # noqa: PLC0415 - optional: only a machine that serves ONNX models has it
    except ImportError as error:
        raise unsupported(
            "ONNX models need ONNX Runtime, which is not installed; run `pip install onnxruntime` "
            "(or `onnxruntime-gpu[cuda,cudnn]` on a machine with a GPU, never both)"
        ) from error
    # Fatal ones only: errors come as exceptions, warnings fill CloudWatch, and either would be lines that are no JSON.
    onnxruntime.set_default_logger_severity(FATAL)
    return onnxruntime


@functools.cache
def preload_cuda(runtime: Any) -> None:
    """CUDA and cuDNN may lie in wheels, where the loader does not look; what is loaded already, the provider finds."""
    runtime.preload_dlls()


@functools.cache
def preload_tensorrt() -> None:
    """TensorRT may lie in wheels as well, which load its libraries when they are imported."""
    with contextlib.suppress(MmeError):  # it may be where the loader looks: the provider tells
        tensorrt("TensorRT")


def unloadable(provider: str) -> str:
    """What keeps the library of a provider from being loaded, "" for nothing: ONNX Runtime only logs it."""
    name = provider.removesuffix("ExecutionProvider").lower()
    library = Path(onnx_runtime().__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return ""


def create_session(path: Path, options: Any, model: str, providers: list[Any] | None = None) -> Any:
    runtime = onnx_runtime()
    parallel = options.execution_mode == runtime.ExecutionMode.ORT_PARALLEL
    between = options.inter_op_num_threads if parallel else 1
    prove_room(options.intra_op_num_threads + between - 2, f"worker of '{model}'")  # it would hang
    wanted = providers or [CPU_PROVIDER]
    try:
        return runtime.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)
    except Exception as error:  # ONNX Runtime raises a dozen unrelated classes, some of them plain RuntimeError
        limited = any(GPU_LIMIT in each[1] for each in wanted if not isinstance(each, str))
        raise session_failure(error, model, others=len(wanted) > 1, limited=limited) from error


def session_failure(error: Exception, model: str, *, others: bool, limited: bool = False) -> MmeError:
    """Why there is no session: what is wrong with a model has a class of its own, what drivers and libraries say not.

    `others`: it was to have another provider than the CPU's, which asks those; `limited`: see `translated`.
    """
    failure = translated(error, model, loading=True, limited=limited)
    if not others or type(error) is not RuntimeError or failure.kind is not Kind.INVALID_MODEL:
        return failure
    words = _words(error)
    found = _CUDA_FAILURE.search(words)
    return unavailable(
        f"ONNX Runtime can't start a provider for model '{model}' ({found[0] if found else words}); check its options, "
        "and that the driver, CUDA, cuDNN and, for TensorRT, its version fit the installed onnxruntime-gpu"
    )


def translated(error: Exception, model: str, *, loading: bool, limited: bool = False) -> MmeError:
    """The exception as ours; it carries no code for memory: the words of ONNX Runtime's allocator are all there is.

    `limited` tells whether the model has an arena on a GPU with a limit of its own.
    """
    words = _words(error)
    beyond = None if ONNX_RUNTIME.is_full(error) else _LIMIT.search(words)
    if beyond is not None and not limited:
        return out_of_memory(
            f"model '{model}' ran out of memory: it needs {int(beyond[2]) / 1e6:.1f} MB more, and what executes in the "
            f"server's process has {int(beyond[1]) / 1e6:.1f} MB left of the memory budget; send less at a time, or "
            "raise MME_MEMORY_BUDGET"
        )
    if beyond is not None:  # more memory for all would be no help
        words += "; the model's own limit, gpu_mem_limit, leaves no more: raise it, or send less at a time"
    if loading and type(error).__name__ == "InvalidProtobuf":
        words += "; the file is no ONNX model, or was cut off: export it, or copy it, anew"
    return ONNX_RUNTIME.error(error, model, words, loading=loading)


def _words(error: Exception) -> str:
    # Of CUDA's failures all but the machine's name, which is no client's business.
    return _HOST_NAME.sub("", " ".join(str(error).split()))


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
    """Have sessions made from now on that ask by `USES_SHARED` share an arena of at most `limit` bytes."""
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
    """Providers with their options, the most wanted first; what none of them can compute the last one does."""
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
    # Memory grows by what is asked for: doubling it would waste what models share.
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
    # What would end the process, answer a request with another's inputs, or take memory that is not counted.
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
    for name, _ in wanted:
        if name not in available:
            raise unavailable(
                f"model '{model}' asks for ONNX Runtime's {name}, which the installed build does not have (it has "
                f"{', '.join(available)}); {_ADVICE.get(name, 'install onnxruntime-gpu')}"
            )


_ADVICE = {OPENVINO_PROVIDER: "serve the model by backend 'openvino', which reads ONNX, or remove the accelerator"}


def check_providers(
    wanted: Sequence[Provider], got: Sequence[str], model: str, device: Device, why: Callable[[str], str]
) -> None:
    """Refuse a session without a provider it was to have; `why` tells what keeps one from being loaded."""
    missing = next((name for name, _ in wanted if name not in got), "")
    if missing:
        reason = f" ({found})" if (found := why(missing)) else ""
        raise unavailable(
            f"model '{model}' was to run on {device}, but ONNX Runtime's {missing} did not start{reason}; check that "
            "the driver, CUDA, cuDNN and, for TensorRT, its version fit the installed onnxruntime-gpu"
        )


# optimization.graph.level and the parameter `level` use the same numbers.
_GRAPH_LEVELS = {-1: "ORT_DISABLE_ALL", 1: "ORT_ENABLE_BASIC", 2: "ORT_ENABLE_EXTENDED", 0: "ORT_ENABLE_ALL"}
_THREADS = _WITHIN, _BETWEEN, _MODE = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode")
_SHOWN = 200  # characters of a file name in a message
_BESIDE = "put the library beside the model or its config.pbtxt, and name it by its file name"
_PARAMETERS = frozenset((*_THREADS, "level", "enable_mem_arena", "enable_mem_pattern", SHRINKAGE, *CUDA_PARAMETERS))


def session_threads(config: ModelConfig, threads: int) -> Threads:
    parameter = next((name for name in _THREADS if integer(config, name, 0, range(1025))), "")
    within = integer(config, _WITHIN, 0, range(1025)) or threads
    return take_threads(within + (_between(config) - 1 if parameter else 0), config.name, parameter)


def _between(config: ModelConfig) -> int:
    # With one thread between operators ONNX Runtime would run them one after the other, whatever the mode.
    usual = processors() if integer(config, _MODE, 0, range(2)) else 1
    return integer(config, _BETWEEN, 0, range(1025)) or usual


def session_options(config: ModelConfig, threads: int) -> Any:
    """The options of a session, which computes on `threads` threads unless the configuration says more."""
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
    level = integer(config, "level", config.optimization_level, range(-1, 3))
    if level not in _GRAPH_LEVELS:
        raise invalid_model(f"model '{config.name}': optimization.graph.level must be -1, 0, 1 or 2, got {level}")
    return _GRAPH_LEVELS[level]


def run_options(config: ModelConfig) -> Any:
    """The options of all executions: whether the named arenas give back what they hold when one is done."""
    options = onnx_runtime().RunOptions()
    if arenas := config.parameters.get(SHRINKAGE):
        options.add_run_config_entry(SHRINKAGE, arenas)
    return options


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


def signature(session: Any, model: str) -> tuple[list[SignatureTensor], list[SignatureTensor]]:
    """The inputs and outputs of a session. ONNX Runtime shows a tensor of unknown rank like a scalar."""
    return (
        [_graph_tensor(node, model) for node in session.get_inputs()],
        [_graph_tensor(node, model) for node in session.get_outputs()],
    )


def firsts(session: Any) -> dict[str, str]:
    nodes = (*session.get_inputs(), *session.get_outputs())
    return {node.name: node.shape[0] for node in nodes if node.shape and isinstance(node.shape[0], str)}


def _graph_tensor(node: Any, model: str) -> SignatureTensor:
    type_name = _TYPES.get(node.type)
    if type_name is None:
        raise RefusedError(
            f"model '{model}': tensor '{node.name}' has ONNX type {node.type}, which can't be sent over the protocol; "
            "export the model with plain tensors (with skl2onnx: zipmap=False)"
        )
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else -1 for dim in node.shape)
    return (node.name, BY_NAME[type_name], shape)
