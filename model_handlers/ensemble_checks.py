"""The rules that an ensemble's own configuration must obey, whatever its models are. Pure; sentences are Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.config import EnsembleStep, ModelConfig
    from model_handlers.errors import MmeError

    Problem = tuple[str, MmeError]

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
    if config.instance_groups:
        yield "instance_group", invalid_model(f"instance group should not be specified for ensemble '{name}'")
    if config.optimization_level:
        yield "optimization", invalid_model(f"optimization should not be specified for ensemble '{name}'")
    if config.warmup:
        yield "model_warmup", invalid_model(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble:
        sentence = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        yield _STEPS, invalid_model(f"{sentence}: must specify 'step' for ensemble '{name}'")


def _step_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, step in enumerate(config.ensemble):
        for field, value in (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs)):
            if not value:
                sentence = f"must specify '{field}' in step {index} of ensemble '{config.name}'"
                yield f"{_STEPS}[{index}].{field}", invalid_model(sentence)


def _tensor_problems(config: ModelConfig) -> Iterator[Problem]:
    if not config.ensemble:
        return
    inputs = {spec.name for spec in config.inputs}
    read = {tensor for step in config.ensemble for tensor in step.inputs.values()}
    written = set(inputs)
    yield from _written(config.ensemble, written, config.name)
    for index, spec in enumerate(config.inputs):
        if spec.name not in read:
            sentence = f"ensemble input '{spec.name}' for ensemble '{config.name}' is not used"
            yield f"input[{index}]", invalid_model(sentence)
    for tensor in sorted(written - inputs):
        if tensor not in read and config.output(tensor) is None:
            yield _STEPS, invalid_model(f"ensemble tensor '{tensor}' is unused in ensemble '{config.name}'")
    for index, spec in enumerate(config.outputs):
        if spec.name not in written - inputs:
            sentence = f"output '{spec.name}' for ensemble '{config.name}' is not written"
            yield f"output[{index}]", invalid_model(sentence)
    output = config.outputs[0].name if config.outputs else ""
    for tensor in sorted(read - written):
        which = f": at least one of its depending tensors, '{tensor}', is not connected"
        yield _STEPS, invalid_model(f"output '{output}' for ensemble '{config.name}' is not written{which}")


def _written(steps: tuple[EnsembleStep, ...], written: set[str], name: str) -> Iterator[Problem]:
    """Adds what the steps write."""
    for index, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in written:
                yield (
                    f"{_STEPS}[{index}].output_map",
                    invalid_model(
                        f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                    ),
                )
            written.add(tensor)
