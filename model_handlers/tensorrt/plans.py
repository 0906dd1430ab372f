"""What the first bytes of a plan tell: that it is one, and who built it. PURE, but for reading them.

TensorRT writes a tag, and the version behind a few other fields; TensorRT-RTX has a tag of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from pathlib import Path

_TAGS = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}
_VERSION = slice(24, 28)


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """Who built a plan: `TensorRT` or `TensorRT-RTX`, and which version of it."""

    builder: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.builder} {'.'.join(map(str, self.version))}"


def read_header(model: str, path: Path) -> PlanHeader:
    """The header of the plan in a file.

    Raises:
        MmeError: INVALID_MODEL when the file is no plan.
    """
    with path.open("rb") as file:
        head = file.read(_VERSION.stop)
    builder = _TAGS.get(head[:4])
    if builder is None or len(head) < _VERSION.stop:
        raise invalid_model(
            f"model '{model}': '{path.name}' is no engine of TensorRT; build one on the kind of GPU that is to run it: "
            "mme build-engine model.onnx"
        )
    return PlanHeader(builder, tuple(head[_VERSION]))
