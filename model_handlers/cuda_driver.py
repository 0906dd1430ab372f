"""Whether a GPU still answers this process, by the driver's own library: frameworks don't tell.

A kernel that goes wrong, by an index out of range for one, leaves its process with an error that every later call on
that GPU gets, whichever model it is for. Only a new process helps. Asked by who has seen an execution or a load fail.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from model_handlers.errors import Kind, MmeError
from model_handlers.lost import lost_process

_LIBRARY = "libcuda.so.1"
# CUDA's errors of which it says that the process has to end: memory and links that are damaged, kernels that reached
# where they must not, took too long, or asserted what was not so; and the one of which it does not know what it is.
_FOR_GOOD = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999})


@functools.cache
def driver() -> Any:
    """The driver's library; None where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def lost(failure: MmeError, index: int) -> MmeError:
    """`failure`, or what to raise in its place where the GPU of that number answers nothing but errors from now on."""
    words = "" if failure.kind is Kind.INVALID_ARGUMENT else _trouble(driver(), index)
    return lost_process(failure, words) if words else failure


def _trouble(library: Any, index: int) -> str:
    """What the driver answers to everything from now on; "" where it answers, or has not begun to.

    Any of its functions may be the one that tells: each can return the error of work that was begun before.
    """
    if library is None:
        return ""
    device, active, flags = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    error = library.cuDeviceGet(ctypes.byref(device), index)
    error = error or library.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if not error and active.value:  # asking for more would make a context
        error = _of_context(library, device)
    return _words(library, error) if error in _FOR_GOOD else ""


def _of_context(library: Any, device: ctypes.c_int) -> int:
    """What the driver says of the context that all in this process have on a GPU, 0 if nothing is wrong."""
    context = ctypes.c_void_p()
    error: int = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if error:
        return error
    error = library.cuCtxPushCurrent_v2(context)
    if not error:
        error = library.cuCtxSynchronize()
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
    library.cuDevicePrimaryCtxRelease_v2(device)
    return error


def _words(library: Any, error: int) -> str:
    words = ctypes.c_char_p()
    library.cuGetErrorString(error, ctypes.byref(words))
    return f"CUDA error {error}, {(words.value or b'which it has no words for').decode()}"
