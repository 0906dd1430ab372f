"""The rules that a configuration must obey whatever its text looked like, and the defaults that Triton fills in.

Pure: takes a `ModelConfig`, returns one or raises. Knows neither config.pbtxt nor the machine: whether a GPU exists
is asked where instances are made. Sentences are Triton's where it has one, so that a search for them finds its users.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.config.model_config import DEFAULT_IDLE_US, ControlKind, InstanceKind, OldestStrategy, TimeoutAction
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.system.bounds import INT32_MAX, MAX_INSTANCES, MAX_ITEMS, too_large, too_many
from model_handlers.tensor import BYTES, INT32, INT64, UINT32, UINT64, TensorFormat, check_elements, check_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from model_handlers.config.model_config import (
        DynamicBatching,
        InstanceGroup,
        ModelConfig,
        QueuePolicy,
        RepositoryAgent,
        WarmupSample,
    )
    from model_handlers.tensor import TensorSpec

    Check = tuple[str, Callable[[], object]]
    from collections.abc import Iterable, Mapping

    from model_handlers.config.autocomplete import GraphTensor
    from model_handlers.config.model_config import (
        Control,
        ControlInput,
        DirectStrategy,
        EnsembleStep,
        InitialState,
        SequenceBatching,
        SequenceState,
    )

    Problem = tuple[str, MmeError]

CHECKSUM = "checksum"
_OF_TENSORFLOW = ("tensorrt", "auto_mixed_precision", "gpu_io")  # Triton's, which spare time or memory
_BATCH_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
_TAG = re.compile(r"[A-Za-z0-9_]+")
_LIBRARY = re.compile(r"libtriton_(\w+)\.so")
_WHOLE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def normalise(config: ModelConfig) -> ModelConfig:
    """Check a configuration and fill in the defaults that depend on other fields.

    Call it again after a handler has completed the configuration: with a batch size come new limits and defaults.

    Raises:
        MmeError: INVALID_MODEL, naming the field.
    """
    for _, check in checks(config):
        check()
    return replace(
        config,
        instance_group=tuple(_group(config, index, group) for index, group in enumerate(config.instance_group)),
        dynamic_batching=config.dynamic_batching and _batching(config, config.dynamic_batching),
        sequence_batching=normalise_sequences(config),
    )


def check_named(config: ModelConfig) -> None:
    """Check, once the backend is known, that somebody completes the tensors that config.pbtxt only names.

    Raises:
        MmeError: INVALID_MODEL, naming the first one of a model that has no `auto_complete_config`.
    """
    for what, tensors in (("input", config.named_inputs), ("output", config.named_outputs)):
        for tensor in tensors if config.backend != "python" else ():
            lacking = "data_type" if tensor.data_type is None else "dims"
            raise invalid_model(f"model {what} '{tensor.name}' must specify '{lacking}' for {config.name}")


def checks(config: ModelConfig) -> Iterator[Check]:
    """Every rule by itself: the field that it is about, and a function that raises where it is broken."""
    yield "max_batch_size", partial(_check_batch_size, config)
    for field, error in ensemble_problems(config):
        yield field, partial(_raise, error)
    yield (
        "default_model_filename",
        partial(_check_path, "default_model_filename", config.default_model_filename, config.name),
    )
    yield from _tensor_checks("input", config.inputs, config.name)
    yield from _tensor_checks("output", config.outputs, config.name)
    for filename in config.cc_model_filenames.values():
        yield "cc_model_filenames", partial(_check_path, "cc_model_filenames", filename, config.name)
    yield "optimization.execution_accelerators", partial(_check_accelerators, config)
    yield "batch_input", partial(check_ragged, config)
    yield "response_cache", partial(_check_cache, config)
    yield "runtime", partial(_check_runtime, config)
    yield f"parameters['{_BATCH_STRATEGY}']", partial(_check_strategy, config)
    for tag in config.metric_tags:
        yield f"metric_tags['{tag}']", partial(_check_tag, tag, config.name)
    for index, agent in enumerate(config.agents):
        yield f"model_repository_agents.agents[{index}]", partial(_check_agent, agent, config.name)
    for index, sample in enumerate(config.model_warmup):
        yield f"model_warmup[{index}]", partial(_check_sample, config, sample)
    for family, buckets in config.histograms.items():
        yield "model_metrics", partial(_check_histogram, family, buckets, config.name)
    yield "instance_group", partial(_check_instances, config)
    for index, group in enumerate(config.instance_group):
        yield f"instance_group[{index}]", partial(_group, config, index, group)
    if config.dynamic_batching is not None:
        yield "dynamic_batching", partial(_batching, config, config.dynamic_batching)
    yield from sequence_checks(config)


def _raise(error: MmeError) -> None:
    raise error


def _check_batch_size(config: ModelConfig) -> None:
    if config.max_batch_size < 0:
        raise invalid_model(f"'max_batch_size' must be non-negative value for {config.name}")
    if config.max_batch_size > INT32_MAX:  # as code of the model's may say, where the field of the message can't
        raise too_large("max_batch_size", config.max_batch_size, INT32_MAX).error(config.name)


def _check_accelerators(config: ModelConfig) -> None:
    """Once the backend is known: only ONNX Runtime has them. TensorFlow's own make no other answers."""
    spared = _OF_TENSORFLOW if config.backend == "tensorflow" else ()
    asked = [*config.cpu_accelerators, *(each for each in config.gpu_accelerators if each.name not in spared)]
    if asked and config.backend not in {"", "onnxruntime"}:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': config.pbtxt field 'optimization.execution_accelerators' is not honoured for "
            f"backend '{config.backend}', only for 'onnxruntime': remove it",
        )


