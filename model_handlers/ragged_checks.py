"""Rules for the helpers of ragged batches. Pure; sentences are Triton's where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model_handlers.completion import GraphTensor
    from model_handlers.config import ModelConfig


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
