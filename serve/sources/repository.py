"""From a directory on disk to what can be loaded: which model it is, which versions, which file of each.

The layouts are Triton's: `config.pbtxt` beside directories of versions, each with a model file; and SageMaker's, an
inference script (see `scripts`). It reads the configuration and looks at names; it opens no model file and knows no
framework. Runs on load threads; holds no state.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.body import BACKEND, SUBMIT_DIRECTORY
from model_handlers.config import ModelConfig
from model_handlers.config_override import parse_config_json
from model_handlers.disk import disk_errors
from model_handlers.ensemble_checks import PLATFORM
from model_handlers.errors import Kind, MmeError, invalid_argument, invalid_model
from model_handlers.pbtxt import parse_config
from model_handlers.registry import Backend, detect_backend, find_backend, told_by_file
from serve.sources.checksums import checksum_errors
from serve.sources.disk import directory_size
from serve.sources.misplaced import advice
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.sources.source import is_plain, is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from model_handlers.config import EnsembleStep

_log = logging.getLogger("mme.load")
CONFIG_NAME = "config.pbtxt"
ENTRY = "MME_ENTRY"  # a parameter of the model that an archive of several is asked for
MAX_CONFIG_SIZE = 1 << 20
_SHOWN_FILES = 12
COMPILED = "__pycache__"  # what Python keeps of code that it has read: appears with the first load
CONFIGS = "configs"  # a directory of configurations that a server may be told to read instead
_RESERVED = ("warmup", "initial_state", CONFIGS)  # directories of a model that are no versions
_EXPECTED = f"{CONFIG_NAME} and 1/model.onnx, or one directory that holds them; or code/inference.py beside a model"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One model on disk, with everything that its files and its configuration leave open decided.

    Attributes:
        name: that it is served under.
        path: the directory of its configuration and versions.
        config: with backend, platform and model file named.
        versions: number to directory, of those that the version policy selects, ascending.
        members: the other models of its archive, which only it may call; their names begin with its own.
        counted_as: the model of a repository whose requests its own are counted with, "" for none.
    """

    name: str
    path: Path
    config: ModelConfig
    versions: dict[int, Path]
    members: tuple[ModelDirectory, ...] = ()
    counted_as: str = ""

    @property
    def first(self) -> Path:
        """The directory of the lowest version."""
        return next(iter(self.versions.values()))

    def model_file(self, version: int) -> Path:
        """The file (or directory, for some backends) that the handler of that version loads."""
        return self.versions[version] / self.config.default_model_filename

    def size(self) -> int:
        """Bytes on disk of the selected versions."""
        return sum(directory_size(path) for path in self.versions.values())

    def fingerprint(self) -> str:
        """A name for what these files are, wherever they lie: another one when any of them was written anew."""
        digest = hashlib.sha256()
        files = sorted(_files_in(self.path))
        for place, status in files:
            digest.update(os.fsencode(f"{'/'.join(place)}\0{status.st_size}\0{status.st_mtime_ns}\0"))
        if any(place == (CONFIG_NAME,) for place, _ in files):  # archives packed alike have one size and one time
            digest.update((self.path / CONFIG_NAME).read_bytes())
        return digest.hexdigest()[:32]


def _files_in(folder: Path) -> Iterator[tuple[tuple[str, ...], os.stat_result]]:
    """The files below a folder: where in it, and what they are. Links to directories are not followed."""
    for base, directories, names in os.walk(folder):  # a tenth of what Path.rglob takes
        directories[:] = [name for name in directories if name != COMPILED]
        place = Path(base).relative_to(folder).parts
        for name in names:
            with contextlib.suppress(OSError):  # it went this moment, or is a link to nowhere
                status = os.stat(os.path.join(base, name))  # noqa: PTH116, PTH118 - as above
                if stat.S_ISREG(status.st_mode):
                    yield (*place, name), status


