"""`mme config check` and `mme config fields`: reads paths, prints reports, and a table of fields.

Exit code 1 when anything would not be served.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

from container.config.check import check
from container.config.report import document, lines
from model_handlers.pbtxt.fields import Fate, every_field
from model_handlers.proto import model_config_pb2 as pb
from serve.sources.scripts import Scripts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from container.config.report import Line

_WORDS = {Fate.HONOURED: "honoured", Fate.HARMLESS: "ignored", Fate.REFUSED: "refused"}


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        MmeError: a path that is none.
    """
    return _run_fields(arguments) if arguments.action == "fields" else _run_check(arguments)


def _run_check(arguments: argparse.Namespace) -> int:
    scripts = Scripts(program=arguments.program, config_name=arguments.config_name)
    logging.disable(logging.WARNING)  # what they say is in the report
    try:
        reports = [check(source, scripts) for source in arguments.sources]
    finally:
        logging.disable(logging.NOTSET)
    ok = all(report.ok for report in reports)
    if arguments.json:
        print(json.dumps({"ok": ok, "reports": [document(report) for report in reports]}, indent=2))
        return 0 if ok else 1
    for report in reports:
        _show(lines(report, quiet=arguments.quiet))
    return 0 if ok else 1


def _show(shown: Iterable[Line]) -> None:
    """In colours on a terminal, where rich is installed."""
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and 100 ms
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        for _, text in shown:
            print(text)
        return
    if not sys.stdout.isatty():
        for _, text in shown:
            print(text)
        return
    console = Console(highlight=False)
    for style, text in shown:
        console.print(Text(text, style=style), soft_wrap=True)


def _run_fields(arguments: argparse.Namespace) -> int:
    rows = [
        (path, _WORDS[rule.fate], rule.reason)
        for path, rule in every_field(pb.DESCRIPTOR.message_types_by_name["ModelConfig"])
    ]
    if arguments.format == "markdown":
        print("| field | | why |\n|---|---|---|")
        together: dict[tuple[str, str], list[str]] = {}
        for path, fate, reason in rows:
            if fate != _WORDS[Fate.HONOURED]:
                together.setdefault((fate, reason), []).append(f"`{path}`")
        for (fate, reason), paths in together.items():
            print(f"| {', '.join(paths)} | {fate} | {reason} |")
        return 0
    width = max(len(path) for path, _, _ in rows)
    for path, fate, reason in rows:
        print(f"{path:{width}}  {fate:8}  {reason}".rstrip())
    return 0
