"""A configuration completed from what a model file says that it takes and gives, and checked against it. PURE."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.config.model_config import (
    DynamicBatching,
    Guess,
    ModelConfig,
    all_inputs,
    hidden_inputs,
    hidden_outputs,
)
from model_handlers.config.validate import check_ragged_names, normalise
from model_handlers.errors import invalid_model
from model_handlers.tensor import DataType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


_BATCH = re.compile(r"[NB]|(?i:batch|batch_?size|bs)")
_OTHER = re.compile(r"T|(?i:seq.*|time.*|(.*_)?len(gth)?)")
# Written by converters, one for each dimension of which they know nothing: unk__12, DynamicDimension.0, Add_dim_0.
_MACHINE_MADE = re.compile(r"unk__\d+|(.*\.)?DynamicDimension\.\d+|.*_dim_\d+|\?|-1|None|")


def guess(names: Iterable[str]) -> Guess:
    """What the names of the first dimensions of all inputs and outputs say; "" for one without a name."""
    all_names = list(names)
    known = [name for name in all_names if not _MACHINE_MADE.fullmatch(name)]
    # batch, Batch, batch_size and bs are alike; N and B may be the numbers of two different things.
    if (
        any(_OTHER.fullmatch(name) for name in known)
        or len({"batch" if len(name) > 1 and _BATCH.fullmatch(name) else name for name in known}) > 1
    ):
        return Guess.OTHER
    if len(known) == len(all_names) > 0 and _BATCH.fullmatch(known[0]):
        return Guess.BATCH
    return Guess.UNKNOWN


DEFAULT_MAX_BATCH_SIZE = 4  # what Triton gives a batching model whose configuration names no batch size

# A tensor as the model declares it: name, type, shape with -1 for dimensions of any size.
SignatureTensor = tuple[str, DataType, tuple[int, ...]]


def complete(
    config: ModelConfig,
    inputs: list[SignatureTensor],
    outputs: list[SignatureTensor],
    default_max_batch_size: int = 0,
    firsts: Mapping[str, str] | None = None,
) -> ModelConfig:
    """The configuration with what it leaves out taken from the model. Raises INVALID_MODEL where the two disagree.

    Where the configuration names inputs and outputs, or is strict, it has to name all inputs.

    `inputs` and `outputs` are the model's own; `default_max_batch_size` holds where it batches and the configuration
    leaves that out, 0 for the server's or Triton's; `firsts` has names of first dimensions by tensor.
    """
    made = {target for given in config.batch_input for target in given.target_name}
    split = {target for given in config.batch_output for target in given.target_name}
    batching = config.sequence_batching
    told = {spec.name for spec in hidden_inputs(batching)}
    kept = {spec.name for spec in hidden_outputs(batching) if config.output(spec.name) is None}
    own, inputs = inputs, _without(inputs, made | told)
    own_outputs, outputs = outputs, _without(outputs, kept)
    served = inputs + [tensor for tensor in outputs if not config.outputs or config.output(tensor[0])]
    incomplete = not (config.strict or (config.inputs and config.outputs))
    fixed = [f"'{name}' {_brackets(shape)}" for name, _, shape in served if name not in split and shape[:1] != (-1,)]
    called = [(firsts or {}).get(name, "") for name, _, _ in served]
    config = _batched(config, fixed, default_max_batch_size if incomplete else None, called)
    _check_hidden(config, own, own_outputs)
    if not incomplete:
        _check_whole(config, len(made | told), own)
    config = normalise(
        replace(
            config,
            inputs=_merge("input", config.inputs, inputs, config),
            outputs=_merge("output", config.outputs, outputs, config, split),
        )
    )
    check_ragged_names(config, own)
    return config


def _batched(config: ModelConfig, fixed: list[str], default: int | None, called: list[str]) -> ModelConfig:
    # `fixed` are tensors without a batch dimension, `called` the names of first dimensions. Without a default nothing
    # is completed.
    max_batch_size, dynamic, found = config.max_batch_size, config.dynamic_batching, config.guess
    if max_batch_size > 0 and fixed:
        raise invalid_model(
            f"autofill failed for model '{config.name}': model does not support batching while non-zero "
            f"max_batch_size is specified: {', '.join(fixed)} must have a variable first dimension"
        )
    if default is not None and not fixed and max_batch_size == 0:
        max_batch_size = default or config.default_max_batch_size or DEFAULT_MAX_BATCH_SIZE
        found = Guess.NONE if _asks_for_batches(config) else guess(called)
    if default is not None and max_batch_size > 1 and dynamic is None and config.sequence_batching is None:
        dynamic = DynamicBatching(preferred_batch_size=(max_batch_size,))
    return replace(config, max_batch_size=max_batch_size, dynamic_batching=dynamic, guess=found)


def _asks_for_batches(config: ModelConfig) -> bool:
    return bool(config.dynamic_batching or config.sequence_batching or config.batch_input or config.batch_output)


def whole_shapes(config: ModelConfig) -> ModelConfig:
    """The same model without a batch dimension: what was that is a dimension like all others."""

    def whole(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dims=(-1, *spec.dims), reshape=None if spec.reshape is None else (-1, *spec.reshape))

    inputs, outputs = tuple(map(whole, config.inputs)), tuple(map(whole, config.outputs))
    return replace(config, max_batch_size=0, dynamic_batching=None, guess=Guess.NONE, inputs=inputs, outputs=outputs)


def given_to(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Everything that a model is given: by clients, signals and states of sequences, facts of ragged batches."""
    made = (TensorSpec(name, given.data_type, (-1,)) for given in config.batch_input for name in given.target_name)
    return (*all_inputs(config), *made)


