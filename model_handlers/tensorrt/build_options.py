"""How an engine is to be built: values, and shapes out of text as `trtexec` writes them. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Shape = tuple[int, ...]
    Range = tuple[Shape, Shape, Shape]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that is said beside the model.

    Attributes:
        profiles: each: input → smallest, best and largest shape.
        fp16, int8: precisions to compute in.
        workspace: bytes that building may take on the GPU, 0 for all.
        timing_cache: a file that remembers what was measured; None for none.
        level: how hard it is tried, None for the builder's own idea.
        version_compatible, hardware_compatible: what else the engine is to run on.
        builder: `TensorRT` or `TensorRT-RTX`; "" for whichever is installed.
    """

    profiles: tuple[Mapping[str, Range], ...] = ()
    fp16: bool = False
    int8: bool = False
    workspace: int = 0
    timing_cache: Path | None = None
    level: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    builder: str = ""


def profiles_of(smallest: Sequence[str], best: Sequence[str], largest: Sequence[str]) -> tuple[dict[str, Range], ...]:
    """Profiles out of texts, one of each kind for each profile; where a kind is missing, the nearest stands for it.

    Raises:
        MmeError: INVALID_ARGUMENT for text that is no shapes, or ranges that end before they begin.
    """
    count = max(len(smallest), len(best), len(largest))
    for name, texts in (("min", smallest), ("opt", best), ("max", largest)):
        if len(texts) not in {0, count}:
            raise invalid_argument(
                f"--{name} is given {len(texts)} times: once for each of the {count} profiles, or never"
            )
    return tuple(
        _profile(*(_shapes(texts[index]) if texts else {} for texts in (smallest, best, largest)))
        for index in range(count)
    )


def _profile(smallest: dict[str, Shape], best: dict[str, Shape], largest: dict[str, Shape]) -> dict[str, Range]:
    found = {}
    for name in {**smallest, **best, **largest}:
        low = smallest.get(name) or best.get(name) or largest[name]
        high = largest.get(name) or best.get(name) or smallest[name]
        middle = best.get(name) or high
        ordered = len(low) == len(middle) == len(high) and all(
            a <= b <= c for a, b, c in zip(low, middle, high, strict=True)
        )
        if not ordered:
            raise invalid_argument(
                f"shapes of input '{name}' must grow from --min {_text(low)} over --opt {_text(middle)} to --max "
                f"{_text(high)}, in as many dimensions"
            )
        found[name] = (low, middle, high)
    return found


def _shapes(text: str) -> dict[str, Shape]:
    """`ids:1x16,mask:1x16` as shapes; a name may hold colons."""
    found = {}
    for part in text.split(","):
        name, _, dims = part.strip().rpartition(":")
        sizes = dims.split("x")
        if not name or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise invalid_argument(f"'{part}' is no shape of an input; write its name and sizes, as in ids:1x16")
        found[name] = tuple(map(int, sizes))
    return found


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))
