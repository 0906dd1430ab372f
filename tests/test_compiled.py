"""What the sources say that are compiled: what mypyc would make something else of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS_OF_C = {
    "_alignof",
    "_asm",
    "_attribute",
    "_const",
    "_inline",
    "_int128",
    "_label",
    "_signed",
    "_thread",
    "_typeof",
}


def compiled_files() -> list[str]:
    """The modules that setup.py lists."""
    listed = next(
        node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    )
    return [f"{storey}/{module}.py" for storey, modules in ast.literal_eval(listed).items() for module in modules]


def bounds(tree: ast.AST) -> list[ast.expr]:
    """What slices begin and end with."""
    slices = [node for node in ast.walk(tree) if isinstance(node, ast.Slice)]
    return [bound for each in slices for bound in (each.lower, each.upper) if bound is not None]


def does_something(expression: ast.expr) -> bool:
    """Whether evaluating it may be noticed."""
    return any(
        isinstance(node, ast.NamedExpr | ast.Await) or (isinstance(node, ast.Call) and ast.unparse(node.func) != "len")
        for node in ast.walk(expression)
    )


@pytest.mark.parametrize("file", compiled_files())
def test_no_bound_of_a_slice_does_something(file):
    """It would be evaluated twice: a frame was sent twice that way."""
    found = [ast.unparse(bound) for bound in bounds(ast.parse((ROOT / file).read_text())) if does_something(bound)]

    assert found == []


@pytest.mark.parametrize("file", compiled_files())
def test_no_attribute_is_a_word_of_c(file):
    """An underscore comes before it in what mypyc makes: the compiler would refuse `__thread`."""
    found = {node.attr for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Attribute)}

    assert not found & WORDS_OF_C


def test_a_bound_that_does_something_is_seen():
    """By the check above."""
    tree = ast.parse("data = data[send(data):]; rest = data[len(data) : (n := 3)]; more = data[1 : len(data)]")

    assert [does_something(bound) for bound in bounds(tree)] == [True, False, True, False, False]
