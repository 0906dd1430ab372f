"""Whether a package is there, imports without what they would import on the side, syntax trees of models' sources."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def is_installed(name: str) -> bool:
    """Whether there is such a module; asks without importing it, only the packages that it is in."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even what it would be in
        return False


@functools.cache
def version_of(package: str) -> str:
    """The installed version of a package of PyPI, "" where it is not installed. Imports nothing of it."""
    from importlib import metadata  # noqa: PLC0415 - 30 ms that a server without models does not need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def import_without(name: str, *hidden: str) -> Any:
    """The module `name`, for which the `hidden` ones seem not to be installed, unless they are there already.

    Raises:
        ImportError: it is not installed, or does not get along without them.
    """
    hidden = tuple(each for each in hidden if each not in sys.modules)
    for each in hidden:
        sys.modules[each] = None  # type: ignore[assignment] # which makes an import of it fail
    try:
        return importlib.import_module(name)
    finally:
        for each in hidden:
            if sys.modules.get(each, each) is None:
                del sys.modules[each]


# Python before 3.11.8 takes the trees that two threads make at a time for one another's (SystemError), and which
# warnings are ignored is the same for all threads.
_ONE_AT_A_TIME = threading.Lock()


def syntax_tree(file: Path) -> ast.Module:
    """What a file says; nobody is warned of it.

    Raises:
        OSError: it can't be read.
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python, or too much of it.
    """
    source = file.read_bytes()
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, str(file))
