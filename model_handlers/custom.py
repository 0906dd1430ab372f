"""A handler that an archive brings along as handler.py, beside the model that it loads.

The file is its author's code: it runs in the process of the instance, never in the serving process unless the
configuration places the model there. What stands in its place here knows how to find the class and nothing of what it
does; the class is a `Handler` like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import Device, Handler, LoadedModel, Placement, Traits
from model_handlers.config.validate import normalise
from model_handlers.errors import invalid_model, unsupported
from model_handlers.python.author_code import (
    ANY_RUNTIME,
    AuthorFiles,
    ImportedFile,
    check_syntax,
    free_name,
    version_directory,
)
from model_handlers.registry import HANDLER_FILE, defines

if TYPE_CHECKING:
    from types import ModuleType

    from model_handlers.config.model_config import ModelConfig


_EXECUTE_REQUESTS = LoadedModel.execute_requests.__name__


class FileHandler(Handler):
    """Loads the class in handler.py, and has it load the model: what `load` returns is the author's handler."""

    backend: ClassVar[str] = ""
    default_filename: ClassVar[str] = HANDLER_FILE

    @classmethod
    def traits(cls, config: ModelConfig, model_file: Path) -> Traits:
        """Its process is its own, and may have an environment of its own, as with Python models."""
        folder = version_directory(config, model_file)
        code = AuthorFiles(config, folder / HANDLER_FILE, folder.parent, (folder, folder.parent))
        sees_requests = defines(code.path, _EXECUTE_REQUESTS)
        return Traits(placement=Placement.PROCESS, sees_requests=sees_requests, runtime=ANY_RUNTIME, code=code)

    @classmethod
    def autocomplete(cls, config: ModelConfig, model_file: Path) -> ModelConfig:
        """Check that it is Python. MmeError: INVALID_MODEL; UNSUPPORTED where only its code knows the tensors."""
        check_syntax(config.name, version_directory(config, model_file) / HANDLER_FILE)
        if not (config.inputs and config.outputs):
            raise unsupported(f"model '{config.name}' is completed by its own {HANDLER_FILE}, which only a load runs")
        return normalise(config)

    @classmethod
    def load(cls, config: ModelConfig, model_file: Path, device: Device, lane: str) -> Handler:
        """Have the class in handler.py load the model: the file that the configuration names, else the class."""
        path = version_directory(config, model_file) / HANDLER_FILE
        folders = [str(path.parent), str(path.parent.parent)]
        name = free_name(f"handler_of_{path.parent.name}")
        file = ImportedFile(config.name, path, name, folders, path.parent.parent, left={"model_handlers"})
        try:
            author_class = _author_class(file.module, config)
            named = model_file if model_file != path else path.with_name(author_class.default_filename)
            handler = author_class.load(config, named, device, lane)
            _forget_when_closed(handler, file)
        except BaseException:
            file.forget()
            raise
        return handler


def _forget_when_closed(handler: Handler, file: ImportedFile) -> None:
    """Have the handler's `close` forget its file too: the process may go on."""
    close = handler.close

    def close_and_forget() -> None:
        del vars(handler)["close"]  # so that the handler goes with its last user, not with the next collection
        try:
            close()
        finally:
            file.forget()

    vars(handler)["close"] = close_and_forget


def _author_class(module: ModuleType, config: ModelConfig) -> type[Handler]:
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Handler) and value.__module__ == module.__name__
    ]
    chosen = [each for each in classes if getattr(each, "backend", "") == config.backend] or classes
    if len(chosen) != 1:
        raise invalid_model(
            f"model '{config.name}': {HANDLER_FILE} must define one subclass of model_handlers.base.Handler whose "
            f"backend is '{config.backend}'; it defines {', '.join(each.__name__ for each in classes) or 'none'}"
        )
    _check_methods(chosen[0], config.name, Path(module.__file__ or ""))
    return chosen[0]


def _check_methods(author_class: type[Handler], model: str, file: Path) -> None:
    """Refuse a class that lacks what it is called by, before it is called."""
    own = {name for base in author_class.__mro__ if not issubclass(Handler, base) for name in vars(base)}
    sees_requests = _EXECUTE_REQUESTS in own
    if sees_requests is not defines(file, _EXECUTE_REQUESTS):
        raise invalid_model(
            f"model '{model}': {HANDLER_FILE} must define '{_EXECUTE_REQUESTS}' in the class itself, which is read "
            "before it is imported"
        )
    methods = ("autocomplete", "load", _EXECUTE_REQUESTS if sees_requests else "execute", "close")
    missing = [name for name in methods if name not in own]
    if missing:
        raise invalid_model(
            f"model '{model}': class {author_class.__name__} in {HANDLER_FILE} has no {' and no '.join(missing)}; a "
            f"handler has {', '.join(methods[:-1])} and {methods[-1]}"
        )
