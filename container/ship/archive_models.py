"""What kind of model a file or folder is, the places that models have in an archive, and their configurations there.

A kind is told by a name and the first bytes, without any framework. Models are staged in a directory of links beside
them, which goes when it was packed: gigabytes are not copied where the disk has hard links. An error that names a
staged file names the place it comes from.

Models are opened by the same code that the server uses. A bare file gets the configuration that the server would
complete, in writing. An ensemble of models one behind the other is wired by the names of their tensors: an input
takes the tensor of its name that a step before makes, or that the ensemble is given; a step that would take nothing
of the one before by name is wired to it in order. Nothing is guessed where types or shapes disagree.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_handlers.config.autocomplete import whole_shapes
from model_handlers.config.model_config import DynamicBatching, EnsembleStep, Guess, ModelConfig
from model_handlers.config.pbtxt import config_text
from model_handlers.config.validate import PLATFORM
from model_handlers.errors import Kind, MmeError, RefusedError, invalid_argument, invalid_model
from model_handlers.registry import detect_backend, find_backend, handler_for
from serve.sources.layout import BY_SCRIPTS
from serve.sources.repository import open_model, open_target, parts_beside
from serve.sources.scripts import DEFAULT_SCRIPTS
from serve.sources.store import ARCHIVE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from model_handlers.tensor import TensorSpec
    from serve.sources.repository import ModelDirectory

    Made = Mapping[str, tuple[str, TensorSpec]]  # a step's tensor → the ensemble's, and what it is


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
        is_saved_model = any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt"))
        return FrameworkFile("model.savedmodel") if is_saved_model else None
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


def link_or_copy(origin: Path | str, destination: Path | str) -> None:
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
    shutil.copytree(origin, destination, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)


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
        return {"." if model.config.takes_raw_body else name: ModelSource(model.path)}
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
    if alone:
        models = [_opened(staging, staging / next(iter(origins)), name)]
    else:
        entry = open_target(staging, archive)
        models = [entry, *entry.members]
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
            if error.kind is not Kind.UNSUPPORTED or isinstance(error, RefusedError):
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
        # an optional input is wired where a model before makes it
        wanted = [spec for spec in step.inputs if not spec.optional or spec.name in known]
        taken = {spec.name: _source(step, spec, before, known, batch) for spec in wanted}
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


def _source(step: ModelConfig, spec: TensorSpec, before: Made, known: Made, batch: int) -> str:
    in_order = len(before) == len(step.inputs) and not any(each.name in before for each in step.inputs)
    if in_order:
        tensor, source = list(before.values())[[each.name for each in step.inputs].index(spec.name)]
    elif spec.name in known:
        tensor, source = known[spec.name]
    else:
        raise invalid_argument(
            f"--ensemble: nobody makes input '{spec.name}' of '{step.name}': before it there are "
            f"{', '.join(map(repr, known))}; rename one of them, or write the ensemble's config.pbtxt yourself"
        )
    wanted = _outer(spec, step, batch)
    if source.data_type is not wanted.data_type or not _fits(source.dims, wanted.dims):
        raise invalid_argument(
            f"--ensemble: input '{spec.name}' of '{step.name}' is {_shown(wanted)}, and '{source.name}' before it is "
            f"{_shown(source)}: put a model between them that turns one into the other"
        )
    return tensor


def _outer(spec: TensorSpec, step: ModelConfig, batch: int) -> TensorSpec:
    """A tensor of a step as the ensemble sees it: of one that batches in an ensemble that does not, the whole shape."""
    dims = (-1, *spec.dims) if step.max_batch_size and not batch else spec.dims
    return replace(spec, dims=dims, reshape=None, allow_ragged_batch=False, optional=False, label_filename="")


def _fits(made: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(made) == len(wanted) and all(-1 in pair or pair[0] == pair[1] for pair in zip(made, wanted, strict=True))


def _shown(spec: TensorSpec) -> str:
    return f"{spec.data_type.name} {list(spec.dims)}"
