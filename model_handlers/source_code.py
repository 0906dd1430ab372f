"""The syntax trees of models' source files. Any thread may ask."""

from __future__ import annotations

import ast
import threading
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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
