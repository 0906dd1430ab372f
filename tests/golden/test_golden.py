"""Frozen answers: what the server and its commands say is what `answers/` has recorded, to the byte.

`groups.py` lists the groups; each records one file or a few of `answers/`. Requests and configurations are data:
`cases_*.py` hold them, and a new one is a row there and a `make golden`. What differs between runs and machines is
masked by the one table of `masks.py`, or pinned by the group.

A difference is either a mistake, or meant: then `make golden` (or `make golden ARGS="GROUP …"`) records it, `git diff`
shows it, and it is a commit of its own that says why.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.groups import GROUPS

ANSWERS = Path(__file__).parent / "answers"
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", GROUPS)
def test_answers_are_as_recorded(group, tmp_path):
    """Every answer of a group is the recorded one; it is asked for in a process that no other test has touched."""
    command = [sys.executable, "-m", "tests.golden", "--into", str(tmp_path), group]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    differences = []
    for file in sorted(tmp_path.iterdir()):
        name, text = file.name, file.read_text()
        recorded = (ANSWERS / name).read_text() if (ANSWERS / name).is_file() else ""
        lines = recorded.splitlines(), text.splitlines()
        differences += difflib.unified_diff(*lines, f"recorded {name}", f"now {name}", lineterm="", n=8)
    if differences:
        pytest.fail(
            "\n".join(differences) + f"\n\nIf this is meant: `make golden ARGS={group}` records it, and the difference "
            "is a commit of its own with its reason.",
            pytrace=False,
        )
