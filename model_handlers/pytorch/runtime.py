"""PyTorch itself: the one module that imports it, and its exceptions as ours.

Called on load threads and in fork servers; `translated` on any.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.framework_errors import PYTORCH
from model_handlers.lost import lost_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

PRELOAD = "model_handlers.pytorch.runtime:pytorch"
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]", re.MULTILINE)  # of its version.py, which says None otherwise
_WORDS = 600  # characters of an exception, whose C++ stack is of no use to a client
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_one_at_a_time = threading.Lock()


@functools.cache
def pytorch() -> Any:
    """The framework, imported when the first model needs it.

    Raises:
        MmeError: UNSUPPORTED where it is not installed.
    """
    try:
        import torch  # noqa: PLC0415 - optional, and a second of import
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            "PyTorch models need PyTorch, which is not installed; run `pip install 'mme[torch]'`",
        ) from error
    # Inputs lie in memory that numpy may not write to. Models that write into their inputs write into their own copy
    # of a request, which nobody reads again.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return torch


@functools.cache
def built_for_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, told without importing it; False where there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return _CUDA.search(Path(found.origin).with_name("version.py").read_text("utf-8")) is not None


def cuda_device(index: int, model: str) -> Any:
    """PyTorch's own for a GPU, which it has begun to use.

    Raises:
        MmeError: UNAVAILABLE where it can't; OUT_OF_MEMORY.
    """
    torch = pytorch()
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:  # the latter of a build for the CPU
        failure = translated(error, model, loading=True)
        if failure.kind is Kind.OUT_OF_MEMORY:
            raise failure from error
        raise _no_gpu(index, model, first_words(error)) from error
    if index >= count:
        raise _no_gpu(index, model, f"it sees {count} of them")
    return torch.device("cuda", index)


def _no_gpu(index: int, model: str, reason: str) -> MmeError:
    sentence = f"model '{model}' was to run on gpu:{index}, but PyTorch can't use that GPU ({reason})"
    return MmeError(Kind.UNAVAILABLE, f"{sentence}; check that the driver fits the installed torch")


def on_device(device: Any) -> AbstractContextManager[Any]:
    """A context in which a device (None for the CPU) is the calling thread's.

    Otherwise that is the first GPU, on which CUDA then takes hundreds of megabytes to give back memory of another.
    """
    return nullcontext() if device is None else pytorch().cuda.device(device)


def lost(failure: MmeError, device: Any) -> MmeError:
    """`failure`, or what to raise in its place where CUDA answers nothing but errors from now on.

    So it does in a process whose kernel went wrong, by an index out of range for one. Only a new process helps.
    """
    try:
        pytorch().cuda.synchronize(device)
    except RuntimeError:
        return lost_process(failure)
    return failure


def give_back(device: Any) -> None:
    """Have the memory of a GPU given back that PyTorch keeps for later; one in trouble gives nothing back."""
    with suppress(RuntimeError), on_device(device):
        pytorch().cuda.empty_cache()


@contextmanager
def never_unpickling() -> Iterator[None]:
    """Whatever PyTorch reads meanwhile with `torch.load` is tensors and plain values: code in a pickle is refused.

    torch.export.load would fall back to running it.
    """
    with _one_at_a_time:
        before = os.environ.get(_FORCE)
        os.environ[_FORCE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FORCE]
            else:
                os.environ[_FORCE] = before


def translated(error: Exception, model: str, *, loading: bool, given: str = "") -> MmeError:
    """PyTorch raises RuntimeError for nearly everything; only GPUs have a class for running out of memory.

    `given` says behind it what an execution was given.
    """
    is_full = isinstance(error, pytorch().OutOfMemoryError)
    failure = PYTORCH.error(error, model, first_words(error), loading=loading, is_full=is_full)
    return MmeError(failure.kind, failure.message + given) if failure.kind is Kind.EXECUTION_FAILED else failure


def first_words(error: Exception) -> str:
    """What went wrong, in one bounded line. Of an error inside TorchScript that is the last: the others are code."""
    text = str(error).split("\nException raised from", 1)[0]
    if "Traceback of TorchScript" in text:
        text = text.rstrip().rpartition("\n")[2]
    return " ".join(f"{text or type(error).__name__}".split())[:_WORDS]
