"""The C library's heap: what it keeps of memory that was freed. Needs no package, so that any process can have it."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_LARGE_BLOCK = 1 << 20


def return_large_blocks() -> None:
    """Have the C library give every large block back to the system as soon as it is freed. Called once a process.

    By default glibc does so only until the first is freed; from then on blocks of that size, up to 32 MiB, come from
    heaps of the threads, whose free ends not even `malloc_trim` gives back. Then a model that a thread loaded takes
    twice its size, and goes on taking most of it after it was closed.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; musl always gives large blocks back
    if option is not None:
        option(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def trim() -> None:
    """Hand freed heap pages back to the system, so that what a model gave back is seen by everybody."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
