"""Checksums of unpacked copies: whether what lies on disk is still what was written there.

    .sums/<name of the copy>     JSON: "files", path → bytes and CRC-32

Checksums are taken of the bytes on their way to the disk and kept before the copy appears, so that a copy without them
is an older version's. A copy is read and compared when this process looks at it for the first time, 20 to 70 ms for 90
MB, and again when the status of any of its files has changed. A CRC finds what disks, crashes and hands do by accident;
intent is kept away by the directory's permissions. Thread-safe; runs on load threads.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from isal import isal_zlib

from model_handlers.cancel_token import NEVER
from model_handlers.system.disk import disk_errors, own_directory, replacing, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.cancel_token import CancelToken

Sums = dict[str, tuple[int, int]]  # path below the copy → bytes and CRC-32

_BLOCK_SIZE = 1 << 20
_NEW_SECONDS = 3600.0  # for which checksums without a copy stay: another server may be about to have it appear


class CopySums:
    """The checksums of the copies in one directory.

    Args:
        directory: where the copies lie; it exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = directory / ".sums"
        self._whole: dict[str, int] = {}  # copy → what its files looked like when they were what was written
        self._sweep()

    def __repr__(self) -> str:
        return f"<CopySums of {self._directory}, {len(self._whole)} seen>"

    def note(self, name: str, sums: Sums) -> None:
        """Keep what is about to appear as the copy of that name.

        Raises:
            OSError: the disk has something against it.
        """
        own_directory(self._folder)
        with replacing(self._folder / name) as file:
            file.write(json.dumps({"files": sums}).encode())

    def appeared(self, path: Path) -> None:
        """A copy is in its place, just written."""
        with suppress(FileNotFoundError):  # it left for another already
            self._whole[path.name] = _look_of(path)

    def forget(self, name: str) -> None:
        """The copy of that name was removed."""
        self._whole.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)

    def knows(self, path: Path) -> bool:
        """Whether there are checksums of a copy."""
        return path.name in self._whole or (self._folder / path.name).exists()

    def damage(self, path: Path, token: CancelToken) -> str:
        """What is wrong with a copy, "" for nothing. The caller holds the copy.

        Raises:
            MmeError: CANCELLED; INTERNAL when the copy can't be read.
        """
        with disk_errors(f"{path} cannot be read"):
            look = _look_of(path)
            if self._whole.get(path.name) == look:
                return ""
            sums = self._noted(path.name)
            if sums is None:
                return "it has no checksums, as an older version left it"
            for name, expected in sums.items():
                if wrong := _wrong(path / name, expected, token):
                    return f"{name} {wrong}"
        self._whole[path.name] = look
        return ""

    def _noted(self, name: str) -> Sums | None:
        """What was noted of a copy; None where that is nothing, or is damaged itself."""
        try:
            noted = json.loads((self._folder / name).read_bytes())["files"]
            return {file: (int(size), int(crc)) for file, (size, crc) in noted.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def _sweep(self) -> None:
        """Remove what was noted of copies that an older version, a crash or a hand removed."""
        new = time.time() - _NEW_SECONDS
        with suppress(FileNotFoundError):
            for noted in list(self._folder.iterdir()):
                with suppress(FileNotFoundError):
                    if not (self._directory / noted.name).is_dir() and noted.stat().st_mtime < new:
                        noted.unlink()


def _wrong(file: Path, expected: tuple[int, int], token: CancelToken) -> str:
    """What a file is instead of what was written, "" for the same."""
    size, crc = expected
    try:
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes of {size}"
        return "" if crc_of(file, token) == crc else "has other bytes than were written"
    except (FileNotFoundError, NotADirectoryError):
        return "is not there"


def crc_of(file: Path, token: CancelToken = NEVER) -> int:
    """The CRC-32 of a file.

    Raises:
        MmeError: CANCELLED.
        OSError: the file can't be read.
    """
    crc, block = 0, memoryview(bytearray(min(_BLOCK_SIZE, max(file.stat().st_size, 1))))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            crc = isal_zlib.crc32(block[:size], crc)
            token.check()
    return crc


def _look_of(path: Path) -> int:
    """What the files of a copy look like, without a look into them."""
    looks = []
    for base, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
            status = os.stat(os.path.join(base, file), follow_symlinks=False)  # noqa: PTH116, PTH118
            looks.append((base, file, *state_of(status)))
    return hash(tuple(looks))
