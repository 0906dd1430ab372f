"""Which handler serves which backend, and how a model directory without a configuration gives its backend away.

A handler's module imports its framework when the first such model is loaded. Names that are not in the table are looked
for among installed packages, which register a backend by an entry point and are imported into the serving process, and
in the archive, whose handler.py is its author's and only read here (`custom` loads it).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from model_handlers.base import Handler
from model_handlers.errors import invalid_model, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping


_NO_VARIANTS: Mapping[str, str] = MappingProxyType({})
_TREE_FILES = MappingProxyType(
    {
        "xgboost": "xgboost.model",
        "xgboost_json": "xgboost.json",
        "xgboost_ubj": "xgboost.ubj",
        "lightgbm": "model.txt",
        "treelite_checkpoint": "checkpoint.tl",
    }
)


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend as config.pbtxt names it."""

    name: str  # the `backend` field
    platforms: tuple[str, ...]  # values of the older `platform` field that mean the same
    filename: str  # its model file in a version directory, when the configuration names none; "" where it has none
    handler: str  # `module:class` of the handler
    detect: bool = True  # whether the file's presence is enough to recognise the backend
    # where the model file depends on a parameter of the configuration: that, and values → file names
    variants: tuple[str, Mapping[str, str]] = ("", _NO_VARIANTS)

    def filename_in(self, version_directory: Path, parameters: Mapping[str, str]) -> str:
        parameter, names = self.variants
        chosen = names.get(parameters.get(parameter, ""))
        return chosen or next((name for name in names.values() if (version_directory / name).exists()), self.filename)


# In the order in which Triton tries to recognise a model by its file.
BACKENDS = (
    Backend(
        "tensorflow", ("tensorflow_savedmodel",), "model.savedmodel", "model_handlers.tensorflow:SavedModelHandler"
    ),
    Backend("tensorflow", ("tensorflow_graphdef",), "model.graphdef", "model_handlers.tensorflow:GraphdefHandler"),
    Backend("tensorrt", ("tensorrt_plan",), "model.plan", "model_handlers.tensorrt:TensorrtHandler"),
    Backend("onnxruntime", ("onnxruntime_onnx",), "model.onnx", "model_handlers.onnx:OnnxHandler"),
    Backend("openvino", (), "model.xml", "model_handlers.openvino:OpenvinoHandler"),
    Backend("pytorch", ("pytorch_libtorch", "libtorch"), "model.pt", "model_handlers.pytorch:TorchHandler"),
    Backend("pytorch", ("torch_aoti",), "model.pt2", "model_handlers.pytorch:Pt2Handler"),
    Backend("pytorch", ("pytorch",), "model.py", "model_handlers.pytorch:CodeHandler", detect=False),
    Backend("python", (), "model.py", "model_handlers.python.handler:PythonHandler"),
    Backend("sagemaker", (), "code/inference.py", "model_handlers.scripts.host:ScriptHandler", detect=False),
    Backend(
        "fil",
        (),
        "xgboost.json",
        "model_handlers.trees:TreesHandler",
        detect=False,
        variants=("model_type", _TREE_FILES),
    ),
)


# What backends are called by the framework's name alone; for messages.
_ALIASES = {
    "onnx": "onnxruntime",
    "torch": "pytorch",
    "torchscript": "pytorch",
    "tf": "tensorflow",
    "savedmodel": "tensorflow",
    "trt": "tensorrt",
    "xgboost": "fil",
    "lightgbm": "fil",
}


def detect_backend(version_directory: Path) -> Backend | None:
    return next((b for b in BACKENDS if b.detect and (version_directory / b.filename).exists()), None)


def find_backend(name: str, platform: str, model: str, version_directory: Path | None = None) -> Backend:
    """The backend that `backend`, `platform` or both name: of the table, installed packages, or `version_directory`.

    A platform means nothing to a backend that has none, as in Triton; but `pytorch` has the Python backend take a
    module.
    Raises MmeError: INVALID_MODEL when the two disagree or neither is known; UNSUPPORTED for a package that fails to
    import.
    """
    if (name, platform) == ("python", "pytorch") and _is_module(version_directory):
        name = "pytorch"
    if name and not any(b.platforms for b in BACKENDS if b.name == name):
        platform = ""
    if platform and not any(platform in b.platforms for b in BACKENDS):
        raise invalid_model(f"unexpected platform type '{platform}' for {model}{_instead(platform)}")
    matches = [b for b in BACKENDS if (not name or b.name == name) and (not platform or platform in b.platforms)]
    if matches:
        return matches[0]
    if platform:
        raise invalid_model(f"unexpected 'platform' and 'backend' pair, got:{platform}, {name}")
    brought = _brought(name, version_directory) if version_directory is not None else None
    found = brought or registered_backend(name)
    if found is not None:
        return found
    raise invalid_model(
        f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration. "
        f"Model '{model}': the backends served here are {', '.join(served_backends())}; another one is a package that "
        f"registers it, or a {HANDLER_FILE} beside the model.{_meant(name)}"
    )


