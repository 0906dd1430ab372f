"""`mme settings`: every variable that the server reads, for people or as a table of Markdown."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

from typing import TYPE_CHECKING

from container.cli.command import Command

if TYPE_CHECKING:
    import argparse

_EXAMPLES = """\
examples:
  mme settings | grep -A 2 BUDGET            what each means, what it may be, and its default
  mme settings --format markdown             the same as a table
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "markdown"), default="text")


def run(arguments: argparse.Namespace) -> int:
    from container.settings import settings_table  # noqa: PLC0415 - what enumerations of the engine come with

    if arguments.format == "markdown":
        print("| variable | flag | default | allowed | effect |\n|---|---|---|---|---|")
        for name, flag, default, allowed, text in settings_table():
            cells = (f"`{name}`", f"`{flag}`" if flag else "", default, allowed, text)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return 0
    for name, flag, default, allowed, text in settings_table():
        print(f"{name}{f'  ({flag})' if flag else ''}\n    {text}\n    {allowed}; default: {default or '-'}")
    return 0


COMMAND = Command("settings", "list every variable the server reads", _EXAMPLES, _add_flags, run)
