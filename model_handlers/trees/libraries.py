"""XGBoost, LightGBM and treelite: the one module that imports them, and what their errors say.

Called on load threads and in a fork server; `words` on any.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.importing import import_without, is_installed

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELOAD = "model_handlers.trees.libraries:preload"
_OPENMP = "OMP_NUM_THREADS"
_LIBRARIES = ("xgboost", "lightgbm", "treelite")
_STAMP = re.compile(r"^\[\d\d:\d\d:\d\d\] (?:\S+:\d+: )?")
_CHECK = re.compile(r"^Check failed: .*?: ")
_MOST_WORDS = 300


@functools.cache
def imported(name: str) -> Any:
    """The library of that name, imported when the first model needs it.

    Raises:
        MmeError: UNSUPPORTED where it is not installed, or wants a library of the system that is not there.
    """
    try:
        with _one_thread():
            # For wrappers in scikit-learn's style they would import all of that: 65 MiB and seconds.
            module = import_without(name, "sklearn")
    except ImportError as error:
        raise MmeError(
            Kind.UNSUPPORTED,
            f"this model of trees needs {name}, which is not installed; run `pip install 'mme[trees]'`",
        ) from error
    except OSError as error:  # LightGBM wants libgomp.so.1, which slim images leave out
        raise MmeError(
            Kind.UNSUPPORTED, f"this model of trees needs {name}, which can't be imported ({error}); install that, too"
        ) from error
    if name == "lightgbm":  # it would write to standard output, where lines are JSON
        module.register_logger(logging.getLogger("mme.lightgbm"))
    return module


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """OpenMP that is loaded meanwhile has one thread where it is not told how many: see `crew`."""
    told = os.environ.get(_OPENMP)
    os.environ[_OPENMP] = "1"
    try:
        yield
    finally:
        del os.environ[_OPENMP]
        if told is not None:
            os.environ[_OPENMP] = told


def preload() -> None:
    """Import what can be imported, for the processes that are forked from this one. Why not, a model is told."""
    for name in filter(is_installed, _LIBRARIES):
        with contextlib.suppress(MmeError):
            imported(name)


def words(error: Exception) -> str:
    """What a library says, in one line, without its clock, its source files and its stack."""
    text = str(error).partition("Stack trace")[0].partition("\n\n")[0].strip()
    text = _CHECK.sub("", _STAMP.sub("", text))
    return " ".join(text.split())[:_MOST_WORDS] or type(error).__name__
