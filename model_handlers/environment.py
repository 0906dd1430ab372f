"""A model's own interpreter and packages, where the server's are not enough: what it wants, and what an environment is.

An environment is a folder with an interpreter in `bin`. Around that is what Triton's Python backend puts there, so that
an environment that works with it works here; but the server's PYTHONPATH is not for it, nor for what it starts.

pip installs nothing for a requirement that an installed version meets, nor for what that version requires itself, if
all of that is met too: an environment would hold nothing but an interpreter, and its model may be forked from a process
that has its framework. What pip alone can judge counts as not met: other files, constraints, hashes, URLs, paths,
variables, continued lines. What is installed is looked at once. Runs on load threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from model_handlers.errors import invalid_model
from model_handlers.system.threads import CancelToken
from model_handlers.worker.fork_server import Program
from model_handlers.worker.limits import LOAD_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHOWN = 200  # characters of a line in a message
_COMMENT = re.compile(r"(^|\s)#.*$")
_SOURCES = re.compile(  # where packages come from that are to be installed; one such option a line
    r"(-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host|--only-binary|--no-binary)(\s+|=)\S+"
    r"|--no-index|--prefer-binary"
)


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """An environment that is there, as a folder or packed; `brought` by the model, or put there by others."""

    path: Path
    brought: bool = field(default=True, compare=False)

    @property
    def subject(self) -> str:
        return f"its environment {self.path}"

    @property
    def remedy(self) -> str:
        return (
            "put it into the archive, or leave EXECUTION_ENV_PATH out where the server has what it imports"
            if self.brought
            else "put it there before the model is loaded, or let the model bring it, in $$TRITON_MODEL_DIRECTORY"
        )


@dataclass(frozen=True, slots=True)
class Requirements:
    """Packages to be installed on top of the server's: requirements.txt, from `wheels` alone or by pip's index."""

    file: Path
    wheels: Path | None

    @property
    def subject(self) -> str:
        return self.file.name


Wanted = Prebuilt | Requirements


def lack_of(file: Path) -> str:
    """Why the server's packages are not enough for a requirements.txt, in words; "" where they are."""
    try:
        asked = list(_asked(file.read_bytes().decode("utf-8-sig")))
        return next(filter(None, map(_lack, _with_all_that_is_required(asked))), "")
    except UnicodeDecodeError:
        return "it is not in UTF-8"
    except ValueError as error:
        return str(error)


def _asked(text: str) -> Iterator[Requirement]:
    for line in (_COMMENT.sub("", line).strip() for line in text.splitlines()):
        if line and not _SOURCES.fullmatch(line):
            requirement = _read(line)
            if _applies(requirement):
                yield requirement


def _read(text: str) -> Requirement:
    with contextlib.suppress(ValueError, RecursionError):
        requirement = Requirement(text)
        if requirement.url is None:
            return requirement
    raise ValueError(f"'{text[:_SHOWN]}' is for pip to judge")


def _applies(requirement: Requirement, extras: frozenset[str] = frozenset()) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _with_all_that_is_required(asked: list[Requirement]) -> Iterator[Requirement]:
    """These requirements, and those of what is installed for them. Takes `asked` apart."""
    seen = set()
    while asked:
        requirement = asked.pop()
        yield requirement
        wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if wanted not in seen:
            seen.add(wanted)
            asked += required_by(*wanted)


def _lack(requirement: Requirement) -> str:
    version, _ = installed(canonicalize_name(requirement.name))
    if not version:
        return f"{requirement} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement} is not met by {version}"
    return ""


@functools.cache
def required_by(name: str, extras: frozenset[str]) -> list[Requirement]:
    return [requirement for requirement in map(_read, installed(name)[1]) if _applies(requirement, extras)]


@functools.cache
def installed(name: str) -> tuple[str, tuple[str, ...]]:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "", ()
    return found.version or "", tuple(found.requires or ())


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
