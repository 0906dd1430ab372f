"""Modules of authors, imported and forgotten."""

from __future__ import annotations

import sys
from types import ModuleType

from model_handlers.python.author_code import ImportedFile


def test_copies_of_a_model_may_be_forgotten_at_the_same_time(tmp_path, monkeypatch):
    """One finds what the other has forgotten a moment before; both are done with it."""
    (tmp_path / "model.py").write_text("")
    one, other = (ImportedFile("m", tmp_path / "model.py", name, [], tmp_path) for name in ("t_one", "t_other"))
    between = ModuleType("t_between")
    monkeypatch.setitem(sys.modules, "t_between", between)
    monkeypatch.setitem(sys.modules, "t_last", other.module)

    def forget_other(_name):
        del between.__getattr__
        other.forget()

    between.__getattr__ = forget_other  # runs while `one` goes through all modules

    one.forget()

    assert not {"t_one", "t_other", "t_last"} & sys.modules.keys()
