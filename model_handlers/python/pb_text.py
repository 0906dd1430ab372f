"""Text that models give to `pb_utils`: `str`, or `bytes`, which is what tensors of strings hold. PURE."""

from __future__ import annotations

from typing import Any


def text(what: str, value: Any) -> str:
    """The text that a value is.

    Raises:
        TypeError: it is none; `what` says of what.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"{what} must be text, got {type(value)}")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TypeError(f"{what} must be text, and these bytes are no UTF-8: {bytes(value[:100])!r}") from None
