"""Optimisation profiles: the ranges of shapes that an engine was built for, and which one takes a request. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_argument, invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig


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


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """One of them.

    Attributes:
        index: its number in the engine.
        ranges: input → smallest, best and largest shape.
    """

    index: int
    ranges: Mapping[str, tuple[Shape, Shape, Shape]]

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether every input is within its range."""
        return all(
            len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
            for shape, (low, _, high) in ((shapes[name], self.ranges[name]) for name in shapes)
        )

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        """How far a request is from what the profile is best for, in elements."""
        return sum(abs(math.prod(shapes[name]) - math.prod(self.ranges[name][1])) for name in shapes)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The best and the largest size of the first dimension, that of the input with the least."""
        return (
            min(best[0] for _, best, _ in self.ranges.values()),
            min(high[0] for _, _, high in self.ranges.values()),
        )


def chosen(config: ModelConfig, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles that instances execute by: those that their groups name, else all.

    Raises:
        MmeError: INVALID_MODEL for a name that is none.
    """
    named = [name for group in config.instance_group for name in group.profile]
    for name in named:
        if not name.isdecimal() or int(name) >= len(profiles):
            raise invalid_model(
                f"model '{config.name}': instance_group names profile '{name}', but the engine has "
                f"{len(profiles)}: 0 to {len(profiles) - 1}"
            )
    return [profiles[index] for index in sorted({int(name) for name in named})] or list(profiles)


def select(model: str, profiles: Iterable[Profile], shapes: Mapping[str, Shape]) -> Profile:
    """The profile that is best for a request.

    Raises:
        MmeError: INVALID_ARGUMENT where none takes it, with the ranges.
    """
    fitting = [profile for profile in profiles if profile.takes(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    wanted = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
    ranges = "; ".join(
        ", ".join(f"'{name}' {list(low)} to {list(high)}" for name, (low, _, high) in profile.ranges.items())
        for profile in profiles
    )
    raise invalid_argument(f"model '{model}': its engine does not take {wanted}; it was built for {ranges}")


def largest_batch(config: ModelConfig, profiles: Sequence[Profile]) -> int:
    """The largest batch that any profile takes.

    Raises:
        MmeError: INVALID_MODEL where the configuration wants a larger one.
    """
    largest = max(profile.batch_sizes[1] for profile in profiles)
    if config.max_batch_size > largest:
        raise invalid_model(
            f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} but "
            f"TensorRT engine only supports max-batch {largest}"
        )
    return largest
