"""The flags and examples of `mme config`. Imports nothing heavy; see `container.cli.command`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from container.cli.command import Command

if TYPE_CHECKING:
    import argparse

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


COMMAND = Command(
    "config",
    "check configurations, and list what becomes of their fields",
    _EXAMPLES,
    _add_flags,
    "container.config.command:run",
)
