"""Does an ensemble fit the models of its steps? PURE. Asked when they are loaded; sentences are Triton's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from model_handlers.config import EnsembleStep, ModelConfig
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
    tensors: dict[str, _Side] = {}
    for spec in (*config.inputs, *config.outputs):
        tensors[spec.name] = _side(config.name, config, spec)
    for step, member in zip(config.ensemble, members, strict=True):
        if config.max_batch_size > member.max_batch_size > 0:
            raise invalid_model(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{step.model} which only allows maximum batch size to be {member.max_batch_size}"
            )
        for spec in member.inputs:
            if spec.name not in step.inputs and not spec.optional:
                raise invalid_model(
                    f"in ensemble {config.name}, input {spec.name} in model {step.model} is not mapped to any "
                    "ensemble tensors"
                )
        for tensor, side in _sides(config.name, step, member):
            _check_same(config.name, tensor, tensors.setdefault(tensor, side), side)


def _sides(ensemble: str, step: EnsembleStep, member: ModelConfig) -> Iterator[tuple[str, _Side]]:
    """The tensors of a step as its model takes them."""
    for name, tensor in step.inputs.items():
        spec = member.input(name)
        if spec is None:
            raise invalid_model(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model}"
            )
        yield tensor, _side(step.model, member, spec)
    for name, tensor in step.outputs.items():
        spec = member.output(name)
        if spec is None:
            raise invalid_model(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model}"
            )
        yield tensor, _side(step.model, member, spec)


def _side(model: str, config: ModelConfig, spec: TensorSpec) -> _Side:
    return _Side(model, spec.data_type, spec.dims, config.max_batch_size > 0)


def _check_same(ensemble: str, tensor: str, one: _Side, other: _Side) -> None:
    if one.data_type is not other.data_type:
        raise invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent data type: {one.data_type.config_name} is "
            f"inferred from model {one.model} while {other.data_type.config_name} is inferred from model {other.model}"
        )
    if not _same_shape(one, other):
        raise invalid_model(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {_shape(one)} is inferred from "
            f"model {one.model} while {_shape(other)} is inferred from model {other.model}"
        )


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
