"""Tests reach the product by its public names: docs/architecture.md lists which seam each folder goes through."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FILES = 40
MOST_FILES_A_NAME = 4
_PRIVATE = re.compile(r"(?<!self)(?<!cls)\.(?!__)(_[a-z]\w*)")
_STRING = re.compile(r'"[^"\n]*"')
REMEDY = (
    "test through the folder's seam (docs/architecture.md, How tests get in), or, where nothing public tells, by the one "
    "helper that knows the name, as tests/serve/inside.py"
)


def own_names() -> set[str]:
    """What the product defines: functions, attributes and variables, by name."""
    found = set()
    for storey in ("container", "mme", "serve", "model_handlers"):
        for path in (ROOT / storey).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_private_names_are_known_to_few_tests():
    """A name that many tests know can't be changed any more, however private it is."""
    product = own_names()
    tests = {str(path.relative_to(ROOT)): _STRING.sub("", path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    touched = {path: set(_PRIVATE.findall(text)) & product for path, text in tests.items()}
    by_name = defaultdict(list)
    for path, names in touched.items():
        for name in names:
            by_name[name].append(path)
    files = sorted(path for path, names in touched.items() if names)

    assert len(files) <= MOST_FILES, (
        f"{len(files)} files touch private names, of at most {MOST_FILES}: {REMEDY}: {files}"
    )
    spread = {name: sorted(paths) for name, paths in by_name.items() if len(paths) > MOST_FILES_A_NAME}
    assert not spread, f"private names in more than {MOST_FILES_A_NAME} files: {REMEDY}: {spread}"
