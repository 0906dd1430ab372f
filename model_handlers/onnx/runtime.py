"""ONNX Runtime itself: the one module that imports it, its exceptions, and how a session is made.

Called on load threads; `translated` on any.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from pathlib import Path
from typing import Any

from model_handlers.errors import Kind, MmeError, out_of_memory
from model_handlers.framework_errors import ONNX_RUNTIME
from model_handlers.system.system_limits import prove_room
from model_handlers.tensorrt.runtime import tensorrt

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
    """The framework, imported when the first model needs it.

    Raises:
        MmeError: UNSUPPORTED where it is not installed.
    """
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
    """What keeps the library of a provider from being loaded, in the loader's words: ONNX Runtime only logs it.

    Returns:
        "" where nothing does.
    """
    name = provider.removesuffix("ExecutionProvider").lower()
    library = Path(onnx_runtime().__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return ""


def create_session(path: Path, options: Any, model: str, providers: list[Any] | None = None) -> Any:
    """A session over the file `path`, on the CPU if no providers are named.

    Raises:
        MmeError: INVALID_MODEL when ONNX Runtime refuses the file, OUT_OF_MEMORY when it finds no room, UNAVAILABLE
            when a provider can't start, or the system has no room for its threads.
    """
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
    """Why there is no session; `others` tells whether it was to have another provider than the CPU's.

    `limited` tells whether the model has an arena on a GPU with a limit of its own.

    What is wrong with a model has a class of ONNX Runtime's own; drivers and libraries, which providers ask, do not.
    """
    failure = translated(error, model, loading=True, limited=limited)
    if not others or type(error) is not RuntimeError or failure.kind is not Kind.INVALID_MODEL:
        return failure
    words = _words(error)
    found = _CUDA_FAILURE.search(words)
    return MmeError(
        Kind.UNAVAILABLE,
        f"ONNX Runtime can't start a provider for model '{model}' ({found[0] if found else words}); check its options, "
        "and that the driver, CUDA, cuDNN and, for TensorRT, its version fit the installed onnxruntime-gpu",
    )


def translated(error: Exception, model: str, *, loading: bool, limited: bool = False) -> MmeError:
    """ONNX Runtime's exceptions carry a status class but no code for memory: its allocator's words are all there is.

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
    """What it says, in one line: of CUDA's failures all but the machine's name, which is no client's business."""
    return _HOST_NAME.sub("", " ".join(str(error).split()))
