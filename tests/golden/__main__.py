"""`make golden`: record the answers of this checkout; ARGS name groups, none means all."""

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
    if unknown := set(groups) - GROUPS.keys():
        sys.stderr.write(f"there is no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}\n")
        return 2
    with Forker() as Server.forker:
        for group in groups or GROUPS:
            with tempfile.TemporaryDirectory(prefix="golden-") as folder:
                for name, text in GROUPS[group](Path(folder)).items():
                    (ANSWERS / name).write_text(text)
                    sys.stdout.write(f"{os.path.relpath(ANSWERS / name)}: {len(text)} characters\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
