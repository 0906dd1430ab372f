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


@pytest.fixture(scope="module")
def recorded(request, tmp_path_factory):
    """A folder for each group of which a test is to run: recorded in one process, which no other test has touched."""
    folder = tmp_path_factory.mktemp("golden")
    groups = [item.callspec.params["group"] for item in request.session.items if item.path == request.path]
    command = [sys.executable, "-m", "tests.golden", "--into", str(folder), *groups]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.parametrize("group", GROUPS)
def test_answers_are_as_recorded(group, recorded):
    """Every answer of a group is the recorded one."""
    differences = []
    for file in sorted((recorded / group).iterdir()):
        name, text = file.name, file.read_text()
        before = (ANSWERS / name).read_text() if (ANSWERS / name).is_file() else ""
        lines = before.splitlines(), text.splitlines()
        differences += difflib.unified_diff(*lines, f"recorded {name}", f"now {name}", lineterm="", n=8)
    if differences:
        pytest.fail(
            "\n".join(differences) + f"\n\nIf this is meant: `make golden ARGS={group}` records it, and the difference "
            "is a commit of its own with its reason.",
            pytrace=False,
        )
