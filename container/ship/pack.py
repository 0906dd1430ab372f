"""`mme pack`: from models as frameworks write them to a .tar.gz that an endpoint loads; `mme build-engine` is below.

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
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli import ARCHIVE_SUFFIX, Command, progress, whole
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from container.ship.archive_models import ModelSource
    from model_handlers.config.model_config import ModelConfig

_EXAMPLES = """\
examples:
  mme pack repository/bert-0 -o bert-0.tar.gz     a Triton model directory: config.pbtxt and versions
  mme pack resnet.onnx --name resnet50            a bare file becomes resnet50/1/model.onnx, and gets a config.pbtxt
  mme pack traced.pt --config config.pbtxt        a file that does not tell its shapes, and what does
  mme pack customers/*.json -o archives           an archive of each, in a folder that is there
  mme pack bert.onnx --copies 50                  bert-0.tar.gz to bert-49.tar.gz, a fleet to try things with
  mme pack search -o search.tar.gz                several models: the one with parameter MME_ENTRY calls the others
  mme pack pre bert.onnx post --ensemble pre,bert,post -o pipeline.tar.gz
      models one behind the other, wired by the names of their tensors
"""
_MOST_COPIES = 10_000


def _add_flags(parser: argparse.ArgumentParser) -> None:
    sources = "model directories, a folder of several, or files of ONNX, PyTorch, TensorRT, TensorFlow, OpenVINO, trees"
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help=f"{sources}; model.py, inference.py")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE|DIR",
        help="the archive; NAME.tar.gz by default; into a folder goes an archive of each model",
    )
    parser.add_argument("--name", help="the model's name; that of the directory or file by default")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the config.pbtxt of a bare file")
    parser.add_argument("--ensemble", metavar="MODEL,MODEL...", help="run these one behind the other, as one model")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="the same as NAME-0 to NAME-(N-1)")
    parser.add_argument("--level", type=int, default=1, help="0 (fastest) to 3 (smallest); default 1")


def run(arguments: argparse.Namespace) -> int:
    if arguments.output is None or not arguments.output.is_dir():
        return _pack(arguments)
    for name, path in _named(arguments).items():
        output = arguments.output / f"{name}{ARCHIVE_SUFFIX}"
        each = argparse.Namespace(**vars(arguments) | {"models": [path], "output": output})
        _pack(each, brief=len(arguments.models) > 1)
    return 0


def _named(arguments: argparse.Namespace) -> dict[str, Path]:
    """The models that become an archive each, by their names."""
    from container.ship.archive_models import ModelSource  # noqa: PLC0415 - heavy

    if arguments.ensemble:
        raise invalid_argument(f"-o '{arguments.output}' is a folder: an ensemble is one archive, name it")
    if arguments.name and len(arguments.models) > 1:
        raise invalid_argument("--name is for one model: several in a folder are called after their files")
    stems = [arguments.name or ModelSource.of(path, None).stem for path in arguments.models]
    again = next((stem for stem in stems if stems.count(stem) > 1), None)
    if again is not None:
        raise invalid_argument(f"two models would be '{again}{ARCHIVE_SUFFIX}': pack them into folders of their own")
    return dict(zip(stems, arguments.models, strict=True))


def _pack(arguments: argparse.Namespace, *, brief: bool = False) -> int:
    from container.ship import archive_models as models  # noqa: PLC0415 - heavy, as numpy is
    from serve.sources.archive import pack  # noqa: PLC0415

    sources = [models.ModelSource.of(path, arguments.config) for path in arguments.models]
    name = _name(arguments, sources)
    output: Path = arguments.output or Path(f"{name}{ARCHIVE_SUFFIX}")
    _check_arguments(arguments, name, output)
    archive = output.name.removesuffix(ARCHIVE_SUFFIX)
    steps = arguments.ensemble.split(",") if arguments.ensemble else []
    origins = models.origins_of(sources, steps, name, archive)
    copies = _copies(output, arguments.copies)
    with models.staged(origins) as staging:
        configs = models.configured(staging, origins, steps, name, archive)
        total = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        with progress(total, f"pack {output.name}") as advance:
            pack(staging, copies[0], level=arguments.level, progress=advance)
        if not brief:
            _describe(staging, [*origins, *([name] if steps else [])], configs)
    for copy in copies[1:]:
        copy.unlink(missing_ok=True)
        models.link_or_copy(copies[0], copy)
    for path in copies:
        print(f"{path}: {_size(path.stat().st_size)}")
    return 0


def _describe(staging: Path, folders: list[str], configs: list[ModelConfig]) -> None:
    from model_handlers.config.pbtxt import config_text  # noqa: PLC0415 - heavy

    for folder in folders:
        print(f"{folder}/")
        for line in _tree(staging / folder):
            print(f"  {line}")
    for config in configs:
        print(f"\nconfiguration in effect\n{textwrap.indent(config_text(config).rstrip(), '  ')}")
    print()


def _name(arguments: argparse.Namespace, sources: list[ModelSource]) -> str:
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


def _copies(output: Path, count: int) -> list[Path]:
    """The archives: one, or as many of the same content under names with a number."""
    if count == 1:
        return [output]
    stem = output.name.removesuffix(ARCHIVE_SUFFIX)
    return [output.with_name(f"{stem}-{number}{ARCHIVE_SUFFIX}") for number in range(count)]


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


COMMAND = Command("pack", "make a .tar.gz that a multi-model endpoint can load", _EXAMPLES, _add_flags, run)


# -- mme build-engine -----------------------------------------------------------------------------------------------

_WIDTH = 30  # of its bar
_ENGINE_EXAMPLES = """\
examples:
  mme build-engine model.onnx --min ids:1x16 --opt ids:8x128 --max ids:32x512 --fp16 -o model/1/model.plan
      one profile: batches of 1 to 32, best at 8
  mme build-engine model.onnx --min x:1x3x224x224 --opt x:1x3x224x224 --max x:1x3x224x224 \\
                              --min x:2x3x224x224 --opt x:8x3x224x224 --max x:16x3x224x224
      two profiles, for single requests and for batches
  mme build-engine model.onnx --timing-cache timing.cache --version-compatible

An engine runs on the kind of GPU, and with the version of TensorRT, that it was built by; build it where it is to run.
"""


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ONNX", type=Path, help="the model")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the engine; beside the model by default")
    for name, what in (("min", "smallest"), ("opt", "best"), ("max", "largest")):
        parser.add_argument(
            f"--{name}",
            metavar="SHAPES",
            action="append",
            default=[],
            help=f"{what} shapes, as in ids:1x16,mask:1x16; once more for each further profile",
        )
    parser.add_argument("--fp16", action="store_true", help="compute in FP16; inputs and outputs stay as they are")
    parser.add_argument("--int8", action="store_true", help="compute in INT8 what the model quantises")
    parser.add_argument(
        "--workspace", metavar="MIB", type=whole(0, 1 << 20), default=0, help="memory that building may take; all"
    )
    parser.add_argument("--timing-cache", metavar="FILE", type=Path, help="remembers measurements; made if missing")
    parser.add_argument("--optimization-level", metavar="N", type=int, choices=range(6), help="0 to 5; 3 by default")
    parser.add_argument("--version-compatible", action="store_true", help="for later versions of TensorRT too")
    parser.add_argument("--hardware-compatible", action="store_true", help="for other GPUs from Ampere on too")
    parser.add_argument("--builder", choices=("tensorrt", "tensorrt-rtx"), help="whichever is installed by default")


def run_build_engine(arguments: argparse.Namespace) -> int:
    from model_handlers.tensorrt.builder import BuildOptions, build, profiles_of  # noqa: PLC0415 - numpy

    output = arguments.output or arguments.model.with_name("model.plan")
    options = BuildOptions(
        profiles_of(arguments.min, arguments.opt, arguments.max),
        fp16=arguments.fp16,
        int8=arguments.int8,
        workspace=arguments.workspace << 20,
        timing_cache=arguments.timing_cache,
        level=arguments.optimization_level,
        version_compatible=arguments.version_compatible,
        hardware_compatible=arguments.hardware_compatible,
        builder={"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}.get(arguments.builder or "", ""),
    )
    began = time.monotonic()
    try:
        builder = build(arguments.model, output, options, _show_phase)
    finally:
        _show_on_terminal("\x1b[K")
    size = output.stat().st_size
    print(f"{output}: {size / 1e6:.1f} MB, built by {builder} in {time.monotonic() - began:.1f} s")
    return 0


def _show_phase(phase: str, done: int, total: int) -> None:
    filled = _WIDTH * done // max(total, 1)
    _show_on_terminal(f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {phase[:60]:60}")


def _show_on_terminal(line: str) -> None:
    """Write over the line that was written before."""
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


BUILD_ENGINE = Command(
    "build-engine",
    "build an engine of TensorRT from an ONNX model",
    _ENGINE_EXAMPLES,
    _add_engine_flags,
    run_build_engine,
)
