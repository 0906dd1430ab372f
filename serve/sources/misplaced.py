"""What to do about a directory that is no model, by what lies in it: for the end of an error's sentence.

People pack one folder too many, leave the version's directory out, or bring what another server takes. Looks at names
alone, on load threads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from model_handlers.registry import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def advice(path: Path, model: str = "") -> str:
    """A clause such as "; move model.pt to 1/model.pt", or "" where nothing is to be said.

    Args:
        path: the directory that was looked into.
        model: what its model's directory in it is to be called, with a slash behind it, "" where it is that itself.
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
    except OSError:  # whoever loads it will tell
        return False


def is_version(path: Path) -> bool:
    """Whether a directory looks like a version of a model: it is called by a number and holds a model file."""
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
    """The directory in which a version's file belongs: what was to be one, called rightly, or a new one."""
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
    """Models that lie in a folder which should not be there."""
    for child in _below(path, _DEEPEST):
        if (child / _CONFIG).is_file() and child.parent != path:
            outer = child.parent.relative_to(path).as_posix()
            return (
                f"a model lies too deep, in '{outer}/{child.name}': pack what is in '{outer}', not that folder itself"
            )
    return ""


def _below(path: Path, depth: int) -> Iterator[Path]:
    """The directories below, those near the top first."""
    level, seen = [path], 0
    for _ in range(depth):
        level = [child for each in level for child in sorted(each.iterdir()) if child.is_dir() and child.name[0] != "."]
        seen += len(level)
        if seen > _MOST:
            return
        yield from level
