"""The kept inputs of each target: `corpus/TARGET.txt` has those to begin with, one a line as Python writes bytes.

What was found is a file of its own, `corpus/TARGET/HASH.bin`, as it was sent.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.hunt import Finding

FOLDER = Path(__file__).parent / "corpus"


def kept(target: str) -> list[bytes]:
    """All of a target's."""
    lines = FOLDER / f"{target}.txt"
    seeds = [ast.literal_eval(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return [*seeds, *(file.read_bytes() for file in sorted((FOLDER / target).glob("*.bin")))]


def add(finding: Finding) -> Path:
    """Write what was found."""
    file = FOLDER / finding.target / finding.file
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(finding.data)
    return file
