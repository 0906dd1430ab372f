"""`mme config`: `check` reads paths and prints reports, `fields` and `bounds` print tables of fields.

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
from model_handlers.config.bounds import every_bound
from model_handlers.config.pbtxt import Support, every_field
from model_handlers.proto import model_config_pb2 as pb
from serve.sources.scripts import Scripts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from container.config.report import Line

    Row = tuple[str, str, str]  # the field, what becomes of it, and why

_ANY = "any value"
_MODEL_CONFIG = pb.DESCRIPTOR.message_types_by_name["ModelConfig"]
_WORDS = {Support.HONOURED: "honoured", Support.HARMLESS: "ignored", Support.REFUSED: "refused"}


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        MmeError: a path that is none.
    """
    if arguments.action == "check":
        return _run_check(arguments)
    if arguments.action == "fields":
        return _print_table([*_field_rows()], "", _WORDS[Support.HONOURED], arguments.format)
    return _print_table([*_bound_rows()], "may hold", _ANY, arguments.format)


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


def _field_rows() -> Iterator[Row]:
    for path, rule in every_field(_MODEL_CONFIG):
        yield path, _WORDS[rule.support], rule.reason


def _bound_rows() -> Iterator[Row]:
    for path, bound in every_bound(_MODEL_CONFIG):
        entries = f"{bound.entries:,} entries" if bound.entries is not None else ""
        value = f"at most {bound.most:,}" if bound.most is not None else ""
        yield path, ", each ".join(filter(None, (entries, value))) or _ANY, bound.reason


def _print_table(rows: Sequence[Row], head: str, usual: str, form: str) -> int:
    """Print rows as text; in Markdown those of one kind together, and without the usual kind."""
    if form == "markdown":
        print(f"| field |{head and f' {head}'} | why |\n|---|---|---|")
        together: dict[tuple[str, str], list[str]] = {}
        for path, word, reason in rows:
            if word != usual:
                together.setdefault((word, reason), []).append(f"`{path}`")
        for (word, reason), paths in together.items():
            print(f"| {', '.join(paths)} | {word} | {reason} |")
        return 0
    longest, widest = (max(len(row[column]) for row in rows) for column in (0, 1))
    for path, word, reason in rows:
        print(f"{path:{longest}}  {word:{widest}}  {reason}".rstrip())
    return 0
