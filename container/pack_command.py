"""`mme pack`: from a model directory, Triton's or SageMaker's, or a bare ONNX file to a .tar.gz that an endpoint loads.

The archive holds one directory named after the model, which suits a multi-model endpoint and a single-model one (that
wants the directory). Of a folder of several models, one of which requests are for, it holds each under its own name;
of an ensemble in a repository, also the models that it consists of. A model of an inference script is packed as
SageMaker's own containers want it, `code/` at the root. Before anything is written the models are opened by the same
code that the server uses, and their files are held against their configurations where the framework is installed.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.body import takes_body
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.pbtxt import config_text
from model_handlers.registry import find_backend, handler_for
from serve.archive import pack
from serve.repository import open_model, open_target

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from model_handlers.config import ModelConfig
    from serve.repository import ModelDirectory

_ONNX_WEIGHTS = (".data", "_data")  # what exporters append to the model's file name for weights beside it


def run(arguments: argparse.Namespace) -> int:
    """Check, pack, and tell what was packed.

    Raises:
        MmeError: what is wrong with the model, by file or field; or with the arguments.
    """
    source: Path = arguments.source
    name = arguments.name or source.resolve().name.removesuffix(".onnx")
    output: Path = arguments.output or Path(f"{name}.tar.gz")
    if "/" in name or name in {"", ".", ".."}:
        raise invalid_argument(f"--name '{name}' is not the name of a directory")
    if not output.name.endswith(".tar.gz"):
        raise invalid_argument(f"-o '{output}' must end in .tar.gz, because SageMaker takes no other archive")
    archive = output.name.removesuffix(".tar.gz")
    origins = _origins(source, name, archive)
    with _staged(origins) as staging:
        first = staging / next(iter(origins))
        models = [_opened(staging, first, name)] if len(origins) == 1 else _opened_all(staging, archive)
        _check_steps(models)
        configs = [model.config if model.config.ensemble else _checked(model) for model in models]
        total = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        with _progress(total, output.name) as progress:
            pack(staging, output, level=arguments.level, progress=progress)
        for folder in origins:
            print(f"{folder}/")
            for line in _tree(staging / folder):
                print(f"  {line}")
    for config in configs:
        print(f"\nconfiguration in effect\n{_indented(config_text(config))}")
    print(f"\n{output}: {_size(output.stat().st_size)}")
    return 0


def _origins(source: Path, name: str, archive: str) -> dict[str, Path]:
    """What is packed, by its place in the archive: the .onnx file or the model's directory, or those of several models.

    Raises:
        MmeError: there is no such model, or nothing says which of several requests are for.
    """
    if not source.exists():
        raise invalid_argument(f"'{source}' does not exist: name a model directory or an .onnx file")
    if source.is_file() and source.suffix != ".onnx":
        raise invalid_argument(f"'{source}' is neither a model directory nor an .onnx file")
    if source.is_file():
        return {name: source}
    model = open_target(source, archive)
    if model.config.ensemble and not model.members:  # the models of its steps are beside it
        model = open_model(model.path, archive, strict_name=False)
    if not model.members:
        return {"." if takes_body(model.config) else name: model.path}
    return {each.path.name: each.path for each in (model, *model.members)}


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


@contextlib.contextmanager
def _staged(origins: Mapping[str, Path]) -> Iterator[Path]:
    """A directory that holds the models' directories in their places, and nothing else.

    Files are hard links where the disk allows, so that gigabytes are not copied.
    """
    first = next(iter(origins.values()))
    with tempfile.TemporaryDirectory(prefix=".mme-pack-", dir=_link_parent(first)) as folder:
        staging = Path(folder)
        for name, origin in origins.items():
            if origin.is_file():
                _stage_onnx(origin, staging / name / "1")
            else:
                _stage_directory(origin, staging / name)
        try:
            yield staging
        except MmeError as error:  # the sentence names files, and its reader knows them by the place they come from
            message = error.message
            for name, origin in origins.items():
                place = origin.parent if origin.is_file() else origin
                message = message.replace(str(staging / name), str(place))
            raise MmeError(error.kind, message) from error


def _link_parent(origin: Path) -> Path | None:
    """Where links to `origin` can be made: beside it; None for the temporary directory, where files are copied."""
    parent = origin.resolve().parent
    return parent if os.access(parent, os.W_OK) else None


def _stage_onnx(file: Path, version: Path) -> None:
    version.mkdir(parents=True)
    _link_or_copy(file.resolve(), version / "model.onnx")
    for suffix in _ONNX_WEIGHTS:  # found under the name that the model's file gives it
        weights = file.with_name(file.name + suffix)
        if weights.is_file():
            _link_or_copy(weights.resolve(), version / weights.name)


def _stage_directory(origin: Path, destination: Path) -> None:
    """The same files under new directories. Links stay links, for `pack` to refuse."""
    destination.mkdir(exist_ok=True)
    for entry in os.scandir(origin):
        if entry.is_dir(follow_symlinks=False):
            _stage_directory(Path(entry.path), destination / entry.name)
        else:
            _link_or_copy(Path(entry.path), destination / entry.name)


def _link_or_copy(origin: Path, destination: Path) -> None:
    try:
        os.link(origin, destination, follow_symlinks=False)
    except OSError:  # another disk, or one without links
        shutil.copy2(origin, destination, follow_symlinks=False)


def _check_steps(models: list[ModelDirectory]) -> None:
    """Every model of an ensemble's steps has to be among them."""
    there = {model.path.name for model in models}
    for model in models:
        for step in model.config.ensemble:
            if step.model not in there:
                raise invalid_model(
                    f"ensemble '{model.name}' has a step of model '{step.model}', which is neither in its folder nor "
                    f"beside it: found {', '.join(sorted(there))}"
                )


def _checked(model: ModelDirectory) -> ModelConfig:
    """The configuration as the server would complete it; every served version's file has to agree with it."""
    handler = handler_for(find_backend(model.config.backend, model.config.platform, model.name), model.name)
    config = model.config
    for version in model.versions:
        try:
            config = handler.autocomplete(model.config, model.model_file(version))
        except MmeError as error:
            if error.kind is not Kind.UNSUPPORTED:
                raise
            _note(f"{model.config.default_model_filename} is not checked: {error.message}")
            return model.config
    return config


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal where rich is installed, else nothing."""
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and 100 ms
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    except ImportError:
        yield lambda _count: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"pack {what}", total=total)
        yield lambda count: progress.advance(task, count)


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
