"""PyTorch itself: the one module that imports it, tensors to and from arrays, and its exceptions as ours.

Called on load threads, on those that execute, and in fork servers.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import PYTORCH, Kind, MmeError, invalid_argument, unavailable, unsupported
from model_handlers.system.devices import lost_process
from model_handlers.system.importing import file_of, variable
from model_handlers.tensor import BF16, BY_DTYPE_NAME, BYTES, Array, DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


def data_type(dtype: Any) -> DataType | None:
    """The protocol's type for one of torch's, None where it has none. By its name, which needs no framework."""
    return BY_DTYPE_NAME.get(str(dtype).removeprefix("torch."))


def to_tensor(torch: Any, array: Array, spec: TensorSpec, device: Any) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if spec.data_type is BF16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device is None else tensor.to(device)


def to_strings(array: Array, spec: TensorSpec, model: str) -> list[str]:
    """An input of strings, row by row. Raises INVALID_ARGUMENT where one is no UTF-8."""
    try:
        return [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise invalid_argument(
            f"input '{spec.name}' for model '{model}' must hold UTF-8 text, as strings in PyTorch are: {error}"
        ) from None


def from_result(torch: Any, result: Any, spec: TensorSpec, rows: int | None, model: str) -> Array:
    """A result as the array of an output; `rows` are those of the batch, None where the model has no batches."""
    found: DataType | None = None
    array: Array | None = None
    if isinstance(result, (list, tuple)) and all(isinstance(element, str) for element in result):
        found, array = BYTES, _strings(result, spec, rows)
    elif isinstance(result, torch.Tensor) and not result.is_sparse:
        found = data_type(result.dtype)
        if found is not None:
            tensor = result.detach().cpu().resolve_conj().resolve_neg()
            array = (tensor.view(torch.uint16) if found is BF16 else tensor).numpy()
    if found is not spec.data_type or array is None:
        shown = found.config_name if found is not None else _kind(torch, result)
        raise MmeError(
            Kind.EXECUTION_FAILED,
            f"model '{model}': unexpected datatype {shown} for inference output '{spec.name}', expecting "
            f"{spec.data_type.config_name}: correct its data_type in config.pbtxt",
        )
    return array


def _kind(torch: Any, result: Any) -> str:
    return f"{result.dtype} tensor" if isinstance(result, torch.Tensor) else type(result).__name__


def _strings(strings: Sequence[str], spec: TensorSpec, rows: int | None) -> Array:
    # A list has one dimension: the shape is the output's, where the strings fill it.
    array = np.empty(len(strings), dtype=np.object_)
    array[:] = [text.encode() for text in strings]
    try:
        return array.reshape(spec.model_dims if rows is None else (rows, *spec.model_dims))
    except ValueError:
        return array


PRELOAD = "model_handlers.pytorch.runtime:pytorch"  # what a fork server calls before it forks
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]", re.MULTILINE)  # of its version.py, which says None otherwise
_MAX_CHARACTERS = 600  # characters of an exception, whose C++ stack is of no use to a client
_one_at_a_time = threading.Lock()


@functools.cache
def pytorch() -> Any:
    """The framework, imported when the first model needs it. Raises UNSUPPORTED where it is not installed."""
    try:
        import torch  # noqa: PLC0415 - optional, and a second of import
    except ImportError as error:
        raise unsupported(
            "PyTorch models need PyTorch, which is not installed; run `pip install 'mme[torch]'`"
        ) from error
    # Inputs lie in memory that numpy may not write to. Models that write into their inputs write into their own copy
    # of a request, which is not read again.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    return torch


def built_for_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, told without importing it; False where there is none."""
    return _CUDA.search(file_of("torch", "version.py")) is not None


def cuda_device(index: int, model: str) -> Any:
    """PyTorch's own for a GPU, which it has begun to use. Raises UNAVAILABLE where it can't; OUT_OF_MEMORY."""
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
    return unavailable(f"{sentence}; check that the driver fits the installed torch")


def on_device(device: Any) -> AbstractContextManager[Any]:
    """A context in which a device is the calling thread's (None: the CPU): else the first GPU gets a context, too."""
    return nullcontext() if device is None else pytorch().cuda.device(device)


def lost(failure: MmeError, device: Any) -> MmeError:
    """Return `failure`, or what to raise in its place where CUDA fails whatever it is asked from now on.

    So it does in a process in which a kernel failed, by an index out of range for example. Only a new process helps.
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
    """Refuse code in pickles that `torch.load` reads meanwhile: torch.export.load would fall back to running it."""
    with _one_at_a_time, variable("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
        yield


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
    return " ".join(f"{text or type(error).__name__}".split())[:_MAX_CHARACTERS]
