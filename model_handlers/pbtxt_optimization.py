"""`optimization` of config.pbtxt: from the message to values, and back. PURE."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.config import Accelerator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_handlers.config import ModelConfig
    from model_handlers.proto import model_config_pb2 as pb


def gpu_accelerators(message: pb.ModelConfig) -> tuple[Accelerator, ...]:
    """What instances on GPUs execute by."""
    return _accelerators(message.optimization.execution_accelerators.gpu_execution_accelerator)


def cpu_accelerators(message: pb.ModelConfig) -> tuple[Accelerator, ...]:
    """What instances on the CPU execute by."""
    return _accelerators(message.optimization.execution_accelerators.cpu_execution_accelerator)


def _accelerators(
    messages: Iterable[pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator],
) -> tuple[Accelerator, ...]:
    return tuple(Accelerator(each.name, MappingProxyType(dict(each.parameters))) for each in messages)


def set_optimization(message: pb.ModelConfig, config: ModelConfig) -> None:
    """Say it in the message, where there is anything to be said."""
    if config.optimization_level:
        message.optimization.graph.level = config.optimization_level
    for each in config.gpu_accelerators:
        message.optimization.execution_accelerators.gpu_execution_accelerator.add(
            name=each.name, parameters=each.parameters
        )
    for each in config.cpu_accelerators:
        message.optimization.execution_accelerators.cpu_execution_accelerator.add(
            name=each.name, parameters=each.parameters
        )
