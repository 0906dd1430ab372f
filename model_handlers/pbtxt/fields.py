"""What becomes of each field of config.pbtxt: one row a field, and the walk that looks the rows up.

A field that is set is honoured, harmless (logged once, then forgotten) or refused; none is dropped in silence. A row
of a message field that is honoured sends the walk inside; any other row speaks for everything below it. Fields that
are spelled out with their default value (`decoupled: false`) count as not set, as protobuf itself has it.
Knows fields, not their values: `config_checks.py` judges those. Runs on a load thread; holds no state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError, invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

_log = logging.getLogger("mme.config")


class Fate(Enum):
    """What becomes of a field that is set."""

    HONOURED = "honoured"
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the fate, and what the reader of the log line or of the error should know about it."""

    fate: Fate
    reason: str = ""


def _harmless(reason: str) -> Rule:
    return Rule(Fate.HARMLESS, reason)


def _refused(reason: str) -> Rule:
    return Rule(Fate.REFUSED, reason)


_HONOURED = Rule(Fate.HONOURED)
_SPEED = _harmless("it changes speed, never results")
_SHAPES = _refused(
    "shape tensors are only supported for TensorRT platform, and an engine is told a request's own shapes here"
)
_LAYOUTS = _refused("Non-linear IO format is only supported for the TensorRT platform, and tensors lie as numpy's here")

