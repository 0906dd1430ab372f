"""The code of a model's author: its files as modules, the environment that they ask for, and what they raised.

The author's directories go in front of `sys.path`, as that of a script does, so that `import helper` finds a file in
them. They belong to the whole process, and so do the names of modules: another model's helper makes way, which that
model has by then, unless it imports it again while it executes. A process of models has our packages, too, and what
they import: an author's `serve` or `psutil` would be ours to the author's code. So where an author's directories hold
such a name, import statements of code that lies in them find the author's module, which is not in `sys.modules`, where
there is one place for a name, and those of any other code what they always do.

model.py is `<version>.model`, as Triton has it, so that `from .helper import f` finds a file beside it; `import helper`
finds one there too, and in the model's directory, where no file hides a module of Python's own library. Models that
share a process are told apart by a number behind the version.

Anything that the code raises is the model's failure: `sys.exit` and KeyboardInterrupt too, which would otherwise end
the process that hosts it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import itertools
import sys
import threading
import traceback
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from model_handlers.base import Runtime
from model_handlers.errors import Kind, MmeError, invalid_model, out_of_memory
from model_handlers.registry import syntax_tree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from model_handlers.config.model_config import ModelConfig
    from model_handlers.environment import Wanted


_OURS = frozenset({"container", "mme", "model_handlers", "serve"})
_SHARED = frozenset({"numpy"})  # what tensors cross in: there is one in a process

_import = builtins.__import__
_here: list[OwnModules] = []  # all of this process


class OwnModules:
    """The modules of one author that lie under taken names; the names in `left` stay the server's."""

    def __init__(self, directories: Sequence[str], inside: str, left: Collection[str] = ()) -> None:
        self.inside = inside
        self._directories = [place for place in directories if f"{place}/".startswith(inside)]
        self._modules: dict[str, ModuleType] = {}
        self._lock = threading.RLock()
        self._names = {
            name for place in self._directories for name in _names_in(Path(place), inside) if name not in left
        }
        if self._names:
            _here.append(self)
            builtins.__import__ = _imported

    def forget(self) -> None:
        if self in _here:
            _here.remove(self)
        if not _here:
            builtins.__import__ = _import

    def has(self, name: str) -> bool:
        return name.partition(".")[0] in self._names

    def module(self, name: str, wanted: Sequence[str], *, top: bool) -> ModuleType:
        """What an import statement of the author's code gets.

        `wanted` is what is taken from it, submodules among them; with `top` it binds the package that all of it lies
        in.
        """
        with self._lock:
            module = self._loaded(name)
            names = getattr(module, "__all__", ()) if "*" in wanted else wanted
            for each in names:
                if not hasattr(module, each) and hasattr(module, "__path__"):
                    self._load_if_there(f"{name}.{each}")
            return self._modules[name.partition(".")[0]] if top else module

    def _load_if_there(self, name: str) -> None:
        try:
            self._loaded(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise

    def _loaded(self, name: str) -> ModuleType:
        known = self._modules.get(name)
        if known is not None:
            return known
        above, _, own = name.rpartition(".")
        parent = self._loaded(above) if above else None
        spec = PathFinder.find_spec(name, self._directories if parent is None else getattr(parent, "__path__", []))
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = self._modules[name] = importlib.util.module_from_spec(spec)
        try:
            if spec.loader is not None:
                spec.loader.exec_module(module)
        except BaseException:
            self._modules.pop(name, None)
            raise
        if parent is not None:
            setattr(parent, own, module)
        return module


def _names_in(directory: Path, inside: str) -> list[str]:
    files = [file.stem for file in directory.glob("*.py")]
    packages = [file.parent.name for file in directory.glob("*/__init__.py")]
    taken = [name for name in (*files, *packages) if name in _OURS or _is_taken(name, inside)]
    return [*taken, *(name for name in _OURS if (directory / name).is_dir())]


def _is_taken(name: str, inside: str) -> bool:
    # The process has another module of that name, which is not Python's own.
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    others = name not in _SHARED and name not in sys.stdlib_module_names
    return module is not None and others and not file.startswith(inside) and name != "__main__"


def _imported(
    name: str,
    globals: Mapping[str, Any] | None = None,  # noqa: A002 - what Python calls them
    locals: Mapping[str, Any] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    file = (globals or {}).get("__file__") or ""
    for own in _here if isinstance(file, str) else ():
        if file.startswith(own.inside):
            whole = _whole(name, globals or {}, level)
            if own.has(whole):
                return own.module(whole, fromlist or (), top=not fromlist and not level)
    return _import(name, globals, locals, fromlist or (), level)


def _whole(name: str, importer: Mapping[str, Any], level: int) -> str:
    if not level:
        return name
    package = importer.get("__package__") or ""
    above = package.rsplit(".", level - 1)[0]
    return f"{above}.{name}" if name else above


_files: list[ImportedFile] = []  # all of this process


class ImportedFile:
    """One file, imported under a name; it may import from `directories`, and what lies in `root` is its own.

    The names in `left` stay the server's. Raises INVALID_MODEL when it is no Python file or raises, OUT_OF_MEMORY.
    """

    def __init__(
        self, model: str, path: Path, name: str, directories: Sequence[str], root: Path, left: Collection[str] = ()
    ) -> None:
        self._directories = directories
        self._inside = f"{root}/"
        self._top = name.partition(".")[0]
        self._others_make_way()
        self._own = OwnModules(directories, self._inside, left)
        _files.append(self)
        sys.path[:0] = directories
        importlib.invalidate_caches()
        try:
            self.module = _imported_module(model, path, name)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Forget the module, those that it imported from its own directories, and the directories."""
        if self in _files:
            _files.remove(self)
        self._own.forget()
        for directory in self._directories:
            if directory in sys.path:
                sys.path.remove(directory)
        for name in self._imported():
            sys.modules.pop(name, None)  # another copy of the model may be forgotten at the same time

    def _imported(self) -> list[str]:
        files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
        return [name for name, file in files.items() if file.startswith(self._inside)]

    def _others_make_way(self) -> None:
        others = [each for each in _files if each._inside != self._inside]  # noqa: SLF001 - of its own class, as below
        for name, own in ((name, each._top) for each in others for name in each._imported()):  # noqa: SLF001
            top = name.partition(".")[0]
            if top != own and _has(self._directories, top):
                sys.modules.pop(name, None)


def _has(directories: Sequence[str], name: str) -> bool:
    return any(Path(each, f"{name}.py").is_file() or Path(each, name).is_dir() for each in directories)


def version_directory(config: ModelConfig, file: Path) -> Path:
    """The version directory that a model's file lies in, wherever below it that is."""
    depth = len(PurePosixPath(config.default_model_filename or file.name).parts)
    return file.parents[depth - 1]


def check_syntax(model: str, path: Path) -> ast.Module:
    """What a file says, without running it. Raises INVALID_MODEL, naming file and line."""
    try:
        return syntax_tree(path)
    except (SyntaxError, ValueError) as error:
        raise failed_load(f"{path} was read", error, model) from None


def free_name(wanted: str) -> str:
    name, number = wanted, 1
    while name in sys.modules:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _imported_module(model: str, path: Path, name: str) -> ModuleType:
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


_CLASS = "TritonPythonModel"


# Code chooses its libraries itself; it is told which GPU is its own, and may use it or not.
ANY_RUNTIME = Runtime(gpu_capable=lambda: True)


class AuthorFiles:
    """Where the code of a model's author is: `path`, and what lies beside it in `places`."""

    def __init__(self, config: ModelConfig, path: Path, model_directory: Path, places: Sequence[Path]) -> None:
        self.path = path
        self.model_directory = model_directory
        self._config = config
        self._places = tuple(dict.fromkeys(places))

    def directories(self) -> list[str]:
        return list(map(str, self._places))

    def imports(self) -> str:
        """What the file imports though it does not show; see `preload_for`."""
        return ""

    def preload(self) -> str:
        from model_handlers.python.preload import preload_for  # noqa: PLC0415 - nothing is forked where models run

        return preload_for(self.path, self._places, self.imports())

    def environment(self) -> Wanted | None:
        """By Triton's parameter or a requirements.txt.

        The parameter names one that is there, packed or not, and is complete. Without it the first
        requirements.txt says what is to be installed, out of a folder `wheels` if there is one.
        """
        from model_handlers.environment import Prebuilt, Requirements  # noqa: PLC0415 - not asked where models run

        text = self._config.parameters.get(PARAMETER, "")
        if text:
            path = _path(text, self._config.name, self.model_directory)
            return Prebuilt(path, brought=_MODEL_DIRECTORY in text)
        requirements = next((path for place in self._places if (path := place / "requirements.txt").is_file()), None)
        if requirements is None or not _asks(requirements):
            return None
        wheels = next((path for place in self._places if (path := place / "wheels").is_dir()), None)
        return Requirements(requirements, wheels)


class ModelFile(AuthorFiles):
    """The files of a version of a Python model."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        version = version_directory(config, path)
        super().__init__(config, path, version.parent, (path.parent, version, version.parent))
        self.version = version.name


class ModelModule:
    """model.py, imported, and its `TritonPythonModel`. Raises INVALID_MODEL."""

    def __init__(self, model: str, file: ModelFile, library: Sequence[str]) -> None:
        self._package = free_name(file.version)
        package = sys.modules[self._package] = ModuleType(self._package)
        package.__path__ = [str(file.path.parent)]
        name = f"{self._package}.{file.path.stem}"
        try:
            directories = [*library, *file.directories()]
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
        self._file.forget()
        sys.modules.pop(self._package, None)


def check_class(model: str, file: ModelFile, source: ast.Module) -> None:
    """Refuse a file that binds no such class in any way, without running it; the load finds what else is wrong."""
    bound = {name for node in ast.walk(source) for name in _bound(node)}
    if bound.isdisjoint({_CLASS, "*"}):
        raise _no_class(model, file, [node.name for node in source.body if isinstance(node, ast.ClassDef)])
    if "execute" not in bound and any(_inherits_nothing(node) for node in source.body):
        raise _no_execute(model, file)


def _inherits_nothing(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef) or node.name != _CLASS:
        return False
    return not (node.bases or node.keywords or node.decorator_list)


def _bound(node: ast.AST) -> Iterator[str]:
    # Names that a node gives to something, `*` for any.
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


PARAMETER = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


def _asks(requirements: Path) -> bool:
    lines = requirements.read_text(errors="replace").splitlines()
    return any(line.strip() and not line.strip().startswith("#") for line in lines)


def _path(text: str, model: str, model_directory: Path) -> Path:
    path = Path(text.replace(_MODEL_DIRECTORY, str(model_directory)))
    if not path.is_absolute():
        raise invalid_model(
            f"model '{model}': parameter '{PARAMETER}' is '{text}'; it must be an absolute path or begin with "
            f"{_MODEL_DIRECTORY}"
        )
    return path


_OUR_FOLDERS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("python", "scripts"))
_MOST_ALIKE = 3  # frames
_LONGEST = 128 << 10  # characters of what an author has to say; Triton sends any number


def failed_load(doing: str, error: BaseException, model: str) -> MmeError:
    if is_memory(error):
        return out_of_memory(f"model '{model}' ran out of memory while {doing}: {told(error)}")
    if isinstance(error, SyntaxError):
        where = f"{error.filename} line {error.lineno}"
        return invalid_model(printable(f"model '{model}': {where}: {type(error).__name__}: {error.msg}"))
    return invalid_model(f"model '{model}' failed while {doing}: {told(error)}")


def failed_execution(error: BaseException, lane: str) -> MmeError:
    if is_memory(error):
        return out_of_memory(f"model instance '{lane}' ran out of memory: {told(error)}")
    return failed_batch(told(error), lane)


def failed_batch(message: str, lane: str) -> MmeError:
    return MmeError(Kind.EXECUTION_FAILED, f"Failed to process the request(s) for model '{lane}', message: {message}")


def printable(text: str) -> str:
    """What a response can carry of an author's text: bounded, and without halves of characters."""
    return text[:_LONGEST].encode(errors="replace").decode()


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out: for Python, for numpy, or on a GPU, as torch and cupy call it."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def told(error: BaseException) -> str:
    """`<Type>: <message>` and where, innermost frame first, without the frames that called the author's code."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_ours(frame)]
    text = printable(f"{type(error).__name__}: {_text(error)}")
    if frames:
        text += f"\n\nAt:\n{printable(''.join(_places(reversed(frames))))}"
    advice = _advice(error, [Path(frame.f_code.co_filename) for frame, _ in frames])
    return f"{text}\n{printable(advice)}" if advice else text


def _places(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    # A line a frame; of one that comes again and again, as a recursion's does, few.
    lines = (f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n" for frame, line in frames)
    for place, same in itertools.groupby(lines):
        times = sum(1 for _ in same)
        yield from [place] * min(times, _MOST_ALIKE)
        if times > _MOST_ALIKE:
            yield f"  (the same {times - _MOST_ALIKE} times more)\n"


def _advice(error: BaseException, files: list[Path]) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "Install it into the image, or let the model bring it: by a requirements.txt, or EXECUTION_ENV_PATH"
    if isinstance(error, AttributeError) and error.obj is None and error.name == "as_numpy":
        return "get_input_tensor_by_name gives None for an input that the request does not have; names are exact"
    if (
        isinstance(error, FileNotFoundError)
        and isinstance(error.filename, str)
        and not Path(error.filename).is_absolute()
    ):
        return _where_it_lies(error.filename, files)
    return ""


def _where_it_lies(name: str, files: list[Path]) -> str:
    for file in reversed(files):
        for up, directory in enumerate(file.parents[:2]):
            if (directory / name).exists():
                begin = "Path(__file__).parent" if up == 0 else f"Path(__file__).parents[{up}]"
                return f"It lies in {directory}, and was looked for where the server runs: write {begin} / '{name}'"
    return (
        "A relative path begins where the server runs: begin it with Path(__file__).parent, or with the directory that "
        "initialize and model_fn are given"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error) or "<EMPTY MESSAGE>"
    except Exception:  # noqa: BLE001 - the author's __str__ may raise as well as anything else of theirs
        return "an exception that cannot be printed"


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((*_OUR_FOLDERS, "<frozen importlib"))
