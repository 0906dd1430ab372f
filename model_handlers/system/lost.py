"""What this process has lost for good: a GPU that answers nothing but errors. Told on any thread.

A process of models alone ends with the error. The serving process is asked for the reason by who can end it. CUDA's
driver is asked where a framework does not tell.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from model_handlers.errors import Kind, LostProcessError, MmeError

_reasons: list[str] = []


def lost_process(failure: MmeError, words: str = "") -> LostProcessError:
    """What went wrong, where the GPU answers nothing but errors because of it; `words` are the driver's."""
    kind = Kind.UNAVAILABLE if failure.kind is Kind.INVALID_MODEL else failure.kind  # the file may be as good as any
    because = f" ({words})" if words else ""
    sentence = f"{failure.message}; in this process the GPU answers nothing but errors now{because}"
    if not _reasons:
        _reasons.append(sentence)
    return LostProcessError(kind, sentence)


def first_reason() -> str:
    """The sentence of the first such failure, "" while there was none."""
    return _reasons[0] if _reasons else ""


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
