"""What is traced at the moment, in the words of Triton's trace extension. PURE.

    trace_level    ["TIMESTAMPS"] or ["OFF"]; tensors are not traced
    trace_rate     one request of so many, of those whose client does not say
    trace_count    so many more requests, -1 for all

Values are texts, as Triton has them; null means what the server was started with. What Triton can change besides
(a file, how often it is written) has no meaning where traces are sent, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEVELS = {("TIMESTAMPS",): True, ("OFF",): False, (): False}
_FIXED = {"trace_mode": "opentelemetry", "log_frequency": "0", "trace_file": ""}
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced.

    Attributes:
        on: whether anything is.
        rate: one request of so many.
        count: how many more requests, -1 for all.
    """

    on: bool = False
    rate: int = 1000
    count: int = -1

    def as_document(self) -> dict[str, Any]:
        """As a client reads them."""
        return {
            "trace_level": ["TIMESTAMPS" if self.on else "OFF"],
            "trace_rate": str(self.rate),
            "trace_count": str(self.count),
            **_FIXED,
        }

    def changed(self, wanted: Mapping[str, Any], first: TraceSettings) -> TraceSettings:
        """These with what a client wants otherwise.

        Args:
            wanted: setting → text, or null.
            first: what null means.

        Raises:
            MmeError: INVALID_ARGUMENT, UNSUPPORTED; then nothing is changed.
        """
        new = self
        for name, value in wanted.items():
            if name == "trace_level":
                new = replace(new, on=first.on if value is None else _level(value))
            elif name == "trace_rate":
                new = replace(new, rate=first.rate if value is None else _number(name, value, 1))
            elif name == "trace_count":
                new = replace(new, count=first.count if value is None else _number(name, value, -1))
            elif name not in _FIXED:
                known = ", ".join(self.as_document())
                raise invalid_argument(f"trace setting '{name}' is none of {known}")
            elif value is not None and value != _FIXED[name]:
                raise _not_here(name, value)
        return new


def _level(value: Any) -> bool:
    levels = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    if levels not in _LEVELS:
        raise MmeError(Kind.UNSUPPORTED, f"trace_level must be TIMESTAMPS or OFF, got {value!r}: no tensors are traced")
    return _LEVELS[levels]


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = int(value)
    except (ValueError, TypeError):
        raise invalid_argument(f"Unable to parse '{name}', got: {value}") from None
    if not least <= number <= _MOST:
        raise invalid_argument(f"Unable to parse '{name}', got: {value}, value is out of range")
    return number


def _not_here(name: str, value: Any) -> MmeError:
    if name == "trace_file":
        return MmeError(Kind.UNSUPPORTED, "trace file location can not be updated through network protocol")
    return MmeError(Kind.UNSUPPORTED, f"{name} is '{_FIXED[name]}' here: traces are sent, not written; got {value!r}")
