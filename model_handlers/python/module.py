"""model.py as a module, and the class in it. Runs on the thread that loads.

The module is called `<version>.model`, as Triton has it, so that `from .helper import f` finds a file beside it;
`import helper` finds one there too, and in the model's directory, where no file hides a module of Python's own library.
Models that share a process (placed inline) are told apart by a number behind the version. `unload` takes everything out
again.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from types import ModuleType
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.python import pb_utils
from model_handlers.python.imports import ImportedFile, free_name, version_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.errors import MmeError

_CLASS = "TritonPythonModel"


class ModelFile:
    """Where the files of a model version are.

    Attributes:
        path: model.py.
        version_directory, model_directory: what holds it.
    """

    def __init__(self, config: ModelConfig, path: Path) -> None:
        self.path = path
        self.version_directory = version_directory(config, path)
        self.model_directory = self.version_directory.parent

    @property
    def version(self) -> str:
        """The version's number, as text."""
        return self.version_directory.name

    def directories(self) -> list[str]:
        """Where the model's own modules are looked for."""
        return list(dict.fromkeys(map(str, (self.path.parent, self.version_directory, self.model_directory))))


class ModelModule:
    """model.py, imported.

    Attributes:
        author_class: the class `TritonPythonModel`.

    Raises:
        MmeError: INVALID_MODEL when it cannot be imported or has no such class.
    """

    def __init__(self, model: str, file: ModelFile) -> None:
        pb_utils.install()
        self._package = free_name(file.version)
        package = sys.modules[self._package] = ModuleType(self._package)
        package.__path__ = [str(file.path.parent)]
        name = f"{self._package}.{file.path.stem}"
        try:
            directories = [*_library(), *file.directories()]
            self._file = ImportedFile(model, file.path, name, directories, file.model_directory)
        except BaseException:
            sys.modules.pop(self._package, None)
            raise
        try:
            self.author_class = _author_class(model, self._file.module, file)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Forget the module, those that it imported from its own directories, and the directories."""
        self._file.forget()
        sys.modules.pop(self._package, None)


def _library() -> list[str]:
    """Where Python's own library is, of what is looked through."""
    pure, platform = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    return [place for place in (pure, platform, f"{platform}/lib-dynload") if place in sys.path]


def check_class(model: str, file: ModelFile, source: ast.Module) -> None:
    """Refuse a file that binds no such class in any way, without running it: what else a load may find is left to it.

    Raises:
        MmeError: INVALID_MODEL, as the load would.
    """
    bound = {name for node in ast.walk(source) for name in _bound(node)}
    if bound.isdisjoint({_CLASS, "*"}):
        raise _no_class(model, file, [node.name for node in source.body if isinstance(node, ast.ClassDef)])
    if "execute" not in bound and any(_inherits_nothing(node) for node in source.body):
        raise _no_execute(model, file)


def _inherits_nothing(node: ast.stmt) -> bool:
    """Whether it is the class, with all that it has in this file."""
    if not isinstance(node, ast.ClassDef) or node.name != _CLASS:
        return False
    return not (node.bases or node.keywords or node.decorator_list)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node gives to something, `*` for any."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # as `globals()` and `setattr` are given
        yield node.value


def _author_class(model: str, module: ModuleType, file: ModelFile) -> type[Any]:
    author_class: type[Any] | None = getattr(module, _CLASS, None)
    if not isinstance(author_class, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise _no_class(model, file, classes)
    if not callable(getattr(author_class, "execute", None)):
        raise _no_execute(model, file)
    return author_class


def _no_class(model: str, file: ModelFile, classes: Iterable[str]) -> MmeError:
    return invalid_model(
        f"model '{model}': {file.path} defines no class {_CLASS}; the classes in it are: {', '.join(classes) or 'none'}"
    )


def _no_execute(model: str, file: ModelFile) -> MmeError:
    return invalid_model(f"Python model {file.path} of '{model}' does not implement `execute` method.")
