"""The largest value of every integer, and the most entries of every list, of a model's configuration. PURE.

`BOUNDS` has a row for each integer and each repeated field of the published message. `excesses` walks a message once
and tells what lies beyond its row: a list that is too long before anything looks at its entries. It runs before a
configuration is made of the message, since a number may stand for as much memory as it says. Lower bounds are rules of
`config_checks`, in Triton's words; so are limits that depend on another field.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from model_handlers.errors import MmeError, invalid_model
from model_handlers.tensor import MAX_DIMS, MAX_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.message import Message


MAX_CONFIG_SIZE = 1 << 20  # bytes of a config.pbtxt, or of the JSON of an override
MAX_INSTANCES = 1024  # of a model on all devices together
MAX_ITEMS = 4096  # inputs, outputs or parameters, of a model or a request
INT32_MAX = 2**31 - 1
_SHOWN_KEY = 100  # characters of a map's key in a sentence


class Bound(NamedTuple):
    """What a field may hold."""

    most: int | None  # the largest value of an integer, None where any is harmless or where the field is none
    entries: int | None  # how many a repeated field may have, None where it is not repeated
    reason: str  # why so many, or why any value is harmless


_COMPARED = "any value is harmless: it is compared with what is there, and nothing is made of that size"
_LOOKED_UP = "any value is harmless: it is looked up among what there is"
_SHOWN = "any value is harmless: clients are shown it, and it changes nothing"
_REFUSED = "any value is refused with its field"
_ELEMENT = "any value is harmless: it is one element of a tensor"
_DIMENSION = "a request's tensor has no more elements, nor dimensions"
_NAMES = "each is one name in a table"
_LIBRARIES = "each is opened when the model is loaded"


def _value(most: int | None, reason: str) -> Bound:
    return Bound(most, None, reason)


def _list(entries: int, reason: str) -> Bound:
    return Bound(None, entries, reason)


_DIMS = Bound(MAX_ELEMENTS, MAX_DIMS, _DIMENSION)

# By message and field, as the published message calls them.
BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "ModelConfig.max_batch_size": _value(INT32_MAX, _COMPARED),
        "ModelConfig.input": _list(MAX_ITEMS, "as many as a request may have"),
        "ModelConfig.output": _list(MAX_ITEMS, "as many as a request may have"),
        "ModelConfig.batch_input": _list(256, "each is computed for every batch"),
        "ModelConfig.batch_output": _list(256, "each is split for every batch"),
        "ModelConfig.instance_group": _list(MAX_INSTANCES, "each has an instance or more"),
        "ModelConfig.cc_model_filenames": _list(64, _NAMES),
        "ModelConfig.metric_tags": _list(64, "each is a label of all of the model's metrics"),
        "ModelConfig.parameters": _list(MAX_ITEMS, _NAMES),
        "ModelConfig.model_warmup": _list(256, "each is executed on every instance"),
        "ModelRateLimiter.Resource.count": _value(None, _COMPARED),
        "ModelRateLimiter.resources": _list(64, "each is looked at for every execution"),
        "ModelRateLimiter.priority": _value(None, "any value is harmless: it is a weight"),
        "ModelInstanceGroup.count": _value(MAX_INSTANCES, "each is a thread while it executes, or a process"),
        "ModelInstanceGroup.gpus": Bound(None, 64, f"{_LOOKED_UP}; each has instances of its own"),
        "ModelInstanceGroup.secondary_devices": _list(64, _REFUSED),
        "ModelInstanceGroup.SecondaryDevice.device_id": _value(None, _REFUSED),
        "ModelInstanceGroup.profile": _list(64, "each is a context of the engine"),
        "ModelTensorReshape.shape": _DIMS,
        "ModelInput.dims": _DIMS,
        "ModelOutput.dims": _DIMS,
        "BatchInput.target_name": _list(256, "each is computed for every batch"),
        "BatchInput.source_input": _list(256, "each is looked at for every batch"),
        "BatchOutput.target_name": _list(256, "each is split for every batch"),
        "BatchOutput.source_input": _list(256, "each is looked at for every batch"),
        "ModelVersionPolicy.Latest.num_versions": _value(None, _COMPARED),
        "ModelVersionPolicy.Specific.versions": Bound(None, 1024, f"{_LOOKED_UP}; each that is not there is logged"),
        "ModelOptimizationPolicy.Graph.level": _value(None, _LOOKED_UP),
        "ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim": Bound(None, MAX_DIMS, _SHOWN),
        "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound.batch_size": _value(None, _SHOWN),
        "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound.input": _list(MAX_ITEMS, _SHOWN),
        "ModelOptimizationPolicy.Cuda.GraphSpec.batch_size": _value(None, _SHOWN),
        "ModelOptimizationPolicy.Cuda.GraphSpec.input": _list(MAX_ITEMS, _SHOWN),
        "ModelOptimizationPolicy.Cuda.graph_spec": _list(1024, _SHOWN),
        "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator.parameters": _list(1024, _NAMES),
        "ModelOptimizationPolicy.ExecutionAccelerators.gpu_execution_accelerator": _list(16, _LIBRARIES),
        "ModelOptimizationPolicy.ExecutionAccelerators.cpu_execution_accelerator": _list(16, _LIBRARIES),
        "ModelOptimizationPolicy.gather_kernel_buffer_threshold": _value(None, _SHOWN),
        "ModelQueuePolicy.default_timeout_microseconds": _value(None, _COMPARED),
        "ModelQueuePolicy.max_queue_size": _value(None, _COMPARED),
        "ModelDynamicBatching.preferred_batch_size": Bound(None, 1024, f"{_COMPARED}; each is tried for every batch"),
        "ModelDynamicBatching.max_queue_delay_microseconds": _value(None, _COMPARED),
        "ModelDynamicBatching.priority_levels": _value(1024, "each is a queue that is looked at for every batch"),
        "ModelDynamicBatching.default_priority_level": _value(None, _LOOKED_UP),
        "ModelDynamicBatching.priority_queue_policy": _list(1024, "there are no more levels"),
        "ModelDynamicBatching.PriorityQueuePolicyEntry.key": _value(None, _LOOKED_UP),
        "ModelSequenceBatching.Control.int32_false_true": Bound(None, 2, _ELEMENT),
        "ModelSequenceBatching.Control.fp32_false_true": _list(2, _ELEMENT),
        "ModelSequenceBatching.Control.bool_false_true": _list(2, _ELEMENT),
        "ModelSequenceBatching.ControlInput.control": _list(4, "there are no more kinds"),
        "ModelSequenceBatching.InitialState.dims": _DIMS,
        "ModelSequenceBatching.State.dims": _DIMS,
        "ModelSequenceBatching.State.initial_state": _list(4, "a state has one"),
        "ModelSequenceBatching.StrategyDirect.max_queue_delay_microseconds": _value(None, _COMPARED),
        "ModelSequenceBatching.StrategyOldest.max_candidate_sequences": _value(None, _COMPARED),
        "ModelSequenceBatching.StrategyOldest.preferred_batch_size": Bound(
            None, 1024, f"{_COMPARED}; each is tried for every batch"
        ),
        "ModelSequenceBatching.StrategyOldest.max_queue_delay_microseconds": _value(None, _COMPARED),
        "ModelSequenceBatching.max_sequence_idle_microseconds": _value(None, _COMPARED),
        "ModelSequenceBatching.control_input": _list(64, "each is a tensor of every batch"),
        "ModelSequenceBatching.state": _list(1024, "each is kept for every sequence"),
        "ModelEnsembling.Step.model_version": _value(None, _LOOKED_UP),
        "ModelEnsembling.Step.input_map": _list(MAX_ITEMS, "as many as a model has"),
        "ModelEnsembling.Step.output_map": _list(MAX_ITEMS, "as many as a model has"),
        "ModelEnsembling.step": _list(256, "each is a served model, which is loaded with it"),
        "ModelEnsembling.max_inflight_requests": _value(None, _COMPARED),
        "ModelWarmup.Input.dims": _DIMS,
        "ModelWarmup.batch_size": _value(1 << 16, "so many requests are made"),
        "ModelWarmup.inputs": _list(MAX_ITEMS, "as many as a request may have"),
        "ModelWarmup.count": _value(100_000, "so often the sample is executed"),
        "ModelOperations.op_library_filename": _list(256, _LIBRARIES),
        "ModelRepositoryAgents.Agent.parameters": _list(4096, "each is a file that is read"),
        "ModelRepositoryAgents.agents": _list(16, "each reads the model's files"),
        "ModelMetrics.MetricControl.HistogramOptions.buckets": _list(256, "each is a counter"),
        "ModelMetrics.metric_control": _list(256, "each is a family of metrics"),
    }
)


def every_bound(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, Bound]]:
    for field in message.fields:
        bound = BOUNDS.get(field.full_name.removeprefix("mme."))
        path = f"{prefix}{field.name}{'[]' if field.is_repeated else ''}"
        if bound is not None:
            yield path, bound
        inside = field.message_type
        if inside is not None and inside.GetOptions().map_entry:
            inside = inside.fields_by_name["value"].message_type
        if inside is not None:
            yield from every_bound(inside, f"{path}.")


class Excess(NamedTuple):
    """A field that holds more than it may."""

    path: str  # of the field
    sentence: str  # how much it holds, and how much it may

    def error(self, model: str) -> MmeError:
        return invalid_model(f"model '{model}': {self.sentence}")


def too_large(path: str, value: int, most: int) -> Excess:
    return Excess(path, f"{path} is {value}, at most {most}")


def too_many(path: str, number: int, most: int) -> Excess:
    return Excess(path, f"{path} has {number} entries, at most {most}")


def excesses(message: Message, prefix: str = "") -> Iterator[Excess]:
    """Everything in a ModelConfig message that lies beyond its bound, depth first."""
    for field, value in message.ListFields():
        bound = BOUNDS.get(field.full_name.removeprefix("mme."))
        path = prefix + field.name
        if bound is not None and bound.entries is not None and len(value) > bound.entries:
            yield too_many(path, len(value), bound.entries)
            continue
        most = None if bound is None else bound.most
        for place, each in _entries(field, value, path):
            if field.message_type is not None:
                yield from excesses(each, f"{place}.") if hasattr(each, "ListFields") else ()
            elif most is not None and each > most:
                yield too_large(place, each, most)


def _entries(field: FieldDescriptor, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each entry of a field: itself, those of a list, or the values of a map."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        yield from ((f"{path}['{str(key)[:_SHOWN_KEY]}']", value[key]) for key in sorted(value))
    elif field.is_repeated:
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(value))
    else:
        yield path, value
