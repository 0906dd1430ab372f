"""Engines of TensorRT, in the one module that imports NVIDIA's libraries, in whichever form they are installed.

One engine on a device for all of its instances: its weights, its profiles, and a context for each execution under way.
A context has what one execution at a time needs: a stream, memory on the device, and pinned memory on the host, so that
the copies of one overlap with the computing of another. Never on the event loop: an execution has its thread wait for
the device. A runtime that is made on a machine without a driver ends the process when it is thrown away, so the driver
is asked for first. CUDA's calls go to the device that the calling thread has set.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from model_handlers.base import Device, Handler, Runtime, Traits
from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import (
    DynamicBatching,
    Guess,
    InstanceKind,
    ModelConfig,
    choice,
    switch,
    warn_of_unknown,
)
from model_handlers.errors import (
    Kind,
    MmeError,
    invalid_argument,
    invalid_model,
    out_of_memory,
    unavailable,
    unsupported,
)
from model_handlers.system.devices import lost
from model_handlers.tensor import BY_NAME, Array, DataType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


# Full, lean and dispatch run TensorRT's plans, the last two those that are version-compatible. PyPI's wheels have the
# names that end with _bindings.
_TENSORRT = ("tensorrt", "tensorrt_bindings", "tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_dispatch")
_RTX = ("tensorrt_rtx", "tensorrt_rtx_bindings")
_DRIVER = "libcuda.so.1"


def installed(builder: str = "") -> str:
    """The module that runs plans of `builder`, or of any; "" where there is none."""
    names = {"TensorRT": _TENSORRT, "TensorRT-RTX": _RTX}.get(builder, (*_TENSORRT, *_RTX))
    return next((name for name in names if importlib.util.find_spec(name) is not None), "")


@functools.cache
def tensorrt(builder: str = "") -> Any:
    """The module for plans of `builder`, or of any."""
    name, wanted = installed(builder), builder or "TensorRT"
    if not name:
        how = "run `pip install 'mme[tensorrt]'`, with NVIDIA's package index where PyPI's has no libraries for it"
        if builder == "TensorRT-RTX":
            how = "run `pip install 'mme[tensorrt-rtx]'`"
        raise unsupported(f"{wanted} is needed for engines and not installed; {how}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise unsupported(f"{wanted} is installed as {name}, but can't be loaded: {error}") from error


def require_driver(model: str) -> None:
    """See to it that there is a GPU with a driver that answers. Raises UNAVAILABLE where there is none."""
    try:
        code = ctypes.CDLL(_DRIVER).cuInit(0)
    except OSError:
        raise _no_gpu(model, f"no NVIDIA driver ({_DRIVER}) is installed") from None
    if code:
        raise _no_gpu(model, f"the driver answers with CUDA's error {code}")


def _no_gpu(model: str, reason: str) -> MmeError:
    return unavailable(f"model '{model}' is an engine of TensorRT, which needs a GPU, but {reason}")


def make_logger(framework: Any) -> Any:
    """A logger for a runtime or a builder, which keeps what went wrong: nothing goes to standard error."""

    class Kept(framework.ILogger):  # type: ignore[misc] # of a module that is only known when it runs
        def __init__(self) -> None:
            framework.ILogger.__init__(self)
            self.said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (framework.ILogger.Severity.INTERNAL_ERROR, framework.ILogger.Severity.ERROR):
                self.said.append(message)

    return Kept()


def last_words(said: Sequence[str]) -> str:
    return " ".join(said[0].split())[:300] if said else "it does not say why"


_MODULES = ("cuda.bindings.runtime", "cuda.cudart")  # of cuda-python 12.8 and later, and before
_NON_BLOCKING = 1


@functools.cache
def cuda() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise unsupported("engines of TensorRT need cuda-python, which is not installed; run `pip install 'mme[tensorrt]'`")


def call(function: str, *arguments: Any) -> Any:
    """Call a function of CUDA's runtime; what it returns beside its error. Raises OUT_OF_MEMORY or EXECUTION_FAILED."""
    runtime = cuda()
    error, *results = getattr(runtime, function)(*arguments)
    if int(error) == 0:
        return results[0] if len(results) == 1 else results
    words = f"{function}: CUDA error {int(error)}, {runtime.cudaGetErrorString(error)[1].decode()}"
    if int(error) == int(runtime.cudaError_t.cudaErrorMemoryAllocation):
        raise out_of_memory(f"the GPU has no memory left ({words})")
    raise MmeError(Kind.EXECUTION_FAILED, f"the GPU failed ({words})")


