"""`make golden`: record the answers of this checkout; ARGS name groups, none means all.

With --into FOLDER they are written there, each group into a folder of its name: the test records in a process of its
own, which other tests did nothing to.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.contract.forked import Forker
from tests.contract.server import Server
from tests.golden.groups import GROUPS

ANSWERS = Path(__file__).parent / "answers"


def main(groups: list[str]) -> int:
    """Write the files of these groups."""
    into = None
    if groups[:1] == ["--into"]:
        into, groups = Path(groups[1]), groups[2:]
    if unknown := set(groups) - GROUPS.keys():
        sys.stderr.write(f"there is no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}\n")
        return 2
    with Forker() as Server.forker:
        for group in groups or GROUPS:
            answers = into / group if into else ANSWERS
            answers.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="golden-") as folder:
                for name, text in GROUPS[group](Path(folder)).items():
                    (answers / name).write_text(text)
                    sys.stdout.write(f"{group} {os.path.relpath(answers / name)}: {len(text)} characters\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
