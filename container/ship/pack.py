"""`mme pack`: from models as frameworks write them to a .tar.gz that an endpoint loads.

An archive holds one directory named after the model, which suits a multi-model endpoint and a single-model one (that
wants the directory). Of several models, one of which requests are for, it holds each under its own name; of an ensemble
in a repository, also the models that it consists of. A model of an inference script is packed as SageMaker's own
containers want it, `code/` at the root. A bare file gets the configuration that the server would complete, in writing.
Before anything is written the models are opened by the same code that the server uses, and their files are held against
their configurations where the framework is installed.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from container.ship.progress import progress
from container.ship.staging import CONFIG, Origin, link_or_copy, staged
from container.ship.wiring import ensemble_of
from model_handlers.config.autocomplete import whole_shapes
from model_handlers.config.model_config import DynamicBatching, Guess
from model_handlers.config.pbtxt import config_text
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.registry import find_backend, handler_for
from model_handlers.scripts.default_script import takes_raw_body
from serve.sources.archive import pack
from serve.sources.repository import open_model, open_target
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.config.model_config import ModelConfig
    from serve.sources.repository import ModelDirectory

_MOST_COPIES = 10_000


def run(arguments: argparse.Namespace) -> int:
    """Check, pack, and tell what was packed: one archive, or into a folder one of each model.

    Raises:
        MmeError: what is wrong with the model, by file or field; or with the arguments.
    """
    if arguments.output is None or not arguments.output.is_dir():
        return _pack(arguments)
    for name, path in _named(arguments).items():
        output = arguments.output / f"{name}{ARCHIVE_SUFFIX}"
        each = argparse.Namespace(**vars(arguments) | {"models": [path], "output": output})
        _pack(each, brief=len(arguments.models) > 1)
    return 0


def _named(arguments: argparse.Namespace) -> dict[str, Path]:
    """The models that become an archive each, by their names.

    Raises:
        MmeError: two have one name, or they are asked to be one.
    """
    if arguments.ensemble:
        raise invalid_argument(f"-o '{arguments.output}' is a folder: an ensemble is one archive, name it")
    if arguments.name and len(arguments.models) > 1:
        raise invalid_argument("--name is for one model: several in a folder are called after their files")
    stems = [arguments.name or Origin.of(path, None).stem for path in arguments.models]
    again = next((stem for stem in stems if stems.count(stem) > 1), None)
    if again is not None:
        raise invalid_argument(f"two models would be '{again}{ARCHIVE_SUFFIX}': pack them into folders of their own")
    return dict(zip(stems, arguments.models, strict=True))


def _pack(arguments: argparse.Namespace, *, brief: bool = False) -> int:
    """Make one archive; `brief` tells no more than that."""
    sources = [Origin.of(path, arguments.config) for path in arguments.models]
    name = _name(arguments, sources)
    output: Path = arguments.output or Path(f"{name}{ARCHIVE_SUFFIX}")
    _check_arguments(arguments, name, output)
    archive = output.name.removesuffix(ARCHIVE_SUFFIX)
    steps = arguments.ensemble.split(",") if arguments.ensemble else []
    origins = _parts(sources, steps, name) if steps or len(sources) > 1 else _origins(sources[0], name, archive)
    copies = _copies(output, arguments.copies)
    with staged(origins) as staging:
        configs = _configured(staging, origins, steps, name, archive)
        total = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        with progress(total, f"pack {output.name}") as advance:
            pack(staging, copies[0], level=arguments.level, progress=advance)
        if not brief:
            _describe(staging, [*origins, *([name] if steps else [])], configs)
    for copy in copies[1:]:
        copy.unlink(missing_ok=True)
        link_or_copy(copies[0], copy)
    for path in copies:
        print(f"{path}: {_size(path.stat().st_size)}")
    return 0


def _describe(staging: Path, folders: list[str], configs: list[ModelConfig]) -> None:
    """Tell of each model its files and its configuration."""
    for folder in folders:
        print(f"{folder}/")
        for line in _tree(staging / folder):
            print(f"  {line}")
    for config in configs:
        print(f"\nconfiguration in effect\n{_indented(config_text(config))}")
    print()


def _name(arguments: argparse.Namespace, sources: list[Origin]) -> str:
    """The model's name: given, or that of what is packed."""
    if arguments.name:
        return str(arguments.name)
    if len(sources) == 1 and not arguments.ensemble:
        return sources[0].stem
    if arguments.output:
        return str(arguments.output.name).removesuffix(ARCHIVE_SUFFIX)
    raise invalid_argument(
        "several models become one archive: name it with -o NAME.tar.gz; for one each, name a folder that there is"
    )


