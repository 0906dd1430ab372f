"""How a TensorFlow model runs: from its configuration's parameters, as Triton's backend names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.config.parameters import integer, warn_of_unknown, warn_once
from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import processors

if TYPE_CHECKING:
    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig

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
    """The signature that requests are for."""
    return config.parameters.get(SIGNATURE, "").strip() or DEFAULT_SIGNATURE


def tag(config: ModelConfig) -> str:
    """The tag of the graph that holds it."""
    return config.parameters.get(TAG, "").strip() or "serve"


def check(config: ModelConfig) -> None:
    """Refuse what is not honoured.

    Raises:
        MmeError: UNSUPPORTED.
    """
    warn_of_unknown(
        config, (SIGNATURE, TAG, _WITHIN, _BETWEEN, _INIT), "TensorFlow models", "mme.tensorflow", _WITHOUT_EFFECT
    )
    names = ", ".join(each.name for each in config.gpu_accelerators)
    if names:
        sentence = f"gpu_execution_accelerator {names} changes nothing: TensorFlow computes by itself here"
        warn_once("mme.tensorflow", sentence, config.name)
    if _INIT in config.parameters:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': parameter '{_INIT}' is not honoured: freeze the graph, so that nothing is to be "
            "initialised, or export it as a SavedModel",
        )


def session_config(tf: Any, config: ModelConfig, device: Device) -> Any:
    """How a session computes, and what it sees of GPUs. The first one of a process settles both for all of it.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be; UNAVAILABLE where TensorFlow does not see
            the GPU.
    """
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
        raise MmeError(
            Kind.UNAVAILABLE,
            f"a model was to run on {device}, but TensorFlow does not see that GPU; check that the driver, CUDA and "
            "cuDNN fit it",
        )


def device_name(device: Device) -> str:
    """TensorFlow's name for a device; it sees one GPU alone, which is its first."""
    return "/CPU:0" if device.kind == "cpu" else "/GPU:0"
