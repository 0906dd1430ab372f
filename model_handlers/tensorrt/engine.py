"""One engine on one device: its weights, what it takes and gives, and contexts in which it is executed.

The weights are held once. A context has what one execution at a time needs: a stream of its own, memory on the device,
and pinned memory on the host, so that the copies of one execution overlap with the computing of another.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory
from model_handlers.tensor import BY_NAME, DataType
from model_handlers.tensorrt import cuda
from model_handlers.tensorrt.profiles import Profile, read_header, select
from model_handlers.tensorrt.runtime import last_words, make_logger, tensorrt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from model_handlers.tensor import Array
    from model_handlers.tensorrt.profiles import PlanHeader

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
    """An input or output.

    Attributes:
        name, data_type: its own; shape: with -1 for dimensions of any size.
        on_host: whether the engine reads or writes it in the host's memory, as it does with shapes.
    """

    name: str
    data_type: DataType
    shape: tuple[int, ...]
    on_host: bool


class Engine:
    """A plan, read and on its device.

    Args:
        model: for messages.
        path: the plan.
        device: CUDA's number of the device; the calling thread's from now on.
        compatible: whether the plan may bring code for the host, as those do that fit several versions.
        strategy: when contexts take their memory, by TensorRT's name.
    """

    def __init__(self, model: str, path: Path, device: int, *, compatible: bool = False, strategy: str = "") -> None:
        header = read_header(model, path)
        self.model = model
        self._framework = framework = tensorrt(header.builder)
        self._device = device
        cuda.set_device(device)
        self._logger = make_logger(framework)
        try:
            self._runtime = framework.Runtime(self._logger)
        except TypeError as error:  # of the bindings, since there is none
            words = last_words(self._logger.said)
            sentence = f"model '{model}' was to run on gpu:{device}, but {header.builder} can't begin there ({words})"
            raise MmeError(Kind.UNAVAILABLE, f"{sentence}; check that the driver fits it") from error
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
        """Why TensorRT did not take the plan: it says so to its logger only, and want of memory is not told apart."""
        words = last_words(self._logger.said)
        if cuda.free_memory() < size:
            return out_of_memory(f"the GPU has no memory left for the engine of model '{self.model}': {words}")
        ours = f"{header.builder} {self._framework.__version__}"
        return invalid_model(
            f"model '{self.model}': its engine was built by {header}, and {ours} can't run it on this GPU ({words}); "
            "build it anew with this version on this kind of GPU: mme build-engine model.onnx"
        )

    def _tensor(self, name: str) -> EngineTensor:
        type_name = self._engine.get_tensor_dtype(name).name
        if type_name not in _TYPES:
            raise MmeError(
                Kind.UNSUPPORTED,
                f"model '{self.model}': tensor '{name}' has TensorRT's type {type_name}, which can't be sent over the "
                "protocol; build the engine with inputs and outputs of another type",
            )
        on_host = self._engine.get_tensor_location(name) == self._framework.TensorLocation.HOST
        return EngineTensor(name, BY_NAME[_TYPES[type_name]], tuple(self._engine.get_tensor_shape(name)), on_host)

    def _profile(self, index: int) -> Profile:
        """Of tensors whose values are shapes no ranges are checked here: TensorRT does it."""
        ranges = {}
        for name, tensor in self.inputs.items():
            if not tensor.on_host:
                low, best, high = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, index))
                ranges[name] = (low, best, high)
        return Profile(index, ranges)

    def context(self) -> Context:
        """A new one.

        Raises:
            MmeError: OUT_OF_MEMORY where there is no room for what it needs.
        """
        cuda.set_device(self._device)
        made = self._engine.create_execution_context(self._strategy)
        if made is None:
            raise out_of_memory(
                f"model '{self.model}': the GPU has no memory left for another execution: "
                f"{last_words(self._logger.said)}"
            )
        return Context(self, made)

    def set_device(self) -> None:
        """The calling thread's calls go where the engine is."""
        cuda.set_device(self._device)

    def failure(self, what: str) -> MmeError:
        """TensorRT refused something while it executed."""
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
        """Give the device's memory back; its contexts are closed already."""
        cuda.set_device(self._device)
        self._engine = None
        self._runtime = None


class Context:
    """What one execution at a time needs. One thread at a time uses it."""

    def __init__(self, engine: Engine, context: Any) -> None:
        self._engine = engine
        self._context = context
        self._profile = -1
        self._stream = cuda.Stream()
        names = (*engine.inputs, *engine.outputs)
        self._on_device = {name: cuda.DeviceMemory() for name in names}
        self._on_host = {name: cuda.HostMemory() for name in names}

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
        """One batch: arrays of the host in, arrays of the host out, one an entry of `outputs`.

        Raises:
            MmeError: INVALID_ARGUMENT for shapes that no profile takes, OUT_OF_MEMORY, EXECUTION_FAILED.
        """
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
        """Put an input where the engine finds it, by way of pinned memory."""
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
        """Memory for an output, whose shape follows from the inputs'."""
        tensor, shape = self._engine.outputs[name], tuple(self._context.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise MmeError(
                Kind.UNSUPPORTED,
                f"model '{self._engine.model}': the shape of output '{name}' depends on the values of inputs; build "
                "the engine so that it has a largest size, and pads",
            )
        size = math.prod(shape) * tensor.data_type.itemsize
        memory = self._on_host[name] if tensor.on_host else self._on_device[name]
        if not self._context.set_tensor_address(name, memory.reserve(size)):
            raise self._engine.failure(f"output '{name}'")
        return shape

    def _fetch(self, outputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Array]:
        """Copies of the outputs that are wanted: the pinned memory is the next execution's."""
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
        """Give its memory back."""
        self._engine.set_device()
        self._stream.wait()
        self._context = None
        for memory in (*self._on_device.values(), *self._on_host.values()):
            memory.close()
        self._stream.close()
