"""Which models of a repository consist of which others: tables of entries."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.dependents import parts_of, wholes_of
from serve.source import InRepository, Unpacked


def entry(path, *members, resident=True, registered=True):
    """A model of a repository, in memory, that consists of others."""
    held = SimpleNamespace(members=dict.fromkeys(members)) if resident else None
    path = Path(path)
    return SimpleNamespace(name=path.name, source=InRepository(path), resident=held, registered=registered)


WORLD = {
    "whole": entry("/r/whole", "pre", "model", "gone"),
    "other": entry("/r/other", "model"),
    "pre": entry("/r/pre"),
    "model": entry("/r/model"),
    "gone": entry("/r/gone", registered=False),
    "evicted": entry("/r/evicted", resident=False),
    "far": entry("/elsewhere/far", "pre"),
    "posted": SimpleNamespace(
        name="posted",
        source=Unpacked(Path("/r/posted"), "/r/posted"),
        resident=SimpleNamespace(members={"pre": None}),
        registered=True,
    ),
}


@pytest.mark.parametrize(
    ("name", "wholes"), [("pre", ["whole"]), ("model", ["whole", "other"]), ("whole", []), ("nobody", [])]
)
def test_who_is_made_of_a_model(name, wholes):
    """Those in memory, of the same repository; an archive's members are its own."""
    assert wholes_of(name, WORLD) == wholes


@pytest.mark.parametrize(
    ("name", "parts"), [("whole", ["pre"]), ("other", []), ("pre", []), ("evicted", []), ("nobody", [])]
)
def test_what_a_model_is_made_of(name, parts):
    """Registered ones alone, and those that no other model in memory is made of."""
    assert parts_of(name, WORLD) == parts
