"""A venv with what a model's requirements.txt names, installed by pip, on the interpreter that we run on.

The packages of the server are seen there too, behind the model's own: what a requirement names and the server has is
not installed again, and a model finds the server's numpy unless its requirements want another, which is then installed
in front of it. `--system-site-packages` would do that only where the server itself runs in no venv; a `.pth` file with
the server's folders does it in any case, and pip takes it for the same.

Runs on load threads; venv and pip are processes of their own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.environments.environment import NICENESS
from model_handlers.errors import MmeError, invalid_model
from model_handlers.system.digests import DIGITS, text_digest
from model_handlers.worker import fork_client
from model_handlers.worker.fork_server import Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from model_handlers.environments.environment import Environment, Patience
    from model_handlers.environments.wanted import Requirements
    from model_handlers.system.digests import Digests

_CONTINUED = re.compile(r"\\\n")  # a line that goes on
_COMMENT = re.compile(r"(^|\s+)#.*$")
_INCLUDES = re.compile(r"-[rc](?P<short>.*)|--(?:requirem|con)[a-z]*(?:=(?P<long>.*))?")  # pip takes abbreviations
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")  # what pip replaces by the value of an environment variable
_SHOWN = 200  # characters of a name in a message
_ERRORS = 3  # of pip's last ones, in an error message
_PIP = [
    *("-I", "-m", "pip", "install", "--no-input", "--no-color", "--progress-bar", "off"),
    *("--disable-pip-version-check", "--root-user-action", "ignore"),
    "--no-cache-dir",  # what is installed is kept itself
]


def name_of(wanted: Requirements, digests: Digests, patience: Patience) -> str:
    """What the folder of such an environment is called: it tells what was asked for, and on top of what.

    Raises:
        MmeError: INVALID_MODEL for an included file outside of the model's folder.
        OSError: a file can't be read.
    """
    wheels = sorted(path for path in wanted.wheels.iterdir() if path.is_file()) if wanted.wheels is not None else []
    asked = [
        list(sys.version_info),
        _server_packages(),
        _server_distributions(),
        [digests.of(file, patience) for file in _read_by_pip(wanted, patience.model)],
        [(wheel.name, digests.of(wheel, patience)) for wheel in wheels],
        wanted.wheels is None,
    ]
    return f"installed-{text_digest(json.dumps(asked), DIGITS)}"


def make(environment: Environment, wanted: Requirements, patience: Patience) -> None:
    """Make the venv in its empty folder and install. What is in it after a failure is the caller's to remove.

    Raises:
        MmeError: INVALID_MODEL with pip's last words when it fails, EXECUTION_FAILED when somebody killed it; what
            `patience` raises.
        OSError: what the disk says.
    """
    subject = f"model '{patience.model}': {wanted.subject}"
    if importlib.util.find_spec("pip") is None:
        raise invalid_model(f"{subject} can't be installed: the server's Python has no pip")
    venv = Program((sys.executable, "-I", "-m", "venv", "--without-pip", str(environment.prefix)), niceness=NICENESS)
    ended = fork_client.run(venv, patience.model, "venv", patience)
    if ended.code != 0:
        raise MmeError(ended.kind, f"{subject} can't be installed: venv {ended}")
    [packages] = environment.prefix.glob("lib/python3.*/site-packages")
    (packages / "mme-server.pth").write_text("\n".join(_server_packages()) + "\n")
    temporary = environment.prefix / "tmp"  # so that nothing is left anywhere else when pip is killed
    temporary.mkdir()
    pip = environment.program(
        *_PIP,
        *(("--no-index", "--find-links", str(wanted.wheels)) if wanted.wheels is not None else ()),
        "-r",
        str(wanted.file),
        directory=str(wanted.file.parent),
        variables={"TMPDIR": str(temporary)},
        niceness=NICENESS,
    )
    ended = fork_client.run(pip, patience.model, "pip", patience)
    if ended.code != 0:
        raise MmeError(
            ended.kind, f"{subject} can't be installed: {_told(ended, _read_by_pip(wanted, patience.model))}"
        )
    shutil.rmtree(temporary)


def _told(ended: fork_client.Ended, files: Iterable[Path]) -> str:
    """Why pip failed, in its own words, but for the values of the environment variables that the files name."""
    errors = [line for line in ended.words if line.startswith("ERROR: ")]
    words = " | ".join(errors[-_ERRORS:]) or f"pip {ended}"
    for name in {name for file in files for name in _VARIABLE.findall(file.read_text(errors="replace"))}:
        if value := os.environ.get(name):
            words = words.replace(value, f"${{{name}}}")
    return words


def _read_by_pip(wanted: Requirements, model: str) -> Iterator[Path]:
    """The file of requirements, and those that it includes.

    pip tells the first line of a file that holds no requirements, and clients are told what pip says.

    Raises:
        MmeError: INVALID_MODEL for one outside of the model's folder.
    """
    folder = wanted.file.parent.resolve()
    pending, seen = [wanted.file], set()
    while pending:
        file = pending.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        yield file
        for name in _included(file.read_text(errors="replace")):
            included = file.parent / name
            if "$" in name or ":" in name or not included.resolve().is_relative_to(folder):
                raise invalid_model(
                    f"model '{model}': {wanted.subject} includes '{name[:_SHOWN]}', which is outside of the model's "
                    "folder: put the file into the archive, beside requirements.txt"
                )
            pending.append(included)


def _included(text: str) -> Iterator[str]:
    """The files that -r and -c name in a file of requirements."""
    for line in _CONTINUED.sub("", text.replace("\r\n", "\n")).splitlines():
        words = iter(_words(_COMMENT.sub("", line)))
        for word in words:
            if match := _INCLUDES.fullmatch(word):
                yield match["short"] or match["long"] or next(words, "")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # pip refuses a line whose quotes do not end
        return line.split()


@functools.cache
def _server_packages() -> list[str]:
    """The folders that the server's packages lie in."""
    folders = [*site.getsitepackages(), str(Path(np.__file__).parents[1])]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


@functools.cache
def _server_distributions() -> list[str]:
    """The server's packages with their versions."""
    found = importlib.metadata.distributions(path=_server_packages())
    return sorted({f"{distribution.name}=={distribution.version}" for distribution in found})
