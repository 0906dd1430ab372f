"""Sizes of memory as people write them, and what a budget comes to on a machine. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
_UNITS |= {f"{prefix}i{b}": 1024**power for power, prefix in enumerate("kmgtp", start=1) for b in ("b", "")}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII)
_MOST_BYTES = 1 << 50
BYTES_ALLOWED = "a size such as 67108864, 350MB or 2GiB, at most 1PiB"
_SHARE = re.compile(r"(?:([0-9]+(?:\.[0-9]+)?)%|([01]\.[0-9]+))(?:\s*-\s*(.+))?")
_BUDGET_ALLOWED = (
    "a size such as 350MB or 2GiB, at most 1PiB, or a share such as 80% or 0.8, or one less a size such as 95%-2GiB"
)


@dataclass(frozen=True, slots=True)
class Share:
    """A share (0 to 1) of what there is, less so many bytes that are to stay free."""

    of: float
    less: int

    def __str__(self) -> str:
        return f"{Decimal(repr(self.of)):f}-{self.less}"


HOST_SHARE = 0.8  # of the host's memory, when no budget is set: the rest is for us, the page cache and batches
DEVICE_SHARE = 0.9

# An int is a number of bytes, a float a share (0 to 1) of what the host or the device has, None its own measure.
MemoryBudget = int | float | Share | None


def byte_size(text: str) -> int:
    """A number of bytes: `67108864`, `350MB` (powers of 1000), `2GiB` and Kubernetes' `2Gi` (powers of 1024).

    Raises:
        ValueError: with what is allowed, worded to follow "expected".
    """
    match = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or not 1 <= int(float(match[1]) * unit) <= _MOST_BYTES:
        raise ValueError(BYTES_ALLOWED)
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def memory_budget(text: str) -> int | float | Share:
    """A number of bytes, or a share of what there is: `80%`, `0.8`; less a reserve if one is named: `95%-2GiB`.

    Returns:
        an int for bytes, a float in (0, 1] for a share, a `Share` for one less a reserve.

    Raises:
        ValueError: as `byte_size`.
    """
    share = _SHARE.fullmatch(text)
    try:
        if share is None:
            return byte_size(text)
        reserve = byte_size(share[3]) if share[3] else 0
    except ValueError:
        raise ValueError(_BUDGET_ALLOWED) from None
    value = float(share[1]) / 100 if share[1] else float(share[2])
    if not 0 < value <= 1:
        raise ValueError(_BUDGET_ALLOWED)
    return Share(value, reserve) if reserve else value


def bytes_of(budget: MemoryBudget, available: int, default_share: float) -> int:
    """Bytes that a budget comes to, of so many that there are.

    Raises:
        ValueError: a reserve leaves nothing.
    """
    if isinstance(budget, Share):
        found = int(available * budget.of) - budget.less
    elif isinstance(budget, float) or budget is None:
        found = int(available * (default_share if budget is None else budget))
    else:
        found = budget
    if found <= 0:
        raise ValueError(f"that leaves nothing of {available} bytes")
    return found
