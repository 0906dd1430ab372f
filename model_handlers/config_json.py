"""A `ModelConfig` as the JSON of the published message: what clients ask for, and what a Python model is told.

PURE, and without protobuf: a model's own environment need not have it. The shape is that of protobuf's JSON with every
default in it, but for integers of 64 bits, which are numbers here, and for what Triton adds: `optimization` to any
model but an ensemble, `model_transaction_policy` to an ensemble. The tests compare the two.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from model_handlers.config import QueuePolicy, WarmupData
from model_handlers.sequence_json import sequence_json

if TYPE_CHECKING:
    from model_handlers.config import (
        Accelerator,
        BatchInput,
        BatchOutput,
        DynamicBatching,
        InstanceGroup,
        ModelConfig,
        RepositoryAgent,
        VersionPolicy,
        WarmupInput,
        WarmupSample,
    )
    from model_handlers.tensor import TensorSpec

    Json = dict[str, Any]

OPTIMIZATION: Json = {  # where config.pbtxt says nothing of it
    "priority": "PRIORITY_DEFAULT",
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
}


def config_json(config: ModelConfig, *, filled_in: bool = True) -> Json:
    """The configuration as `GET /v2/models/M/config` answers it; not `filled_in`, without what Triton adds.

    Field names are the message's; every scalar, list and map is there, with its default if it was not set; messages
    only where set; enums by name.
    """
    return {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "runtime": config.runtime,
        "version_policy": _version_policy(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [_input(spec) for spec in config.inputs],
        "output": [_output(spec) for spec in config.outputs],
        "batch_input": [_batch_input(given) for given in config.batch_input],
        "batch_output": [_batch_output(given) for given in config.batch_output],
        **_optimization(config, filled_in=filled_in),
        **_dynamic_batching(config.dynamic_batching),
        **sequence_json(config.sequence_batching),
        **_ensemble(config),
        "instance_group": [_instance_group(group) for group in config.instance_group],
        "default_model_filename": config.default_model_filename,
        "cc_model_filenames": dict(config.cc_model_filenames),
        "metric_tags": dict(config.metric_tags),
        "parameters": {key: {"string_value": value} for key, value in config.parameters.items()},
        "model_warmup": [_warmup(sample) for sample in config.model_warmup],
        **({"model_operations": {"op_library_filename": list(config.op_libraries)}} if config.op_libraries else {}),
        **_transaction_policy(config, filled_in=filled_in),
        **({"response_cache": {"enable": True}} if config.response_cache else {}),
        **_agents(config.agents),
        **_histograms(config),
    }


def _agents(agents: tuple[RepositoryAgent, ...]) -> Json:
    if not agents:
        return {}
    listed = [{"name": agent.name, "parameters": dict(agent.parameters)} for agent in agents]
    return {"model_repository_agents": {"agents": listed}}


def _histograms(config: ModelConfig) -> Json:
    if not config.histograms:
        return {}
    controls = [
        {"metric_identifier": {"family": family}, "histogram_options": {"buckets": list(buckets)}}
        for family, buckets in config.histograms.items()
    ]
    return {"model_metrics": {"metric_control": controls}}


def _version_policy(policy: VersionPolicy) -> Json:
    if policy.all:
        return {"all": {}}
    if policy.specific:
        return {"specific": {"versions": list(policy.specific)}}
    return {"latest": {"num_versions": policy.latest}}


def _input(spec: TensorSpec) -> Json:
    return {
        "name": spec.name,
        "data_type": spec.data_type.config_name,
        "format": spec.format,
        "dims": list(spec.dims),
        **_reshape(spec),
        "is_shape_tensor": False,
        "allow_ragged_batch": spec.allow_ragged_batch,
        "optional": spec.optional,
        "is_non_linear_format_io": False,
    }


def _output(spec: TensorSpec) -> Json:
    return {
        "name": spec.name,
        "data_type": spec.data_type.config_name,
        "dims": list(spec.dims),
        **_reshape(spec),
        "label_filename": spec.label_filename,
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }


def _reshape(spec: TensorSpec) -> Json:
    return {} if spec.reshape is None else {"reshape": {"shape": list(spec.reshape)}}


def _optimization(config: ModelConfig, *, filled_in: bool) -> Json:
    """Filled in: with defaults for what changes nothing here, where nothing is said of it."""
    if config.ensemble and filled_in:
        return {}
    accelerators = {
        "gpu_execution_accelerator": [_accelerator(each) for each in config.gpu_accelerators],
        "cpu_execution_accelerator": [_accelerator(each) for each in config.cpu_accelerators],
    }
    told = {name: json.loads(value) for name, value in config.optimization.items()}
    found = {**OPTIMIZATION, **told} if filled_in else told
    if config.optimization_level:
        found["graph"] = {"level": config.optimization_level}
    if any(accelerators.values()):
        found["execution_accelerators"] = accelerators
    return {"optimization": found} if found else {}


def _accelerator(accelerator: Accelerator) -> Json:
    return {"name": accelerator.name, "parameters": dict(accelerator.parameters)}


def _dynamic_batching(batching: DynamicBatching | None) -> Json:
    if batching is None:
        return {}
    policy = batching.default_queue_policy
    return {
        "dynamic_batching": {
            "preferred_batch_size": list(batching.preferred_batch_size),
            "max_queue_delay_microseconds": batching.max_queue_delay_microseconds,
            "preserve_ordering": batching.preserve_ordering,
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_priority_level,
            **({} if policy == QueuePolicy() else {"default_queue_policy": _queue_policy(policy)}),
            "priority_queue_policy": {
                str(level): _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()
            },
        }
    }


def _ensemble(config: ModelConfig) -> Json:
    if not config.ensemble:
        return {}
    return {
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": step.model_name,
                    "model_version": step.model_version,
                    "input_map": dict(step.input_map),
                    "output_map": dict(step.output_map),
                    "model_namespace": step.model_namespace,
                }
                for step in config.ensemble
            ],
            "max_inflight_requests": config.max_inflight_requests,
        }
    }


def _queue_policy(policy: QueuePolicy) -> Json:
    return {
        "timeout_action": policy.timeout_action.name,
        "default_timeout_microseconds": policy.default_timeout_microseconds,
        "allow_timeout_override": policy.allow_timeout_override,
        "max_queue_size": policy.max_queue_size,
    }


def _instance_group(group: InstanceGroup) -> Json:
    return {
        "name": group.name,
        "kind": f"KIND_{group.kind.name}",
        "count": group.count,
        "gpus": list(group.gpus),
        **_rate_limiter(group),
        "secondary_devices": [],
        "profile": list(group.profile),
        "passive": False,
        "host_policy": group.host_policy,
    }


def _rate_limiter(group: InstanceGroup) -> Json:
    if not group.resources and group.priority == 1:
        return {}
    resources = [{"name": needed.name, "global": needed.is_global, "count": needed.count} for needed in group.resources]
    return {"rate_limiter": {"resources": resources, "priority": group.priority}}


def _batch_input(given: BatchInput) -> Json:
    return {
        "kind": f"BATCH_{given.kind.name}",
        "target_name": list(given.target_name),
        "data_type": given.data_type.config_name,
        "source_input": list(given.source_input),
    }


def _batch_output(given: BatchOutput) -> Json:
    return {
        "target_name": list(given.target_name),
        "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
        "source_input": list(given.source_input),
    }


def _warmup(sample: WarmupSample) -> Json:
    return {
        "name": sample.name,
        "batch_size": sample.batch_size,
        "inputs": {name: _warmup_input(given) for name, given in sample.inputs.items()},
        "count": sample.count,
    }


def _warmup_input(given: WarmupInput) -> Json:
    data: dict[WarmupData, Json] = {
        WarmupData.ZERO: {"zero_data": True},
        WarmupData.RANDOM: {"random_data": True},
        WarmupData.FILE: {"input_data_file": given.file},
    }
    return {"data_type": given.data_type.config_name, "dims": list(given.dims), **data[given.data]}


def _transaction_policy(config: ModelConfig, *, filled_in: bool) -> Json:
    if not (config.decoupled or config.not_decoupled or (config.ensemble and filled_in)):
        return {}
    return {"model_transaction_policy": {"decoupled": config.decoupled}}
