"""What commands print: the table of settings, every --help, and `mme config check` on good and bad models."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING
from unittest import mock

from container.cli import main
from tests.golden.cases_config import MODELS
from tests.golden.masks import Masks

if TYPE_CHECKING:
    from pathlib import Path

_PARENTS = ((), ("config",))  # commands that have commands
_WIDTH = "110"


def run(*words: str, command=main.main) -> str:
    """What a command prints, with its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": _WIDTH, "LINES": "50"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = command(list(words))
        except SystemExit as end:
            code = end.code
    said = f"(exit {code})\n" if code else ""
    return said + out.getvalue() + "".join(f"! {line}\n" for line in err.getvalue().splitlines())


def record_settings(_: Path) -> dict[str, str]:
    """The table of variables."""
    return {"settings.md": run("settings", "--format", "markdown")}


def record_help(_: Path) -> dict[str, str]:
    """Each command's help."""
    parts = [f"$ serve --help\n{run('--help', command=main.serve_command)}"]
    waiting = [()]
    while waiting:
        words = waiting.pop(0)
        text = run(*words, "--help")
        parts.append(f"$ {' '.join(('mme', *words))} --help\n{text}")
        if words in _PARENTS:
            waiting += [(*words, name) for name in _named(text)]
    return {"help.txt": "\n".join(parts)}


def _named(text: str) -> list[str]:
    """The commands that a help lists."""
    _, _, listed = text.partition("  COMMAND\n")
    names = []
    for line in listed.splitlines():
        if not line.strip():
            break
        if line.startswith("    ") and line[4] != " ":
            names.append(line.split()[0])
    return names


def record_checks(folder: Path) -> dict[str, str]:
    """What is said of each model, by itself; of the good ones also what they are understood to be."""
    masked, parts = Masks({str(folder): "folder"}), []
    for number, (name, files) in enumerate(MODELS.items()):
        place = folder / str(number)
        for path, content in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        source = next(
            (place / path for path in files if path.endswith(".tar.gz")), place / next(iter(files)).split("/")[0]
        )
        quiet = () if name.startswith("good") else ("--quiet",)
        parts.append(f"== {name}\n{masked(run('config', 'check', *quiet, str(source)))}")
    return {"config-check.txt": "\n".join(parts), "config-fields.txt": run("config", "fields")}
