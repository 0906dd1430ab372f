"""`mme config`: what configurations say, what is wrong with them, and what becomes of each of their fields.

Exit code 1 when anything would not be served.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

from container.cli import Command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from container.cli.config_check import Line

    Row = tuple[str, str, str]  # the field, what becomes of it, and why

_ANY = "any value"
_EXAMPLES = """\
examples:
  mme config check ./repository            every model of a repository, with every problem and how to mend it
  mme config check bert-0.tar.gz *.tar.gz  archives, as a server would open them
  mme config check ./bert-0 --json | jq '.models[].problems'
  mme config fields                        what becomes of each field of config.pbtxt
  mme config bounds                        what each number and list of it may hold at most
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "print what is understood, and every problem; exit code 1 if there are any"
    check = actions.add_parser(
        "check", help=summary, description=summary, epilog=_EXAMPLES, formatter_class=parser.formatter_class
    )
    sources = "a model directory, a repository of several, or a .tar.gz archive"
    check.add_argument("sources", metavar="DIR|ARCHIVE", nargs="+", help=sources)
    check.add_argument("--json", action="store_true", help="one JSON document for programs")
    check.add_argument("--config-name", default="", metavar="NAME", help="read configs/NAME.pbtxt where a model has it")
    check.add_argument("--program", default="inference.py", metavar="FILE", help="what inference scripts are called")
    check.add_argument("--quiet", action="store_true", help="only problems, no configurations and trees")
    for name, summary, text in (
        ("fields", "what becomes of each field of config.pbtxt", "of those that are not honoured"),
        ("bounds", "what each number and list of config.pbtxt may hold at most", "of those that have a limit"),
    ):
        table = actions.add_parser(name, help=summary, description=summary)
        what = f"text, or a table in Markdown {text}"
        table.add_argument("--format", choices=("text", "markdown"), default="text", help=what)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "check":
        return _run_check(arguments)
    if arguments.action == "fields":
        return _print_table([*_field_rows()], "", "honoured", arguments.format)
    return _print_table([*_bound_rows()], "may hold", _ANY, arguments.format)


def _run_check(arguments: argparse.Namespace) -> int:
    from container.cli.config_check import check, document, lines  # noqa: PLC0415 - numpy, and what loads models
    from serve.sources.scripts import Scripts  # noqa: PLC0415

    scripts = Scripts(program=arguments.program, config_name=arguments.config_name)
    logging.disable(logging.WARNING)  # what they say is in the report
    try:
        reports = [check(source, scripts) for source in arguments.sources]
    finally:
        logging.disable(logging.NOTSET)
    ok = not any(report.count for report in reports)
    if arguments.json:
        print(json.dumps({"ok": ok, "reports": [document(report) for report in reports]}, indent=2))
    else:
        _show(line for report in reports for line in lines(report, quiet=arguments.quiet))
    return 0 if ok else 1


def _show(shown: Iterable[Line]) -> None:
    """In colours on a terminal, where rich is installed."""
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and 100 ms
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        console = None
    else:
        console = Console(highlight=False) if sys.stdout.isatty() else None
    for style, text in shown:
        if console is None:
            print(text)
        else:
            console.print(Text(text, style=style), soft_wrap=True)


def _field_rows() -> Iterator[Row]:
    from model_handlers.config.pbtxt import Support, every_field  # noqa: PLC0415 - protobuf
    from model_handlers.proto import model_config_pb2 as pb  # noqa: PLC0415

    words = {Support.HONOURED: "honoured", Support.HARMLESS: "ignored", Support.REFUSED: "refused"}
    for path, rule in every_field(pb.DESCRIPTOR.message_types_by_name["ModelConfig"]):
        yield path, words[rule.support], rule.reason


def _bound_rows() -> Iterator[Row]:
    from model_handlers.config.bounds import every_bound  # noqa: PLC0415 - protobuf
    from model_handlers.proto import model_config_pb2 as pb  # noqa: PLC0415

    for path, bound in every_bound(pb.DESCRIPTOR.message_types_by_name["ModelConfig"]):
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


COMMAND = Command("config", "check configurations, and list what becomes of their fields", _EXAMPLES, _add_flags, run)
