"""Triton's rules for a configuration, and the defaults that depend on other fields. PURE.

A rule is a predicate and a sentence, Triton's letter by letter where it has one, so that a search finds its users; the
fields that they are about are in `_rules`. Of the rules about one field, which may presuppose one another, the first
that is broken counts. Neither config.pbtxt nor the machine is known here: whether a GPU exists is asked where instances
are made.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.config.bounds import INT32_MAX, MAX_INSTANCES, MAX_ITEMS, too_large, too_many
from model_handlers.config.model_config import (
    DEFAULT_IDLE_US,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    EnsembleStep,
    InitialState,
    InstanceGroup,
    InstanceKind,
    MetricControl,
    ModelConfig,
    OldestStrategy,
    RepositoryAgent,
    SequenceBatching,
    SequenceState,
    TimeoutAction,
    WarmupSample,
)
from model_handlers.errors import MmeError, invalid_model, unsupported
from model_handlers.tensor import BYTES, INT32, INT64, MAX_DIMS, MAX_ELEMENTS, UINT32, UINT64, TensorFormat, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from model_handlers.config.autocomplete import SignatureTensor

    Broken = Iterator[str | MmeError]  # what is said of a subject, by one rule after another
    Rules = Iterator[tuple[str, Iterable[str | MmeError]]]

PLATFORM = "ensemble"
_BATCH_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
_STEPS = "ensemble_scheduling.step"


def normalise(config: ModelConfig) -> ModelConfig:
    """Check a configuration and fill in the defaults that depend on other fields. Raises INVALID_MODEL or UNSUPPORTED.

    Call it again after a handler has completed the configuration: with a batch size come new limits and defaults.
    """
    for _, error in broken_rules(config):
        raise error
    groups = (replace(group, name=_group_name(config, index)) for index, group in enumerate(config.instance_group))
    dynamic, sequences = config.dynamic_batching, config.sequence_batching
    if dynamic is not None:
        dynamic = replace(dynamic, preferred_batch_size=_sizes(dynamic, config))
    if sequences is not None:
        strategy = sequences.strategy
        if isinstance(strategy, OldestStrategy):
            strategy = replace(strategy, preferred_batch_size=_sizes(strategy, config))
        idle = sequences.max_sequence_idle_microseconds or DEFAULT_IDLE_US
        sequences = replace(sequences, strategy=strategy, max_sequence_idle_microseconds=idle)
    return replace(config, instance_group=tuple(groups), dynamic_batching=dynamic, sequence_batching=sequences)


def broken_rules(config: ModelConfig) -> Iterator[tuple[str, MmeError]]:
    """Everything that is wrong: the field that it is about, and the error."""
    for field, broken in _rules(config):
        for said in islice(broken, 1):
            yield field, invalid_model(said) if isinstance(said, str) else said


def _rules(config: ModelConfig) -> Rules:
    yield "max_batch_size", _batch_size(config)
    yield from _ensemble(config)
    yield "default_model_filename", _file("default_model_filename", config.default_model_filename, config)
    yield from _tensors("input", config.inputs, config)
    yield from _tensors("output", config.outputs, config)
    for filename in config.cc_model_filenames.values():
        yield "cc_model_filenames", _file("cc_model_filenames", filename, config)
    yield "optimization.execution_accelerators", _accelerators(config)
    yield "batch_input", _ragged(config)
    yield "response_cache", _response_cache(config)
    yield "runtime", _runtime(config)
    yield f"parameters['{_BATCH_STRATEGY}']", _batch_strategy(config)
    for tag in config.metric_tags:
        yield f"metric_tags['{tag}']", _tag(tag, config)
    for index, agent in enumerate(config.agents):
        yield f"model_repository_agents.agents[{index}]", _agent(agent, config)
    for index, sample in enumerate(config.model_warmup):
        yield f"model_warmup[{index}]", _sample(sample, config)
    for control in {each.family: each for each in config.metric_control}.values():
        yield "model_metrics", _histogram(control, config)
    yield "instance_group", _instances(config)
    for index, group in enumerate(config.instance_group):
        subject = f"instance group {_group_name(config, index)} of model {config.name}"
        yield f"instance_group[{index}]", _group(subject, group, config)
    if config.dynamic_batching is not None:
        yield "dynamic_batching", _dynamic(config.dynamic_batching, config)
    if config.sequence_batching is not None:
        yield from _sequences(config.sequence_batching, config)


# -- the model ---------------------------------------------------------------------------------------------------------


def _batch_size(config: ModelConfig) -> Broken:
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {config.name}"
    if config.max_batch_size > INT32_MAX:  # as code of the model's may say, where the field of the message can't
        yield too_large("max_batch_size", config.max_batch_size, INT32_MAX).error(config.name)


def _file(field: str, value: str, config: ModelConfig) -> Broken:
    if _is_outside(value):
        yield f"'{field}' of {config.name} is '{value}'; it must name a file inside the model's directory"


def _is_outside(path: str) -> bool:
    # Whether a file named in an archive would not lie in the archive.
    parts = PurePosixPath(path)
    return parts.is_absolute() or ".." in parts.parts or "\0" in path


def _accelerators(config: ModelConfig) -> Broken:
    # Once the backend is known: only ONNX Runtime has them. Triton's for TensorFlow make no other answers.
    spared = ("tensorrt", "auto_mixed_precision", "gpu_io") if config.backend == "tensorflow" else ()
    asked = [*config.cpu_accelerators, *(each for each in config.gpu_accelerators if each.name not in spared)]
    if asked and config.backend not in {"", "onnxruntime"}:
        yield unsupported(
            f"model '{config.name}': config.pbtxt field 'optimization.execution_accelerators' is not honoured for "
            f"backend '{config.backend}', only for 'onnxruntime': remove it"
        )


def _response_cache(config: ModelConfig) -> Broken:
    if config.response_cache and config.decoupled:
        yield (
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache."
        )


def _runtime(config: ModelConfig) -> Broken:
    runtime = config.runtime
    if "/" in runtime:
        yield f"backend library name '{runtime}' escapes backend directory"
    # A library of Triton's own is what a backend is here anyway; another one can't be had.
    library = re.fullmatch(r"libtriton_(\w+)\.so", runtime)
    named = runtime == "model.py" and config.backend in {"python", "pytorch"}
    if runtime and not (named or (library is not None and config.backend in {"", library[1]})):
        yield (
            f"unable to find backend library '{runtime}' for model '{config.name}': leave 'runtime' out, the backend "
            "is chosen by 'backend', 'platform' or the model file"
        )


def _batch_strategy(config: ModelConfig) -> Broken:
    if _BATCH_STRATEGY in config.parameters:
        yield unsupported(
            f"model '{config.name}': parameter '{_BATCH_STRATEGY}' is not honoured (how requests are batched is told "
            "by dynamic_batching alone, not by a library); remove it or serve the model elsewhere"
        )


def _tag(tag: str, config: ModelConfig) -> Broken:
    if not re.fullmatch(r"[A-Za-z0-9_]+", tag):
        yield f"metric tag '{tag}' of {config.name} can't be the name of a label: use letters, digits and underscores"


def _agent(agent: RepositoryAgent, config: ModelConfig) -> Broken:
    if agent.name != "checksum":
        yield (f"repository agent '{agent.name}' of {config.name} is not known; the one that there is is 'checksum'")
    for key in agent.parameters:
        kind, _, path = key.partition(":")
        if kind != "MD5" or not path:
            yield f"parameter '{key}' of agent 'checksum' of {config.name} must be MD5: and a file's path"
        yield from _file("parameter of agent 'checksum'", path, config)


def _sample(sample: WarmupSample, config: ModelConfig) -> Broken:
    name, largest = config.name, config.max_batch_size
    if 0 < largest < sample.batch_size:
        yield (
            f"warmup sample '{sample.name}' has batch_size {sample.batch_size}, must be at most {largest} for {name}"
        )
    for tensor, given in sample.inputs.items():
        yield from _rank(f"input '{tensor}' of warmup sample '{sample.name}'", given.dims, name)
        if any(dim < 0 for dim in given.dims):
            yield f"warmup setting expects all variable-size dimensions are specified for input '{tensor}' for {name}"
        yield from _file(f"input_data_file of warmup sample '{sample.name}'", given.input_data_file or "", config)


def _histogram(control: MetricControl, config: ModelConfig) -> Broken:
    family, buckets = control.family, control.buckets
    if not family:
        yield f"metric identifier must specify non-empty 'family' for {config.name}"
    if not buckets:
        yield f"histogram options must specify non-empty 'buckets' of '{family}' for {config.name}"
    if any(not low < high for low, high in pairwise(buckets)) or not all(map(math.isfinite, buckets)):
        yield f"model_metrics buckets of '{family}' must be ascending numbers for {config.name}"


# -- tensors -----------------------------------------------------------------------------------------------------------

_WHOLE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def _tensors(what: str, specs: Sequence[TensorSpec], config: ModelConfig) -> Rules:
    if len(specs) > MAX_ITEMS:
        yield what, (too_many(what, len(specs), MAX_ITEMS).error(config.name),)
        return
    names: set[str] = set()
    for index, spec in enumerate(specs):
        subject = f"model {what} '{spec.name}'"
        if spec.name in names:
            yield f"{what}[{index}].name", (f"{subject} specified more than once for {config.name}",)
        names.add(spec.name)
        yield f"{what}[{index}]", _tensor(subject, spec, config)


def _tensor(subject: str, spec: TensorSpec, config: ModelConfig) -> Broken:
    model, dims, reshape = config.name, spec.dims, spec.reshape
    if not dims:
        yield f"{subject} must specify 'dims' for {model}"
    yield from _rank(subject, dims, model)
    if not _are_dimensions(dims):
        yield f"{subject} dimension {_WHOLE} for {model}"
    yield from _elements(subject, dims, model)
    if spec.format is not TensorFormat.NONE and len(dims) != 3:
        yield f"model input NHWC/NCHW require 3 dims for {model}: {subject} has {list(dims)}"
    if reshape is not None:  # an empty one (a scalar inside, one element outside) is right with a batch dimension, too
        if not _are_dimensions(reshape):
            yield f"{subject} reshape dimensions {_WHOLE} for {model}"
        if dims.count(-1) != reshape.count(-1):
            yield f"{subject} has different number of variable-size dimensions for dims and reshape for {model}"
        if _segments(dims) != _segments(reshape):
            yield f"{subject} has different size for dims and reshape for {model}"
    yield from _file(f"label_filename of {subject}", spec.label_filename, config)


def _rank(subject: str, dims: Sequence[int], model: str) -> Broken:
    if len(dims) > MAX_DIMS:
        yield f"{subject} has {len(dims)} dimensions, must be at most {MAX_DIMS} for {model}"


def _elements(subject: str, dims: Sequence[int], model: str) -> Broken:
    if math.prod(dim for dim in dims if dim > 0) > MAX_ELEMENTS:
        yield f"{subject} has more than {MAX_ELEMENTS} elements, the limit, for {model}"


def _are_dimensions(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _segments(dims: tuple[int, ...]) -> list[int]:
    # Element counts before, between and after the variable dimensions: those that a reshape must keep, in order.
    cuts = [-1, *(index for index, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[start + 1 : end]) for start, end in pairwise(cuts)]


def check_named(config: ModelConfig) -> None:
    """Check, once the backend is known, that the model's code completes the tensors that config.pbtxt only names.

    Raises INVALID_MODEL, naming the first one of a model that has no `auto_complete_config`.
    """
    for what, tensors in (("input", config.named_inputs), ("output", config.named_outputs)):
        for tensor in tensors if config.backend != "python" else ():
            lacking = "data_type" if tensor.data_type is None else "dims"
            raise invalid_model(f"model {what} '{tensor.name}' must specify '{lacking}' for {config.name}")


# -- instances and batches ---------------------------------------------------------------------------------------------


def _instances(config: ModelConfig) -> Broken:
    # Each GPU that a group names has as many instances as it says.
    instances = sum(group.count * max(len(group.gpus), 1) for group in config.instance_group)
    if instances > MAX_INSTANCES:
        yield f"model '{config.name}': instance_group asks for {instances} instances in all, at most {MAX_INSTANCES}"


def _group_name(config: ModelConfig, index: int) -> str:
    return config.instance_group[index].name or f"{config.name}_{index}"


def _group(subject: str, group: InstanceGroup, config: ModelConfig) -> Broken:
    if group.kind in (InstanceKind.CPU, InstanceKind.MODEL) and group.gpus:
        yield f"{subject} has kind KIND_{group.kind.name} but specifies one or more GPUs"
    if group.count < 1:
        yield f"{subject} has count {group.count}, must be at least 1"
    if group.profile and config.backend not in {"", "tensorrt"}:
        yield f"{subject} specifies profile field which is only supported for TensorRT models"
    yield from (f"{subject} specifies invalid or unsupported gpu id {gpu}" for gpu in group.gpus if gpu < 0)


def _sizes(batching: DynamicBatching | OldestStrategy, config: ModelConfig) -> tuple[int, ...]:
    sizes = tuple(sorted(set(batching.preferred_batch_size)))
    return sizes or ((config.max_batch_size,) if config.max_batch_size > 0 else ())


def _dynamic(batching: DynamicBatching, config: ModelConfig) -> Broken:
    model, levels, sizes = config.name, batching.priority_levels, batching.preferred_batch_size
    if any(size < 1 for size in sizes):
        yield f"dynamic batching preferred size must be positive for {model}"
    # Another batch size comes of completion, but not where all tensors are named: those its own code alone completes.
    named = bool(config.inputs and config.outputs and config.backend not in {"", "python"})
    if max(sizes, default=0) > config.max_batch_size and (config.max_batch_size > 0 or named):
        yield f"dynamic batching preferred size must be <= max batch size for {model}"
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield f"default priority level must be in range [1, {levels}] for {model}"
    if levels and any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        yield f"priority queue policy must have priority level in range [1, {levels}] for {model}"
    if batching.preserve_ordering and levels > 1:
        yield f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
    delaying = (each for each in batching.policies if each.timeout_action is TimeoutAction.DELAY)
    if batching.preserve_ordering and any(each.default_timeout_microseconds > 0 for each in delaying):
        yield f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"


# -- ensembles ---------------------------------------------------------------------------------------------------------


def _ensemble(config: ModelConfig) -> Rules:
    name = config.name
    if config.platform != PLATFORM:
        if config.ensemble:
            sentence = f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
            yield "ensemble_scheduling", (sentence,)
        return
    if config.backend:
        yield "backend", (f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type",)
    if config.instance_group:
        yield "instance_group", (f"instance group should not be specified for ensemble '{name}'",)
    if config.optimization_level or config.gpu_accelerators or config.cpu_accelerators:
        yield "optimization", (f"optimization should not be specified for ensemble '{name}'",)
    if config.model_warmup:
        yield "model_warmup", (f"model_warmup can not be specified for ensemble '{name}'",)
    if not config.ensemble:
        sentence = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        yield _STEPS, (f"{sentence}: must specify 'step' for ensemble '{name}'",)
        return
    for index, step in enumerate(config.ensemble):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"{_STEPS}[{index}].{field}", (f"must specify '{field}' in step {index} of ensemble '{name}'",)
    yield from _flow(config)


def _flow(config: ModelConfig) -> Rules:
    name, steps = config.name, config.ensemble
    sources = {tensor: list(step.input_map.values()) for step in steps for tensor in step.output_map.values()}
    read = {tensor for step in steps for tensor in step.input_map.values()}
    inputs = {spec.name for spec in config.inputs}
    ready = _ready(sources, inputs)
    yield from _written_twice(steps, inputs, name)
    for index, spec in enumerate(config.inputs):
        if spec.name not in read:
            yield f"input[{index}]", (f"ensemble input '{spec.name}' for ensemble {name}' is not used",)
    unwritten = [(index, spec.name) for index, spec in enumerate(config.outputs) if spec.name not in ready - inputs]
    for index, output in unwritten:
        yield f"output[{index}]", (_unwritten(output, sources, ready, name),)
    outputs = {spec.name for spec in config.outputs}
    for tensor in () if unwritten else sorted((sources.keys() | read) - outputs):
        if tensor not in ready or tensor not in read:
            yield _STEPS, (f"ensemble tensor '{tensor}' is unused in ensemble '{name}'",)


def _ready(sources: Mapping[str, list[str]], inputs: set[str]) -> set[str]:
    ready = set(inputs)
    while more := {tensor for tensor, read in sources.items() if tensor not in ready and ready.issuperset(read)}:
        ready |= more
    return ready


def _unwritten(output: str, sources: Mapping[str, list[str]], ready: set[str], name: str) -> str:
    # Which tensor keeps it waiting; where they wait for one another, that is none.
    if output not in sources:  # the one quotation mark is Triton's, here and for inputs
        return f"ensemble output '{output}' for ensemble {name}' is not used"
    culprit, seen = output, set()
    while missing := next((t for t in sources.get(culprit, ()) if t not in ready and t not in seen), ""):
        culprit = missing
        seen.add(missing)
    sentence = f"output '{output}' for ensemble '{name}' is not written"
    if culprit != output:
        sentence += f": at least one of its depending tensors, '{culprit}', is not connected"
    return sentence


def _written_twice(steps: tuple[EnsembleStep, ...], inputs: set[str], name: str) -> Rules:
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in written:
                sentence = f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                yield f"{_STEPS}[{index}].output_map", (f"{sentence} step {index}",)
            written.add(tensor)


# -- sequences ---------------------------------------------------------------------------------------------------------

_CORRID_TYPES = (UINT64, INT64, UINT32, INT32, BYTES)
_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")


def _sequences(batching: SequenceBatching, config: ModelConfig) -> Rules:
    field = "sequence_batching"
    yield field, _company(config)
    for index, tensor in enumerate(batching.control_input):
        before = batching.control_input[:index]
        yield f"{field}.control_input[{index}]", _control(tensor, before, config.name)
    for index, state in enumerate(batching.state):
        yield f"{field}.state[{index}]", _state(state, config.name)
        for initial in state.initial_state:
            yield f"{field}.state[{index}].initial_state", _initial(state, initial, config.name)
    yield field, _names(batching, config)
    if isinstance(batching.strategy, OldestStrategy):
        yield f"{field}.oldest", _oldest(batching.strategy, config)
    else:
        yield f"{field}.direct", _direct(batching.strategy, config)


def _company(config: ModelConfig) -> Broken:
    if config.dynamic_batching is not None:
        yield (
            f"model '{config.name}' asks for dynamic_batching and for sequence_batching: choose one (the strategy "
            "'oldest' batches sequences dynamically)"
        )
    if config.response_cache:
        yield (
            f"Response Cache does not currently support model {config.name} with sequence batching scheduler. Please "
            "disable the response cache."
        )
    ragged = [spec.name for spec in config.inputs if spec.allow_ragged_batch]
    if ragged or config.batch_input or config.batch_output:
        name = ragged[0] if ragged else "batch_input and batch_output"
        yield f"{name} of {config.name} can't be ragged with sequence batching: rows of a batch have one shape"


def _direct(strategy: DirectStrategy, config: ModelConfig) -> Broken:
    if not 0 <= strategy.minimum_slot_utilization <= 1:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}"


def _oldest(strategy: OldestStrategy, config: ModelConfig) -> Broken:
    if any(size < 1 for size in strategy.preferred_batch_size):
        yield f"sequence batching preferred batch size must be positive for {config.name}"
    if 0 < config.max_batch_size < max(strategy.preferred_batch_size, default=0):
        yield f"sequence batching preferred batch size must be <= max batch size for {config.name}"
    if strategy.max_candidate_sequences < 0:
        yield f"sequence batching max_candidate_sequences must be positive for {config.name}"


def _control(tensor: ControlInput, before: Sequence[ControlInput], model: str) -> Broken:
    if not tensor.name:
        yield f"sequence batching control tensor must have a name for {model}"
    subject = f"sequence batching control tensor '{tensor.name}'"
    if len(tensor.control) > 1 or any(other.name == tensor.name for other in before):
        yield f"{subject} is specified for multiple control kinds for {model}"
    if not tensor.control:
        yield f"{subject} must specify 'control' for {model}"
    control = tensor.control[0]
    kind = control.kind.name
    if any(control.kind is known.kind for other in before for known in other.control):
        yield f"sequence batching specifies multiple {kind} tensors for {model}"
    given = [field for field in _VALUES if getattr(control, field)]
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        if given:
            yield (
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind} for {model}"
            )
        if control.data_type not in _CORRID_TYPES:
            yield (
                f"unexpected data type for control {kind} for {model}. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        yield (
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{kind} for {model}"
        )
    if len(given) > 1:
        yield (
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {model}"
        )
    if len(control.false_true) != 2:
        yield f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {model}"
    if control.data_type is not None:
        yield f"{subject} must not specify 'data_type' for {kind} for {model}"


def _names(batching: SequenceBatching, config: ModelConfig) -> Broken:
    # A tensor has one meaning: what a client sends, a signal, or a state.
    inputs = {spec.name: "a model input" for spec in config.inputs}
    names = [(tensor.name, "control tensor") for tensor in batching.control_input]
    names += [(state.input_name, "state input") for state in batching.state]
    for name, what in names:
        if name in inputs:
            yield f"sequence batching {what} '{name}' is {inputs[name]} as well for {config.name}: give it one meaning"
        inputs[name] = f"a {what}"
    outputs = set()
    for state in batching.state:
        subject = f"sequence batching state output '{state.output_name}'"
        if state.output_name in outputs:
            yield f"{subject} is specified more than once for {config.name}"
        outputs.add(state.output_name)
        declared = config.output(state.output_name)
        if declared is not None and declared.data_type is not state.data_type:
            yield (
                f"{subject} is {state.data_type.config_name}, but as a model output {declared.data_type.config_name} "
                f"for {config.name}"
            )


def _state(state: SequenceState, model: str) -> Broken:
    subject = f"state input '{state.input_name}'"
    for field, name in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not name:
            yield f"sequence batching state must specify '{field}' for {model}"
    if not state.dims or not _are_dimensions(state.dims):
        yield f"{subject} dimension {_WHOLE} for {model}"
    yield from _rank(subject, state.dims, model)
    yield from _elements(subject, state.dims, model)
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield f"{subject} has 'use_growable_memory', which needs 'use_same_buffer_for_input_output', for {model}"
    if len(state.initial_state) > 1:
        yield (
            f"initial_state field for {subject} must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements. (model {model})"
        )


def _initial(state: SequenceState, initial: InitialState, model: str) -> Broken:
    name = state.input_name
    where = f"for state input '{name}'"
    if not initial.name:
        yield f"Field 'name' must be set when using initial_state {where}. (model {model})"
    if initial.data_type is not state.data_type:
        yield (
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type. "
            f"(model {model})"
        )
    if len(initial.dims) != len(state.dims):
        yield (
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions {where}. "
            f"{len(initial.dims)} != {len(state.dims)} (model {model})"
        )
    if any(dim < 1 for dim in initial.dims):
        yield f"'initial_state' field for state input name '{name}' contains variable dimensions. (model {model})"
    for dim, declared in zip(initial.dims, state.dims, strict=True):
        if declared not in (-1, dim):
            yield (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {declared} (model {model})"
            )
    if initial.zero_data == bool(initial.data_file):
        yield f"'initial_state' {where} must be 'zero_data: true' or name a 'data_file'. (model {model})"
    if _is_outside(initial.data_file):
        yield (
            f"'data_file' of 'initial_state' {where} is '{initial.data_file}'; it must name a file inside the folder "
            f"initial_state of {model}"
        )


# -- ragged batches ----------------------------------------------------------------------------------------------------


def _ragged(config: ModelConfig) -> Broken:
    kinds = [(f"batch input kind 'BATCH_{given.kind.name}'", given.source_input) for given in config.batch_input]
    kinds += [("batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE'", each.source_input) for each in config.batch_output]
    for what, sources in kinds:
        if len(sources) != 1:
            yield f"{what} expects 1 source input, got {len(sources)} for {config.name}"
    inputs, outputs = ([each.target_name for each in helpers] for helpers in (config.batch_input, config.batch_output))
    for direction, targets in (("input", inputs), ("output", outputs)):
        seen: set[str] = set()
        for names in targets:
            if not names:
                yield f"batch {direction} must specify 'target_name' for {config.name}"
            for name in names:
                if name in seen:
                    yield f"target {direction} name '{name}' can only be specified once for {config.name}"
                seen.add(name)


def check_ragged_names(config: ModelConfig, inputs: list[SignatureTensor]) -> None:
    """Check that what ragged batches name is there; `inputs` are the model's own. INVALID_MODEL names the tensor."""
    types = {name: data_type for name, data_type, _ in inputs}
    sources = [source for given in config.batch_input for source in given.source_input]
    for source in (*sources, *(source for output in config.batch_output for source in output.source_input)):
        if config.input(source) is None:
            raise invalid_model(f"unknown source input name '{source}' for {config.name}")
    for output in config.batch_output:
        for target in output.target_name:
            if config.output(target) is None:
                raise invalid_model(f"unknown target output name '{target}' for {config.name}")
    for given in config.batch_input:
        for target in given.target_name:
            if types.get(target) is not given.data_type:
                provides = types[target].config_name if target in types else "no such input"
                raise invalid_model(
                    f"unable to load model '{config.name}', configuration expects datatype "
                    f"{given.data_type.config_name} for batch input '{target}', model provides {provides}"
                )
