"""Which sequence the steps of an ensemble belong to: the request's, unless a step behind which they run says otherwise.

PURE. A step says so by parameters of its response that have the names of a request's: `sequence_id`, `sequence_start`
and `sequence_end`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Belongs = tuple[int | str, int]  # the correlation id, and where in the sequence: its flags

_FLAGS = {"sequence_start": FLAG_SEQUENCE_START, "sequence_end": FLAG_SEQUENCE_END}


def overridden(belongs: Belongs, parameters: Mapping[str, Any] | None) -> Belongs:
    """What the steps behind one belong to, which belongs to `belongs` itself and answered with these parameters.

    Raises:
        MmeError: EXECUTION_FAILED for a parameter of another type.
    """
    if not parameters:
        return belongs
    correlation_id, flags = belongs
    given = parameters.get("sequence_id", correlation_id)
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise _wrong("sequence_id", "INT or TRITONSERVER_PARAMETER_STRING", given)
    for name, flag in _FLAGS.items():
        value = parameters.get(name, bool(flags & flag))
        if not isinstance(value, bool):
            raise _wrong(name, "BOOL", value)
        flags = flags | flag if value else flags & ~flag
    return given, flags


def belonging(own: Belongs, sources: Iterable[Belongs]) -> Belongs:
    """What a step belongs to whose tensors come from steps of these: whatever differs from the request's `own`."""
    return next((belongs for belongs in sources if belongs != own), own)


def _wrong(name: str, expected: str, value: object) -> MmeError:
    return MmeError(
        Kind.EXECUTION_FAILED, f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_{expected}, got {value!r}"
    )