def _check_arguments(arguments: argparse.Namespace, name: str, output: Path) -> None:
    if "/" in name or name in {"", ".", ".."}:
        raise invalid_argument(f"--name '{name}' is not the name of a directory")
    if not output.name.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(
            f"-o '{output}' must end in .tar.gz, because SageMaker takes no other archive, or be a folder"
        )
    if not output.parent.is_dir():
        raise invalid_argument(f"-o '{output}' lies in no folder that there is: make '{output.parent}' first")
    if not 1 <= arguments.copies <= _MOST_COPIES:
        raise invalid_argument(f"--copies {arguments.copies} is not between 1 and {_MOST_COPIES}")
    if arguments.config and len(arguments.models) > 1:
        raise invalid_argument("--config is for one model: put a config.pbtxt into the directory of each")


def _origins(source: Origin, name: str, archive: str) -> dict[str, Origin]:
    """What is packed, by its place in the archive: the model, or those of a folder of several.

    Raises:
        MmeError: there is no such model, or nothing says which of several requests are for.
    """
    if source.file is not None:
        return {"." if source.file.is_script else name: source}
    if source.bare or source.config is not None:
        return {name: source}
    model = open_target(source.path, archive)
    if model.config.ensemble and not model.members:  # the models of its steps are beside it
        model = open_model(model.path, archive, strict_name=False)
    if not model.members:
        return {"." if takes_raw_body(model.config) else name: Origin(model.path)}
    return {each.path.name: Origin(each.path) for each in (model, *model.members)}


def _parts(sources: list[Origin], steps: list[str], name: str) -> dict[str, Origin]:
    """Several models by their names; those of an ensemble's steps where there is one.

    Raises:
        MmeError: a step has no model, or two have one name.
    """
    if len(sources) == 1 and sources[0].file is None:
        sources = [Origin.of(path, None) for path in sorted(sources[0].path.iterdir()) if path.is_dir()]
    parts = {source.stem: source for source in sources}
    if len(parts) < len(sources):
        raise invalid_argument(f"two models have one name among {', '.join(sorted(each.stem for each in sources))}")
    missing = [step for step in steps if step not in parts]
    if missing:
        raise invalid_argument(f"--ensemble: there is no model '{missing[0]}' among {', '.join(parts)}")
    if steps and name in parts:
        raise invalid_argument(f"the ensemble can't be called '{name}' like its model: give --name")
    return {step: parts[step] for step in steps} if steps else parts


def _configured(
    staging: Path, origins: Mapping[str, Origin], steps: list[str], name: str, archive: str
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


def _copies(output: Path, count: int) -> list[Path]:
    """The archives: one, or as many of the same content under names with a number."""
    if count == 1:
        return [output]
    stem = output.name.removesuffix(ARCHIVE_SUFFIX)
    return [output.with_name(f"{stem}-{number}{ARCHIVE_SUFFIX}") for number in range(count)]


def _opened(staging: Path, directory: Path, name: str) -> ModelDirectory:
    """The staged model; a configuration with another name is mentioned, because only some modes take it."""
    model = open_target(staging, name)
    try:
        open_model(directory, name)
    except MmeError as error:
        _note(f"{error.message}; an endpoint of this one model refuses that, give --name")
    return model


def _opened_all(staging: Path, archive: str) -> list[ModelDirectory]:
    """The staged models, first the one that requests for the archive are for."""
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


def _tree(directory: Path) -> list[str]:
    """A line for each file: its path below the model's directory, and its size."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory).as_posix() for path in files]
    width = max(map(len, names), default=0)
    return [f"{name:{width}}  {_size(path.stat().st_size):>9}" for name, path in zip(names, files, strict=True)]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


def _note(sentence: str) -> None:
    print(f"pack: note: {sentence}", file=sys.stderr)
