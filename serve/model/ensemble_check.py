"""Does an ensemble fit the models of its steps? PURE. Asked when they are loaded; sentences are Triton's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from model_handlers.config.model_config import EnsembleStep, ModelConfig
    from model_handlers.errors import MmeError
    from model_handlers.tensor import DataType, TensorSpec


@dataclass(frozen=True, slots=True)
class _Side:
    """What one model, or the ensemble itself, takes a tensor for."""

    model: str
    data_type: DataType
    dims: tuple[int, ...]
    batches: bool


def check_members(config: ModelConfig, members: Sequence[ModelConfig]) -> None:
    """Check every mapping against the model of its step, and every tensor against all who read and write it.

    Args:
        config: the ensemble's.
        members: the configuration of each step's model, completed.

    Raises:
        MmeError: INVALID_MODEL, naming ensemble, tensor and models.
    """
    for _, error in member_problems(config, members):
        raise error


def member_problems(config: ModelConfig, members: Sequence[ModelConfig | None]) -> Iterator[tuple[str, MmeError]]:
    """All that such a check finds: the field of the ensemble's configuration, and the error.

    Arguments are those of `check_members`; of a step whose model is None nothing is known.
    """
    tensors: dict[str, _Side] = {}
    for spec in (*config.inputs, *config.outputs):
        tensors[spec.name] = _side(config.name, config, spec)
    for index, (step, member) in enumerate(zip(config.ensemble, members, strict=True)):
        if member is not None:
            for field, error in _step_problems(config, step, member, tensors):
                yield f"ensemble_scheduling.step[{index}]{field}", error


def _step_problems(
    config: ModelConfig, step: EnsembleStep, member: ModelConfig, tensors: dict[str, _Side]
) -> Iterator[tuple[str, MmeError]]:
    if config.max_batch_size > member.max_batch_size > 0:
        sentence = (
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
            f"{step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
        )
        yield "", invalid_model(sentence)
    for spec in member.inputs:
        if spec.name not in step.input_map and not spec.optional:
            sentence = (
                f"in ensemble {config.name}, input {spec.name} in model {step.model_name} is not mapped to any "
                "ensemble tensors"
            )
            yield ".input_map", invalid_model(sentence)
    for field, name, tensor, found in _mapped(step, member):
        if found is None:
            way = "mapping to non-existing input" if field == ".input_map" else "mapped from non-existing output"
            sentence = f"in ensemble {config.name}, ensemble tensor {tensor} is {way} {name} in model {step.model_name}"
            yield field, invalid_model(sentence)
            continue
        side = _side(step.model_name, member, found)
        error = _difference(config.name, tensor, tensors.setdefault(tensor, side), side)
        if error is not None:
            yield field, error


def _mapped(step: EnsembleStep, member: ModelConfig) -> Iterator[tuple[str, str, str, TensorSpec | None]]:
    """The map, the tensor of the model by its name there, that of the ensemble, and what the model has."""
    for name, tensor in step.input_map.items():
        yield ".input_map", name, tensor, member.input(name)
    for name, tensor in step.output_map.items():
        yield ".output_map", name, tensor, member.output(name)


def _side(model: str, config: ModelConfig, spec: TensorSpec) -> _Side:
    return _Side(model, spec.data_type, spec.dims, config.max_batch_size > 0)


def _difference(ensemble: str, tensor: str, one: _Side, other: _Side) -> MmeError | None:
    """What two models disagree about, if they do."""
    if one.data_type is not other.data_type:
        return invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent data type: {one.data_type.config_name} is "
            f"inferred from model {one.model} while {other.data_type.config_name} is inferred from model {other.model}"
        )
    if not _same_shape(one, other):
        return invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {_shape(one)} is inferred from "
            f"model {one.model} while {_shape(other)} is inferred from model {other.model}"
        )
    return None


def _same_shape(one: _Side, other: _Side) -> bool:
    """Whether both can mean one tensor, whose batch dimension may come and go where only one of them batches."""
    forms = [(one.dims, other.dims)]
    if one.batches != other.batches:
        batched, plain = (one, other) if one.batches else (other, one)
        forms = [((-1, *batched.dims), plain.dims), (batched.dims, plain.dims)]
    return any(_fit(a, b) for a, b in forms)


def _fit(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _shape(side: _Side) -> str:
    return "[" + ",".join(map(str, (-1, *side.dims) if side.batches else side.dims)) + "]"


def check_circle(start: str, steps: Mapping[str, Sequence[str]]) -> None:
    """Refuse an ensemble that is a step of its own steps, however far behind.

    Args:
        start: its name.
        steps: of each model beside it, itself too, the models of its steps.

    Raises:
        MmeError: INVALID_MODEL, with the way back to it.
    """
    waiting = [[start]]
    seen: set[str] = set()
    while waiting:
        way = waiting.pop()
        for step in steps.get(way[-1], ()):
            if step == start:
                raise invalid_model(f"circular dependency between ensembles: {' -> '.join([*way, start])}")
            if step not in seen:
                seen.add(step)
                waiting.append([*way, step])
