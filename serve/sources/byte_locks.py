"""Locks that several processes share through one file, each of them one byte of it.

They belong to the open file (OFD locks of Linux): they end with it, however its process ends, and two open files
exclude each other even within one process. Never waited for. Not thread-safe: the caller takes turns.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, and a pid that must be 0
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have none, where nobody can share anything


class ByteLocks:
    """The locks of one file, which is made if it is not there."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, self._fd)  # gives every lock back; once

    def share(self, byte: int) -> bool:
        """Lock a byte together with others; False if somebody has it alone. What is held already becomes shared."""
        return self._set(fcntl.F_RDLCK, byte)

    def exclude(self, byte: int) -> bool:
        """Lock a byte alone; False if anybody else has it."""
        return self._set(fcntl.F_WRLCK, byte)

    def unlock(self, byte: int) -> None:
        """Give a byte back."""
        self._set(fcntl.F_UNLCK, byte)

    def others_have(self, byte: int) -> bool:
        """Whether another open file has locked a byte, alone or together with others."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
        return True
