"""What environment a model asks for, as values. PURE: nothing here looks whether it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folder:
    """An environment that lies unpacked on this machine, and is used where it is."""

    path: Path


Wanted = Folder
