"""Importing without what a package would import on the side."""

import sys

import pytest

from model_handlers.system.importing import import_without


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages: one imports the other if it is there."""
    (tmp_path / "mme_side.py").write_text("")
    (tmp_path / "mme_main.py").write_text("try:\n    import mme_side\nexcept ImportError:\n    mme_side = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mme_side", "mme_main"):
        sys.modules.pop(name, None)


def test_what_is_hidden_seems_not_to_be_installed(packages):
    """The package gets along without the other, which everybody else can import afterwards."""
    assert import_without("mme_main", "mme_side").mme_side is None

    assert "mme_side" not in sys.modules
    import mme_side  # noqa: PLC0415 - it is made by the test

    assert mme_side.__name__ == "mme_side"


def test_what_is_imported_already_is_not_hidden(packages):
    """Whoever has it goes on having it."""
    import mme_side  # noqa: PLC0415

    assert import_without("mme_main", "mme_side").mme_side is mme_side