def _is_module(version_directory: Path | None) -> bool:
    code = None if version_directory is None else version_directory / "model.py"
    return code is not None and code.is_file() and b"TritonPythonModel" not in code.read_bytes()


def _instead(platform: str) -> str:
    backend = _ALIASES.get(platform.lower(), platform)
    if any(backend == b.name for b in BACKENDS):
        return f'; that is a backend: write backend: "{backend}" instead'
    return (
        f"; there are {', '.join(dict.fromkeys(p for b in BACKENDS for p in b.platforms))}, or name a backend instead"
    )


def _meant(name: str) -> str:
    if any(name in b.platforms for b in BACKENDS):
        return f" '{name}' is a platform: write platform: \"{name}\" instead."
    alias = _ALIASES.get(name.lower(), "")
    return f' Write backend: "{alias}" instead.' if alias else ""


def _brought(name: str, version_directory: Path) -> Backend | None:
    file = version_directory / HANDLER_FILE
    if not file.is_file():
        return None
    return Backend(name, (), HANDLER_FILE, "model_handlers.custom:FileHandler", detect=False)


@functools.cache
def registered_backend(name: str) -> Backend | None:
    """The backend that an installed package registers; packages do not come and go while this process lives."""
    for backend, (value, package) in registrations().items():
        if backend == name:
            handler = registered_handler(value, name, package)
            return Backend(name, (), handler.default_filename, value, detect=False)
    return None


def registrations() -> dict[str, tuple[str, str]]:
    # a tenth of what a fork server imports, which asks never
    from configparser import ConfigParser, Error  # noqa: PLC0415
    from importlib.metadata import entry_points  # noqa: PLC0415

    found: dict[str, tuple[str, str]] = {}
    for each in entry_points(group=GROUP):  # of several the first that Python finds
        found.setdefault(each.name, (each.value, each.dist.name if each.dist else each.value))
    checkout = ConfigParser(interpolation=None)
    with contextlib.suppress(Error, UnicodeError):  # what lies beside an installed package is not ours
        checkout.read(Path(__file__).parents[1] / "setup.cfg", "utf-8")
    own = checkout.get("options.entry_points", GROUP, fallback="").strip()
    pairs = (line.split(" = ") for line in own.splitlines())
    return found | {name: (value, "mme") for name, value in pairs}  # it may be installed in another version too


def platform_of(name: str) -> str:
    """What clients are told of a model whose configuration names the backend alone."""
    return next((b.platforms[0] for b in BACKENDS if b.name == name and b.platforms), name)


def told_by_file(backend: Backend, version_directory: Path) -> Backend:
    """Of the rows of one backend the one whose model file is there; `backend` itself where none is, or several are."""
    rows = [b for b in BACKENDS if b.name == backend.name and (version_directory / b.filename).exists()]
    return rows[0] if len(rows) == 1 else backend


def handler_for(backend: Backend) -> type[Handler]:
    """The handler class of a backend; imports its module, not yet its framework."""
    module, _, name = backend.handler.partition(":")
    handler: type[Handler] = getattr(importlib.import_module(module), name)
    return handler


def served_backends() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*(b.name for b in BACKENDS), *sorted(registrations()))))


GROUP = "mme.handlers"  # of entry points: backend = module:class
HANDLER_FILE = "handler.py"
_LARGEST = 1 << 20  # bytes of a file that is looked into


def registered_handler(value: str, backend: str, package: str) -> type[Handler]:
    """The class that an entry point names. Raises MmeError: UNSUPPORTED when it can't be imported, or is no handler."""
    subject = f"backend '{backend}' is registered by the package '{package}' as {value}, which"
    module, _, name = value.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the package may raise anything
        raise unsupported(f"{subject} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Handler)):
        raise unsupported(f"{subject} is no subclass of model_handlers.base.Handler")
    return found


def defines(file: Path, method: str) -> bool:
    """Whether a class in a Python file has a method of that name; what can't be read has none yet."""
    try:
        tree = syntax_tree(file) if file.stat().st_size <= _LARGEST else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # said when it is loaded
        return False
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(isinstance(each, ast.FunctionDef) and each.name == method for node in classes for each in node.body)


# Python before 3.11.8 takes the trees that two threads make at a time for one another's (SystemError), and which
# warnings are ignored is the same for all threads.
_ONE_AT_A_TIME = threading.Lock()


def syntax_tree(file: Path) -> ast.Module:
    """What a Python file says. OSError: unreadable. SyntaxError, ValueError, RecursionError, MemoryError: no Python."""
    source = file.read_bytes()
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, str(file))
