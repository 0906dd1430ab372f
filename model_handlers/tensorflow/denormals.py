"""Numbers too small for a normal float count as zero while a model runs, as in TensorFlow's own threads.

A processor takes a hundred times as long to compute with such numbers (*denormals*), and what TensorFlow's threads make
of them is the answer that a model's author knows. What runs in our thread has to be told so.

The C library's floating-point environment belongs to the thread that sets it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORDS = 16  # 32 bits each, more than the environment of any of these has
# The word of the environment that controls vectors, and the bits that say so: of results, on x86 of operands too.
_FLUSHING = {"x86_64": (7, 0x8040), "aarch64": (0, 1 << 24)}
_Environment = ctypes.c_uint32 * _WORDS


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Count them as zero meanwhile, in this thread. On a processor that we don't know all stays as it is."""
    known = _FLUSHING.get(platform.machine())
    if known is None:
        yield
        return
    before, library = _Environment(), _library()
    library.fegetenv(before)
    word, bits = known
    flushing = _Environment(*before)
    flushing[word] |= bits
    library.fesetenv(flushing)
    try:
        yield
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> Any:
    return ctypes.PyDLL("libm.so.6")