RULES: Mapping[str, Mapping[str, Rule]] = {
    "ModelConfig": {
        "name": _HONOURED,
        "platform": _HONOURED,
        "backend": _HONOURED,
        "runtime": _HONOURED,
        "version_policy": _HONOURED,
        "max_batch_size": _HONOURED,
        "input": _HONOURED,
        "output": _HONOURED,
        "batch_input": _HONOURED,
        "batch_output": _HONOURED,
        "optimization": _HONOURED,
        "dynamic_batching": _HONOURED,
        "sequence_batching": _HONOURED,
        "ensemble_scheduling": _HONOURED,
        "instance_group": _HONOURED,
        "default_model_filename": _HONOURED,
        "cc_model_filenames": _HONOURED,
        "metric_tags": _HONOURED,
        "parameters": _HONOURED,
        "model_warmup": _HONOURED,
        "model_operations": _HONOURED,
        "model_transaction_policy": _HONOURED,
        "model_repository_agents": _HONOURED,
        "response_cache": _HONOURED,
        "model_metrics": _HONOURED,
    },
    "ModelParameter": {"string_value": _HONOURED},
    "ModelInput": {
        "name": _HONOURED,
        "data_type": _HONOURED,
        "format": _HONOURED,
        "dims": _HONOURED,
        "reshape": _HONOURED,
        "is_shape_tensor": _SHAPES,
        "allow_ragged_batch": _HONOURED,
        "optional": _HONOURED,
        "is_non_linear_format_io": _LAYOUTS,
    },
    "ModelOutput": {
        "name": _HONOURED,
        "data_type": _HONOURED,
        "dims": _HONOURED,
        "reshape": _HONOURED,
        "label_filename": _HONOURED,
        "is_shape_tensor": _SHAPES,
        "is_non_linear_format_io": _LAYOUTS,
    },
    "BatchInput": {"kind": _HONOURED, "target_name": _HONOURED, "data_type": _HONOURED, "source_input": _HONOURED},
    "BatchOutput": {"target_name": _HONOURED, "kind": _HONOURED, "source_input": _HONOURED},
    "ModelSequenceBatching": {
        "direct": _HONOURED,
        "oldest": _HONOURED,
        "max_sequence_idle_microseconds": _HONOURED,
        "control_input": _HONOURED,
        "state": _HONOURED,
        "iterative_sequence": _HONOURED,
    },
    "ModelSequenceBatching.Control": {
        "kind": _HONOURED,
        "int32_false_true": _HONOURED,
        "fp32_false_true": _HONOURED,
        "bool_false_true": _HONOURED,
        "data_type": _HONOURED,
    },
    "ModelSequenceBatching.ControlInput": {"name": _HONOURED, "control": _HONOURED},
    "ModelSequenceBatching.InitialState": {
        "data_type": _HONOURED,
        "dims": _HONOURED,
        "zero_data": _HONOURED,
        "data_file": _HONOURED,
        "name": _HONOURED,
    },
    "ModelSequenceBatching.State": {
        "input_name": _HONOURED,
        "output_name": _HONOURED,
        "data_type": _HONOURED,
        "dims": _HONOURED,
        "initial_state": _HONOURED,
        "use_same_buffer_for_input_output": _HONOURED,
        "use_growable_memory": _HONOURED,
    },
    "ModelSequenceBatching.StrategyDirect": {
        "max_queue_delay_microseconds": _HONOURED,
        "minimum_slot_utilization": _HONOURED,
    },
    "ModelSequenceBatching.StrategyOldest": {
        "max_candidate_sequences": _HONOURED,
        "preferred_batch_size": _HONOURED,
        "max_queue_delay_microseconds": _HONOURED,
        "preserve_ordering": _HONOURED,
    },
    "ModelEnsembling": {
        "step": _HONOURED,
        "max_inflight_requests": _HONOURED,
    },
    "ModelEnsembling.Step": {
        "model_name": _HONOURED,
        "model_version": _HONOURED,
        "input_map": _HONOURED,
        "output_map": _HONOURED,
        "model_namespace": _HONOURED,
    },
    "ModelTensorReshape": {"shape": _HONOURED},
    "ModelVersionPolicy": {"latest": _HONOURED, "all": _HONOURED, "specific": _HONOURED},
    "ModelVersionPolicy.Latest": {"num_versions": _HONOURED},
    "ModelVersionPolicy.All": {},
    "ModelVersionPolicy.Specific": {"versions": _HONOURED},
    "ModelOptimizationPolicy": {
        "graph": _HONOURED,
        "priority": _SPEED,
        "cuda": _HONOURED,
        "execution_accelerators": _HONOURED,
        "input_pinned_memory": _SPEED,
        "output_pinned_memory": _SPEED,
        "gather_kernel_buffer_threshold": _SPEED,
        "eager_batching": _SPEED,
    },
    "ModelOptimizationPolicy.Graph": {"level": _HONOURED},
    "ModelOptimizationPolicy.Cuda": {
        "graphs": _SPEED,
        "busy_wait_events": _SPEED,
        "graph_spec": _SPEED,
        "output_copy_stream": _SPEED,
    },
    "ModelOptimizationPolicy.ExecutionAccelerators": {
        "gpu_execution_accelerator": _HONOURED,
        "cpu_execution_accelerator": _HONOURED,
    },
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": {"name": _HONOURED, "parameters": _HONOURED},
    "ModelDynamicBatching": {
        "preferred_batch_size": _HONOURED,
        "max_queue_delay_microseconds": _HONOURED,
        "preserve_ordering": _HONOURED,
        "priority_levels": _HONOURED,
        "default_priority_level": _HONOURED,
        "default_queue_policy": _HONOURED,
        "priority_queue_policy": _HONOURED,
    },
    "ModelQueuePolicy": {
        "timeout_action": _HONOURED,
        "default_timeout_microseconds": _HONOURED,
        "allow_timeout_override": _HONOURED,
        "max_queue_size": _HONOURED,
    },
    "ModelInstanceGroup": {
        "name": _HONOURED,
        "kind": _HONOURED,
        "count": _HONOURED,
        "rate_limiter": _HONOURED,
        "gpus": _HONOURED,
        "secondary_devices": _refused("instances run on CPUs and GPUs alone"),
        "profile": _HONOURED,
        "passive": _refused("every instance takes requests"),
        "host_policy": _harmless("threads and memory are the operating system's to place"),
    },
    "ModelRateLimiter": {"resources": _HONOURED, "priority": _HONOURED},
    "ModelRateLimiter.Resource": {"name": _HONOURED, "global": _HONOURED, "count": _HONOURED},
    "ModelWarmup": {"name": _HONOURED, "batch_size": _HONOURED, "count": _HONOURED, "inputs": _HONOURED},
    "ModelWarmup.Input": {
        "data_type": _HONOURED,
        "dims": _HONOURED,
        "zero_data": _HONOURED,
        "random_data": _HONOURED,
        "input_data_file": _HONOURED,
    },
    "ModelOperations": {"op_library_filename": _HONOURED},
    "ModelTransactionPolicy": {"decoupled": _HONOURED},
    "ModelRepositoryAgents": {"agents": _HONOURED},
    "ModelRepositoryAgents.Agent": {"name": _HONOURED, "parameters": _HONOURED},
    "ModelResponseCache": {"enable": _HONOURED},
    "ModelMetrics": {"metric_control": _HONOURED},
    "ModelMetrics.MetricControl": {"metric_identifier": _HONOURED, "histogram_options": _HONOURED},
    "ModelMetrics.MetricControl.MetricIdentifier": {"family": _HONOURED},
    "ModelMetrics.MetricControl.HistogramOptions": {"buckets": _HONOURED},
}


