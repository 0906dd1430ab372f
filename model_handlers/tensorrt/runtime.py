"""TensorRT itself: the one module that imports it, in whichever form it is installed, and what it says when it fails.

A runtime that is made on a machine without a driver ends the process when it is thrown away, so the driver is asked for
first, by the driver's own library. Called on load threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Full, lean and dispatch run TensorRT's plans, the last two those that are version-compatible. PyPI's wheels have the
# names that end with _bindings.
_TENSORRT = ("tensorrt", "tensorrt_bindings", "tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_dispatch")
_RTX = ("tensorrt_rtx", "tensorrt_rtx_bindings")
_DRIVER = "libcuda.so.1"


def installed(builder: str = "") -> str:
    """The module that runs plans of `builder`, or of anybody; "" where there is none."""
    names = {"TensorRT": _TENSORRT, "TensorRT-RTX": _RTX}.get(builder, (*_TENSORRT, *_RTX))
    return next((name for name in names if importlib.util.find_spec(name) is not None), "")


@functools.cache
def tensorrt(builder: str = "") -> Any:
    """The module for plans of `builder`, or of anybody.

    Raises:
        MmeError: UNSUPPORTED where it is not installed, or does not find its libraries.
    """
    name, wanted = installed(builder), builder or "TensorRT"
    if not name:
        how = "run `pip install 'mme[tensorrt]'`, with NVIDIA's package index where PyPI's has no libraries for it"
        if builder == "TensorRT-RTX":
            how = "run `pip install 'mme[tensorrt-rtx]'`"
        raise MmeError(Kind.UNSUPPORTED, f"{wanted} is needed for engines and not installed; {how}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MmeError(Kind.UNSUPPORTED, f"{wanted} is installed as {name}, but can't be loaded: {error}") from error


def require_driver(model: str) -> None:
    """See to it that there is a GPU with a driver that answers.

    Raises:
        MmeError: UNAVAILABLE where there is none.
    """
    try:
        code = ctypes.CDLL(_DRIVER).cuInit(0)
    except OSError:
        raise _no_gpu(model, f"no NVIDIA driver ({_DRIVER}) is installed") from None
    if code:
        raise _no_gpu(model, f"the driver answers with CUDA's error {code}")


def _no_gpu(model: str, reason: str) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"model '{model}' is an engine of TensorRT, which needs a GPU, but {reason}")


def make_logger(framework: Any) -> Any:
    """A logger for a runtime or a builder, which keeps what went wrong: nothing goes to standard error."""

    class Kept(framework.ILogger):  # type: ignore[misc] # of a module that is only known when it runs
        """What TensorRT complained of, the last line last."""

        def __init__(self) -> None:
            framework.ILogger.__init__(self)
            self.said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            """Called by TensorRT, on any thread."""
            if severity in (framework.ILogger.Severity.INTERNAL_ERROR, framework.ILogger.Severity.ERROR):
                self.said.append(message)

    return Kept()


def last_words(said: Sequence[str]) -> str:
    """What a logger kept, in one line."""
    return " ".join(said[0].split())[:300] if said else "it does not say why"
