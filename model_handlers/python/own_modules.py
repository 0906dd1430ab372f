"""Modules of a model's author whose names the process has for others: each importer gets its own.

A process of models has our packages, and what they import: an author's `model_handlers`, `serve` or `psutil` would be
ours to the author's code, though it lies in front on `sys.path`. So where an author's directories hold such a name,
import statements of code that lies in them find the author's module, and those of any other code what they always do.
The author's modules are not in `sys.modules`, where there is one place for a name. Runs on whatever thread imports.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import ModuleType

_OURS = frozenset({"container", "model_handlers", "serve"})
_SHARED = frozenset({"numpy"})  # what tensors cross in: there is one in a process

_import = builtins.__import__
_here: list[OwnModules] = []  # all of this process


class OwnModules:
    """The modules of one author that lie under taken names.

    Args:
        directories: where modules are looked for; those that lie inside are the author's.
        inside: how the paths of the author's files begin.
        left: names that stay the server's.
    """

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
        """Have import statements find what they did before."""
        if self in _here:
            _here.remove(self)
        if not _here:
            builtins.__import__ = _import

    def has(self, name: str) -> bool:
        """Whether a module is the author's."""
        return name.partition(".")[0] in self._names

    def module(self, name: str, wanted: Sequence[str], *, top: bool) -> ModuleType:
        """What an import statement of the author's code gets.

        Args:
            name: the module's whole name.
            wanted: what is taken from it, submodules of a package among them.
            top: whether the statement binds the package that all of it lies in.
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
    """The names of modules in a directory that are taken."""
    files = [file.stem for file in directory.glob("*.py")]
    packages = [file.parent.name for file in directory.glob("*/__init__.py")]
    taken = [name for name in (*files, *packages) if name in _OURS or _is_taken(name, inside)]
    return [*taken, *(name for name in _OURS if (directory / name).is_dir())]


def _is_taken(name: str, inside: str) -> bool:
    """Whether the process has another module of that name, which is not Python's own."""
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
    """See `builtins.__import__`."""
    file = (globals or {}).get("__file__") or ""
    for own in _here if isinstance(file, str) else ():
        if file.startswith(own.inside):
            whole = _whole(name, globals or {}, level)
            if own.has(whole):
                return own.module(whole, fromlist or (), top=not fromlist and not level)
    return _import(name, globals, locals, fromlist or (), level)


def _whole(name: str, importer: Mapping[str, Any], level: int) -> str:
    """The whole name of what a statement imports, which may begin at the importer's package."""
    if not level:
        return name
    package = importer.get("__package__") or ""
    above = package.rsplit(".", level - 1)[0]
    return f"{above}.{name}" if name else above
