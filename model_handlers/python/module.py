"""model.py as a module, and the class in it. Runs on the thread that loads.

The module is called `<version>.model`, as Triton has it, so that `from .helper import f` finds a file beside it. The
directories of version and model go in front of `sys.path`, as that of a script does, so that `import helper` finds one
too. Both belong to the whole process: models that share one (placed inline) share them as well, and are told apart by
a number behind the version. `unload` takes everything out again.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.python import pb_utils
from model_handlers.python.failures import failed_load

if TYPE_CHECKING:
    from model_handlers.config import ModelConfig

_CLASS = "TritonPythonModel"


class ModelFile:
    """Where the files of a model version are.

    Attributes:
        path: model.py.
        version_directory, model_directory: what holds it.
    """

    def __init__(self, config: ModelConfig, path: Path) -> None:
        depth = len(PurePosixPath(config.default_model_filename or path.name).parts)
        self.path = path
        self.version_directory = path.parents[depth - 1]
        self.model_directory = self.version_directory.parent

    @property
    def version(self) -> str:
        """The version's number, as text."""
        return self.version_directory.name

    def directories(self) -> list[str]:
        """Where the model's own modules are looked for."""
        return list(dict.fromkeys(map(str, (self.path.parent, self.version_directory, self.model_directory))))


def check_syntax(model: str, file: ModelFile) -> None:
    """Refuse text that is not Python, without running it.

    Raises:
        MmeError: INVALID_MODEL, naming file and line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(file.path.read_bytes(), str(file.path))
    except (SyntaxError, ValueError) as error:
        raise failed_load(f"{file.path} was read", error, model) from None


class ModelModule:
    """model.py, imported.

    Attributes:
        author_class: the class `TritonPythonModel`.

    Raises:
        MmeError: INVALID_MODEL when it cannot be imported or has no such class.
    """

    def __init__(self, model: str, file: ModelFile) -> None:
        pb_utils.install()
        self._file = file
        self._package = _free_name(file.version)
        sys.path[:0] = file.directories()
        importlib.invalidate_caches()
        try:
            self.author_class = _author_class(model, self._import(model), file)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Forget the module, those that it imported from its own directories, and the directories."""
        for directory in self._file.directories():
            if directory in sys.path:
                sys.path.remove(directory)
        inside = f"{self._file.model_directory}/"
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(inside) or name == self._package:
                del sys.modules[name]

    def _import(self, model: str) -> ModuleType:
        package = ModuleType(self._package)
        package.__path__ = [str(self._file.path.parent)]
        name = f"{self._package}.{self._file.path.stem}"
        spec = importlib.util.spec_from_file_location(name, self._file.path)
        if spec is None or spec.loader is None:
            raise invalid_model(f"model '{model}': {self._file.path} is no Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules.update({self._package: package, name: module})
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            raise failed_load(f"{self._file.path} was imported", error, model) from error
        return module


def _free_name(version: str) -> str:
    name, number = version, 1
    while name in sys.modules:
        number += 1
        name = f"{version}_{number}"
    return name


def _author_class(model: str, module: ModuleType, file: ModelFile) -> type[Any]:
    author_class: type[Any] | None = getattr(module, _CLASS, None)
    if not isinstance(author_class, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise invalid_model(
            f"model '{model}': {file.path} defines no class {_CLASS}; "
            f"the classes in it are: {', '.join(classes) or 'none'}"
        )
    if not callable(getattr(author_class, "execute", None)):
        raise invalid_model(f"Python model {file.path} of '{model}' does not implement `execute` method.")
    return author_class
