"""What environment a model asks for, as values. PURE: nothing here looks whether it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Given:
    """An environment that is there: a folder, used where it is, or a packed one."""

    path: Path

    @property
    def subject(self) -> str:
        """What errors call it."""
        return f"its environment {self.path}"


@dataclass(frozen=True, slots=True)
class Requirements:
    """Packages to be installed, on top of the server's own.

    Attributes:
        file: requirements.txt.
        wheels: the folder that they come from, and from nowhere else; None for whatever index pip knows.
    """

    file: Path
    wheels: Path | None

    @property
    def subject(self) -> str:
        """What errors call it."""
        return self.file.name


Wanted = Given | Requirements
