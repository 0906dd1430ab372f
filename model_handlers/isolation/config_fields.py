"""A model configuration as plain JSON values, to cross between processes, and back.

PURE. Unlike config.pbtxt this says everything that a `ModelConfig` says and checks nothing: it was checked before.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from model_handlers.config import (
    Accelerator,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    NamedTensor,
    QueuePolicy,
    RepositoryAgent,
    Resource,
    TimeoutAction,
    VersionPolicy,
    WarmupData,
    WarmupInput,
    WarmupSample,
)
from model_handlers.isolation.sequence_fields import sequences_from, tuples
from model_handlers.tensor import BY_NAME, DataType, TensorSpec


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The configuration as dictionaries, lists, strings and numbers."""
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, DataType):
        return value.name
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, MappingProxyType):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def config_from(plain: dict[str, Any]) -> ModelConfig:
    """The configuration that `config_fields` took apart.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it did not.
    """
    batching = plain["dynamic_batching"]
    return ModelConfig(
        **{
            **plain,
            "inputs": tuple(_spec(spec) for spec in plain["inputs"]),
            "outputs": tuple(_spec(spec) for spec in plain["outputs"]),
            "version_policy": VersionPolicy(**tuples(plain["version_policy"])),
            "instance_groups": tuple(_group(group) for group in plain["instance_groups"]),
            "dynamic_batching": None if batching is None else _batching(batching),
            "parameters": MappingProxyType(plain["parameters"]),
            "metric_tags": MappingProxyType(plain["metric_tags"]),
            "ensemble": tuple(_step(step) for step in plain["ensemble"]),
            "batch_inputs": tuple(_batch_input(given) for given in plain["batch_inputs"]),
            "batch_outputs": tuple(BatchOutput(**tuples(given)) for given in plain["batch_outputs"]),
            "warmup": tuple(_sample(sample) for sample in plain["warmup"]),
            "sequence_batching": sequences_from(plain["sequence_batching"]),
            "cc_filenames": MappingProxyType(plain["cc_filenames"]),
            "gpu_accelerators": tuple(_accelerator(each) for each in plain["gpu_accelerators"]),
            "cpu_accelerators": tuple(_accelerator(each) for each in plain["cpu_accelerators"]),
            "histograms": MappingProxyType({name: tuple(buckets) for name, buckets in plain["histograms"].items()}),
            "op_libraries": tuple(plain["op_libraries"]),
            "named_inputs": tuple(NamedTensor(**tuples(named)) for named in plain["named_inputs"]),
            "named_outputs": tuple(NamedTensor(**tuples(named)) for named in plain["named_outputs"]),
            "agents": tuple(_agent(each) for each in plain["agents"]),
        }
    )


def _spec(plain: dict[str, Any]) -> TensorSpec:
    return TensorSpec(**{**tuples(plain), "data_type": BY_NAME[plain["data_type"]]})


def _step(plain: dict[str, Any]) -> EnsembleStep:
    return EnsembleStep(
        **{**plain, "inputs": MappingProxyType(plain["inputs"]), "outputs": MappingProxyType(plain["outputs"])}
    )


def _batch_input(plain: dict[str, Any]) -> BatchInput:
    fields = {"kind": BatchInputKind[plain["kind"]], "data_type": BY_NAME[plain["data_type"]]}
    return BatchInput(**{**tuples(plain), **fields})


def _sample(plain: dict[str, Any]) -> WarmupSample:
    inputs = {
        name: WarmupInput(BY_NAME[given["data_type"]], tuple(given["dims"]), WarmupData[given["data"]], given["file"])
        for name, given in plain["inputs"].items()
    }
    return WarmupSample(**{**plain, "inputs": MappingProxyType(inputs)})


def _accelerator(plain: dict[str, Any]) -> Accelerator:
    return Accelerator(plain["name"], MappingProxyType(plain["parameters"]))


def _agent(plain: dict[str, Any]) -> RepositoryAgent:
    return RepositoryAgent(plain["name"], MappingProxyType(plain["parameters"]))


def _group(plain: dict[str, Any]) -> InstanceGroup:
    resources = tuple(Resource(**needed) for needed in plain["resources"])
    return InstanceGroup(**{**tuples(plain), "kind": InstanceKind[plain["kind"]], "resources": resources})


def _batching(plain: dict[str, Any]) -> DynamicBatching:
    policies = {int(level): _policy(policy) for level, policy in plain["priority_policies"].items()}
    fields = {"queue_policy": _policy(plain["queue_policy"]), "priority_policies": MappingProxyType(policies)}
    return DynamicBatching(**{**tuples(plain), **fields})


def _policy(plain: dict[str, Any]) -> QueuePolicy:
    return QueuePolicy(**{**plain, "timeout_action": TimeoutAction[plain["timeout_action"]]})
