"""CUDA, as much of it as an execution needs: a stream, memory on the device and on the host, copies between them.

The one module that imports cuda-python. Every call goes to the device that the calling thread has set. Called on load
threads and by instance threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, out_of_memory

if TYPE_CHECKING:
    from model_handlers.tensor import Array

_MODULES = ("cuda.bindings.runtime", "cuda.cudart")  # of cuda-python 12.8 and later, and before
_NON_BLOCKING = 1


@functools.cache
def cuda() -> Any:
    """CUDA's runtime.

    Raises:
        MmeError: UNSUPPORTED where cuda-python is not installed.
    """
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MmeError(
        Kind.UNSUPPORTED,
        "engines of TensorRT need cuda-python, which is not installed; run `pip install 'mme[tensorrt]'`",
    )


def call(function: str, *arguments: Any) -> Any:
    """Call a function of CUDA's runtime; what it returns beside its error.

    Raises:
        MmeError: OUT_OF_MEMORY, or EXECUTION_FAILED with CUDA's words.
    """
    runtime = cuda()
    error, *results = getattr(runtime, function)(*arguments)
    if int(error) == 0:
        return results[0] if len(results) == 1 else results
    words = f"{function}: CUDA error {int(error)}, {runtime.cudaGetErrorString(error)[1].decode()}"
    if int(error) == int(runtime.cudaError_t.cudaErrorMemoryAllocation):
        raise out_of_memory(f"the GPU has no memory left ({words})")
    raise MmeError(Kind.EXECUTION_FAILED, f"the GPU failed ({words})")


def set_device(index: int) -> None:
    """The device of the calling thread's calls."""
    call("cudaSetDevice", index)


def free_memory() -> int:
    """Bytes of the device that nobody has."""
    free, _ = call("cudaMemGetInfo")
    return int(free)


class Stream:
    """A queue of work on the device."""

    def __init__(self) -> None:
        self.handle = call("cudaStreamCreateWithFlags", _NON_BLOCKING)
        self.number = int(self.handle)  # which is how TensorRT wants it

    def to_device(self, device: DeviceMemory, host: HostMemory, size: int) -> None:
        """Have bytes copied."""
        kind = cuda().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", device.address, host.address, size, kind, self.handle)

    def to_host(self, host: HostMemory, device: DeviceMemory, size: int) -> None:
        """Have bytes copied."""
        kind = cuda().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", host.address, device.address, size, kind, self.handle)

    def wait(self) -> None:
        """Until all is done. Others run meanwhile."""
        call("cudaStreamSynchronize", self.handle)

    def close(self) -> None:
        """It is not used any more."""
        call("cudaStreamDestroy", self.handle)


class _Memory:
    """Memory that grows to what is asked for, and never shrinks."""

    _take = ""
    _give_back = ""

    def __init__(self) -> None:
        self.address = 0
        self.size = 0

    def reserve(self, size: int) -> int:
        """Have so many bytes; their address. What was there is lost if it grows."""
        size = max(size, 1)  # nothing has an address too
        if size > self.size:
            self.close()
            self.address = int(call(self._take, size))
            self.size = size
        return self.address

    def close(self) -> None:
        """Give it back."""
        if self.address:
            address, self.address, self.size = self.address, 0, 0
            call(self._give_back, address)


class DeviceMemory(_Memory):
    """On the device."""

    _take, _give_back = "cudaMalloc", "cudaFree"


class HostMemory(_Memory):
    """On the host, where the device reads and writes it without the processor: pinned."""

    _take, _give_back = "cudaMallocHost", "cudaFreeHost"

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Its first bytes as an array, as long as it neither grows nor is closed."""
        size = math.prod(shape) * dtype.itemsize
        raw = (ctypes.c_char * size).from_address(self.address)
        return np.ndarray(shape, dtype, memoryview(raw))
