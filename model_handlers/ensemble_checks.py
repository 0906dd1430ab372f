"""The rules that an ensemble's own configuration must obey, whatever its models are. Pure; sentences are Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
