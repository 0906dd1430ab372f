"""What lies in a directory on disk, told by names: models, versions, configurations; and what to do if it is no model.

The layouts are Triton's: `config.pbtxt` beside directories of versions, each with a model file; and SageMaker's, an
inference script (see `scripts`). Runs on load threads; holds no state.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.config.bounds import MAX_CONFIG_SIZE
from model_handlers.config.model_config import ModelConfig, warn_once
from model_handlers.config.pbtxt import parse_config
from model_handlers.errors import invalid_argument, invalid_model
from model_handlers.registry import BACKENDS, detect_backend
from model_handlers.scripts.default_script import default_script
from model_handlers.system.disk import disk_errors
from serve.sources.scripts import DEFAULT_SCRIPTS, Scripts
from serve.sources.source import is_text
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_handlers.errors import MmeError


_log = logging.getLogger("mme.load")
CONFIG_NAME = "config.pbtxt"
ENTRY = "MME_ENTRY"  # a parameter of the model that an archive of several is asked for
_MEANT = 0.8  # how alike a file's name is that was meant to be config.pbtxt: config.txt is, config.json is not
_SHOWN_FILES = 12
COMPILED = "__pycache__"  # what Python keeps of code that it has read: appears with the first load
CONFIGS = "configs"  # a directory of configurations that a server may be told to read instead
_RESERVED = ("warmup", "initial_state", CONFIGS)  # directories of a model that are no versions
_EXPECTED = f"{CONFIG_NAME} and 1/model.onnx, or one directory that holds them; or code/inference.py beside a model"
_CONFIG = "config.pbtxt"
_SAVED_MODEL = "saved_model.pb"
_SAVED_DIRECTORY = "model.savedmodel"
_MODEL_FILES = tuple(
    dict.fromkeys(
        name for each in BACKENDS for name in (each.filename, *each.variants[1].values()) if name and "/" not in name
    )
)
_VERSION = re.compile(r"(?:v|ver|version)?[-_. ]?0*([1-9][0-9]*)", re.IGNORECASE)  # as people call versions
BY_SCRIPTS = (".joblib", ".pkl", ".pickle", ".pth")  # files that only code can load
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024  # bytes
_DEEPEST = 5  # directories below the one that was looked into
_MOST = 1000  # directories that are looked into


def is_model(path: Path) -> bool:
    """Whether a directory is that of a model with a configuration or with versions."""
    return (path / CONFIG_NAME).is_file() or bool(versions_in(path))


def may_be_model(path: Path, scripts: Scripts) -> bool:
    """Whether a directory holds a model; also if it can't be read, as its load will tell."""
    try:
        return is_model(path) or scripts.serves(path)
    except FileNotFoundError:  # it went this moment
        return False
    except OSError:
        return True


def list_models(path: Path, scripts: Scripts = DEFAULT_SCRIPTS) -> list[str]:
    if not path.is_dir():
        raise invalid_argument(f"model repository '{path}' is not a directory: create it, or name another")
    with disk_errors(f"model repository {path} cannot be read"):
        models = [child for child in directories(path) if may_be_model(child, scripts)]
    for child in models:
        if not is_text(child.name):
            _warn_of_name(child)
    return [child.name for child in models if is_text(child.name)]


@functools.lru_cache(maxsize=256)
def _warn_of_name(path: Path) -> None:
    _log.warning("ignore model directory %a, whose name is not UTF-8: rename it", str(path))


def versions_in(path: Path) -> dict[int, Path]:
    """The version directories by their numbers, ascending. 01 is no version to Triton."""
    names = [child.name for child in directories(path) if child.name.isascii() and child.name.isdigit()]
    return {int(name): path / name for name in sorted(names, key=int) if str(int(name)) == name}


def ignored_versions(path: Path) -> list[str]:
    """Directories that are called almost as versions are."""
    versions = versions_in(path).values()
    return [child.name for child in directories(path) if child.name[:1].isdigit() and child not in versions]