def _check_cache(config: ModelConfig) -> None:
    if config.response_cache and config.decoupled:
        raise invalid_model(
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache."
        )


def _check_runtime(config: ModelConfig) -> None:
    """A library of Triton's own is what a backend is here anyway; another one can't be had."""
    runtime = config.runtime
    if "/" in runtime:
        raise invalid_model(f"backend library name '{runtime}' escapes backend directory")
    library = _LIBRARY.fullmatch(runtime)
    own = runtime == "model.py" and config.backend in {"python", "pytorch"}
    named = own or (library is not None and config.backend in {"", library[1]})
    if runtime and not named:
        raise invalid_model(
            f"unable to find backend library '{runtime}' for model '{config.name}': leave 'runtime' out, the backend "
            "is chosen by 'backend', 'platform' or the model file"
        )


def _check_strategy(config: ModelConfig) -> None:
    if _BATCH_STRATEGY in config.parameters:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"model '{config.name}': parameter '{_BATCH_STRATEGY}' is not honoured (how requests are batched is told "
            "by dynamic_batching alone, not by a library); remove it or serve the model elsewhere",
        )


def _check_tag(tag: str, model: str) -> None:
    if not _TAG.fullmatch(tag):
        raise invalid_model(
            f"metric tag '{tag}' of {model} can't be the name of a label: use letters, digits and underscores"
        )


def _check_agent(agent: RepositoryAgent, model: str) -> None:
    if agent.name != CHECKSUM:
        raise invalid_model(
            f"repository agent '{agent.name}' of {model} is not known; the one that there is is '{CHECKSUM}'"
        )
    for key in agent.parameters:
        kind, _, name = key.partition(":")
        if kind != "MD5" or not name:
            raise invalid_model(f"parameter '{key}' of agent '{CHECKSUM}' of {model} must be MD5: and a file's path")
        _check_path(f"parameter of agent '{CHECKSUM}'", name, model)


def _check_histogram(family: str, buckets: tuple[float, ...], model: str) -> None:
    if not family:
        raise invalid_model(f"metric identifier must specify non-empty 'family' for {model}")
    if not buckets:
        raise invalid_model(f"histogram options must specify non-empty 'buckets' of '{family}' for {model}")
    if any(not low < high for low, high in pairwise(buckets)) or not all(map(math.isfinite, buckets)):
        raise invalid_model(f"model_metrics buckets of '{family}' must be ascending numbers for {model}")


