"""What docs/security.md says of attacks is held by tests that are there."""

from __future__ import annotations

import re

from tests.docs.sentences import ROOT


def test_every_test_that_the_table_of_attacks_names_is_there():
    """Files by their place in tests/, tests by their name without `test_`."""
    text = (ROOT / "docs" / "security.md").read_text().partition("## Attacks, and what happens")[2]
    held = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")]
    named = [name for cell in held for name in re.findall(r"`([a-z0-9_/.]+)`", cell)]
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    files = [name for name in named if "/" in name]
    assert len(files) > 5
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []
    assert len(named) - len(files) > 20
    assert [name for name in named if "/" not in name and f"def test_{name}(" not in tests] == []
