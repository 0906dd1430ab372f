"""Which instance types take a multi-model endpoint, and what their hosts have to bring. PURE.

SageMaker serves several models of one container on any CPU type and, with GPUs, on a short list of types with a single
one; it says so only after a deployment has begun.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Collection

_ACCELERATED = re.compile(r"ml\.(p\d|g\d|inf|trn|dl)")
_SIZES = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
MULTI_MODEL_GPU = (
    "ml.p2.xlarge",
    "ml.p3.2xlarge",
    *(f"ml.g4dn.{size}" for size in _SIZES),
    *(f"ml.g5.{size}" for size in _SIZES),
)
# With GPUs that CUDA 13 runs on. Left to itself SageMaker gives the first of them a driver for CUDA 11.4.
_CUDA_13 = re.compile(r"ml\.(g4dn|g5|g6e?|g7e|p4de?|p5(e|en)?|p6-b200)\.")
_CUDA_13_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"  # its driver is 580, the first for CUDA 13
SAGEMAKERS_OWN = "default"


def has_accelerator(instance_type: str) -> bool:
    """Whether the type has GPUs or AWS's own chips."""
    return bool(_ACCELERATED.match(instance_type))


def host_image(instance_type: str, asked: str) -> str:
    """The InferenceAmiVersion for instances whose container may be mme's for GPUs; "" leaves it to SageMaker.

    Args:
        instance_type: as in `ml.g5.xlarge`.
        asked: what a person wants, `default` for SageMaker's own choice; "" for what suits CUDA 13.
    """
    if asked:
        return "" if asked == SAGEMAKERS_OWN else asked
    return _CUDA_13_AMI if _CUDA_13.match(instance_type) else ""


def next_host_image(instance_type: str, had: tuple[str, str]) -> str:
    """The InferenceAmiVersion for other instances of an endpoint: what somebody chose for GPUs stays with GPUs.

    Args:
        instance_type: of the new instances.
        had: type and InferenceAmiVersion of those that they replace.
    """
    old_type, old_image = had
    chosen = has_accelerator(old_type) and old_image != host_image(old_type, "")
    return old_image if chosen and has_accelerator(instance_type) else host_image(instance_type, "")


def check_instance_type(instance_type: str, known: Collection[str], *, multi_model: bool) -> None:
    """Refuse a type that SageMaker would refuse.

    Args:
        instance_type: as in `ml.g5.xlarge`.
        known: the types that the API lists; empty when it lists none.
        multi_model: whether the endpoint serves many models.

    Raises:
        MmeError: INVALID_ARGUMENT, naming one that would do.
    """
    if known and instance_type not in known:
        close = difflib.get_close_matches(instance_type, known, 1, 0.5)
        advice = f"did you mean '{close[0]}'?" if close else "they are called as in ml.g5.xlarge"
        raise invalid_argument(f"SageMaker has no instance type '{instance_type}': {advice}")
    if multi_model and has_accelerator(instance_type) and instance_type not in MULTI_MODEL_GPU:
        raise invalid_argument(
            f"SageMaker runs no multi-model endpoint on '{instance_type}': take a CPU type, or one of the types with a "
            f"single GPU that it does ({', '.join(MULTI_MODEL_GPU)}); --single serves one model on any type, and "
            "--any-instance-type asks SageMaker itself"
        )