def open_target(path: Path, name: str, scripts: Scripts = DEFAULT_SCRIPTS, *, override: str = "") -> ModelDirectory:
    """The model in an unpacked archive: at its root, or in its one model directory, or the one of several to be asked.

    Whatever the configuration calls it, it is served as `name`. Where there are several, the one that requests are for
    is the ensemble of the others, or has the archive's name or the parameter MME_ENTRY; the others are its members.
    An `override` is that model's configuration, as JSON, in place of its own.

    Raises:
        MmeError: INVALID_ARGUMENT when `path` is no directory; INVALID_MODEL when there is no model in it, several
            and none to be asked, or a broken one.
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


def list_models(path: Path, scripts: Scripts = DEFAULT_SCRIPTS) -> list[str]:
    """The names of the models in a repository of several, in order: its directories that hold a model.

    One whose name is no text is left out with a warning.

    Raises:
        MmeError: INVALID_ARGUMENT when the repository is not a directory.
    """
    if not path.is_dir():
        raise invalid_argument(f"model repository '{path}' is not a directory: create it, or name another")
    with disk_errors(f"model repository {path} cannot be read"):
        models = [child for child in _directories(path) if may_be_model(child, scripts)]
    for child in models:
        if not is_text(child.name):
            _warn_of_name(child)
    return [child.name for child in models if is_text(child.name)]


def may_be_model(path: Path, scripts: Scripts) -> bool:
    """Whether a directory holds a model; also if it can't be read, as whoever loads it will tell: others are served."""
    try:
        return is_model(path) or scripts.serves(path)
    except FileNotFoundError:  # it went this moment
        return False
    except OSError:
        return True


@functools.lru_cache(maxsize=256)
def _warn_of_name(path: Path) -> None:
    """Once, however often the repository is looked at."""
    _log.warning("ignore model directory %a, whose name is not UTF-8: rename it", str(path))


def open_model(
    path: Path,
    name: str,
    scripts: Scripts = DEFAULT_SCRIPTS,
    *,
    strict_name: bool = True,
    override: str = "",
    others: tuple[Path, ...] = (),
    fetch: Callable[[str], Path | None] | None = None,
) -> ModelDirectory:
    """The model whose own directory is `path`, such as a repository of several holds.

    Args:
        path: the directory of config.pbtxt and versions, or of an inference script.
        name: that the model is served under.
        scripts: what is the same for all inference scripts.
        strict_name: refuse a configuration that calls the model something else.
        override: a configuration, as JSON, in place of the model's own; "" for that.
        others: further repositories, in which the parts of an ensemble may be that are not beside it.
        fetch: brings a model of a repository that is not on disk, by its name; None where `path` lies in one that is.

    Raises:
        MmeError: UNKNOWN_MODEL when there is no such directory; INVALID_MODEL, UNSUPPORTED.
    """
    if not path.is_dir():
        reason = f"model '{name}' is not in the repository {path.parent}: make {name}/{CONFIG_NAME} and {name}/1/"
        raise MmeError(Kind.UNKNOWN_MODEL, reason)
    with disk_errors(f"model '{name}' cannot be read from {path}"):
        if not is_model(path) and not scripts.serves(path):
            raise _no_model(path, name)
        model = _open(path, name, scripts, strict_name=strict_name, override=override)
        neighbours = _Fetched(fetch) if fetch is not None else _Beside((path.parent, *others))
        with made_of_parts(model.config):
            members = [
                replace(_open_part(part, name, scripts), counted_as=neighbours.called(part))
                for part in _parts(neighbours, model, scripts)
            ]
        return replace(model, members=tuple(members))


@contextlib.contextmanager
def made_of_parts(config: ModelConfig) -> Iterator[None]:
    """What goes wrong in there with an ensemble may come right when one of its parts does, which the error names."""
    try:
        yield
    except MmeError as error:
        error.parts = tuple(dict.fromkeys(step.model for step in config.ensemble))
        raise


