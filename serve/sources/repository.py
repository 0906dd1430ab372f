"""From a directory on disk to what can be loaded: which model it is, which versions, which file of each.

Reads the configuration, and knows by `layout` what lies there; opens no model file and knows no framework. Runs on load
threads; holds no state.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.config.model_config import SCRIPTS
from model_handlers.config.pbtxt import parse_config_json
from model_handlers.config.validate import PLATFORM, check_named
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.registry import Backend, detect_backend, find_backend, told_by_file
from model_handlers.scripts.default_script import SUBMIT_DIRECTORY
from model_handlers.system.disk import directory_size, disk_errors, file_digest
from serve.sources.layout import (
    CONFIG_NAME,
    advice,
    files_in,
    ignored_versions,
    is_model,
    is_pointer,
    models_in,
    no_model,
    read_config,
    shown_tree,
    versions_in,
)
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.sources.source import is_plain

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from model_handlers.config.model_config import EnsembleStep, ModelConfig


_log = logging.getLogger("mme.load")


def checksum_errors(config: ModelConfig, directory: Path) -> Iterator[MmeError]:
    """An error for each file of the model's directory that is not what its digest says."""
    for agent in config.agents:
        for key, expected in agent.parameters.items():
            name = key.removeprefix("MD5:")
            file = directory / name
            whose = f"checksum of '{name}' of model '{config.name}'"
            if not file.is_file():
                yield invalid_model(f"{whose}: there is no such file in the model's directory")
                continue
            with disk_errors(whose):
                actual = file_digest(file, "md5").hex()
            if actual != expected.strip().lower():
                yield invalid_model(f"{whose}: mismatched MD5 hash, expected {expected.strip()}, got {actual}")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One model on disk, with everything that its files and its configuration leave open decided.

    Attributes:
        config: with backend, platform and model file named.
        versions: number to directory, of those that the version policy selects, ascending.
        members: the other models of its archive, which only it may call; their names begin with its own.
        steps: of an ensemble of a repository, for each step the name that its model is served under.
    """

    name: str
    path: Path
    config: ModelConfig
    versions: dict[int, Path]
    members: tuple[ModelDirectory, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def first(self) -> Path:
        return next(iter(self.versions.values()))

    def model_file(self, version: int) -> Path:
        """The file (or directory, for some backends) that the handler of that version loads."""
        return self.versions[version] / self.config.default_model_filename

    def size(self) -> int:
        return sum(directory_size(path) for path in self.versions.values())

    def fingerprint(self) -> str:
        """A name for what these files are, wherever they lie."""
        digest = hashlib.sha256()
        files = sorted(files_in(self.path))
        for place, status in files:
            digest.update(os.fsencode(f"{'/'.join(place)}\0{status.st_size}\0{status.st_mtime_ns}\0"))
        if any(place == (CONFIG_NAME,) for place, _ in files):  # archives packed alike have one size and one time
            digest.update((self.path / CONFIG_NAME).read_bytes())
        return digest.hexdigest()[:32]


def open_target(path: Path, name: str, scripts: Scripts = DEFAULT_SCRIPTS, *, override: str = "") -> ModelDirectory:
    """The model in an unpacked archive: at its root, in its one model directory, or the one of several to be asked.

    Whatever the configuration calls it, it is served as `name`. Of several the one to be asked is the ensemble of the
    others, or has the archive's name or the parameter MME_ENTRY; the others are its members. An `override` is that
    model's configuration, as JSON.
    """
    if not path.is_dir():
        raise invalid_argument(f"model '{name}' should be in {path}, which is not a directory")
    with disk_errors(f"model '{name}' cannot be read from {path}"):
        entry, *others = models_in(path, name, scripts)
        model = _open(entry, name, scripts, strict_name=False, override=override)
        members = [_open_part(other, name, scripts) for other in others]
        for error in (error for each in (model, *members) for error in namespace_errors(each.config)):
            raise error
        return replace(model, members=tuple(members))


def open_model(
    path: Path,
    name: str,
    scripts: Scripts = DEFAULT_SCRIPTS,
    *,
    strict_name: bool = True,
    override: str = "",
    others: tuple[Path, ...] = (),
) -> ModelDirectory:
    """The model whose own directory is `path`, such as a repository of several holds.

    `strict_name` refuses a configuration that calls it something else. Steps of an ensemble are models beside it or in
    `others`, as far as those are on disk.
    """
    if not path.is_dir():
        reason = f"model '{name}' is not in the repository {path.parent}: make {name}/{CONFIG_NAME} and {name}/1/"
        raise MmeError(Kind.UNKNOWN_MODEL, reason)
    with disk_errors(f"model '{name}' cannot be read from {path}"):
        if not is_model(path) and not scripts.serves(path):
            raise no_model(path, name)
        model = _open(path, name, scripts, strict_name=strict_name, override=override)
        places = (path.parent, *others)
        return replace(model, steps=tuple(_served_name(step, places) for step in model.config.ensemble))


def _served_name(step: EnsembleStep, repositories: tuple[Path, ...]) -> str:
    """What the model of a step is served as: with its repository's name where others have one of that name too.

    One that is in none of them may be there all the same, as it was loaded with files of a client's.
    """
    name, space = step.model_name, step.model_namespace
    holders = [place for place in repositories if is_plain(name) and (place / name).is_dir()]
    meant = next((place for place in holders if space in {"", place.name, str(place)}), None)
    if meant is None:
        return f"{space}/{name}" if space else name
    return name if len(holders) == 1 else f"{meant.name}/{name}"


def parts_beside(model: ModelDirectory, scripts: Scripts = DEFAULT_SCRIPTS) -> list[Path]:
    """The directories of the models that an ensemble consists of, and those of ensembles among them, beside it."""
    waiting = [step.model_name for step in model.config.ensemble]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        part = model.path.parent / name
        if name not in found and part != model.path and is_plain(name) and part.is_dir():
            found[name] = part
            waiting += [step.model_name for step in read_config(part, name, scripts, strict_name=False).ensemble]
    return list(found.values())


def namespace_errors(config: ModelConfig) -> Iterator[MmeError]:
    for index, step in enumerate(config.ensemble):
        if step.model_namespace:
            yield invalid_model(
                f"model_namespace '{step.model_namespace}' in step {index} of ensemble '{config.name}': the models of "
                "an archive are a namespace of their own, leave it out"
            )


def _open(path: Path, name: str, scripts: Scripts, *, strict_name: bool, override: str = "") -> ModelDirectory:
    if override:
        config = parse_config_json(override, model=name, strict_name=strict_name)
    else:
        config = read_config(path, name, scripts, strict_name=strict_name)
    for directory in ignored_versions(path):
        why = "contains leading zeros in its directory name" if directory.isdigit() else "is no number"
        _log.warning("ignore version directory '%s' which %s", directory, why, extra={"target_model": name})
    config, available = decided(path, replace(config, name=name), scripts)
    model = ModelDirectory(name, path, config, selected_versions(config, available, name, path))
    if config.platform != PLATFORM:
        check_named(config)
        for error in (*missing_files(model), *checksum_errors(config, path)):
            raise error
    return model


def decided(path: Path, config: ModelConfig, scripts: Scripts) -> tuple[ModelConfig, dict[int, Path]]:
    """The configuration with backend, platform and model file named, and the versions that the directory holds.

    What has no files may lack the directory of its version: an ensemble, a backend that loads none, a script.
    """
    available = versions_in(path)
    if config.platform == PLATFORM:
        return config, available or {1: path}
    backend = backend_of(path, config, available, scripts)
    if backend.name == SCRIPTS:
        available = {version: where for version, where in available.items() if scripts.own(where)} or {1: path}
        config = scripts.completed(config, next(iter(available.values())))
    if not backend.filename:
        available = available or {1: path}
    sizes = dict(scripts.batch_sizes)
    size = sizes.get(backend.name, sizes.get("", 0))
    config = replace(with_backend(config, backend, available), strict=scripts.strict, default_max_batch_size=size)
    return config, available


def _open_part(path: Path, whole: str, scripts: Scripts) -> ModelDirectory:
    part = _open(path, f"{whole}:{path.name}", scripts, strict_name=False)
    return replace(part, config=replace(part.config, part_of=whole))


def with_backend(config: ModelConfig, backend: Backend, available: dict[int, Path]) -> ModelConfig:
    return replace(
        config,
        backend=backend.name,
        platform=config.platform or next(iter(backend.platforms), ""),
        default_model_filename=config.default_model_filename or _default_file(backend, config, available),
    )


def _default_file(backend: Backend, config: ModelConfig, available: dict[int, Path]) -> str:
    first = next(iter(available.values()), None)
    return backend.filename if first is None else backend.filename_in(first, config.parameters)


def selected_versions(config: ModelConfig, available: dict[int, Path], name: str, path: Path) -> dict[int, Path]:
    for version in absent_versions(config, available):
        _log.warning("version %d is specified for model '%s', but the version directory is not present", version, name)
    selected = config.version_policy.select(tuple(available))
    if not selected:
        found = ", ".join(map(str, available)) or f"no version directory{advice(path)}"
        raise invalid_model(
            f"at least one version must be available under the version policy of model '{name}': found {found}"
        )
    return {version: available[version] for version in selected}


def absent_versions(config: ModelConfig, available: Container[int]) -> list[int]:
    return [version for version in config.version_policy.specific or () if version not in available]


def backend_of(path: Path, config: ModelConfig, available: dict[int, Path], scripts: Scripts) -> Backend:
    """The backend that the configuration names, or the first version's file or an inference script gives away."""
    if config.backend or config.platform:
        first = next(iter(available.values()), None)
        named = find_backend(config.backend, config.platform, config.name, first)
        alone = not (config.platform or config.default_model_filename)
        return told_by_file(named, first) if alone and first is not None else named
    for directory in list(available.values())[:1]:  # Triton, too, looks at the first one alone
        detected = detect_backend(directory)
        if detected is not None:
            return detected
    if scripts.serves(path):
        return find_backend(SCRIPTS, "", config.name)
    custom = path.name.partition(".")[2]
    if custom and not config.default_model_filename:  # a backend of one's own may be named by the directory
        with contextlib.suppress(MmeError):
            return find_backend(custom, "", config.name, next(iter(available.values()), None))
    error = no_model(path, config.name)
    if not (path / CONFIG_NAME).is_file():
        raise error
    raise invalid_model(
        f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
        f"configuration. Expected model name of the form 'model.<backend_name>'. Name one: {error.message}"
    )


