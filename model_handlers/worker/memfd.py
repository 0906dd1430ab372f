"""Anonymous files, by the kernel's own numbers: interpreters that were built long before can do without their names.

Conda's are such: built against a C library of 2012, for all that they run with a newer one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from model_handlers.errors import Kind, MmeError, out_of_memory

_CLOEXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _GET_SEALS = 1033, 1034
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_SEAL, _SHRINK, _GROW, _WRITE = 1, 2, 4, 8


def create(name: str) -> int:
    """The descriptor of a new file in memory, which this process's children do not inherit.

    Raises:
        OSError: the system has none for us.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _CLOEXEC | _ALLOW_SEALING)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create")
    fd: int = library.memfd_create(name.encode(), _CLOEXEC | _ALLOW_SEALING)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


def punch(fd: int, start: int, size: int) -> None:
    """Give the pages of a part of the file back to the system: they read as zeros. Other threads run meanwhile.

    Raises:
        OSError: the system can't.
    """
    library = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_int64
    if library.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset(start), offset(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def refusal(error: OSError, sentence: str) -> MmeError:
    """What to raise where the system refuses us memory: it has none, or no descriptors."""
    if error.errno in {errno.ENOMEM, errno.ENOSPC}:
        return out_of_memory(sentence)
    return MmeError(Kind.UNAVAILABLE, sentence)


def seal(fd: int) -> None:
    """Have the file never shrink again, whoever holds it."""
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _SEAL)


def freeze(fd: int) -> None:
    """Have the file never change again, whoever holds it.

    Raises:
        OSError: somebody has it mapped, to write into it.
    """
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _GROW | _WRITE | _SEAL)


def is_frozen(fd: int) -> bool:
    """Whether the file can neither shrink nor be written.

    Raises:
        OSError: it is no such file.
    """
    return fcntl.fcntl(fd, _GET_SEALS) & (_SHRINK | _WRITE) == _SHRINK | _WRITE
