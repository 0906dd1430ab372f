"""`optimization` of config.pbtxt: from the message to values. PURE."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.config import Accelerator

if TYPE_CHECKING:
    from collections.abc import Iterable

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
