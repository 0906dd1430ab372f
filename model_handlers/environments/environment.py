"""An environment on disk: a folder with an interpreter in `bin`, and how that is started; and the wait for one.

Around the interpreter is what Triton's Python backend puts there, so that an environment that works with it works here;
but the server's PYTHONPATH is not for it, nor for what it starts.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_handlers.errors import invalid_model
from model_handlers.system.threads import CancelToken
from model_handlers.worker.fork_server import Program
from model_handlers.worker.limits import LOAD_TIMEOUT

_ELF = b"\x7fELF"
_CLASS = 5  # bytes of a program's header that say what it is, and of how many bits
_MACHINE = slice(18, 20)  # those that say for which processor
_HEADER = 20
NICENESS = 10  # of what makes environments: as that of loads, it leaves the processors to inference


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with an interpreter in `bin`."""

    prefix: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin/python"

    def program(self, *arguments: str, **options: Any) -> Program:
        """Its interpreter with these arguments; `options` are more of `Program`'s."""
        variables = {"VIRTUAL_ENV": str(self.prefix), "PYTHONNOUSERSITE": "1", **options.pop("variables", {})}
        return Program(
            (str(self.python), *arguments),
            variables=variables,
            removed=("PYTHONHOME", "PYTHONPATH"),
            in_front={"PATH": str(self.prefix / "bin"), "LD_LIBRARY_PATH": str(self.prefix / "lib")},
            **options,
        )


def check_interpreter(environment: Environment, subject: str) -> None:
    """Refuse a folder that is no environment, or whose interpreter is not one of this machine."""
    python = environment.python
    if os.path.lexists(python) and not python.exists():
        raise invalid_model(
            f"{subject} leads with bin/python to {python.resolve()}, which this machine does not have: "
            "pack it together with its interpreter"
        )
    if not os.access(python, os.X_OK):
        raise invalid_model(
            f"{subject} has no bin/python that can be executed: an environment as conda or venv makes it is expected"
        )
    if _of_another_platform(python):
        raise invalid_model(
            f"{subject} was made for another platform: make it anew on Linux with a processor of the kind of this one, "
            f"{platform.machine()}"
        )
    home = _home(environment.prefix / "pyvenv.cfg")
    if home and not os.path.isdir(home):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        raise invalid_model(
            f"{subject} is a venv of the Python in {home}, which this machine does not have: "
            "pack it together with its interpreter, as conda-pack does"
        )


def _of_another_platform(python: Path) -> bool:
    ours, theirs = _header(Path(sys.executable)), _header(python)
    if not ours.startswith(_ELF) or not theirs or theirs.startswith(b"#!"):
        return False
    return theirs[:_CLASS] != ours[:_CLASS] or theirs[_MACHINE] != ours[_MACHINE]


def _header(program: Path) -> bytes:
    try:
        with program.open("rb") as file:
            return file.read(_HEADER)
    except OSError:
        return b""


def _home(configuration: Path) -> str:
    if not configuration.is_file():
        return ""
    lines = configuration.read_text(errors="replace").splitlines()
    return next((line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == "home"), "")


class Patience(CancelToken):
    """A token of a model's load, whose `check` also ends after so many seconds, as INVALID_MODEL."""

    def __init__(self, model: str, seconds: float, token: CancelToken) -> None:
        super().__init__(f"model '{model}'", lambda: token.cancelled)
        self.model = model
        self._seconds = seconds
        self.deadline = time.monotonic() + seconds

    def check(self) -> None:
        super().check()
        if time.monotonic() > self.deadline:
            raise invalid_model(
                f"model '{self.model}': its environment was not there within {self._seconds:g} s; "
                f"give it more by the parameter '{LOAD_TIMEOUT}'"
            )
