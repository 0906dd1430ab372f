"""An environment on disk: a folder with an interpreter in `bin`, and how that is started.

What is around the interpreter is what Triton's Python backend puts there, so that an environment that works with it
works here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_handlers.errors import invalid_model
from model_handlers.isolation.program import Program

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment.

    Attributes:
        prefix: its folder.
    """

    prefix: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.prefix / "bin/python"

    def program(self, *arguments: str, directory: str = "", speaks: bool = False) -> Program:
        """Its interpreter with these arguments. See `Program`."""
        return Program(
            (str(self.python), *arguments),
            directory,
            variables={"VIRTUAL_ENV": str(self.prefix), "PYTHONNOUSERSITE": "1"},
            removed=("PYTHONHOME", "PYTHONPATH"),
            in_front={"PATH": str(self.prefix / "bin"), "LD_LIBRARY_PATH": str(self.prefix / "lib")},
            speaks=speaks,
        )


def check_interpreter(environment: Environment, subject: str) -> None:
    """Refuse a folder that is no environment, or whose interpreter is somewhere else than on this machine.

    Args:
        environment: it.
        subject: what errors call it: "model 'm': …".

    Raises:
        MmeError: INVALID_MODEL.
    """
    python = environment.python
    if not environment.prefix.is_dir():
        raise invalid_model(f"{subject} is not there")
    if os.path.lexists(python) and not python.exists():
        raise invalid_model(
            f"{subject} leads with bin/python to {python.resolve()}, which this machine does not have: "
            "pack it together with its interpreter"
        )
    if not os.access(python, os.X_OK):
        raise invalid_model(
            f"{subject} has no bin/python that can be executed: an environment as conda or venv makes it is expected"
        )
