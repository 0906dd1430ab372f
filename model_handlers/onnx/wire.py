"""Protocol Buffers' wire format, as much of it as it takes to look into a model without parsing it. PURE.

A model's file is gigabytes of weights with a graph around them. The published schema would have a parser copy all of
it, holding the GIL; here fields are found where they lie, and whatever is of no interest is copied as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.file_span import Span

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED_LENGTH = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 10


class Field(NamedTuple):
    """One field of a message: its number, its wire type, where it begins, where its value begins and ends."""

    number: int
    type: int
    start: int
    value: int
    end: int


def fields(data: Window, start: int, end: int) -> Iterator[Field]:
    """The fields of the message from `start` to `end`, in order.

    Raises:
        MmeError: INVALID_MODEL when that is no message.
    """
    at = start
    while at < end:
        tag, value = data.varint(at, end)
        number, kind = tag >> 3, tag & 7
        if kind == BYTES:
            length, value = data.varint(value, end)
            stop = value + length
        elif kind == VARINT:
            stop = data.varint(value, end)[1]
        elif kind in _FIXED_LENGTH:
            stop = value + _FIXED_LENGTH[kind]
        else:
            raise _broken(at)
        if stop > end or not number:
            raise _broken(at)
        yield Field(number, kind, at, value, stop)
        at = stop


class Window:
    """A span of a file, of which a part at a time is in memory; offsets count from the span's beginning."""

    def __init__(self, span: Span, size: int = 1 << 18) -> None:
        self._span = span
        self._size = size
        self._start = 0
        self._held = b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        if not self._start <= start <= end <= self._start + len(self._held):
            self._start = start
            length = min(max(end - start, self._size), self._span.length - start)
            self._held = self._span.file.read(self._span.offset + start, length)
        return self._held[start - self._start : end - self._start]

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at `at`, and where it ends.

        Raises:
            MmeError: INVALID_MODEL when none does before `end`.
        """
        number = shift = 0
        for index, byte in enumerate(self.read(at, min(at + _LONGEST_VARINT, end))):
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at + index + 1
            shift += 7
        raise _broken(at)


def varint(number: int) -> bytes:
    """A number as the format writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def bytes_field(number: int, *parts: bytes) -> bytes:
    """A field of bytes, which a text and a message are too."""
    value = b"".join(parts)
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def _broken(at: int) -> Exception:
    return invalid_model(f"byte {at} begins no field of a model")
