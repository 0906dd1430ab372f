"""What environment a model asks for, as values. PURE: nothing here looks whether it is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Given:
    """An environment that is there: a folder, used where it is, or a packed one.

    Attributes:
        path: where it is.
        brought: whether the model brings it, and not somebody else to a place that the model names.
    """

    path: Path
    brought: bool = field(default=True, compare=False)

    @property
    def subject(self) -> str:
        """What errors call it."""
        return f"its environment {self.path}"

    @property
    def remedy(self) -> str:
        """What to do where it is not there."""
        return (
            "put it into the archive, or leave EXECUTION_ENV_PATH out where the server has what it imports"
            if self.brought
            else "put it there before the model is loaded, or let the model bring it, in $$TRITON_MODEL_DIRECTORY"
        )


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
