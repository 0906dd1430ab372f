"""What every request and every load needs is small, and does without what is added to it: see docs/architecture.md."""

from __future__ import annotations

import ast
import configparser
import re

import pytest

from container import is_compiled
from tests.core_trace import LAYERS, LOAD, PYTHON_REQUEST, REQUEST, ROOT, trace
from tests.docs.test_documents import marked, rows, section

CONTRACT = configparser.ConfigParser()
CONTRACT.read(ROOT / "setup.cfg")
CORE = CONTRACT["importlinter:contract:core"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
DEEDS = {
    "a request": (REQUEST,),
    "a request and a load": (REQUEST, LOAD),
    "and a request of a Python model, in its process too": (REQUEST, LOAD, PYTHON_REQUEST),
}


@pytest.fixture(scope="module")
def traced():
    """Deed → file → functions that ran."""
    if is_compiled():
        pytest.skip("what is compiled is not traced")
    return trace()


def files_of(module: str) -> str:
    """A module's file, or a package's folder."""
    path = module.replace(".", "/")
    return f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"


@pytest.mark.slow
def test_no_deed_of_the_core_runs_what_is_added(traced):
    """Neither an inline request nor a load, nor those of a Python model: each addition costs those who ask for it."""
    additions = tuple(files_of(module) for module in CORE["forbidden_modules"].split())
    ran = {path for files in traced.values() for path in files if path.startswith(additions)}
    assert ran == set()


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(section(ARCHITECTURE, "How much of it runs"))[1:], ids=lambda row: row[0])
def test_no_more_runs_than_is_said(traced, row):
    """The table's numbers are bounds; `python -m tests.core_trace` prints what there is."""
    deed, *bounds = row
    files: dict[str, set[str]] = {}
    for name in DEEDS[deed]:
        for path, functions in traced[name].items():
            files[path] = files.get(path, set()) | functions
    layers = [sum(path.startswith(f"{layer}/") for path in files) for layer in LAYERS]
    found = [layers[0], layers[1] + layers[2], sum(layers), sum(map(len, files.values()))]
    assert all(number <= int(bound) for number, bound in zip(found, bounds, strict=True)), (found, bounds)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "deeds"), [("a request", (REQUEST, LOAD)), ("a load", (LOAD,))])
def test_the_ways_through_the_code_are_those_that_are_gone(traced, table, deeds):
    """Each file of the tables of a request and a load runs in one."""
    start = ARCHITECTURE.index(f"| {table} | look for |")
    named = [marked(row[0])[0] for row in rows(ARCHITECTURE[start : ARCHITECTURE.index("\n\n", start)])[1:]]
    assert len(named) > 10
    assert [path for path in named if not any(path in traced[deed] for deed in deeds)] == []


def test_types_alone_are_imported_of_what_is_added():
    """Where the contract lets the core name an addition, it is for a type checker."""
    for line in CORE["ignore_imports"].strip().splitlines():
        importer, _, addition = re.split(r"\s+", line.strip())
        body = ast.parse((ROOT / files_of(importer)).read_bytes()).body
        assert addition not in {node.module for node in body if isinstance(node, ast.ImportFrom)}, line
