"""Parts of files, read in pieces: a file that somebody replaces or cuts meanwhile must be an error and not a signal.

Mapping such a file would be quicker to write down, but whoever truncates it kills every process that maps it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.disk import identity_of
from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Bytes read at a time. Below it system calls count; from a megabyte on, the C library asks the system for every buffer
# anew (see `heap.return_large_blocks`), which then costs more than what is read into it.
PIECE = 1 << 19


class SourceFile:
    """A file that is open for reading. To be closed.

    Attributes:
        path: where it was.
        size: bytes.
        identity: what it was when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self.size = status.st_size
        self.identity = identity_of(status)

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}, {self.size} bytes>"

    def read(self, offset: int, length: int) -> bytes:
        """Exactly so many bytes.

        Raises:
            MmeError: INVALID_MODEL when the file ends before.
        """
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer.

        Raises:
            MmeError: as `read`.
        """
        while buffer:
            count = os.preadv(self.fd, [buffer], offset)
            if not count:
                raise invalid_model(f"{self.path} ends at byte {offset}, before what it announces")
            buffer, offset = buffer[count:], offset + count

    def is_unchanged(self) -> bool:
        """Whether nobody has written to it since it was opened."""
        return identity_of(os.fstat(self.fd)) == self.identity

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes of a file from `offset` on."""

    file: SourceFile
    offset: int
    length: int

    def pieces(self) -> Iterator[memoryview]:
        """Its content, a bounded piece at a time, each good until the next.

        Raises:
            MmeError: INVALID_MODEL when the file ends before.
        """
        buffer = memoryview(bytearray(min(PIECE, self.length)))
        for start in range(0, self.length, PIECE):
            piece = buffer[: self.length - start]
            self.file.read_into(piece, self.offset + start)
            yield piece

    def equals(self, other: Span) -> bool:
        """Whether both have the same bytes.

        Raises:
            MmeError: as `pieces`.
        """
        if self.length != other.length:
            return False
        # Arrays of bytes are compared at once, views one element after the other.
        ours, theirs = bytearray(PIECE), bytearray(PIECE)
        for start in range(0, self.length, PIECE):
            if self.length - start < PIECE:
                ours, theirs = bytearray(self.length - start), bytearray(self.length - start)
            self.file.read_into(memoryview(ours), self.offset + start)
            other.file.read_into(memoryview(theirs), other.offset + start)
            if ours != theirs:
                return False
        return True