def check_fields(message: Message, model: str) -> None:
    """Refuse or log every field of a ModelConfig message that is set and not honoured.

    Raises:
        MmeError: UNSUPPORTED for a refused field, INVALID_MODEL for a number that its enum does not name; the
            sentence holds the field's full path.
    """
    logged = set()
    for path, field, value, rule in set_fields(message):
        error = field_error(path, field, value, rule, model)
        if error is not None:
            raise error
        if rule.fate is Fate.HARMLESS and field.full_name not in logged:
            logged.add(field.full_name)
            _log.warning("model '%s': config.pbtxt field '%s' is ignored: %s", model, path, rule.reason)


def field_error(path: str, field: FieldDescriptor, value: Any, rule: Rule, model: str) -> MmeError | None:
    """What is wrong with a field that is set, whatever the rest of the configuration says."""
    if rule.fate is Fate.REFUSED:
        return refusal(path, rule.reason, model)
    # A number in the text need not be one that the enum names.
    if field.enum_type is not None and value not in field.enum_type.values_by_number:
        names = ", ".join(field.enum_type.values_by_name)
        return invalid_model(f"model '{model}': config.pbtxt field '{path}' is {value}, must be one of {names}")
    return None


def refusal(path: str, reason: str, model: str) -> MmeError:
    """The error that refuses a field or its value."""
    return MmeError(
        Kind.UNSUPPORTED,
        f"model '{model}': config.pbtxt field '{path}' is not honoured ({reason}); "
        "remove it or serve the model elsewhere",
    )


def set_fields(message: Message, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor, Any, Rule]]:
    """Path, descriptor, value and row of each set field, depth first, as far as the rows lead inside."""
    rules = RULES[message.DESCRIPTOR.full_name.removeprefix("mme.")]
    for field, value in message.ListFields():
        path, rule = prefix + field.name, rules[field.name]
        yield path, field, value, rule
        if rule.fate is Fate.HONOURED:
            for member_path, member in _members(field, value, path):
                yield from set_fields(member, f"{member_path}.")


def _members(field: FieldDescriptor, value: Any, path: str) -> Iterable[tuple[str, Message]]:
    """The messages inside a field: none in a scalar, one, those of a list, or the values of a map."""
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        is_message = field.message_type.fields_by_name["value"].message_type is not None
        return [(f"{path}['{key}']", value[key]) for key in sorted(value)] if is_message else ()
    if field.is_repeated:
        return [(f"{path}[{index}]", member) for index, member in enumerate(value)]
    return [(path, value)]
