"""The configuration of an ensemble that runs models one behind the other. PURE.

An input takes the tensor of its name that a step before makes, or that the ensemble is given. A step that would take
nothing of the one before by name is wired to it in order. Nothing is guessed where types or shapes disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from model_handlers.config.model_config import EnsembleStep, ModelConfig
from model_handlers.config.validate import PLATFORM
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model_handlers.errors import MmeError
    from model_handlers.tensor import TensorSpec

    Made = Mapping[str, tuple[str, TensorSpec]]  # a step's tensor → the ensemble's, and what it is


def ensemble_of(name: str, steps: Sequence[ModelConfig]) -> ModelConfig:
    """The ensemble: the first model's inputs, the last one's outputs.

    Args:
        name: the ensemble's.
        steps: configurations of the models in order, their inputs and outputs complete.

    Raises:
        MmeError: INVALID_ARGUMENT when a step needs what nobody makes.
    """
    for step in steps:
        if not step.inputs or not step.outputs:
            raise invalid_argument(
                f"--ensemble: the inputs and outputs of '{step.name}' are not known: write them into its config.pbtxt"
            )
    batch = min(step.max_batch_size for step in steps)
    inputs = tuple(_outer(spec, steps[0], batch) for spec in steps[0].inputs)
    before: Made = {spec.name: (spec.name, spec) for spec in inputs}
    known = before
    called = set(before)
    wired: list[EnsembleStep] = []
    for number, step in enumerate(steps, 1):
        taken = {spec.name: _source(step, spec, before, known, batch) for spec in step.inputs if _wanted(spec, known)}
        before = {
            spec.name: (_tensor(spec.name, step.name, number, len(steps), called), _outer(spec, step, batch))
            for spec in step.outputs
        }
        known = {**known, **before}
        called |= {tensor for tensor, _ in before.values()}
        wired.append(EnsembleStep(step.name, -1, taken, {own: tensor for own, (tensor, _) in before.items()}))
    outputs = tuple(replace(spec, name=tensor) for tensor, spec in before.values())
    used = {tensor for each in wired for tensor in each.input_map.values()} | {spec.name for spec in outputs}
    return ModelConfig(
        name=name,
        platform=PLATFORM,
        max_batch_size=batch,
        inputs=inputs,
        outputs=outputs,
        ensemble=tuple(
            replace(each, output_map={own: tensor for own, tensor in each.output_map.items() if tensor in used})
            for each in wired
        ),
    )


def _tensor(name: str, step: str, number: int, count: int, others: set[str]) -> str:
    """What the ensemble calls an output: of the last step as that does, unless another tensor is called so."""
    if number == count and name not in others:
        return name
    tensor = f"{step}_{name}"
    return tensor if tensor not in others else f"{step}_{number}_{name}"


def _wanted(spec: TensorSpec, known: Made) -> bool:
    """An optional input is wired where somebody makes it."""
    return not spec.optional or spec.name in known


def _source(step: ModelConfig, spec: TensorSpec, before: Made, known: Made, batch: int) -> str:
    """The ensemble's tensor for an input."""
    in_order = len(before) == len(step.inputs) and not any(each.name in before for each in step.inputs)
    if in_order:
        tensor, source = list(before.values())[[each.name for each in step.inputs].index(spec.name)]
    elif spec.name in known:
        tensor, source = known[spec.name]
    else:
        raise _unmade(step, spec, known)
    wanted = _outer(spec, step, batch)
    if source.data_type is not wanted.data_type or not _fits(source.dims, wanted.dims):
        raise invalid_argument(
            f"--ensemble: input '{spec.name}' of '{step.name}' is {_shown(wanted)}, and '{source.name}' before it is "
            f"{_shown(source)}: put a model between them that turns one into the other"
        )
    return tensor


def _unmade(step: ModelConfig, spec: TensorSpec, known: Made) -> MmeError:
    return invalid_argument(
        f"--ensemble: nobody makes input '{spec.name}' of '{step.name}': before it there are "
        f"{', '.join(map(repr, known))}; rename one of them, or write the ensemble's config.pbtxt yourself"
    )


def _outer(spec: TensorSpec, step: ModelConfig, batch: int) -> TensorSpec:
    """A tensor of a step as the ensemble sees it: of one that batches in an ensemble that does not, the whole shape."""
    dims = (-1, *spec.dims) if step.max_batch_size and not batch else spec.dims
    return replace(spec, dims=dims, reshape=None, allow_ragged_batch=False, optional=False, label_filename="")


def _fits(made: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(made) == len(wanted) and all(-1 in pair or pair[0] == pair[1] for pair in zip(made, wanted, strict=True))


def _shown(spec: TensorSpec) -> str:
    return f"{spec.data_type.name} {list(spec.dims)}"
