"""Which framework a model's code imports, so that its process is forked from one that has imported it already.

Importing scikit-learn takes a second and 80 MB, transformers with PyTorch three seconds and 280 MB: in each of hundreds
of processes, unless they share it. `preload_for` only reads. It leaves alone code that could tell the difference: what
changes variables of the environment, or where modules are looked for, which frameworks heed when they are imported, and
what brings a module of an installed one's name. The functions that import are called in fork servers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from model_handlers.pytorch.runtime import PRELOAD as PYTORCH
from model_handlers.pytorch.runtime import pytorch
from model_handlers.registry import syntax_tree
from model_handlers.system.importing import is_installed
from model_handlers.tensorflow import PRELOAD as TENSORFLOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

SCIKIT_LEARN = f"{__name__}:scikit_learn"
SAVED_MODEL = "a SavedModel"
_VARIABLES = {"environ", "environb", "putenv", "unsetenv"}  # of `os`
_READS = {"get", "copy", "keys", "items", "values"}  # what changes nothing in `os.environ`
_LARGEST = 1 << 20  # bytes of source
_MOST_FILES = 64


class _Preload(NamedTuple):
    # A function that imports, what has to be installed for it, and code of what imports it is for: one of `users`, none
    # of `others`.
    function: str
    needs: tuple[str, ...]
    users: frozenset[str]
    others: frozenset[str] = frozenset()


_PRELOADS = (  # the larger one first, for code that imports of both
    _Preload(
        f"{__name__}:transformers",
        ("transformers", "torch"),
        frozenset({"transformers", "sentence_transformers", "peft"}),
    ),
    _Preload(PYTORCH, ("torch",), frozenset({"torch", "torchvision", "torchaudio", "timm"})),
    # Without Keras, of which code that imports TensorFlow finds no modules then.
    _Preload(TENSORFLOW, ("tensorflow",), frozenset({SAVED_MODEL}), frozenset({"tensorflow", "keras"})),
    _Preload(f"{__name__}:xgboost", ("xgboost",), frozenset({"xgboost"})),
    _Preload(SCIKIT_LEARN, ("sklearn",), frozenset({"sklearn", "joblib", "imblearn"})),
)


def preload_for(file: Path, directories: Iterable[Path], imports: str = "") -> str:
    """`module:function` to be called before the process of a model is forked, "" for nothing.

    `imports` is what the file imports though it does not show; SAVED_MODEL where it has SavedModels loaded.
    """
    places = list(directories)
    beside = [each for place in places for each in sorted(place.glob("*.py")) if each != file]
    found = _all_imported([file, *beside], places)
    names = {imports, *(found or ())}
    wanted = next((each for each in _PRELOADS if names & each.users and all(map(is_installed, each.needs))), None)
    if wanted is None or found is None or names & wanted.others:
        return ""
    packages = (each.parent for place in places for each in place.glob("*/__init__.py"))
    modules = [own.stem for own in (*beside, *packages) if own.stem.isidentifier()]
    hides = any(map(is_installed, modules))
    return "" if hides else wanted.function


def _all_imported(files: Iterable[Path], places: Sequence[Path]) -> set[str] | None:
    # And what the packages in `places` import; None where it has to be left alone.
    names: set[str] = set()
    waiting = deque(files)
    for _ in range(_MOST_FILES):
        if not waiting:
            return names
        imported = _imported(waiting.popleft())
        if imported is None:
            return None
        own = (place / name for place in places for name in sorted(imported - names))
        waiting.extend(each for package in own for each in islice(package.rglob("*.py"), _MOST_FILES))
        names |= imported
    return None


def transformers() -> None:
    """Import Hugging Face's library, and of it what nearly every model wants, which it leaves for later."""
    pytorch()
    library = importlib.import_module("transformers")
    for name in ("pipeline", "AutoConfig", "AutoModel", "AutoTokenizer", "PreTrainedModel", "PreTrainedTokenizerFast"):
        with contextlib.suppress(Exception):  # another version may call it otherwise: then models import it themselves
            getattr(library, name)


def xgboost() -> None:
    """Import XGBoost, and scikit-learn where that is installed, as it does itself."""
    importlib.import_module("xgboost")
    with contextlib.suppress(ImportError):
        scikit_learn()


def scikit_learn() -> None:
    """Import scikit-learn, and of it what most models are made of."""
    for name in ("joblib", "sklearn.compose", "sklearn.ensemble", "sklearn.linear_model", "sklearn.pipeline"):
        importlib.import_module(name)


def _imported(file: Path) -> set[str] | None:
    try:
        if file.stat().st_size > _LARGEST:
            return None
        tree = syntax_tree(file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # said when it is loaded
        return None
    reads: set[int] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
        reads.update(map(id, _read(node)))
    changes = any(id(node) not in reads and _is_setting(node) for node in ast.walk(tree))
    return None if changes or "dotenv" in names else names


def _read(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Attribute(value, attr) if attr in _READS:
            yield value
        case ast.Subscript(value, ctx=ast.Load()):
            yield value
        case ast.Compare():
            yield from node.comparators


def _is_setting(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        in_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in _VARIABLES or (node.attr == "path" and in_sys)
    return isinstance(node, ast.ImportFrom) and any(
        (node.module, alias.name) in {("sys", "path"), *(("os", each) for each in _VARIABLES)} for alias in node.names
    )