def directories(path: Path) -> list[Path]:
    """The directories inside, by name, without hidden and reserved ones."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [path / name for name in sorted(names) if not name.startswith(".") and name not in _RESERVED]


def candidates_in(path: Path, scripts: Scripts) -> list[Path]:
    """The model directories of an unpacked archive, or of the one folder that holds all of it.

    It is one itself if it needs no script, unless models of Triton's lie below, which read what lies beside them.
    """
    found = _candidates_in(path, scripts)
    while not found and (inner := _only_folder(path)):
        path = inner
        found = _candidates_in(path, scripts)
    return found


def _only_folder(path: Path) -> Path | None:
    there = [child for child in path.iterdir() if not child.name.startswith(".")]
    return there[0] if len(there) == 1 and there[0].is_dir() else None


def _candidates_in(path: Path, scripts: Scripts) -> list[Path]:
    if is_model(path):
        return [path]
    models = [child for child in directories(path) if is_model(child)]
    if default_script(path) and not any(map(_is_of_triton, models)):
        return [path]
    return models or _scripts_in(path, scripts)


def _is_of_triton(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() or any(map(detect_backend, versions_in(path).values()))


def models_in(path: Path, name: str, scripts: Scripts) -> list[Path]:
    """The model directories of an unpacked archive, the one that requests are for first."""
    candidates = candidates_in(path, scripts)
    if not candidates:
        raise no_model(path, name)
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
    """The marked model; else the ensemble of which no other is made; else the archive's namesake."""
    configs = {candidate: read_config(candidate, name, scripts, strict_name=False) for candidate in candidates}
    chosen = [path for path, config in configs.items() if config.parameters.get(ENTRY, "").strip().lower() == "true"]
    parts = {step.model_name for config in configs.values() for step in config.ensemble}
    whole = [path for path, config in configs.items() if config.ensemble and path.name not in parts]
    archive = PurePosixPath(name).name.removesuffix(ARCHIVE_SUFFIX)
    return chosen or whole or [candidate for candidate in candidates if candidate.name == archive]


def _scripts_in(path: Path, scripts: Scripts) -> list[Path]:
    if scripts.own(path):
        return [path]
    children = [child for child in directories(path) if scripts.own(child)]
    return children or ([path] if scripts.serves(path) else [])


def config_file(path: Path, scripts: Scripts) -> Path:
    named = path / CONFIGS / f"{scripts.config_name}.pbtxt"
    return named if scripts.config_name and named.is_file() else path / CONFIG_NAME


def config_text(file: Path, name: str) -> str:
    if file.stat().st_size > MAX_CONFIG_SIZE:
        raise invalid_model(f"{file.name} of model '{name}' is larger than {MAX_CONFIG_SIZE} bytes")
    try:
        return file.read_text("utf-8-sig")  # Windows begins texts with a mark
    except UnicodeDecodeError as error:
        raise invalid_model(f"{file.name} of model '{name}' is not UTF-8 text: {error}") from error


def read_config(path: Path, name: str, scripts: Scripts, *, strict_name: bool) -> ModelConfig:
    """The configuration of the model in a directory; an empty one where there is none and none is required."""
    file = config_file(path, scripts)
    if not file.is_file():
        if scripts.strict and not scripts.serves(path):
            raise invalid_model(
                f"model '{name}' has no {CONFIG_NAME}, and nothing is taken from model files here "
                "(MME_DISABLE_AUTO_COMPLETE_CONFIG): write one"
            )
        if misnamed := misnamed_config(path):
            warn_once("mme.load", f"model '{name}': {misnamed} is not read: rename it to {CONFIG_NAME}", name)
        return ModelConfig(name=name)
    return parse_config(config_text(file, name), model=name, strict_name=strict_name)


def misnamed_config(path: Path) -> str:
    """The file in a directory without config.pbtxt that was likely meant to be it, "" for none."""
    names = {child.name.lower(): child.name for child in path.iterdir() if child.is_file()}
    nearest = difflib.get_close_matches(CONFIG_NAME, names, 1, _MEANT)
    return names[nearest[0]] if nearest else ""


def files_in(folder: Path) -> Iterator[tuple[tuple[str, ...], os.stat_result]]:
    """The files below a folder, in parts of their paths. Links to directories are not followed."""
    for base, directories, names in os.walk(folder):  # a tenth of what Path.rglob takes
        directories[:] = [name for name in directories if name != COMPILED]
        place = Path(base).relative_to(folder).parts
        for name in names:
            with contextlib.suppress(OSError):  # it went this moment, or is a link to nowhere
                status = os.stat(os.path.join(base, name))  # noqa: PTH116, PTH118 - as above
                if stat.S_ISREG(status.st_mode):
                    yield (*place, name), status


def no_model(path: Path, name: str) -> MmeError:
    return invalid_model(f"no model found in '{name}': found {shown_tree(path)}; expected {_EXPECTED}{advice(path)}")


def shown_tree(path: Path) -> str:
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


