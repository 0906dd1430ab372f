"""What `mme build-engine` does with its flags, and its line of progress."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from model_handlers.tensorrt.builder import BuildOptions, build, profiles_of

if TYPE_CHECKING:
    import argparse

_WIDTH = 30


def run(arguments: argparse.Namespace) -> int:
    """Build the engine and say what it is."""
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
    line = _Line()
    try:
        builder = build(arguments.model, output, options, line.show)
    finally:
        line.end()
    size = output.stat().st_size
    print(f"{output}: {size / 1e6:.1f} MB, built by {builder} in {time.monotonic() - began:.1f} s")
    return 0


class _Line:
    """One line on a terminal, written over and over; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def show(self, phase: str, done: int, total: int) -> None:
        """So many steps of a phase are done."""
        if self._shown:
            filled = _WIDTH * done // max(total, 1)
            print(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {phase[:60]:60}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """What comes now has a line of its own."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