def set_device(index: int) -> None:
    call("cudaSetDevice", index)


def free_memory() -> int:
    free, _ = call("cudaMemGetInfo")
    return int(free)


class CudaStream:
    """A queue of work on the device."""

    def __init__(self) -> None:
        self.handle = call("cudaStreamCreateWithFlags", _NON_BLOCKING)
        self.number = int(self.handle)  # which is how TensorRT wants it

    def to_device(self, device: DeviceMemory, host: HostMemory, size: int) -> None:
        kind = cuda().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", device.address, host.address, size, kind, self.handle)

    def to_host(self, host: HostMemory, device: DeviceMemory, size: int) -> None:
        kind = cuda().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", host.address, device.address, size, kind, self.handle)

    def wait(self) -> None:
        call("cudaStreamSynchronize", self.handle)

    def close(self) -> None:
        call("cudaStreamDestroy", self.handle)


class _Memory:
    # It grows to what is asked for, which loses what was there, and never shrinks.
    _take = ""
    _give_back = ""

    def __init__(self) -> None:
        self.address = 0
        self.size = 0

    def reserve(self, size: int) -> int:
        size = max(size, 1)  # nothing has an address too
        if size > self.size:
            self.close()
            self.address = int(call(self._take, size))
            self.size = size
        return self.address

    def close(self) -> None:
        if self.address:
            address, self.address, self.size = self.address, 0, 0
            call(self._give_back, address)


class DeviceMemory(_Memory):
    """Memory on the device."""

    _take, _give_back = "cudaMalloc", "cudaFree"


class HostMemory(_Memory):
    """On the host, where the device reads and writes it without the processor: pinned."""

    _take, _give_back = "cudaMallocHost", "cudaFreeHost"

    def view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = math.prod(shape) * dtype.itemsize
        raw = (ctypes.c_char * size).from_address(self.address)
        return np.ndarray(shape, dtype, memoryview(raw))


_TAGS = {b"ftrt": "TensorRT", b"vtrt": "TensorRT-RTX"}
_VERSION = slice(24, 28)


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What built a plan: `TensorRT` or `TensorRT-RTX`, and which version of it."""

    builder: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.builder} {'.'.join(map(str, self.version))}"


def read_header(model: str, path: Path) -> PlanHeader:
    """The header of the plan in a file. Raises INVALID_MODEL when the file is no plan."""
    with path.open("rb") as file:
        head = file.read(_VERSION.stop)
    builder = _TAGS.get(head[:4])
    if builder is None or len(head) < _VERSION.stop:
        raise invalid_model(
            f"model '{model}': '{path.name}' is no engine of TensorRT; build one on the kind of GPU that is to run it: "
            "mme build-engine model.onnx"
        )
    return PlanHeader(builder, tuple(head[_VERSION]))


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimisation profile: the ranges an engine was built for, input → smallest, best and largest shape."""

    index: int
    ranges: Mapping[str, tuple[Shape, Shape, Shape]]

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
            for shape, (low, _, high) in ((shapes[name], self.ranges[name]) for name in shapes)
        )

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        """How far a request is from what the profile is best for, in elements."""
        return sum(abs(math.prod(shapes[name]) - math.prod(self.ranges[name][1])) for name in shapes)

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The best and the largest size of the first dimension, that of the input with the least."""
        return (
            min(best[0] for _, best, _ in self.ranges.values()),
            min(high[0] for _, _, high in self.ranges.values()),
        )


def chosen(config: ModelConfig, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles that instances execute by: those that their groups name, else all."""
    named = [name for group in config.instance_group for name in group.profile]
    for name in named:
        if not name.isdecimal() or int(name) >= len(profiles):
            raise invalid_model(
                f"model '{config.name}': instance_group names profile '{name}', but the engine has "
                f"{len(profiles)}: 0 to {len(profiles) - 1}"
            )
    return [profiles[index] for index in sorted({int(name) for name in named})] or list(profiles)


