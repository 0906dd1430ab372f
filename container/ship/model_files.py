"""What kind of model a file or folder is, and the places that models have in an archive.

A kind is told by a name and the first bytes, without any framework. Models are staged in a directory of links beside
them, which goes when it was packed: gigabytes are not copied where the disk has hard links. An error that names a
staged file names the place it comes from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError, invalid_argument
from model_handlers.registry import detect_backend
from serve.sources.layout import BY_SCRIPTS
from serve.sources.scripts import DEFAULT_SCRIPTS
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_SCRIPT = "code/inference.py"
_ONNX_WEIGHTS = (".data", "_data")  # what exporters append to the model's file name for weights beside it
_KNOWN = (
    "a Triton model directory or a folder of them, .onnx, TorchScript (.pt), .pt2, a TensorRT plan (.plan, .engine), "
    "a SavedModel folder, .pb, OpenVINO's .xml, XGBoost's .json, .ubj or .model, LightGBM's .txt, treelite's .tl, "
    "model.py, inference.py or a folder with code/inference.py"
)
_HEAD = 4096


@dataclass(frozen=True, slots=True)
class FrameworkFile:
    """A model that is a file or a folder of a framework's."""

    place: str  # below the version directory; of a script below the model directory
    beside: tuple[tuple[Path, str], ...] = ()  # files that come along, and their names beside it
    config: str = ""  # of config.pbtxt, what tells the server more than the file's name does

    @property
    def is_script(self) -> bool:
        return self.place == _SCRIPT


def recognised(path: Path) -> FrameworkFile | None:
    """What the path is, None for a directory that is none of a framework's own."""
    if not path.exists():
        raise invalid_argument(f"'{path}' does not exist: name a model directory or a model file")
    if path.is_dir():
        return FrameworkFile("model.savedmodel") if _is_saved_model(path) else None
    if path.name.endswith(ARCHIVE_SUFFIX):
        raise invalid_argument(
            f"'{path}' is packed already: `mme config check` tells what it holds, `mme push` uploads it"
        )
    found = _by_name(path)
    if found is None and path.suffix in BY_SCRIPTS:
        raise invalid_argument(
            f"'{path}' is loaded by code alone: pack a folder of it and code/inference.py, whose model_fn loads it, or "
            "convert it, as skl2onnx does for scikit-learn"
        )
    if found is None:
        raise invalid_argument(f"'{path}' is no model that is known here: {_KNOWN}")
    return found


def is_version(path: Path) -> bool:
    """Whether a directory holds what a version directory of Triton's does, and is called otherwise."""
    if not path.is_dir() or (path / "config.pbtxt").exists() or DEFAULT_SCRIPTS.own(path):
        return False
    has_versions = any(child.name.isdecimal() and child.is_dir() for child in path.iterdir())
    return not has_versions and detect_backend(path) is not None


def _is_saved_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt"))


def _by_name(path: Path) -> FrameworkFile | None:
    if path.name == "inference.py":
        return FrameworkFile(_SCRIPT)
    match path.suffix.lower():
        case ".onnx":
            weights = (path.with_name(path.name + suffix) for suffix in _ONNX_WEIGHTS)
            return FrameworkFile("model.onnx", tuple((each, each.name) for each in weights if each.is_file()))
        case ".pt" | ".pth" | ".ts" | ".torchscript":
            return _torch(path)
        case ".pt2":
            return FrameworkFile("model.pt2")
        case ".plan" | ".engine" | ".trt":
            return FrameworkFile("model.plan")
        case ".pb":
            return FrameworkFile("model.graphdef")
        case ".xml":
            return _openvino(path)
        case ".py":
            return _python(path)
        case _:
            return _trees(path)


def _torch(path: Path) -> FrameworkFile:
    """TorchScript is a zip with a program in it; weights alone are none."""
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
    if any(name.endswith("/constants.pkl") for name in names):
        return FrameworkFile("model.pt")
    if any(name.partition("/")[2].startswith("models/") or name.endswith("/archive_format") for name in names):
        return FrameworkFile("model.pt2")
    raise invalid_argument(
        f"'{path}' holds weights and no program: write one with torch.jit.script(model).save(...) or "
        "torch.export.save(...)"
    )


def _openvino(path: Path) -> FrameworkFile:
    weights = path.with_suffix(".bin")
    if b"<net" not in _head(path):
        raise invalid_argument(f"'{path}' is no model of OpenVINO's, which begins with <net")
    if not weights.is_file():
        raise invalid_argument(f"'{path}' has no weights beside it: put {weights.name} there, as OpenVINO writes both")
    return FrameworkFile("model.xml", ((weights, "model.bin"),))


