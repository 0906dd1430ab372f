"""Parts of files, read in pieces: a file that somebody replaces or cuts meanwhile must be an error and not a signal.

Mapping such a file would be quicker to write down, but whoever truncates it kills every process that maps it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIECE = 1 << 20  # bytes read at a time: below it the system calls count, far above it the processor's caches

# What changes when a file does: device, inode, size, time of the last change in nanoseconds.
FileIdentity = tuple[int, int, int, int]


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
        data = os.pread(self.fd, length, offset)
        while len(data) < length:
            more = os.pread(self.fd, length - len(data), offset + len(data))
            if not more:
                raise invalid_model(f"{self.path} ends at byte {offset + len(data)}, before what it announces")
            data += more
        return data

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

    def pieces(self) -> Iterator[bytes]:
        """Its content, a bounded piece at a time.

        Raises:
            MmeError: INVALID_MODEL when the file ends before.
        """
        for start in range(0, self.length, PIECE):
            yield self.file.read(self.offset + start, min(PIECE, self.length - start))


def identity_of(status: os.stat_result) -> FileIdentity:
    """What to remember a file by."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
