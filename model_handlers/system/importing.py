"""Whether a package is there, what its files tell, and importing it without what it would import on the side."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_installed(name: str) -> bool:
    """Whether there is such a module; asks without importing it, only the packages that it is in.

    One that is imported and hides how it was found counts as none.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # the former of what it would be in
        return False


@functools.cache
def file_of(package: str, name: str) -> str:
    """The text of a file of an installed package, "" where there is none. Imports nothing of it."""
    found = importlib.util.find_spec(package)
    file = Path(found.origin).parent / name if found is not None and found.origin else None
    return file.read_text("utf-8") if file is not None and file.is_file() else ""


@functools.cache
def version_of(package: str) -> str:
    """The installed version of a package of PyPI, "" where it is not installed. Imports nothing of it."""
    from importlib import metadata  # noqa: PLC0415 - 30 ms that a server without models does not need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def import_without(name: str, *hidden: str) -> Any:
    """Import `name` as if the `hidden`, unless imported, were missing. ImportError: it is missing or needs them."""
    hidden = tuple(each for each in hidden if each not in sys.modules)
    for each in hidden:
        sys.modules[each] = None  # type: ignore[assignment] # which makes an import of it fail
    try:
        return importlib.import_module(name)
    finally:
        for each in hidden:
            if sys.modules.get(each, each) is None:
                del sys.modules[each]


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """An environment variable that has this value meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
