"""Engines of TensorRT: one engine on a device for all of its instances, a context for each execution under way.

Never executed on the event loop: an execution has its thread wait for the device.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Handler, Runtime, Traits
from model_handlers.config.autocomplete import complete
from model_handlers.config.model_config import DynamicBatching, Guess, InstanceKind, choice, switch, warn_of_unknown
from model_handlers.errors import MmeError, unavailable, unsupported
from model_handlers.system.devices import lost
from model_handlers.tensorrt.engine import (
    Engine,
    chosen,
    installed,
    largest_batch,
    read_header,
    require_driver,
    tensorrt,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.base import Device
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array
    from model_handlers.tensorrt.engine import Context, Profile

_STRATEGY = "execution_context_allocation_strategy"
_COMPATIBLE = "version-compatible"  # as the flag of Triton's backend is called


class TensorrtHandler(Handler):
    """One engine on one GPU."""

    backend: ClassVar[str] = "tensorrt"
    default_filename: ClassVar[str] = "model.plan"

    def __init__(self, engine: Engine, config: ModelConfig, device: Device) -> None:
        self._profiles = chosen(config, engine.profiles)
        super().__init__(_complete(config, engine, self._profiles))
        self._engine = engine
        self._gpu = device.index
        self._idle: deque[Context] = deque()
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
        """Read the plan; parameters are named as Triton's TensorRT backend names them."""
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
            engine = Engine(config.name, model_file, device.index, compatible=compatible, strategy=strategy)
            try:
                return cls(engine, config, device)
            except BaseException:
                with suppress(MmeError):  # it tells no more than what went wrong before
                    engine.close()
                raise
        except MmeError as error:
            raise lost(error, device.index) from error.__cause__

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch, in a context that nothing else uses."""
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


def _complete(config: ModelConfig, engine: Engine, profiles: Sequence[Profile]) -> ModelConfig:
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
