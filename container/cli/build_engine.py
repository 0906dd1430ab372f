"""`mme build-engine`: from an ONNX model to an engine of TensorRT."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli.command import Command, whole

if TYPE_CHECKING:
    import argparse

_WIDTH = 30
_EXAMPLES = """\
examples:
  mme build-engine model.onnx --min ids:1x16 --opt ids:8x128 --max ids:32x512 --fp16 -o model/1/model.plan
      one profile: batches of 1 to 32, best at 8
  mme build-engine model.onnx --min x:1x3x224x224 --opt x:1x3x224x224 --max x:1x3x224x224 \\
                              --min x:2x3x224x224 --opt x:8x3x224x224 --max x:16x3x224x224
      two profiles, for single requests and for batches
  mme build-engine model.onnx --timing-cache timing.cache --version-compatible

An engine runs on the kind of GPU, and with the version of TensorRT, that it was built by; build it where it is to run.
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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
        builder = build(arguments.model, output, options, _show)
    finally:
        _show_on_terminal("\x1b[K")
    size = output.stat().st_size
    print(f"{output}: {size / 1e6:.1f} MB, built by {builder} in {time.monotonic() - began:.1f} s")
    return 0


def _show(phase: str, done: int, total: int) -> None:
    filled = _WIDTH * done // max(total, 1)
    _show_on_terminal(f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {phase[:60]:60}")


def _show_on_terminal(line: str) -> None:
    """Write over the line that was written before."""
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


COMMAND = Command("build-engine", "build an engine of TensorRT from an ONNX model", _EXAMPLES, _add_flags, run)
