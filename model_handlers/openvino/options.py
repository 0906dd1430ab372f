"""How OpenVINO compiles a model: from a configuration's parameters, as Triton's backend names them. PURE.

Weights and results are FP32 unless asked otherwise: of itself OpenVINO computes in BF16 where the processor can, and
the answers differ in the third digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import Kind, MmeError
from model_handlers.parameters import choice, integer, switch, warn_of_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config import ModelConfig

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
