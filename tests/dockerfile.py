"""A Dockerfile as data: its stages, what each says of itself; and its steps, run in a folder.

Reads the part of the language that ours uses; knows nothing of what a good Dockerfile is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

COMPILES = os.environ.get("MME_COMPILE") == "1"  # as images do, which takes minutes
_OUTSIDE = ("pip_", "ssl_", "http", "no_proxy")  # variables that say how this machine reaches packages


@dataclass
class Stage:
    """One FROM and its instructions; `parent` is None for a stage that begins with an image from outside."""

    name: str
    base: str
    parent: Stage | None
    steps: list[tuple[str, str]] = field(default_factory=list)

    def lineage(self) -> list[Stage]:
        """The stages that it is built on, itself last."""
        return [*(self.parent.lineage() if self.parent else []), self]

    def every(self, word: str) -> list[str]:
        """The arguments of an instruction, those of its parents first."""
        return [text for stage in self.lineage() for known, text in stage.steps if known == word]

    def pairs(self, word: str) -> dict[str, str]:
        """What LABEL or ENV set."""
        return dict(pair.split("=", 1) for text in self.every(word) for pair in shlex.split(text))

    def argv(self, word: str) -> list[str]:
        """ENTRYPOINT or CMD. In the exec form it is JSON; the shell form fails here."""
        return json.loads(self.every(word)[-1])

    def health_check(self) -> list[str]:
        """The command of HEALTHCHECK, in its exec form."""
        return json.loads(self.every("HEALTHCHECK")[-1].partition("CMD ")[2])


def stages(path: Path) -> dict[str, Stage]:
    """The stages by name; the last one, which is what a build without a target makes, is also found as ''."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text())
    found: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for line in re.sub(r"\\\n", "", text).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "ARG":
            arguments.update([rest.split("=", 1)])
        elif word == "FROM":
            base, _, name = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], rest).partition(" AS ")
            found[name] = stage = Stage(name, base, found.get(base))
        else:
            stage.steps.append((word, rest))
    return {**found, "": stage}


def pip_commands(text: str) -> list[list[str]]:
    """The `pip …` commands of a RUN, as lists of words."""
    commands = (shlex.split(part) for part in re.split(r"&&", re.sub(r"--mount=\S+", "", text)))
    return [words[1:] for words in commands if words and words[0] == "pip"]


def in_context(patterns: list[str], path: str) -> bool:
    """Whether .dockerignore lets a file into the build: the last pattern that names it or a folder above it decides."""
    parts = path.split("/")
    ancestors = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    inside = True
    for pattern in patterns:
        regex = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(regex, ancestor) for ancestor in ancestors):
            inside = pattern.startswith("!")
    return inside


class Build:
    """The steps of a stage, run in a folder in place of the file system of an image.

    Stages have working directories of their own and share every other path, because an environment knows the path that
    it lies at: /opt/mme is built up in the order of the steps, and copying it from one stage to another changes nothing.
    """

    def __init__(self, folder: Path, context: Path, stages: dict[str, Stage]) -> None:
        self.folder = folder
        self.context = context
        self._stages = stages
        self._built: dict[str, dict[str, str]] = {}
        python = folder / "usr/local/bin/python"  # what the base image has
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
        python.chmod(0o755)

    def path(self, path: str) -> str:
        """A text with the paths of the image in it, as paths of this machine."""
        return re.sub(r"(?<![\w.])/(opt/mme|opt/mypy|dist|usr/local/lib)\b", lambda m: str(self.folder / m[1]), path)

    def make(self, stage: Stage) -> dict[str, str]:
        """Run the stage's steps, those of the stages it needs first; returns its environment."""
        if stage.name in self._built:
            return self._built[stage.name]
        outside = {name: os.environ[name] for name in os.environ if name.lower().startswith(_OUTSIDE)}
        environment = dict(self.make(stage.parent)) if stage.parent else {
            "PATH": f"{self.folder}/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder / "root"), **outside
        }  # fmt: skip
        workdir = self.folder / "stages" / stage.name
        if stage.parent:
            shutil.copytree(self.folder / "stages" / stage.parent.name, workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        for word, text in stage.steps:
            getattr(self, f"_{word.lower()}", lambda *_: None)(text, workdir, environment)
        self._built[stage.name] = environment
        return environment

    def _env(self, text: str, _workdir: Path, environment: dict[str, str]) -> None:
        for pair in text.split():
            name, _, value = pair.partition("=")
            environment[name] = self.path(value).replace("$PATH", environment["PATH"])

    def _copy(self, text: str, workdir: Path, _environment: dict[str, str]) -> None:
        if text.startswith("--from="):
            other, source, target = text.removeprefix("--from=").split()
            assert source == target == "/opt/mme"
            self.make(self._stages[other])
            return
        *sources, target = text.split()
        for source in sources:
            place = workdir / target / ("" if (self.context / source).is_dir() else source)
            copy = shutil.copytree if (self.context / source).is_dir() else shutil.copy
            copy(self.context / source, place)

    def _run(self, text: str, workdir: Path, environment: dict[str, str]) -> None:
        if text.startswith("apt-get "):
            return  # what this machine has of the base's system is taken as it is
        mount = re.match(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+) +", text)
        if mount:
            assert mount[2] == mount[3]
            self.make(self._stages[mount[1]])
            text = text[mount.end() :]
        # the machine's own cache spares the network; that the image keeps none is another test's business
        shown = {**environment, "PIP_NO_CACHE_DIR": "0", "MME_COMPILE": str(int(COMPILES)), "MME_OPTIMIZE": "0"}
        command = self.path(text).replace("--no-cache-dir ", "")
        done = subprocess.run(
            ["/bin/sh", "-ec", command], cwd=workdir, env=shown, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
