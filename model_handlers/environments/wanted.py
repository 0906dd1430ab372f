"""What environment a model asks for, and whether the server's own packages are enough for a requirements.txt.

pip installs nothing for a requirement that an installed version meets, nor for what that version requires itself, if
all of that is met too: an environment would hold nothing but an interpreter, and its model may be forked from a process
that has its framework. What pip alone can judge counts as not met: other files, constraints, hashes, URLs, paths,
variables, continued lines. What is installed is looked at once. Runs on load threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
