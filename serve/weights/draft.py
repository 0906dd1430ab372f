"""A form that is being written, and the blobs that it shares with others.

A blob is named after the CRC-32 and the length of its bytes, and a number: of blobs whose first two are the same, the
first whose bytes are the same is taken, else one more is made. That is as sure as a cryptographic hash, because every
byte is compared, and two to ten times as quick on the machines that models are served on; a load waits for it.

Written on load threads, and by refining processes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.mapped import SourceFile, Span

if TYPE_CHECKING:
    from pathlib import Path

_READABLE = 0o400  # nobody writes to a blob


class Draft:
    """See `model_handlers.mapped.Draft`.

    Attributes:
        folder: the directory for what is needed meanwhile.
        blobs: what the form shares: name → bytes.
        sources: what was opened to be read.
        added: bytes of blobs that were not there before.

    Args:
        files: the directory where all blobs lie.
    """

    def __init__(self, folder: Path, files: Path) -> None:
        self.folder = folder
        self.blobs: dict[str, int] = {}
        self.sources: dict[Path, SourceFile] = {}
        self.added = 0
        self._files = files

    def __repr__(self) -> str:
        return f"<Draft of {len(self.blobs)} blobs, {sum(self.blobs.values()) / 1e6:.1f} MB>"

    def source(self, path: Path) -> SourceFile:
        """See `model_handlers.mapped.Draft`."""
        if path not in self.sources:
            self.sources[path] = SourceFile(path)
        return self.sources[path]

    def put(self, span: Span) -> str:
        """See `model_handlers.mapped.Draft`."""
        stem = f"{_checksum(span):08x}-{span.length:x}"
        number = 0
        while True:
            name = f"{stem}-{number}"
            path = self._files / name
            try:
                if _holds(path, span):
                    os.utime(path)  # whoever sweeps now leaves it
                    break
                number += 1
            except FileNotFoundError:  # there is none, or it was swept this moment
                if self._add(name, span):
                    break
        self.blobs[name] = span.length
        return name

    def is_true(self) -> bool:
        """Whether nobody wrote to a source while it was read."""
        return all(source.is_unchanged() for source in self.sources.values())

    def close(self) -> None:
        """Close the sources."""
        for source in self.sources.values():
            source.close()

    def _add(self, name: str, span: Span) -> bool:
        """Write a new blob; False when somebody else was quicker with one of that name."""
        path = self.folder / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _READABLE)
        try:
            for piece in span.pieces():
                _write(fd, piece)
        finally:
            os.close(fd)
        if not appear(path, self._files / name):
            return False
        self.added += span.length
        return True


def checksum_of(blob: str) -> int:
    """The CRC-32 that the name of a blob tells."""
    return int(blob.partition("-")[0], 16)


def appear(made: Path, name: Path) -> bool:
    """Give a finished file its name; False when there is one of that name. Either way it is not where it was made.

    ONNX Runtime refuses weights that have several hard links, so this one is gone before anybody looks.
    """
    try:
        os.link(made, name)
    except FileExistsError:
        return False
    finally:
        made.unlink()
    return True


def _holds(path: Path, span: Span) -> bool:
    """Whether a blob has these bytes."""
    blob = SourceFile(path)
    try:
        return span.equals(Span(blob, 0, blob.size))  # a crash of the machine may have cut it
    finally:
        blob.close()


def _checksum(span: Span) -> int:
    checksum = 0
    for piece in span.pieces():
        checksum = isal_zlib.crc32(piece, checksum)
    return checksum


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