def _python(path: Path) -> FrameworkFile:
    if "TritonPythonModel" in path.read_text("utf-8", "replace"):
        return FrameworkFile("model.py")
    if path.name == "model.py":
        raise invalid_argument(f"'{path}' has no class TritonPythonModel")
    raise invalid_argument(
        f"'{path}' has no class TritonPythonModel; a script with model_fn and predict_fn is called inference.py"
    )


def _trees(path: Path) -> FrameworkFile | None:
    """A model of trees, whose library is told to the server by a parameter."""
    head = _head(path)
    match path.suffix.lower():
        case ".json" if b'"learner"' in head or b'"version"' in head:
            return _fil("xgboost.json", "xgboost_json")
        case ".ubj":
            return _fil("xgboost.ubj", "xgboost_ubj")
        case ".model" | ".bst":
            return _fil("xgboost.model", "xgboost")
        case ".txt" | ".lgb" if head.startswith(b"tree\n"):
            return _fil("model.txt", "lightgbm")
        case ".tl":
            return _fil("checkpoint.tl", "treelite_checkpoint")
        case _:
            return None


def _fil(place: str, kind: str) -> FrameworkFile:
    config = f'backend: "fil"\nparameters {{ key: "model_type" value: {{ string_value: "{kind}" }} }}\n'
    return FrameworkFile(place, config=config)


def _head(path: Path) -> bytes:
    with path.open("rb") as content:
        return content.read(_HEAD)


CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: its directory, or the file or folder of a framework, maybe with a config.pbtxt."""

    path: Path
    file: FrameworkFile | None = None
    config: Path | None = None

    @classmethod
    def of(cls, path: Path, config: Path | None) -> ModelSource:
        file = recognised(path)
        if config is not None and not config.is_file():
            raise invalid_argument(f"--config '{config}' does not exist")
        if config is not None and file is None and (path / CONFIG).exists():
            raise invalid_argument(f"--config '{config}': '{path}' has a {CONFIG} of its own")
        return cls(path, file, config)

    @property
    def stem(self) -> str:
        name = self.path.resolve().name
        is_file = self.file is not None and self.path.is_file()
        return name.rpartition(".")[0] if is_file and not name.startswith(".") else name

    @property
    def bare(self) -> bool:
        """Whether it comes without a configuration that was written for it."""
        return self.config is None and (self.file is not None or is_version(self.path))

    def stage(self, destination: Path) -> None:
        """Put the model into the new directory `destination`."""
        if self.file is not None:
            _stage_file(self.path, self.file, destination)
        elif is_version(self.path):
            _stage_directory(self.path, destination / "1")
        else:
            _stage_directory(self.path, destination)
        if self.config is not None:
            shutil.copyfile(self.config, destination / CONFIG)


@contextmanager
def staged(origins: Mapping[str, ModelSource]) -> Iterator[Path]:
    """A directory that holds the models' directories in their places, by name, and nothing else."""
    first = next(iter(origins.values())).path
    with tempfile.TemporaryDirectory(prefix=".mme-pack-", dir=_link_parent(first)) as folder:
        staging = Path(folder)
        for name, origin in origins.items():
            origin.stage(staging / name)
        try:
            yield staging
        except MmeError as error:  # the sentence names files, and its reader knows them by the place they come from
            message = error.message
            for name, origin in origins.items():
                place = origin.path if origin.file is None else origin.path.parent
                message = message.replace(str(staging / name), str(place))
            raise MmeError(error.kind, message) from error


def link_or_copy(origin: Path, destination: Path) -> None:
    try:
        os.link(origin, destination, follow_symlinks=False)
    except OSError:  # another disk, or one without links
        shutil.copy2(origin, destination, follow_symlinks=False)


def _link_parent(origin: Path) -> Path | None:
    """Where links to `origin` can be made: beside it; None for the temporary directory, where files are copied."""
    parent = origin.resolve().parent
    return parent if os.access(parent, os.W_OK) else None


def _stage_file(path: Path, file: FrameworkFile, destination: Path) -> None:
    place = destination / file.place if file.is_script else destination / "1" / file.place
    place.parent.mkdir(parents=True)
    if path.is_dir():
        _stage_directory(path, place)
    else:
        link_or_copy(path.resolve(), place)
    for each, name in file.beside:
        link_or_copy(each.resolve(), place.with_name(name))
    if file.config:
        (destination / CONFIG).write_text(file.config)


def _stage_directory(origin: Path, destination: Path) -> None:
    """The same files under new directories. Links stay links, for `pack` to refuse."""
    destination.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(origin):
        if entry.is_dir(follow_symlinks=False):
            _stage_directory(Path(entry.path), destination / entry.name)
        else:
            link_or_copy(Path(entry.path), destination / entry.name)