def advice(path: Path, model: str = "") -> str:
    """A clause such as "; move model.pt to 1/model.pt", or "" where nothing is to be said.

    People pack one folder too many, leave the version's directory out, or bring what another server takes. `model` is
    what the model's directory below `path` is to be called, with a slash, if it has one.
    """
    clause = (
        _saved_model(path, model)
        or _other_server(path)
        or _no_version(path, model)
        or _script(path)
        or _too_deep(path)
        or _own_name(path, model)
    )
    return f"; {clause}" if clause else ""


def is_pointer(file: Path) -> bool:
    """Whether Git LFS left the name and the size of a file in its place, as a clone without it does."""
    try:
        if not file.is_file() or file.stat().st_size > _LONGEST_POINTER:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:  # its load will tell
        return False


def is_version(path: Path) -> bool:
    """Whether a directory is called by a number and holds a model file."""
    return path.name.isdecimal() and any((path / name).exists() for name in _MODEL_FILES)


def _saved_model(path: Path, model: str) -> str:
    """TensorFlow Serving's layout, which lacks a directory."""
    places = (place for place in (path, *_below(path, _DEEPEST)) if place.name != _SAVED_DIRECTORY)
    where = next((place for place in places if (place / _SAVED_MODEL).is_file()), None)
    if where is None:
        return ""
    here = "" if where == path else f"{where.relative_to(path).as_posix()}/"
    version = where.name.lstrip("0") if where.name.isdecimal() else ""
    return f"move {here}{_SAVED_MODEL} and {here}variables/ into {model}{version or 1}/{_SAVED_DIRECTORY}/"


def _no_version(path: Path, model: str) -> str:
    """A model file where a version's directory should be."""
    folders = [path, *(child for child in _below(path, 1) if child.name[0] == "0" or not child.name.isdigit())]
    for folder in folders:
        found = next((name for name in _MODEL_FILES if (folder / name).exists()), "")
        if found:
            here = "" if folder == path else f"{folder.name}/"
            within = "" if here else model
            return f"move {here}{found} to {within}{_version_of(folder, path)}/{found}"
    return ""


def _own_name(path: Path, model: str) -> str:
    """A model file that is called as the model is, and lies where that should be."""
    for suffix in (".onnx", ".pt", ".pt2", ".plan"):
        found = sorted(path.glob(f"*{suffix}"))
        if len(found) == 1:
            return f"move {found[0].name} to {model}1/model{suffix}, or have `mme pack {found[0].name}` do it"
    return ""


def _version_of(folder: Path, path: Path) -> str:
    if folder == path:
        return "1"
    if (path / _CONFIG).is_file():
        meant = _VERSION.fullmatch(folder.name)
        return meant[1] if meant else "1"
    return f"{folder.name}/1"


def _other_server(path: Path) -> str:
    if (path / "MAR-INF").is_dir() or any(path.glob("*.mar")):
        return "archives of MMS and TorchServe are not read: put what their handler does into code/inference.py"
    if (path / "serving.properties").is_file():
        return "serving.properties is DJL Serving's: write config.pbtxt, or code/inference.py"
    return ""


def _script(path: Path) -> str:
    """A script of another name, or a file that only a script could load; an archive in an archive."""
    if (path / _CONFIG).is_file():
        return ""
    named = sorted(file.name for file in path.glob("code/*.py"))
    if named:
        return f"if code/{named[0]} is its script, say so by SAGEMAKER_PROGRAM={named[0]}"
    saved = sorted(file.name for suffix in BY_SCRIPTS for file in path.glob(f"*{suffix}"))
    if saved:
        return f"{saved[0]} is loaded by code/inference.py with model_fn, which is not there"
    packed = sorted(file.name for file in path.glob("*.tar.gz"))
    return f"{packed[0]} is an archive in the archive: pack what is in it" if packed else ""


def _too_deep(path: Path) -> str:
    for child in _below(path, _DEEPEST):
        if (child / _CONFIG).is_file() and child.parent != path:
            outer = child.parent.relative_to(path).as_posix()
            return (
                f"a model lies too deep, in '{outer}/{child.name}': pack what is in '{outer}', not that folder itself"
            )
    return ""


def _below(path: Path, depth: int) -> Iterator[Path]:
    level, seen = [path], 0
    for _ in range(depth):
        level = [child for each in level for child in sorted(each.iterdir()) if child.is_dir() and child.name[0] != "."]
        seen += len(level)
        if seen > _MOST:
            return
        yield from level
