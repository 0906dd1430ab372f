"""Where handlers of others are found, and what is known of them without running them.

What a package registers was installed by whoever runs the server, and is imported into the serving process. What an
archive brings is its author's, and only read here.
"""

from __future__ import annotations

import ast
import importlib
from typing import TYPE_CHECKING

from model_handlers.base import Handler
from model_handlers.errors import Kind, MmeError
from model_handlers.system.importing import syntax_tree

if TYPE_CHECKING:
    from pathlib import Path

GROUP = "mme.handlers"  # of entry points: backend = module:class
HANDLER_FILE = "handler.py"
_LARGEST = 1 << 20  # bytes of a file that is looked into
_REQUESTS = "sees_requests"


def registered_handler(value: str, backend: str, package: str) -> type[Handler]:
    """The class that an entry point names.

    Raises:
        MmeError: UNSUPPORTED when it can't be imported, or is no handler.
    """
    subject = f"backend '{backend}' is registered by the package '{package}' as {value}, which"
    module, _, name = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the package may raise anything
        raise MmeError(Kind.UNSUPPORTED, f"{subject} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Handler)):
        raise MmeError(Kind.UNSUPPORTED, f"{subject} is no subclass of model_handlers.base.Handler")
    return found


def sees_requests(file: Path) -> bool:
    """Whether a class in a Python file says `sees_requests = True`; what can't be read says nothing yet."""
    if file.stat().st_size > _LARGEST:
        return False
    try:
        tree = syntax_tree(file)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # said when it is loaded
        return False
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(_says_so(statement) for node in classes for statement in node.body)


def _says_so(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    value = getattr(statement, "value", None)
    named = any(isinstance(target, ast.Name) and target.id == _REQUESTS for target in targets)
    return named and isinstance(value, ast.Constant) and value.value is True