class _Beside:
    """Where the models of repositories on disk are: the one that an ensemble is in, then the others."""

    def __init__(self, repositories: tuple[Path, ...]) -> None:
        self._repositories = repositories
        self._there: dict[Path, set[Path]] = {}  # read when the first ensemble asks

    def find(self, step: EnsembleStep) -> Path | None:
        """The directory of the model that a step means; None if there is none."""
        self._there = self._there or {place: set(_directories(place)) for place in self._repositories}
        return next((place / step.model for place in self._there if self._is_meant(step, place)), None)

    def called(self, part: Path) -> str:
        """What clients call a model: by its repository too, where its name is not enough."""
        alone = sum((repository / part.name).is_dir() for repository in self._repositories) == 1
        return part.name if alone else f"{part.parent.name}/{part.name}"

    def _is_meant(self, step: EnsembleStep, place: Path) -> bool:
        return step.namespace in {"", place.name, str(place)} and place / step.model in self._there[place]


class _Fetched:
    """Where the models of a repository are that is not on disk: in it alone, and named by their names alone."""

    def __init__(self, fetch: Callable[[str], Path | None]) -> None:
        self._fetch = fetch

    def find(self, step: EnsembleStep) -> Path | None:
        """As `_Beside.find`."""
        return self._fetch(step.model) if is_plain(step.model) and not step.namespace else None

    def called(self, part: Path) -> str:
        """As `_Beside.called`."""
        return part.name


def _parts(neighbours: _Beside | _Fetched, ensemble: ModelDirectory, scripts: Scripts) -> list[Path]:
    """The models that an ensemble consists of, those of its ensembles too."""
    waiting = list(ensemble.config.ensemble)
    found: dict[str, Path] = {}
    while waiting:
        step = waiting.pop()
        part = neighbours.find(step)
        if part is None or part == ensemble.path:
            continue
        if found.get(step.model, part) != part:
            raise invalid_model(
                f"ensemble {ensemble.name} contains models that are not available or ambiguous: {step.model}, which it "
                "takes from two repositories; give one of them another name"
            )
        if step.model not in found:
            found[step.model] = part
            waiting += _read_config(part, step.model, scripts, strict_name=False).ensemble
    return list(found.values())


def namespace_errors(config: ModelConfig) -> Iterator[MmeError]:
    """An error for each step of an archive's ensemble that names a repository."""
    for index, step in enumerate(config.ensemble):
        if step.namespace:
            yield invalid_model(
                f"model_namespace '{step.namespace}' in step {index} of ensemble '{config.name}': the models of an "
                "archive are a namespace of their own, leave it out"
            )


def candidates_in(path: Path, scripts: Scripts) -> list[Path]:
    """The model directories of an unpacked archive."""
    if is_model(path):
        return [path]
    return [child for child in _directories(path) if is_model(child)] or _scripts_in(path, scripts)


def models_in(path: Path, name: str, scripts: Scripts) -> list[Path]:
    """The model directories of an unpacked archive, the one that requests are for first.

    Raises:
        MmeError: INVALID_MODEL when there is none, or none of several that requests are for.
    """
    candidates = candidates_in(path, scripts)
    if not candidates:
        raise _no_model(path, name)
    for candidate in candidates:
        if candidate != path and not is_text(candidate.name):
            raise invalid_model(
                f"archive '{name}' has a model directory whose name is not UTF-8, '{candidate.name}': rename it"
            )
    entries = candidates if len(candidates) == 1 else _entries(candidates, name, scripts)
    if len(entries) != 1:
        found = ", ".join(f"'{candidate.name}'" for candidate in candidates)
        raise invalid_model(
            f"archive '{name}' holds two models or more and no ensemble ({found}): pack each into an archive of its "
            f"own, or say in one config.pbtxt that requests are for that model, which may call the others: "
            f'parameters {{ key: "{ENTRY}" value: {{ string_value: "true" }} }}'
        )
    return entries + [candidate for candidate in candidates if candidate not in entries]


