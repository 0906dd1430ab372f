"""Frozen answers: what the server and its commands say is what `answers/` has recorded, to the byte.

`groups.py` lists the groups; each records one file or a few of `answers/`. Requests and configurations are data:
`cases_*.py` hold them, and a new one is a row there and a `make golden`. What differs between runs and machines is
masked by the one table of `masks.py`, or pinned by the group.

A difference is either a mistake, or meant: then `make golden` (or `make golden ARGS="GROUP …"`) records it, `git diff`
shows it, and it is a commit of its own that says why.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.contract.forked import Forker
from tests.contract.server import Server
from tests.golden.groups import GROUPS

ANSWERS = Path(__file__).parent / "answers"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def forker():
    """Begins the servers."""
    with Forker() as forker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "forker", forker)
        yield


@pytest.mark.parametrize("group", GROUPS)
def test_answers_are_as_recorded(group, tmp_path):
    """Every answer of a group is the recorded one."""
    differences = []
    for name, text in GROUPS[group](tmp_path).items():
        recorded = (ANSWERS / name).read_text() if (ANSWERS / name).is_file() else ""
        lines = recorded.splitlines(), text.splitlines()
        differences += difflib.unified_diff(*lines, f"recorded {name}", f"now {name}", lineterm="", n=8)
    if differences:
        pytest.fail(
            "\n".join(differences) + f"\n\nIf this is meant: `make golden ARGS={group}` records it, and the difference "
            "is a commit of its own with its reason.",
            pytrace=False,
        )
