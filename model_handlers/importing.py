"""Importing a package without what it would import on the side."""

from __future__ import annotations

import importlib
import sys
from typing import Any


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
