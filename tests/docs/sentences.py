"""Every piece of text in the code that could be part of an error, as it is written there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GAP = "\0"  # where a name or a number stands


@functools.cache
def texts() -> str:
    """All string literals of the three storeys, a line each; f-strings with gaps."""
    found = []
    for storey in ("container", "serve", "model_handlers"):
        for file in sorted((ROOT / storey).rglob("*.py")):
            found += [_text(node) for node in ast.walk(ast.parse(file.read_text()))]
    return "\n".join(text.replace("\n", " ") for text in found if text)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or GAP for value in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def is_said(sentence: str) -> bool:
    """Whether the code says that; `…` stands for anything within one sentence."""
    pieces = (re.escape(piece.strip()) for piece in sentence.split("…"))
    return re.search("[^\n]*?".join(pieces), texts()) is not None
