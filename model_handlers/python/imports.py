"""A file of a model's author, imported; what it imports from beside itself is forgotten with it.

The author's directories go in front of `sys.path`, as that of a script does, so that `import helper` finds a file in
them. They belong to the whole process, and so do the names of modules: another model's helper makes way, which that
model has by then, unless it imports it again while it executes. Names that the process has for others are told apart by
their importers (`own_modules`). Runs on the thread that loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.python.author_code import OwnModules
from model_handlers.python.failures import failed_load
from model_handlers.registry import syntax_tree

if TYPE_CHECKING:
    import ast
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from model_handlers.config.model_config import ModelConfig

_here: list[ImportedFile] = []  # all of this process


class ImportedFile:
    """One file, imported under a name.

    Attributes:
        module: what it became.

    Args:
        model: the model's name, for messages.
        path: the file.
        name: what the module is called.
        directories: where it may import from.
        root: the directory whose modules are the model's own.
        left: names that stay the server's, though a module of that name lies there.

    Raises:
        MmeError: INVALID_MODEL when it is no Python file or raises, OUT_OF_MEMORY.
    """

    def __init__(
        self, model: str, path: Path, name: str, directories: Sequence[str], root: Path, left: Collection[str] = ()
    ) -> None:
        self._directories = directories
        self._inside = f"{root}/"
        self._top = name.partition(".")[0]
        self._others_make_way()
        self._own = OwnModules(directories, self._inside, left)
        _here.append(self)
        sys.path[:0] = directories
        importlib.invalidate_caches()
        try:
            self.module = _import(model, path, name)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Forget the module, those that it imported from its own directories, and the directories."""
        if self in _here:
            _here.remove(self)
        self._own.forget()
        for directory in self._directories:
            if directory in sys.path:
                sys.path.remove(directory)
        for name in self._imported():
            sys.modules.pop(name, None)  # another copy of the model may be forgotten at the same time

    def _imported(self) -> list[str]:
        """The modules of its own that are known by their names now, itself among them."""
        files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
        return [name for name, file in files.items() if file.startswith(self._inside)]

    def _others_make_way(self) -> None:
        """Forget the names of other models' modules where this one's directories have modules of these names, too."""
        others = [each for each in _here if each._inside != self._inside]  # noqa: SLF001 - of its own class, as below
        for name, own in ((name, each._top) for each in others for name in each._imported()):  # noqa: SLF001
            top = name.partition(".")[0]
            if top != own and _has(self._directories, top):
                sys.modules.pop(name, None)


def _has(directories: Sequence[str], name: str) -> bool:
    """Whether a module or package of that name lies in one of them."""
    return any(Path(each, f"{name}.py").is_file() or Path(each, name).is_dir() for each in directories)


def version_directory(config: ModelConfig, file: Path) -> Path:
    """The version directory that a model's file lies in, wherever below it that is."""
    depth = len(PurePosixPath(config.default_model_filename or file.name).parts)
    return file.parents[depth - 1]


def check_syntax(model: str, path: Path) -> ast.Module:
    """What a file says, without running it.

    Raises:
        MmeError: INVALID_MODEL, naming file and line.
    """
    try:
        return syntax_tree(path)
    except (SyntaxError, ValueError) as error:
        raise failed_load(f"{path} was read", error, model) from None


def free_name(wanted: str) -> str:
    """The name for a module, with a number behind it where another model of this process has it."""
    name, number = wanted, 1
    while name in sys.modules:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _import(model: str, path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise invalid_model(f"model '{model}': {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise failed_load(f"{path} was imported", error, model) from error
    return module