def _entries(candidates: list[Path], name: str, scripts: Scripts) -> list[Path]:
    """Who says that requests are for it; else the ensemble of which no other is made; else the archive's namesake."""
    configs = {candidate: _read_config(candidate, name, scripts, strict_name=False) for candidate in candidates}
    chosen = [path for path, config in configs.items() if config.parameters.get(ENTRY, "").strip().lower() == "true"]
    parts = {step.model for config in configs.values() for step in config.ensemble}
    whole = [path for path, config in configs.items() if config.ensemble and path.name not in parts]
    archive = PurePosixPath(name).name.removesuffix(".tar.gz")
    return chosen or whole or [candidate for candidate in candidates if candidate.name == archive]


def _scripts_in(path: Path, scripts: Scripts) -> list[Path]:
    """The model of an archive without configuration and versions, which an inference script may serve."""
    if scripts.own(path):
        return [path]
    children = [child for child in _directories(path) if scripts.own(child)]
    return children or ([path] if scripts.serves(path) else [])


def _open(path: Path, name: str, scripts: Scripts, *, strict_name: bool, override: str = "") -> ModelDirectory:
    if override:
        config = parse_config_json(override, model=name, strict_name=strict_name)
    else:
        config = _read_config(path, name, scripts, strict_name=strict_name)
    available = versions_in(path)
    for directory in ignored_versions(path):
        why = "contains leading zeros in its directory name" if directory.isdigit() else "is no number"
        _log.warning("ignore version directory '%s' which %s", directory, why, extra={"target_model": name})
    if config.platform == PLATFORM:  # it has no files: archives may have lost its empty version
        available = available or {1: path}
        return ModelDirectory(name, path, replace(config, name=name), selected_versions(config, available, name, path))
    backend = backend_of(path, config, available, scripts)
    if backend.name == BACKEND:
        available = {version: where for version, where in available.items() if scripts.own(where)} or {1: path}
        config = scripts.completed(replace(config, name=name), next(iter(available.values())))
    if not backend.filename:  # it loads no file: archives may have lost its empty version
        available = available or {1: path}
    config = scripts.ruled(with_backend(replace(config, name=name), backend, available))
    model = ModelDirectory(name, path, config, selected_versions(config, available, name, path))
    for error in (*missing_files(model), *checksum_errors(config, path)):
        raise error
    return model


def _open_part(path: Path, whole: str, scripts: Scripts) -> ModelDirectory:
    """A model that is loaded for another one, and belongs to it."""
    part = _open(path, f"{whole}:{path.name}", scripts, strict_name=False)
    return replace(part, config=replace(part.config, part_of=whole))


def with_backend(config: ModelConfig, backend: Backend, available: dict[int, Path]) -> ModelConfig:
    """The configuration with what it leaves out of backend, platform and model file."""
    return replace(
        config,
        backend=backend.name,
        platform=config.platform or next(iter(backend.platforms), ""),
        default_model_filename=config.default_model_filename or _default_file(backend, config, available),
    )


def _default_file(backend: Backend, config: ModelConfig, available: dict[int, Path]) -> str:
    """The model file of a configuration that names none, judged by the first version."""
    first = next(iter(available.values()), None)
    return backend.filename if first is None else backend.filename_in(first, config.parameters)


def selected_versions(config: ModelConfig, available: dict[int, Path], name: str, path: Path) -> dict[int, Path]:
    """The versions in a model's directory that the version policy selects."""
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
    """Those that the version policy names and that are not there."""
    return [version for version in config.version_policy.specific if version not in available]


def ignored_versions(path: Path) -> list[str]:
    """Directories that are called almost as versions are, and are none."""
    versions = versions_in(path).values()
    return [child.name for child in _directories(path) if child.name[:1].isdigit() and child not in versions]


