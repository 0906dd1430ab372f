"""What texts and files contain, as digests. Thread-safe."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from model_handlers.system.disk import state_of

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.cancel_token import CancelToken
    from model_handlers.system.disk import FileIdentity

DIGITS = 32  # of a digest, where it names a folder
_CHUNK = 1 << 20


def text_digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_digest(path: Path, kind: str = "sha256") -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).digest()


class Digests:
    """SHA-256s of files, worked out once for as long as a file stays the same."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[FileIdentity, str]] = {}  # single operations of a dict need no lock

    def of(self, path: Path, token: CancelToken) -> str:
        """The SHA-256 of a file, in hexadecimal."""
        with path.open("rb") as file:
            state = state_of(os.fstat(file.fileno()))
            known = self._known.get(path)
            if known is not None and known[0] == state:
                return known[1]
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                token.check()
                digest.update(chunk)
        self._known[path] = state, digest.hexdigest()
        return digest.hexdigest()