def _check_path(field: str, value: str, model: str) -> None:
    """A file named in an archive must lie in the archive."""
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\0" in value:
        raise invalid_model(f"'{field}' of {model} is '{value}'; it must name a file inside the model's directory")


def _check_sample(config: ModelConfig, sample: WarmupSample) -> None:
    model, largest = config.name, config.max_batch_size
    if 0 < largest < sample.batch_size:
        raise invalid_model(
            f"warmup sample '{sample.name}' has batch_size {sample.batch_size}, must be at most {largest} for {model}"
        )
    for name, given in sample.inputs.items():
        check_rank(f"input '{name}' of warmup sample '{sample.name}'", given.dims, model)
        if any(dim < 0 for dim in given.dims):
            raise invalid_model(
                f"warmup setting expects all variable-size dimensions are specified for input '{name}' for {model}"
            )
        _check_path(f"input_data_file of warmup sample '{sample.name}'", given.input_data_file or "", model)


def _tensor_checks(what: str, specs: Sequence[TensorSpec], model: str) -> Iterator[Check]:
    if len(specs) > MAX_ITEMS:
        yield what, partial(_raise, too_many(what, len(specs), MAX_ITEMS).error(model))
        return
    names: set[str] = set()
    for index, spec in enumerate(specs):
        subject = f"model {what} '{spec.name}'"
        if spec.name in names:
            error = invalid_model(f"{subject} specified more than once for {model}")
            yield f"{what}[{index}].name", partial(_raise, error)
        names.add(spec.name)
        yield f"{what}[{index}]", partial(_check_tensor, subject, spec, model)


def _check_tensor(subject: str, spec: TensorSpec, model: str) -> None:
    if not spec.dims:
        raise invalid_model(f"{subject} must specify 'dims' for {model}")
    check_rank(subject, spec.dims, model)
    if not _are_dimensions(spec.dims):
        raise invalid_model(f"{subject} dimension {_WHOLE} for {model}")
    check_elements(subject, spec.dims, model)
    if spec.format is not TensorFormat.NONE and len(spec.dims) != 3:
        raise invalid_model(f"model input NHWC/NCHW require 3 dims for {model}: {subject} has {list(spec.dims)}")
    if spec.reshape is not None:
        _check_reshape(subject, spec.dims, spec.reshape, model)
    _check_path(f"label_filename of {subject}", spec.label_filename, model)


def _check_reshape(subject: str, dims: tuple[int, ...], reshape: tuple[int, ...], model: str) -> None:
    """A reshape keeps the element count, and the order of what surrounds each variable dimension.

    An empty one (a scalar inside, one element outside) is right with and without a batch dimension.
    """
    if not _are_dimensions(reshape):
        raise invalid_model(f"{subject} reshape dimensions {_WHOLE} for {model}")
    if dims.count(-1) != reshape.count(-1):
        raise invalid_model(
            f"{subject} has different number of variable-size dimensions for dims and reshape for {model}"
        )
    if _segments(dims) != _segments(reshape):
        raise invalid_model(f"{subject} has different size for dims and reshape for {model}")


