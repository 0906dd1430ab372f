"""TensorRT and CUDA without a GPU: as much of both as the handler calls, in the host's memory.

Stands in because no machine that the tests run on can execute an engine. An engine here is y = x + x over profiles
that a test gives; it really reads from and writes to the addresses it is told, when the stream is waited for, and it
complains of what the real one complains of: shapes beyond a profile, addresses that are not set, memory that is used
after it was given back.
"""
# ruff: noqa: D106, ARG002, N801, N815 - names and arguments are NVIDIA's

from __future__ import annotations

import ctypes
import enum
import types
from typing import Any

import numpy as np

PLAN = b"ftrt" + bytes(20) + bytes([11, 4, 0, 106]) + b"engine"


class FakeCuda(types.ModuleType):
    """`cuda.bindings.runtime`."""

    class cudaError_t(enum.IntEnum):
        cudaSuccess = 0
        cudaErrorInvalidValue = 1
        cudaErrorMemoryAllocation = 2

    class cudaMemcpyKind(enum.IntEnum):
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2

    def __init__(self, total: int = 1 << 20) -> None:
        super().__init__("cuda.bindings.runtime")
        self.total = total
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, list[Any]] = {}
        self.current = -1

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, self.cudaError_t(error).name.encode()

    def cudaSetDevice(self, index: int) -> tuple[int]:
        self.current = index
        return (self.cudaError_t.cudaSuccess,)

    def used(self) -> int:
        return sum(len(buffer) for buffer in self.device.values())

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.total - self.used(), self.total

    def _take(self, held: dict[int, Any], size: int) -> tuple[int, int | None]:
        if held is self.device and self.used() + size > self.total:
            return self.cudaError_t.cudaErrorMemoryAllocation, None
        buffer = ctypes.create_string_buffer(size)
        held[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:
        return self._take(self.device, size)

    def cudaMallocHost(self, size: int) -> tuple[int, int | None]:
        return self._take(self.pinned, size)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.device[address]
        return (0,)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        number = 1000 + len(self.streams)
        self.streams[number] = []
        return 0, number

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        hosts, devices = (source, to) if kind == 1 else (to, source)
        if hosts not in self.pinned or devices not in self.device:
            return (self.cudaError_t.cudaErrorInvalidValue,)
        self.streams[stream].append(lambda: ctypes.memmove(to, source, size))
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        work, self.streams[stream] = self.streams[stream], []
        for each in work:
            each()
        return (0,)

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        del self.streams[stream]
        return (0,)


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    FP8 = 2


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2


class FakeEngine:
    """y = x + x, for x of [-1, width]; a profile is ((rows, width), …) smallest, best, largest."""

    num_io_tensors = 2

    def __init__(self, made: FakeTensorrt) -> None:
        self.made = made
        self.num_optimization_profiles = len(made.profiles)

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y")[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name == "x" else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.made.data_type

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.made.shape

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return self.made.profiles[index]

    def create_execution_context(self, strategy: Any) -> FakeContext | None:
        self.made.strategies.append(strategy)
        return FakeContext(self.made)


class FakeContext:
    def __init__(self, made: FakeTensorrt) -> None:
        self.made = made
        self.profile = -1
        self.shape: tuple[int, ...] = ()
        self.address: dict[str, int] = {}
        made.contexts.append(self)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._raise("Error in set optimization profile async.")
        self.made.cuda.streams[stream].append(lambda: setattr(self, "profile", index))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.made.profiles[self.profile]
        self.shape = tuple(shape)
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.address[name] = address
        return address in self.made.cuda.device

    def _raise(self, words: str) -> None:
        """As the bindings do, whose logger has the reason."""
        if self.made.raises:
            self.made.logger.log(ILogger.Severity.ERROR, self.made.raises)
            raise RuntimeError(words)

    def infer_shapes(self) -> list[str]:
        self._raise("infer_shapes error code: -1")
        return [] if self.shape else ["x"]

    def execute_async_v3(self, stream: int) -> bool:
        if self.made.broken:
            self.made.logger.log(ILogger.Severity.ERROR, "the kernel\nis broken")
            return False
        x, y, shape = self.address["x"], self.address["y"], self.shape
        self.made.executed.append((self, self.profile, shape))

        def compute() -> None:
            size = int(np.prod(shape))
            given, found = (np.frombuffer((ctypes.c_float * size).from_address(at), np.float32) for at in (x, y))
            np.add(given, given, out=found)

        self.made.cuda.streams[stream].append(compute)
        return True


class FakeTensorrt(types.ModuleType):
    """`tensorrt`, whose only engine is the one above."""

    __version__ = "11.4.0.106"
    ILogger = ILogger
    DataType = DataType
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation

    class ExecutionContextAllocationStrategy(enum.Enum):
        STATIC = 0
        ON_PROFILE_CHANGE = 1

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__("tensorrt")
        self.cuda = cuda
        self.profiles: list[Any] = [((1, 3), (4, 3), (8, 3))]
        self.shape = (-1, 3)
        self.data_type = DataType.FLOAT
        self.refuses = ""
        self.broken = False
        self.raises = ""
        self.begins = True
        self.host_code = False
        self.logger: Any = None
        self.contexts: list[FakeContext] = []
        self.executed: list[Any] = []
        self.strategies: list[Any] = []

    def Runtime(self, logger: Any) -> FakeRuntime:
        self.logger = logger
        if not self.begins:
            logger.log(ILogger.Severity.INTERNAL_ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return FakeRuntime(self)


class FakeRuntime:
    def __init__(self, made: FakeTensorrt) -> None:
        self.made = made
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan: bytes) -> FakeEngine | None:
        self.made.host_code = self.engine_host_code_allowed
        if self.made.refuses:
            self.made.logger.log(ILogger.Severity.ERROR, self.made.refuses)
            return None
        return FakeEngine(self.made)
