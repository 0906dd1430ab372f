"""The published message ModelConfig → a `ModelConfig`. Translates alone: see `pbtxt` for its text.

PURE, but for a line in the log.
"""

from __future__ import annotations

import json
import logging
from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf import json_format

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
from model_handlers.config_json import OPTIMIZATION
from model_handlers.errors import invalid_model
from model_handlers.pbtxt.sequences import sequence_batching
from model_handlers.proto import model_config_pb2 as pb
from model_handlers.tensor import BY_NUMBER, FP32, INT32, DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_log = logging.getLogger("mme.config")
_WARMUP_DATA = {
    "zero_data": WarmupData.ZERO,
    "random_data": WarmupData.RANDOM,
    "input_data_file": WarmupData.FILE,
}


def translated(message: pb.ModelConfig, model: str) -> ModelConfig:
    """The message as a configuration, whose rules nobody has looked at yet.

    Raises:
        MmeError: INVALID_MODEL for what a configuration has no place for.
    """
    accelerators = message.optimization.execution_accelerators
    return ModelConfig(
        name=model,
        backend=message.backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input(tensor, model) for tensor in message.input if not is_named_only(tensor, message)),
        outputs=tuple(_output(tensor, model) for tensor in message.output if not is_named_only(tensor, message)),
        named_inputs=_named(message.input, message),
        named_outputs=_named(message.output, message),
        version_policy=_version_policy(message, model),
        instance_group=tuple(_instance_group(group) for group in message.instance_group),
        dynamic_batching=_dynamic_batching(message, model),
        default_model_filename=message.default_model_filename,
        optimization_level=message.optimization.graph.level,
        parameters=MappingProxyType({key: value.string_value for key, value in message.parameters.items()}),
        metric_tags=MappingProxyType(dict(message.metric_tags)),
        decoupled=message.model_transaction_policy.decoupled,
        not_decoupled=_says_not_decoupled(message),
        ensemble=tuple(_step(step) for step in message.ensemble_scheduling.step),
        max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
        batch_input=tuple(map(_batch_input, message.batch_input)),
        batch_output=tuple(
            BatchOutput(tuple(given.target_name), tuple(given.source_input)) for given in message.batch_output
        ),
        model_warmup=_warmup_samples(message, model),
        response_cache=message.response_cache.enable,
        runtime=message.runtime,
        histograms=MappingProxyType(dict(_histogram(control) for control in message.model_metrics.metric_control)),
        op_libraries=tuple(message.model_operations.op_library_filename),
        agents=tuple(
            RepositoryAgent(agent.name, MappingProxyType(dict(agent.parameters)))
            for agent in message.model_repository_agents.agents
        ),
        sequence_batching=sequence_batching(message, model),
        cc_model_filenames=MappingProxyType(dict(message.cc_model_filenames)),
        gpu_accelerators=_accelerators(accelerators.gpu_execution_accelerator),
        cpu_accelerators=_accelerators(accelerators.cpu_execution_accelerator),
        optimization=MappingProxyType(_told(message.optimization)),
    )


