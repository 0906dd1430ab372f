"""Which instance types take a multi-model endpoint. PURE.

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


def has_accelerator(instance_type: str) -> bool:
    """Whether the type has GPUs or AWS's own chips."""
    return bool(_ACCELERATED.match(instance_type))


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