def _check_hidden(config: ModelConfig, inputs: list[SignatureTensor], outputs: list[SignatureTensor]) -> None:
    # Signals and states of sequences must be in the graph as they are in the configuration.
    batching = config.sequence_batching
    for what, specs, graph in (
        ("sequence control or state input", hidden_inputs(batching), inputs),
        ("sequence state output", hidden_outputs(batching), outputs),
    ):
        by_name = {name: (data_type, shape) for name, data_type, shape in graph}
        for spec in specs:
            if spec.name not in by_name:
                raise invalid_model(
                    f"unable to load model '{config.name}', configuration specified {what} '{spec.name}', but the "
                    f"model does not provide it, it has: {', '.join(by_name)}"
                )
            _agreed(what, spec, *by_name[spec.name], config)


def _check_whole(config: ModelConfig, hidden: int, graph: list[SignatureTensor]) -> None:
    # It names all inputs, `hidden` ones apart, and whatever it wants of outputs.
    if not config.outputs:
        raise invalid_model(
            f"model configuration must contain at least one output, none were specified for '{config.name}'"
        )
    expected = len(config.inputs) + hidden
    if expected != len(graph):
        raise invalid_model(
            f"unable to load model '{config.name}', configuration expects {expected} inputs, model provides "
            f"{len(graph)}: {', '.join(name for name, _, _ in graph)}"
        )


def _without(graph: list[SignatureTensor], names: Collection[str]) -> list[SignatureTensor]:
    return [tensor for tensor in graph if tensor[0] not in names]


def _merge(
    what: str,
    declared: tuple[TensorSpec, ...],
    graph: list[SignatureTensor],
    config: ModelConfig,
    split: Collection[str] = (),
) -> tuple[TensorSpec, ...]:
    # All inputs must end up declared. The shapes of outputs that are to be `split` are not the graph's.
    by_name = {name: (data_type, shape) for name, data_type, shape in graph}
    agreed = []
    for spec in declared:
        if spec.name not in by_name:
            raise invalid_model(
                f"unable to load model '{config.name}', unexpected inference {what} '{spec.name}', "
                f"allowed {what}s are: {', '.join(by_name)}"
            )
        data_type, shape = by_name[spec.name]
        agreed.append(_agreed(what, spec, data_type, None if spec.name in split else shape, config))
    names = {spec.name for spec in declared}
    if declared and what == "output":
        return tuple(agreed)
    return (*agreed, *(_spec(name, *by_name[name], config) for name in by_name if name not in names))


def _spec(name: str, data_type: DataType, shape: tuple[int, ...], config: ModelConfig) -> TensorSpec:
    dims = shape[1:] if config.max_batch_size > 0 else shape
    if not dims:  # the protocol has no scalars: one element outside, no dimension inside
        return TensorSpec(name, data_type, (1,), reshape=())
    return TensorSpec(name, data_type, dims)


def _agreed(
    what: str, spec: TensorSpec, data_type: DataType, shape: tuple[int, ...] | None, config: ModelConfig
) -> TensorSpec:
    # A dimension that the graph fixes can't be declared variable. Without a shape the type alone counts.
    if spec.data_type is not data_type:
        raise invalid_model(
            f"unable to load model '{config.name}', configuration expects datatype {spec.data_type.config_name} for "
            f"{what} '{spec.name}', model provides {data_type.config_name}"
        )
    if spec.allow_ragged_batch and shape != (-1,):
        raise invalid_model(
            f"unable to load model '{config.name}', configuration expects model provides input with shape [-1]  for "
            f"ragged input '{spec.name}'"
        )
    if spec.allow_ragged_batch or shape is None:
        return spec
    if not shape:
        return _agreed_scalar(spec, spec.model_dims, config)
    full = spec.model_shape(config.max_batch_size)
    if len(full) != len(shape) or any(has not in (-1, says) for says, has in zip(full, shape, strict=True)):
        batch = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, "
            f"making complete shape {_brackets(full)}"
        )
        raise invalid_model(
            f"model '{config.name}', tensor '{spec.name}': the model expects {len(shape)} dimensions "
            f"(shape {_brackets(shape)}) but the model configuration specifies {len(full)} dimensions "
            f"({batch if config.max_batch_size > 0 else f'shape {_brackets(full)}'})"
        )
    return spec


def _agreed_scalar(spec: TensorSpec, inner: tuple[int, ...], config: ModelConfig) -> TensorSpec:
    # Triton's configurations declare a scalar as `dims: [1]`: one without a batch dimension may not reshape it.
    if any(dim != 1 for dim in inner):
        raise invalid_model(
            f"unable to load model '{config.name}', scalar tensor '{spec.name}', should only provide 1 in the model "
            f"configuration when the model doesn't support batching. Model configuration provided: {_brackets(inner)}."
        )
    return replace(spec, reshape=())


def _brackets(shape: tuple[int, ...]) -> str:
    return f"[{','.join(str(dim) for dim in shape)}]"