def _told(optimization: pb.ModelOptimizationPolicy) -> dict[str, str]:
    """What of it changes nothing here, and is no default."""
    document = json_format.MessageToDict(
        optimization, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    unused = {name: value for name, value in document.items() if name == "cuda" or name in OPTIMIZATION}
    return {name: json.dumps(value) for name, value in unused.items() if value != OPTIMIZATION.get(name)}


def _says_not_decoupled(message: pb.ModelConfig) -> bool:
    return message.HasField("model_transaction_policy") and not message.model_transaction_policy.decoupled


def is_named_only(tensor: pb.ModelInput | pb.ModelOutput, message: pb.ModelConfig) -> bool:
    """Whether a tensor lacks its type or its dims, which a Python model may give it in `auto_complete_config`.

    Where the text names no backend the model's file tells later whether it is one.
    """
    whole = tensor.data_type in BY_NUMBER and tensor.dims
    may_be_python = message.backend == "python" or not (message.backend or message.platform)
    return may_be_python and bool(tensor.name) and not whole


def _named(tensors: Sequence[pb.ModelInput | pb.ModelOutput], message: pb.ModelConfig) -> tuple[NamedTensor, ...]:
    return tuple(
        NamedTensor(
            tensor.name,
            place,
            pb.DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            isinstance(tensor, pb.ModelInput) and tensor.optional,
        )
        for place, tensor in enumerate(tensors)
        if is_named_only(tensor, message)
    )


def _input(tensor: pb.ModelInput, model: str) -> TensorSpec:
    return TensorSpec(
        name=_name(tensor, "input", model),
        data_type=_data_type(tensor, "input", model),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        optional=tensor.optional,
        allow_ragged_batch=tensor.allow_ragged_batch,
        format=pb.ModelInput.Format.Name(tensor.format),
    )


def _output(tensor: pb.ModelOutput, model: str) -> TensorSpec:
    return TensorSpec(
        name=_name(tensor, "output", model),
        data_type=_data_type(tensor, "output", model),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        label_filename=tensor.label_filename,
    )


def _name(tensor: pb.ModelInput | pb.ModelOutput, what: str, model: str) -> str:
    if not tensor.name:
        raise invalid_model(f"model {what} must specify 'name' for {model}")
    return tensor.name


def _data_type(tensor: pb.ModelInput | pb.ModelOutput, what: str, model: str) -> DataType:
    if tensor.data_type not in BY_NUMBER:
        raise invalid_model(f"model {what} '{tensor.name}' must specify 'data_type' for {model}")
    return BY_NUMBER[tensor.data_type]


def _reshape(tensor: pb.ModelInput | pb.ModelOutput) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None


def _version_policy(message: pb.ModelConfig, model: str) -> VersionPolicy:
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "latest":
            return VersionPolicy(latest=policy.latest.num_versions)
        case "all":
            return VersionPolicy(all=True)
        case "specific":
            if not policy.specific.versions:
                raise invalid_model(
                    f"at least one version must be available under the version policy of model '{model}': "
                    "name one in 'version_policy.specific.versions'"
                )
            return VersionPolicy(specific=tuple(policy.specific.versions))
        case _:
            return VersionPolicy()


def _instance_group(group: pb.ModelInstanceGroup) -> InstanceGroup:
    # 0 is how the message says that no count is given; a negative one is left for the checks to refuse.
    limiter = group.rate_limiter
    resources = tuple(Resource(needed.name, needed.count, getattr(needed, "global")) for needed in limiter.resources)
    return InstanceGroup(
        group.name,
        InstanceKind(group.kind),
        group.count or 1,
        tuple(group.gpus),
        resources,
        limiter.priority or 1,
        tuple(group.profile),
        group.host_policy,
    )


def _histogram(control: pb.ModelMetrics.MetricControl) -> tuple[str, tuple[float, ...]]:
    for field in ("metric_identifier", "histogram_options"):
        if not control.HasField(field):
            raise invalid_model(f"metric control must specify '{field}'")
    return control.metric_identifier.family, tuple(control.histogram_options.buckets)


def _step(step: pb.ModelEnsembling.Step) -> EnsembleStep:
    return EnsembleStep(
        step.model_name,
        step.model_version or -1,  # 0 is what the message has where no version is given
        MappingProxyType(dict(step.input_map)),
        MappingProxyType(dict(step.output_map)),
        step.model_namespace,
    )


def _dynamic_batching(message: pb.ModelConfig, model: str) -> DynamicBatching | None:
    if not message.HasField("dynamic_batching"):
        return None
    batching = message.dynamic_batching
    if not batching.priority_levels and (batching.priority_queue_policy or batching.default_priority_level):
        _log.warning("model '%s': priorities change nothing, since dynamic_batching.priority_levels is 0", model)
    policies = {int(level): _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()}
    return DynamicBatching(
        preferred_batch_size=tuple(batching.preferred_batch_size),
        max_queue_delay_microseconds=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        priority_queue_policy=MappingProxyType(policies),
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(policy.timeout_action),
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _batch_input(given: pb.BatchInput) -> BatchInput:
    data_type = BY_NUMBER.get(given.data_type)
    if data_type not in (INT32, FP32):
        raise invalid_model("batch input data type must be TYPE_INT32 or TYPE_FP32")
    return BatchInput(BatchInputKind(given.kind), tuple(given.target_name), data_type, tuple(given.source_input))


def _warmup_samples(message: pb.ModelConfig, model: str) -> tuple[WarmupSample, ...]:
    return tuple(
        WarmupSample(
            sample.name,
            sample.batch_size,
            sample.count or 1,  # 0 is how the message says that none is given
            MappingProxyType({name: _warmup_input(name, sample.inputs[name], model) for name in sorted(sample.inputs)}),
        )
        for sample in message.model_warmup
    )


def _warmup_input(name: str, given: pb.ModelWarmup.Input, model: str) -> WarmupInput:
    chosen = given.WhichOneof("input_data_type")
    if chosen is None:
        raise invalid_model(f"warmup setting expects input '{name}' to have input_data_type set for {model}")
    if given.data_type not in BY_NUMBER:
        raise invalid_model(f"warmup setting expects input '{name}' to have data_type set for {model}")
    return WarmupInput(BY_NUMBER[given.data_type], tuple(given.dims), _WARMUP_DATA[chosen], given.input_data_file)


def _accelerators(
    messages: Iterable[pb.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator],
) -> tuple[Accelerator, ...]:
    return tuple(Accelerator(each.name, MappingProxyType(dict(each.parameters))) for each in messages)