def select(model: str, profiles: Iterable[Profile], shapes: Mapping[str, Shape]) -> Profile:
    """The profile that is best for a request. Raises INVALID_ARGUMENT where none takes it."""
    fitting = [profile for profile in profiles if profile.takes(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    wanted = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
    ranges = "; ".join(
        ", ".join(f"'{name}' {list(low)} to {list(high)}" for name, (low, _, high) in profile.ranges.items())
        for profile in profiles
    )
    raise invalid_argument(f"model '{model}': its engine does not take {wanted}; it was built for {ranges}")


def largest_batch(config: ModelConfig, profiles: Sequence[Profile]) -> int:
    """The largest batch that any profile takes. Raises INVALID_MODEL where the configuration wants a larger one."""
    largest = max(profile.batch_sizes[1] for profile in profiles)
    if config.max_batch_size > largest:
        raise invalid_model(
            f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} but "
            f"TensorRT engine only supports max-batch {largest}"
        )
    return largest


_TYPES = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "HALF": "FP16",
    "BF16": "BF16",
    "FLOAT": "FP32",
}


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """An input or output; shapes, and what else `on_host` says, are read and written in the host's memory."""

    name: str
    data_type: DataType
    shape: tuple[int, ...]
    on_host: bool


class TensorrtEngine:
    """A plan, read and on its device, which is the calling thread's from now on.

    `compatible` plans may bring code for the host; `strategy` is TensorRT's name for when contexts take their memory.
    """

    def __init__(self, model: str, path: Path, device: int, *, compatible: bool = False, strategy: str = "") -> None:
        header = read_header(model, path)
        self.model = model
        self._framework = framework = tensorrt(header.builder)
        self._device = device
        set_device(device)
        self._logger = make_logger(framework)
        try:
            self._runtime = framework.Runtime(self._logger)
        except TypeError as error:  # of the bindings, since there is none
            words = last_words(self._logger.said)
            sentence = f"model '{model}' was to run on gpu:{device}, but {header.builder} can't begin there ({words})"
            raise unavailable(f"{sentence}; check that the driver fits it") from error
        if compatible:
            self._runtime.engine_host_code_allowed = True
        plan = path.read_bytes()
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise self._refusal(header, len(plan))
        self._strategy = getattr(framework.ExecutionContextAllocationStrategy, strategy or "STATIC")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        tensors = {name: self._tensor(name) for name in names}
        inputs = framework.TensorIOMode.INPUT
        self.inputs = {name: t for name, t in tensors.items() if self._engine.get_tensor_mode(name) == inputs}
        self.outputs = {name: t for name, t in tensors.items() if name not in self.inputs}
        self.profiles = [self._profile(index) for index in range(self._engine.num_optimization_profiles)]

    def _refusal(self, header: PlanHeader, size: int) -> MmeError:
        # TensorRT says why to its logger only, and want of memory is not told apart.
        words = last_words(self._logger.said)
        if free_memory() < size:
            return out_of_memory(f"the GPU has no memory left for the engine of model '{self.model}': {words}")
        ours = f"{header.builder} {self._framework.__version__}"
        return invalid_model(
            f"model '{self.model}': its engine was built by {header}, and {ours} can't run it on this GPU ({words}); "
            "build it anew with this version on this kind of GPU: mme build-engine model.onnx"
        )

    def _tensor(self, name: str) -> EngineTensor:
        type_name = self._engine.get_tensor_dtype(name).name
        if type_name not in _TYPES:
            raise unsupported(
                f"model '{self.model}': tensor '{name}' has TensorRT's type {type_name}, which can't be sent over the "
                "protocol; build the engine with inputs and outputs of another type"
            )
        on_host = self._engine.get_tensor_location(name) == self._framework.TensorLocation.HOST
        return EngineTensor(name, BY_NAME[_TYPES[type_name]], tuple(self._engine.get_tensor_shape(name)), on_host)

    def _profile(self, index: int) -> Profile:
        # Of tensors whose values are shapes no ranges are checked here: TensorRT does it.
        ranges = {}
        for name, tensor in self.inputs.items():
            if not tensor.on_host:
                low, best, high = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, index))
                ranges[name] = (low, best, high)
        return Profile(index, ranges)

    def context(self) -> ExecutionContext:
        set_device(self._device)
        made = self._engine.create_execution_context(self._strategy)
        if made is None:
            raise out_of_memory(
                f"model '{self.model}': the GPU has no memory left for another execution: "
                f"{last_words(self._logger.said)}"
            )
        return ExecutionContext(self, made)

    def set_device(self) -> None:
        set_device(self._device)

    def failure(self, what: str) -> MmeError:
        said, self._logger.said = self._logger.said, []
        return MmeError(
            Kind.EXECUTION_FAILED, f"TensorRT failed while running model '{self.model}' ({what}): {last_words(said)}"
        )

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """What TensorRT raises in there, and does not only say to its logger, is a failure."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(what) from error

    def close(self) -> None:
        set_device(self._device)
        self._engine = None
        self._runtime = None


class ExecutionContext:
    """What one execution at a time needs. One thread at a time uses it."""

    def __init__(self, engine: TensorrtEngine, context: Any) -> None:
        self._engine = engine
        self._context = context
        self._profile = -1
        self._stream = CudaStream()
        names = (*engine.inputs, *engine.outputs)
        self._on_device = {name: DeviceMemory() for name in names}
        self._on_host = {name: HostMemory() for name in names}

    def reserve(self, profiles: Sequence[Profile]) -> None:
        """Have the memory for the largest shapes now, while the model is loaded and what it takes is measured."""
        self._engine.set_device()
        for profile in profiles:
            self._switch(profile)
            for name, (_, _, shape) in profile.ranges.items():
                self._reserve(name, self._engine.inputs[name], shape)
                self._context.set_input_shape(name, shape)
            for name, tensor in self._engine.outputs.items():
                shape = tuple(self._context.get_tensor_shape(name))
                if all(dim >= 0 for dim in shape):
                    self._reserve(name, tensor, shape)

    def _reserve(self, name: str, tensor: EngineTensor, shape: tuple[int, ...]) -> None:
        size = math.prod(shape) * tensor.data_type.itemsize
        self._on_host[name].reserve(size)
        if not tensor.on_host:
            self._on_device[name].reserve(size)

    def execute(self, profiles: Sequence[Profile], inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """One batch: arrays of the host in, arrays of the host out, one an entry of `outputs`."""
        self._engine.set_device()
        try:
            return self._execute(profiles, inputs, outputs)
        except BaseException:  # what was begun still reads and writes this memory
            with contextlib.suppress(MmeError):
                self._stream.wait()
            raise

    def _execute(self, profiles: Sequence[Profile], inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        ranged = {name: array.shape for name, array in inputs.items() if not self._engine.inputs[name].on_host}
        self._switch(select(self._engine.model, profiles, ranged))
        for name, array in inputs.items():
            self._give(name, array)
        with self._engine.failing("shapes that do not go together"):
            lacking = self._context.infer_shapes()
        if lacking:
            raise self._engine.failure(f"input {', '.join(lacking)} is not complete")
        shapes = {name: self._expect(name) for name in self._engine.outputs}
        if not self._context.execute_async_v3(self._stream.number):
            raise self._engine.failure("it did not begin")
        return self._fetch(outputs, shapes)

    def _switch(self, profile: Profile) -> None:
        if profile.index != self._profile:
            with self._engine.failing(f"profile {profile.index}"):
                self._context.set_optimization_profile_async(profile.index, self._stream.number)
            self._stream.wait()
            self._profile = profile.index

    def _give(self, name: str, array: Array) -> None:
        # By way of pinned memory.
        tensor = self._engine.inputs[name]
        host = self._on_host[name]
        address = host.reserve(array.nbytes)
        host.view(array.shape, tensor.data_type.dtype)[...] = array
        if not tensor.on_host:
            address = self._on_device[name].reserve(array.nbytes)
            self._stream.to_device(self._on_device[name], host, array.nbytes)
        if not (self._context.set_input_shape(name, array.shape) and self._context.set_tensor_address(name, address)):
            raise self._engine.failure(f"input '{name}' of shape {list(array.shape)}")

    def _expect(self, name: str) -> tuple[int, ...]:
        tensor, shape = self._engine.outputs[name], tuple(self._context.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise unsupported(
                f"model '{self._engine.model}': the shape of output '{name}' depends on the values of inputs; build "
                "the engine so that it has a largest size, and pads"
            )
        size = math.prod(shape) * tensor.data_type.itemsize
        memory = self._on_host[name] if tensor.on_host else self._on_device[name]
        if not self._context.set_tensor_address(name, memory.reserve(size)):
            raise self._engine.failure(f"output '{name}'")
        return shape

    def _fetch(self, outputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Array]:
        # Copies: the pinned memory is the next execution's.
        for name in outputs:
            tensor = self._engine.outputs[name]
            size = math.prod(shapes[name]) * tensor.data_type.itemsize
            if not tensor.on_host:
                self._on_host[name].reserve(size)
                self._stream.to_host(self._on_host[name], self._on_device[name], size)
        self._stream.wait()
        return [
            np.array(self._on_host[name].view(shapes[name], self._engine.outputs[name].data_type.dtype))
            for name in outputs
        ]

    def close(self) -> None:
        self._engine.set_device()
        self._stream.wait()
        self._context = None
        for memory in (*self._on_device.values(), *self._on_host.values()):
            memory.close()
        self._stream.close()


_STRATEGY = "execution_context_allocation_strategy"
_COMPATIBLE = "version-compatible"  # as the flag of Triton's backend is called


class TensorrtHandler(Handler):
    """One engine on one GPU."""

    backend: ClassVar[str] = "tensorrt"
    default_filename: ClassVar[str] = "model.plan"

    def __init__(self, engine: TensorrtEngine, config: ModelConfig, device: Device) -> None:
        self._profiles = chosen(config, engine.profiles)
        super().__init__(_complete(config, engine, self._profiles))
        self._engine = engine
        self._gpu = device.index
        self._idle: deque[ExecutionContext] = deque()
        try:
            for _ in range(_instances(config, device)):
                self._idle.append(engine.context())
                self._idle[-1].reserve(self._profiles)
        except BaseException:
            self._close_contexts()
            raise

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:  # noqa: ARG003 - of all models
        runtime = Runtime(packages=("tensorrt", "tensorrt-rtx"), gpu_capable=lambda: bool(installed()))
        return Traits(warms=True, memory_only=True, estimate_factor=1.3, runtime=runtime)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Never from the file alone: only the GPU that it was built for can read an engine."""
        raise unsupported(
            f"the engine of model '{config.name}' was built by {read_header(config.name, model_file)} and is read by "
            "the GPU that it was built for"
        )

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str = "") -> TensorrtHandler:  # noqa: ARG003 - shared by lanes
        warn_of_unknown(config, (_STRATEGY, _COMPATIBLE), "TensorRT's engines", "mme.tensorrt")
        strategy = choice(config, _STRATEGY, "STATIC", ("STATIC", "ON_PROFILE_CHANGE"))
        compatible = switch(config, _COMPATIBLE, default=False)
        tensorrt(read_header(config.name, model_file).builder)
        require_driver(config.name)
        if device.kind != "gpu":
            raise unavailable(
                f"model '{config.name}' is an engine of TensorRT, which runs on a GPU, but its instances are to run on "
                "the CPU; give them kind KIND_GPU"
            )
        try:
            engine = TensorrtEngine(config.name, model_file, device.index, compatible=compatible, strategy=strategy)
            try:
                return cls(engine, config, device)
            except BaseException:
                with suppress(MmeError):  # it tells no more than what went wrong before
                    engine.close()
                raise
        except MmeError as error:
            raise lost(error, device.index) from error.__cause__

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            context = self._idle.pop()
        except IndexError:
            context = self._engine.context()
        try:
            return context.execute(self._profiles, inputs, outputs)
        except MmeError as error:
            raise lost(error, self._gpu) from error.__cause__
        finally:
            self._idle.append(context)

    def close(self) -> None:
        self._close_contexts()
        self._engine.close()

    def _close_contexts(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _instances(config: ModelConfig, device: Device) -> int:
    groups = (group for group in config.instance_group if not group.gpus or device.index in group.gpus)
    return sum(group.count for group in groups if group.kind is not InstanceKind.CPU) or 1


def _complete(config: ModelConfig, engine: TensorrtEngine, profiles: Sequence[Profile]) -> ModelConfig:
    # A batch dimension is one of any size; how large is what the profiles say.
    inputs, outputs = (
        [(tensor.name, tensor.data_type, tensor.shape) for tensor in tensors.values()]
        for tensors in (engine.inputs, engine.outputs)
    )
    batches = all(shape[:1] == (-1,) for _, _, shape in (*inputs, *outputs))
    if not batches or not any(profile.ranges for profile in profiles):
        return complete(config, inputs, outputs)
    largest = largest_batch(config, profiles)
    incomplete = not (config.strict or (config.inputs and config.outputs))
    scheduled = config.dynamic_batching is not None or config.sequence_batching is not None
    guess = Guess.UNKNOWN if incomplete and config.max_batch_size == 0 and not scheduled else config.guess
    if incomplete and config.max_batch_size in {0, largest} and not scheduled and largest > 1:
        best = {profile.batch_sizes[0] for profile in profiles}
        config = replace(config, dynamic_batching=DynamicBatching(tuple(sorted({*best, largest}))))
    return replace(complete(config, inputs, outputs, largest), guess=guess)
