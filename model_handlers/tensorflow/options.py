"""How a TensorFlow model runs: from its configuration's parameters, as Triton's backend names them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.parameters import integer, warn_of_unknown
from model_handlers.threads import processors

if TYPE_CHECKING:
    from model_handlers.base import Device
    from model_handlers.config import ModelConfig

SIGNATURE, TAG = "TF_SIGNATURE_DEF", "TF_GRAPH_TAG"
DEFAULT_SIGNATURE = "serving_default"
_WITHIN, _BETWEEN, _INIT = "TF_NUM_INTRA_THREADS", "TF_NUM_INTER_THREADS", "TF_INIT_OPS_FILE"
_WITHOUT_EFFECT = {
    "TF_USE_PER_SESSION_THREADS": "a model has a process of its own, and so threads of its own",
    "MAX_SESSION_SHARE_COUNT": "instances in one process share a model anyhow, and others can't",
}
_THREADS = range(1025)


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
    if _INIT in config.parameters:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': parameter '{_INIT}' is not honoured: freeze the graph, so that nothing is to be "
            "initialised, or export it as a SavedModel",
        )


def set_up_process(tf: Any, config: ModelConfig, device: Device) -> None:
    """Threads, and what may be seen of GPUs: once a process, where nothing was computed in it yet.

    Raises:
        MmeError: INVALID_MODEL for a parameter that is not what it should be.
    """
    within = integer(config, _WITHIN, 0, _THREADS) or processors()
    between = integer(config, _BETWEEN, 0, _THREADS) or 1
    with contextlib.suppress(RuntimeError):  # another model of this process came first
        tf.config.threading.set_intra_op_parallelism_threads(within)
        tf.config.threading.set_inter_op_parallelism_threads(between)
        gpus = tf.config.list_physical_devices("GPU")
        mine = gpus[device.index : device.index + 1] if device.kind == "gpu" else []
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine:  # else the first model would take all of its memory
            tf.config.experimental.set_memory_growth(gpu, True)


def device_name(tf: Any, device: Device) -> str:
    """TensorFlow's name for a device; where it sees one GPU alone, that is its first.

    Raises:
        MmeError: UNAVAILABLE where it does not see the GPU.
    """
    if device.kind == "cpu":
        return "/CPU:0"
    seen = tf.config.get_visible_devices("GPU")
    if not seen:
        raise MmeError(
            Kind.UNAVAILABLE,
            f"a model was to run on {device}, but TensorFlow sees no GPU; check that the driver, CUDA and cuDNN fit it",
        )
    return "/GPU:0" if len(seen) == 1 else f"/GPU:{device.index}"