def _read_config(path: Path, name: str, scripts: Scripts, *, strict_name: bool) -> ModelConfig:
    file = config_file(path, scripts)
    if not file.is_file():
        if scripts.strict and not scripts.serves(path):
            raise invalid_model(
                f"model '{name}' has no {CONFIG_NAME}, and nothing is taken from model files here "
                "(MME_DISABLE_AUTO_COMPLETE_CONFIG): write one"
            )
        return ModelConfig(name=name)
    return parse_config(config_text(file, name), model=name, strict_name=strict_name)


def config_file(path: Path, scripts: Scripts) -> Path:
    """Where the configuration of the model in a directory is, if it has one."""
    named = path / CONFIGS / f"{scripts.config_name}.pbtxt"
    return named if scripts.config_name and named.is_file() else path / CONFIG_NAME


def config_text(file: Path, name: str) -> str:
    """What a configuration says.

    Raises:
        MmeError: INVALID_MODEL when it is no text, or too long for one.
    """
    if file.stat().st_size > MAX_CONFIG_SIZE:
        raise invalid_model(f"{file.name} of model '{name}' is larger than {MAX_CONFIG_SIZE} bytes")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise invalid_model(f"{file.name} of model '{name}' is not UTF-8 text: {error}") from error


def backend_of(path: Path, config: ModelConfig, available: dict[int, Path], scripts: Scripts) -> Backend:
    """The backend that the configuration names, or that the first version's file or an inference script gives away."""
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
        return find_backend(BACKEND, "", config.name)
    custom = path.name.partition(".")[2]
    if custom and not config.default_model_filename:  # a backend of one's own may be named by the directory
        with contextlib.suppress(MmeError):
            return find_backend(custom, "", config.name, next(iter(available.values()), None))
    error = _no_model(path, config.name)
    if not (path / CONFIG_NAME).is_file():
        raise error
    raise invalid_model(
        f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
        f"configuration. Expected model name of the form 'model.<backend_name>'. Name one: {error.message}"
    )


def missing_files(model: ModelDirectory) -> Iterator[MmeError]:
    """Every selected version has to have the model file, inside its directory; an error for each that has not."""
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
        names = (str(filename), *model.config.cc_filenames.values())  # of which a device has one: see devices.file_for
        if not any((directory / name).exists() for name in names):
            error = invalid_model(
                f"model '{model.name}' has no file '{filename}' in version {version}, which backend "
                f"'{model.config.backend}' loads: found {_shown_tree(directory)}; name it in default_model_filename"
            )
            error.version = version
            yield error


def is_model(path: Path) -> bool:
    """Whether a directory is that of a model with a configuration or with versions."""
    return (path / CONFIG_NAME).is_file() or bool(versions_in(path))


def versions_in(path: Path) -> dict[int, Path]:
    """The version directories by their numbers, ascending. Other names, and 01 for 1, are no versions to Triton."""
    names = [child.name for child in _directories(path) if child.name.isascii() and child.name.isdigit()]
    return {int(name): path / name for name in sorted(names, key=int) if str(int(name)) == name}


def _directories(path: Path) -> list[Path]:
    """The directories inside, by name, without hidden and reserved ones."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [path / name for name in sorted(names) if not name.startswith(".") and name not in _RESERVED]


def _no_model(path: Path, name: str) -> MmeError:
    return invalid_model(f"no model found in '{name}': found {_shown_tree(path)}; expected {_EXPECTED}{advice(path)}")


def _shown_tree(path: Path) -> str:
    """What lies below, in one bounded line."""
    found = []
    for base, directories, files in os.walk(path):
        directories.sort()
        below = Path(base).relative_to(path)
        found += [(below / file).as_posix() for file in sorted(files)]
        found += [f"{below.as_posix()}/"] * (not files and not directories and below != Path())
        if len(found) > _SHOWN_FILES:
            return f"{', '.join(found[:_SHOWN_FILES])} and more"
    return ", ".join(found) or "nothing"
