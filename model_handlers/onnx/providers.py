"""By which execution providers a session computes: from the device, `execution_accelerators` and parameters. PURE.

Names and parameters are those of Triton's backend. ONNX Runtime leaves out a provider that does not start and computes
on the CPU, at a tenth of the speed and without a word; here that is an error (`check_providers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.onnx.runtime import CPU_PROVIDER, CUDA_PROVIDER, GPU_LIMIT
from model_handlers.parameters import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from model_handlers.base import Device
    from model_handlers.config import Accelerator, ModelConfig

    Provider = tuple[str, dict[str, str]]

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
