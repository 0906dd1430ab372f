"""model.py as a module, and the class in it. Runs on the thread that loads.

The module is called `<version>.model`, as Triton has it, so that `from .helper import f` finds a file beside it;
`import helper` finds one there too, and in the model's directory, where no file hides a module of Python's own library.
Models that share a process (placed inline) are told apart by a number behind the version. `unload` takes everything out
again.
"""

from __future__ import annotations

import sys
import sysconfig
from types import ModuleType
from typing import TYPE_CHECKING, Any

from model_handlers.errors import invalid_model
from model_handlers.python import pb_utils
from model_handlers.python.imports import ImportedFile, free_name, version_directory

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.config import ModelConfig

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
