"""The rules that an ensemble's own configuration must obey, whatever its models are. Pure; sentences are Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from model_handlers.config import EnsembleStep, ModelConfig

PLATFORM = "ensemble"


def check_ensemble(config: ModelConfig) -> None:
    """Check that it is an ensemble in every respect or in none, and that its tensors come from and go somewhere.

    Raises:
        MmeError: INVALID_MODEL, naming the step or the tensor.
    """
    name = config.name
    if config.platform != PLATFORM:
        if config.ensemble:
            raise invalid_model(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble")
        return
    if config.backend:
        raise invalid_model(f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type")
    if config.instance_groups:
        raise invalid_model(f"instance group should not be specified for ensemble '{name}'")
    if config.optimization_level:
        raise invalid_model(f"optimization should not be specified for ensemble '{name}'")
    if not config.ensemble:
        raise invalid_model(f"must specify 'step' for ensemble '{name}'")
    for index, step in enumerate(config.ensemble):
        for field, value in (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs)):
            if not value:
                raise invalid_model(f"must specify '{field}' in step {index} of ensemble '{name}'")
    _check_tensors(config)


def _check_tensors(config: ModelConfig) -> None:
    inputs = {spec.name for spec in config.inputs}
    read = {tensor for step in config.ensemble for tensor in step.inputs.values()}
    written = _written(config.ensemble, inputs, config.name)
    for spec in config.inputs:
        if spec.name not in read:
            raise invalid_model(f"ensemble input '{spec.name}' for ensemble '{config.name}' is not used")
    for tensor in written - inputs:
        if tensor not in read and config.output(tensor) is None:
            raise invalid_model(f"ensemble tensor '{tensor}' is unused in ensemble '{config.name}'")
    missing = sorted(read - written)
    for spec in config.outputs:
        if spec.name not in written - inputs:
            raise invalid_model(f"output '{spec.name}' for ensemble '{config.name}' is not written")
    if missing:
        which = f": at least one of its depending tensors, '{missing[0]}', is not connected"
        output = config.outputs[0].name if config.outputs else ""
        raise invalid_model(f"output '{output}' for ensemble '{config.name}' is not written{which}")


def _written(steps: tuple[EnsembleStep, ...], inputs: set[str], name: str) -> set[str]:
    written = set(inputs)
    for step in steps:
        for tensor in step.outputs.values():
            if tensor in written:
                raise invalid_model(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                )
            written.add(tensor)
    return written