def _are_dimensions(dims: tuple[int, ...]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _segments(dims: tuple[int, ...]) -> list[int]:
    """Element counts before, between and after the variable dimensions: those that a reshape must keep."""
    cuts = [-1, *(index for index, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[start + 1 : end]) for start, end in pairwise(cuts)]


def _check_instances(config: ModelConfig) -> None:
    """Each GPU that a group names has as many instances as it says."""
    instances = sum(group.count * max(len(group.gpus), 1) for group in config.instance_group)
    if instances > MAX_INSTANCES:
        raise invalid_model(
            f"model '{config.name}': instance_group asks for {instances} instances in all, at most {MAX_INSTANCES}"
        )


def _group(config: ModelConfig, index: int, group: InstanceGroup) -> InstanceGroup:
    name = group.name or f"{config.name}_{index}"
    subject = f"instance group {name} of model {config.name}"
    if group.kind in (InstanceKind.CPU, InstanceKind.MODEL) and group.gpus:
        raise invalid_model(f"{subject} has kind KIND_{group.kind.name} but specifies one or more GPUs")
    if group.count < 1:
        raise invalid_model(f"{subject} has count {group.count}, must be at least 1")
    if group.profile and config.backend not in {"", "tensorrt"}:
        raise invalid_model(f"{subject} specifies profile field which is only supported for TensorRT models")
    for gpu in group.gpus:
        if gpu < 0:
            raise invalid_model(f"{subject} specifies invalid or unsupported gpu id {gpu}")
    return replace(group, name=name)


def _batching(config: ModelConfig, batching: DynamicBatching) -> DynamicBatching:
    """The settings with preferred sizes in order; until the batch size is known they are kept as they are."""
    sizes = sorted(set(batching.preferred_batch_size))
    if sizes and sizes[0] < 1:
        raise invalid_model(f"dynamic batching preferred size must be positive for {config.name}")
    if config.max_batch_size > 0:
        sizes = sizes or [config.max_batch_size]
    if sizes and sizes[-1] > config.max_batch_size and _has_batch_size(config):
        raise invalid_model(f"dynamic batching preferred size must be <= max batch size for {config.name}")
    _check_priorities(config.name, batching)
    return replace(batching, preferred_batch_size=tuple(sizes))


def _has_batch_size(config: ModelConfig) -> bool:
    """Whether nobody will give it another one: what names all of its tensors is completed by its own code alone."""
    return config.max_batch_size > 0 or bool(config.inputs and config.outputs and config.backend not in {"", "python"})


def _check_priorities(model: str, batching: DynamicBatching) -> None:
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        raise invalid_model(f"default priority level must be in range [1, {levels}] for {model}")
    if levels and any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        raise invalid_model(f"priority queue policy must have priority level in range [1, {levels}] for {model}")
    if batching.preserve_ordering and levels > 1:
        raise invalid_model(f"Only one priority level is allowed when 'preserve_ordering' is true for {model}")
    if batching.preserve_ordering and any(map(_delays, batching.policies)):
        raise invalid_model(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
        )


def _delays(policy: QueuePolicy) -> bool:
    return policy.timeout_action is TimeoutAction.DELAY and policy.default_timeout_microseconds > 0


PLATFORM = "ensemble"
_STEPS = "ensemble_scheduling.step"


def ensemble_problems(config: ModelConfig) -> Iterator[Problem]:
    """Where it is an ensemble in some respects and not in others, and tensors that come from or go nowhere.

    Yields:
        the field, and the error that names the step or the tensor.
    """
    if config.platform == PLATFORM:
        yield from _whole_problems(config)
        yield from _step_problems(config)
        yield from _tensor_problems(config)
    elif config.ensemble:
        sentence = f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        yield "ensemble_scheduling", invalid_model(sentence)


def _whole_problems(config: ModelConfig) -> Iterator[Problem]:
    name = config.name
    if config.backend:
        sentence = f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
        yield "backend", invalid_model(sentence)
    if config.instance_group:
        yield "instance_group", invalid_model(f"instance group should not be specified for ensemble '{name}'")
    if config.optimization_level or config.gpu_accelerators or config.cpu_accelerators:
        yield "optimization", invalid_model(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        yield "model_warmup", invalid_model(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble:
        sentence = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        yield _STEPS, invalid_model(f"{sentence}: must specify 'step' for ensemble '{name}'")


def _step_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, step in enumerate(config.ensemble):
        for field, value in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not value:
                sentence = f"must specify '{field}' in step {index} of ensemble '{config.name}'"
                yield f"{_STEPS}[{index}].{field}", invalid_model(sentence)


def _tensor_problems(config: ModelConfig) -> Iterator[Problem]:
    if not config.ensemble:
        return
    name, sources = config.name, _sources(config.ensemble)
    read = {tensor for step in config.ensemble for tensor in step.input_map.values()}
    inputs = {spec.name for spec in config.inputs}
    ready = _ready(sources, inputs)
    yield from _written_twice(config.ensemble, inputs, name)
    for index, spec in enumerate(config.inputs):
        if spec.name not in read:
            yield f"input[{index}]", invalid_model(f"ensemble input '{spec.name}' for ensemble {name}' is not used")
    unwritten = [(index, spec.name) for index, spec in enumerate(config.outputs) if spec.name not in ready - inputs]
    for index, output in unwritten:
        yield f"output[{index}]", _unwritten(output, sources, ready, name)
    outputs = {spec.name for spec in config.outputs}
    for tensor in () if unwritten else sorted((sources.keys() | read) - outputs):
        if tensor not in ready or tensor not in read:
            yield _STEPS, invalid_model(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _sources(steps: tuple[EnsembleStep, ...]) -> dict[str, list[str]]:
    """For each tensor that a step writes those that the step reads."""
    return {tensor: list(step.input_map.values()) for step in steps for tensor in step.output_map.values()}


def _ready(sources: Mapping[str, list[str]], inputs: set[str]) -> set[str]:
    """The tensors that come to be, from those that come with a request."""
    ready = set(inputs)
    while more := {tensor for tensor, read in sources.items() if tensor not in ready and ready.issuperset(read)}:
        ready |= more
    return ready


def _unwritten(output: str, sources: Mapping[str, list[str]], ready: set[str], name: str) -> MmeError:
    """Says which tensor it is that it waits for in vain; where they wait for one another, that is none."""
    if output not in sources:  # the one quotation mark is Triton's, here and for inputs
        return invalid_model(f"ensemble output '{output}' for ensemble {name}' is not used")
    culprit, seen = output, set()
    while missing := next((t for t in sources.get(culprit, ()) if t not in ready and t not in seen), ""):
        culprit = missing
        seen.add(missing)
    sentence = f"output '{output}' for ensemble '{name}' is not written"
    if culprit != output:
        sentence += f": at least one of its depending tensors, '{culprit}', is not connected"
    return invalid_model(sentence)


def _written_twice(steps: tuple[EnsembleStep, ...], inputs: set[str], name: str) -> Iterator[Problem]:
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in written:
                sentence = f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                yield f"{_STEPS}[{index}].output_map", invalid_model(f"{sentence} step {index}")
            written.add(tensor)


_CORRID_TYPES = (UINT64, INT64, UINT32, INT32, BYTES)


def normalise_sequences(config: ModelConfig) -> SequenceBatching | None:
    """A configuration's sequence batching with its defaults filled in; None where it has none. It was checked."""
    batching = config.sequence_batching
    if batching is None:
        return None
    strategy = batching.strategy
    if isinstance(strategy, OldestStrategy):
        strategy = _oldest(strategy, config)
    return replace(
        batching,
        strategy=strategy,
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
    )


def sequence_checks(config: ModelConfig) -> Iterator[Check]:
    """Every rule by itself: the field that it is about, and a function that raises where it is broken."""
    batching = config.sequence_batching
    if batching is None:
        return
    field = "sequence_batching"
    yield field, partial(_check_company, config)
    for index, tensor in enumerate(batching.control_input):
        before = batching.control_input[:index]
        yield f"{field}.control_input[{index}]", partial(_check_control, tensor, before, config.name)
    for index, state in enumerate(batching.state):
        yield f"{field}.state[{index}]", partial(_check_state, state, config.name)
        for initial in state.initial_state:
            yield f"{field}.state[{index}].initial_state", partial(_check_initial, state, initial, config.name)
    yield field, partial(_check_names, batching, config)
    if isinstance(batching.strategy, OldestStrategy):
        yield f"{field}.oldest", partial(_oldest, batching.strategy, config)
    else:
        yield f"{field}.direct", partial(_check_direct, batching.strategy, config)


def _check_company(config: ModelConfig) -> None:
    """What can't be together with sequences."""
    if config.dynamic_batching is not None:
        raise invalid_model(
            f"model '{config.name}' asks for dynamic_batching and for sequence_batching: choose one (the strategy "
            "'oldest' batches sequences dynamically)"
        )
    if config.response_cache:
        raise invalid_model(
            f"Response Cache does not currently support model {config.name} with sequence batching scheduler. Please "
            "disable the response cache."
        )
    ragged = [spec.name for spec in config.inputs if spec.allow_ragged_batch]
    if ragged or config.batch_input or config.batch_output:
        name = ragged[0] if ragged else "batch_input and batch_output"
        raise invalid_model(
            f"{name} of {config.name} can't be ragged with sequence batching: rows of a batch have one shape"
        )


def _check_direct(strategy: DirectStrategy, config: ModelConfig) -> None:
    if not 0 <= strategy.minimum_slot_utilization <= 1:
        raise invalid_model(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}")


def _oldest(strategy: OldestStrategy, config: ModelConfig) -> OldestStrategy:
    sizes = sorted(set(strategy.preferred_batch_size))
    if sizes and sizes[0] < 1:
        raise invalid_model(f"sequence batching preferred batch size must be positive for {config.name}")
    if config.max_batch_size > 0:
        sizes = sizes or [config.max_batch_size]
        if sizes[-1] > config.max_batch_size:
            raise invalid_model(f"sequence batching preferred batch size must be <= max batch size for {config.name}")
    if strategy.max_candidate_sequences < 0:
        raise invalid_model(f"sequence batching max_candidate_sequences must be positive for {config.name}")
    return replace(strategy, preferred_batch_size=tuple(sizes))


def _check_control(tensor: ControlInput, before: Sequence[ControlInput], model: str) -> None:
    if not tensor.name:
        raise invalid_model(f"sequence batching control tensor must have a name for {model}")
    if len(tensor.control) > 1 or any(other.name == tensor.name for other in before):
        raise invalid_model(
            f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {model}"
        )
    if not tensor.control:
        raise invalid_model(f"sequence batching control tensor '{tensor.name}' must specify 'control' for {model}")
    control = tensor.control[0]
    if any(control.kind is known.kind for other in before for known in other.control):
        raise invalid_model(f"sequence batching specifies multiple {control.kind.name} tensors for {model}")
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        _check_corrid(control, model)
    else:
        _check_boolean(tensor.name, control, model)


def _check_boolean(name: str, control: Control, model: str) -> None:
    fields = ("int32_false_true", "fp32_false_true", "bool_false_true")
    given = [field for field in fields if getattr(control, field)]
    if not given:
        raise invalid_model(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name} for {model}"
        )
    if len(given) > 1:
        raise invalid_model(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {control.kind.name} for {model}"
        )
    if len(control.false_true) != 2:
        raise invalid_model(
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {control.kind.name} for {model}"
        )
    if control.data_type is not None:
        raise invalid_model(
            f"sequence batching control tensor '{name}' must not specify 'data_type' for {control.kind.name} "
            f"for {model}"
        )


def _check_corrid(control: Control, model: str) -> None:
    if control.false_true:
        raise invalid_model(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name} for {model}"
        )
    if control.data_type not in _CORRID_TYPES:
        raise invalid_model(
            f"unexpected data type for control {control.kind.name} for {model}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )


def _check_names(batching: SequenceBatching, config: ModelConfig) -> None:
    """A tensor has one meaning: what a client sends, a signal, or a state."""
    inputs = {spec.name: "a model input" for spec in config.inputs}
    names = [(tensor.name, "control tensor") for tensor in batching.control_input]
    names += [(state.input_name, "state input") for state in batching.state]
    for name, what in names:
        if name in inputs:
            raise invalid_model(
                f"sequence batching {what} '{name}' is {inputs[name]} as well for {config.name}: give it one meaning"
            )
        inputs[name] = f"a {what}"
    outputs = set()
    for state in batching.state:
        if state.output_name in outputs:
            raise invalid_model(
                f"sequence batching state output '{state.output_name}' is specified more than once for {config.name}"
            )
        outputs.add(state.output_name)
        declared = config.output(state.output_name)
        if declared is not None and declared.data_type is not state.data_type:
            raise invalid_model(
                f"sequence batching state output '{state.output_name}' is {state.data_type.config_name}, but as a "
                f"model output {declared.data_type.config_name} for {config.name}"
            )


def _check_state(state: SequenceState, model: str) -> None:
    subject = f"state input '{state.input_name}'"
    for field, name in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not name:
            raise invalid_model(f"sequence batching state must specify '{field}' for {model}")
    if not state.dims or any(dim < 1 and dim != -1 for dim in state.dims):
        raise invalid_model(
            f"{subject} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    check_rank(subject, state.dims, model)
    check_elements(subject, state.dims, model)
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        raise invalid_model(
            f"{subject} has 'use_growable_memory', which needs 'use_same_buffer_for_input_output', for {model}"
        )
    if len(state.initial_state) > 1:
        raise invalid_model(
            f"initial_state field for {subject} must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements. (model {model})"
        )


def _check_initial(state: SequenceState, initial: InitialState, model: str) -> None:
    where = f"for state input '{state.input_name}'"
    if not initial.name:
        raise invalid_model(f"Field 'name' must be set when using initial_state {where}. (model {model})")
    if initial.data_type is not state.data_type:
        raise invalid_model(
            f"The data type used for 'initial_state' field of state '{state.input_name}' does not match the state data "
            f"type. (model {model})"
        )
    if len(initial.dims) != len(state.dims):
        raise invalid_model(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions {where}. "
            f"{len(initial.dims)} != {len(state.dims)} (model {model})"
        )
    if any(dim < 1 for dim in initial.dims):
        raise invalid_model(
            f"'initial_state' field for state input name '{state.input_name}' contains variable dimensions. "
            f"(model {model})"
        )
    for dim, declared in zip(initial.dims, state.dims, strict=True):
        if declared not in (-1, dim):
            raise invalid_model(
                f"'initial_state' dim for input name '{state.input_name}' doesn't match 'state' dim description. "
                f"{dim} != {declared} (model {model})"
            )
    path = PurePosixPath(initial.data_file)
    if initial.zero_data == bool(initial.data_file):
        raise invalid_model(f"'initial_state' {where} must be 'zero_data: true' or name a 'data_file'. (model {model})")
    if path.is_absolute() or ".." in path.parts or "\0" in initial.data_file:
        raise invalid_model(
            f"'data_file' of 'initial_state' {where} is '{initial.data_file}'; it must name a file inside the folder "
            f"initial_state of {model}"
        )


def check_ragged(config: ModelConfig) -> None:
    """Check what can be known of batch inputs and outputs before the model is.

    Raises:
        MmeError: INVALID_MODEL, naming the field.
    """
    for given in config.batch_input:
        _check_sources(f"batch input kind 'BATCH_{given.kind.name}'", given.source_input, config)
    for output in config.batch_output:
        _check_sources("batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE'", output.source_input, config)
    _check_targets("batch input", (given.target_name for given in config.batch_input), config)
    _check_targets("batch output", (output.target_name for output in config.batch_output), config)


def check_ragged_names(config: ModelConfig, inputs: list[GraphTensor]) -> None:
    """Check that what the helpers name is there, of a completed configuration; `inputs` are the model's own.

    Raises:
        MmeError: INVALID_MODEL, naming the tensor.
    """
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


def _check_sources(what: str, sources: tuple[str, ...], config: ModelConfig) -> None:
    if len(sources) != 1:
        raise invalid_model(f"{what} expects 1 source input, got {len(sources)} for {config.name}")


def _check_targets(what: str, targets: Iterable[tuple[str, ...]], config: ModelConfig) -> None:
    direction = what.removeprefix("batch ")
    seen = set()
    for names in targets:
        if not names:
            raise invalid_model(f"{what} must specify 'target_name' for {config.name}")
        for name in names:
            if name in seen:
                raise invalid_model(f"target {direction} name '{name}' can only be specified once for {config.name}")
            seen.add(name)
