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

from model_handlers.bounds import INT32_MAX, MAX_INSTANCES, MAX_ITEMS, too_large, too_many
from model_handlers.config import InstanceKind, TimeoutAction
from model_handlers.ensemble_checks import ensemble_problems
from model_handlers.errors import Kind, MmeError, invalid_model
from model_handlers.ragged_checks import check_ragged
from model_handlers.sequence_checks import normalise_sequences, sequence_checks
from model_handlers.tensor import TensorFormat, check_elements, check_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from model_handlers.config import (
        DynamicBatching,
        InstanceGroup,
        ModelConfig,
        QueuePolicy,
        RepositoryAgent,
        WarmupSample,
    )
    from model_handlers.tensor import TensorSpec

    Check = tuple[str, Callable[[], object]]

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