def missing_files(model: ModelDirectory) -> Iterator[MmeError]:
    """An error for each selected version that lacks the model file inside its directory."""
    if not model.config.default_model_filename:  # its backend loads none
        return
    filename = PurePosixPath(model.config.default_model_filename)
    # Names are what is checked, not where links lead: archives hold none, and a folder of its owner may.
    if filename.is_absolute() or ".." in filename.parts or not filename.parts:
        yield invalid_model(
            f"default_model_filename '{filename}' of model '{model.name}' lies outside of its version directory"
        )
        return
    for version, inside in model.versions.items():
        directory = Path(model.config.parameters.get(SUBMIT_DIRECTORY, inside))
        names = (
            str(filename),
            *model.config.cc_model_filenames.values(),
        )  # of which a device has one: see devices.file_for
        there = [directory / name for name in names if (directory / name).exists()]
        pointers = [file for file in there if is_pointer(file)]
        if there and not pointers:
            continue
        error = invalid_model(
            f"model '{model.name}': {version}/{pointers[0].name} is a pointer of Git LFS in place of the file: "
            "`git lfs pull` where it comes from, then pack or copy it anew"
            if pointers
            else f"model '{model.name}' has no file '{filename}' in version {version}, which backend "
            f"'{model.config.backend}' loads: found {shown_tree(directory)}; name it in default_model_filename"
        )
        error.version = version
        yield error
