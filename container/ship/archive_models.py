"""The models that an archive holds, with their configurations: those of files, of folders, of an ensemble's steps.

Models are opened by the same code that the server uses. A bare file gets the configuration that the server would
complete, in writing. An ensemble of models one behind the other is wired by the names of their tensors: an input
takes the tensor of its name that a step before makes, or that the ensemble is given; a step that would take nothing
of the one before by name is wired to it in order. Nothing is guessed where types or shapes disagree.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from container.ship.model_files import CONFIG, ModelSource
from model_handlers.config.autocomplete import whole_shapes
from model_handlers.config.model_config import DynamicBatching, EnsembleStep, Guess, ModelConfig
from model_handlers.config.pbtxt import config_text
from model_handlers.config.validate import PLATFORM
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.registry import find_backend, handler_for
from model_handlers.scripts.default_script import takes_raw_body
from serve.sources.repository import open_model, open_target, parts_beside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from model_handlers.tensor import TensorSpec
    from serve.sources.repository import ModelDirectory

    Made = Mapping[str, tuple[str, TensorSpec]]  # a step's tensor → the ensemble's, and what it is


def origins_of(sources: list[ModelSource], steps: list[str], name: str, archive: str) -> dict[str, ModelSource]:
    """What is packed, by its place in the archive."""
    return _of_several(sources, steps, name) if steps or len(sources) > 1 else _of_one(sources[0], name, archive)


def _of_one(source: ModelSource, name: str, archive: str) -> dict[str, ModelSource]:
    """What is packed, by its place in the archive: the model, or those of a folder of several."""
    if source.file is not None:
        return {"." if source.file.is_script else name: source}
    if source.bare or source.config is not None:
        return {name: source}
    model = open_target(source.path, archive)
    parts = [member.path for member in model.members]
    if model.config.ensemble and not parts:  # the models of its steps are beside it
        parts = parts_beside(model)
    if not parts:
        return {"." if takes_raw_body(model.config) else name: ModelSource(model.path)}
    return {path.name: ModelSource(path) for path in (model.path, *parts)}


def _of_several(sources: list[ModelSource], steps: list[str], name: str) -> dict[str, ModelSource]:
    """Several models by their names; those of an ensemble's steps where there is one."""
    if len(sources) == 1 and sources[0].file is None:
        sources = [ModelSource.of(path, None) for path in sorted(sources[0].path.iterdir()) if path.is_dir()]
    parts = {source.stem: source for source in sources}
    if len(parts) < len(sources):
        raise invalid_argument(f"two models have one name among {', '.join(sorted(each.stem for each in sources))}")
    missing = [step for step in steps if step not in parts]
    if missing:
        raise invalid_argument(f"--ensemble: there is no model '{missing[0]}' among {', '.join(parts)}")
    if steps and name in parts:
        raise invalid_argument(f"the ensemble can't be called '{name}' like its model: give --name")
    return {step: parts[step] for step in steps} if steps else parts


def configured(
    staging: Path, origins: Mapping[str, ModelSource], steps: list[str], name: str, archive: str
) -> list[ModelConfig]:
    """The configurations of the staged models, first that of the one to be asked; those of bare files are written."""
    for folder, origin in origins.items():
        if origin.bare and folder != ".":
            _write_config(staging / folder, folder)
    if steps:
        ensemble = ensemble_of(name, [_checked(open_model(staging / step, step, strict_name=False)) for step in steps])
        (staging / name / "1").mkdir(parents=True)
        (staging / name / CONFIG).write_text(config_text(ensemble))
    alone = len(origins) == 1 and not steps
    models = [_opened(staging, staging / next(iter(origins)), name)] if alone else _opened_all(staging, archive)
    _check_steps(models)
    return [model.config if model.config.ensemble else _checked(model) for model in models]


def _write_config(directory: Path, name: str) -> None:
    """Write what the server would complete by itself, with dynamic batching where the model takes batches."""
    model = open_model(directory, name, strict_name=False)
    config = _checked(model, quiet=True)  # the same is said once more when all is there
    if not (config.inputs and config.outputs):
        return
    if config.guess is Guess.UNKNOWN:  # what is written is trusted: this is the server's to find out
        _note(f"'{name}' does not say whether it batches: the server tries it; write max_batch_size if you know")
        config = model.config
    elif config.guess is Guess.OTHER:
        config = whole_shapes(config)
    elif config.max_batch_size > 1 and config.dynamic_batching is None and not config.decoupled:
        config = replace(config, dynamic_batching=DynamicBatching(()))
    # Without a name: the archive may be called as its owner likes.
    (directory / CONFIG).write_text(config_text(replace(config, name="")))


def _opened(staging: Path, directory: Path, name: str) -> ModelDirectory:
    """The staged model; a configuration with another name is mentioned, because only some modes take it."""
    model = open_target(staging, name)
    try:
        open_model(directory, name)
    except MmeError as error:
        _note(f"{error.message}; an endpoint of this one model refuses that, give --name")
    return model


def _opened_all(staging: Path, archive: str) -> list[ModelDirectory]:
    model = open_target(staging, archive)
    return [model, *model.members]


def _check_steps(models: list[ModelDirectory]) -> None:
    """Every model of an ensemble's steps has to be among them."""
    there = {model.path.name for model in models}
    for model in models:
        for step in model.config.ensemble:
            if step.model_name not in there:
                raise invalid_model(
                    f"ensemble '{model.name}' has a step of model '{step.model_name}', which is neither in its folder "
                    f"nor beside it: found {', '.join(sorted(there))}"
                )


def _checked(model: ModelDirectory, *, quiet: bool = False) -> ModelConfig:
    """The configuration as the server would complete it; every served version's file has to agree with it."""
    handler = handler_for(find_backend(model.config.backend, model.config.platform, model.name, model.first))
    config = model.config
    for version in model.versions:
        try:
            config = handler.autocomplete(model.config, model.model_file(version))
        except MmeError as error:
            if error.kind is not Kind.UNSUPPORTED:
                raise
            if not quiet:
                _note(f"{model.config.default_model_filename} is not checked: {error.message}")
            return model.config
    return config


def _note(sentence: str) -> None:
    print(f"pack: note: {sentence}", file=sys.stderr)


def ensemble_of(name: str, steps: Sequence[ModelConfig]) -> ModelConfig:
    """The ensemble: the first model's inputs, the last one's outputs."""
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
    """An optional input is wired where a model before makes it."""
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
