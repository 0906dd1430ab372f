"""The command line: `mme serve | pack | …`, and `serve`, the command that SageMaker runs.

Holds the parsers and what an error looks like to a person. A command is a module of its own, whose flags are added when
it is asked for, and which imports what it needs when it runs. Exit codes: 1 what was asked failed, 2 what was asked is
wrong.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from container import installed_version, is_compiled, local
from container.cli import add_debug, config, models, serve
from container.ship import deploy, invoke, pack, push
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from container.cli import Command

COMMANDS = (
    *(serve.COMMAND, models.COMMAND, pack.COMMAND, local.COMMAND, *invoke.COMMANDS, push.COMMAND),
    *deploy.COMMANDS,
    *(serve.KEY, config.COMMAND, pack.BUILD_ENGINE, serve.SETTINGS),
)

_EXAMPLES = """\
from a model file to an endpoint:
  mme pack bert.onnx -o bert.tar.gz                      an archive of it, checked
  mme serve --model-store .                              a server on port 8080; /dashboard shows what it does
  mme invoke --target bert.tar.gz --json request.json    a request; no load before is needed
  mme models                                             what it has in memory, and what did not load and why
  mme push bert.tar.gz s3://my-bucket/models
  mme deploy bert --models s3://my-bucket/models ...     on SageMaker

`mme COMMAND --help` has more examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `mme`; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] == serve.COMMAND.name:
        return _guarded(serve.COMMAND, serve.parse(parser, words[1:], words[:1]))
    arguments = parser.parse_args(words)
    return _guarded(next(each for each in COMMANDS if each.name == arguments.command), arguments)


def serve_command(argv: Sequence[str] | None = None) -> int:
    """Start the server as SageMaker does: the environment says everything, flags are allowed."""
    parser = _CommandParser(prog="serve", description="Start the server; the same as `mme serve`.")
    parser.command = serve.COMMAND
    return _guarded(serve.COMMAND, serve.parse(parser, sys.argv[1:] if argv is None else argv))


def _guarded(command: Command, arguments: argparse.Namespace) -> int:
    """Run a command; an error becomes a sentence on standard error and an exit code."""
    try:
        return command.run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `mme models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the last stop: a person gets a sentence, --debug shows the rest
        if getattr(arguments, "debug", False):
            import traceback  # noqa: PLC0415 - for this alone

            traceback.print_exc()
        return _report(command.name, error)


def _report(command: str, error: Exception) -> int:
    """Say what went wrong; returns the exit code."""
    if isinstance(error, MmeError):
        for sentence in error.message.splitlines():
            print(f"{command}: {sentence}", file=sys.stderr)
        return 2 if error.kind is Kind.INVALID_ARGUMENT else 1
    if isinstance(error, OSError):
        print(f"{command}: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
        return 1
    kind = type(error).__name__
    print(f"{command}: unexpected {kind}: {error}; --debug shows where it comes from", file=sys.stderr)
    return 1


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command, which refuses itself what it does not know: the error is about it, not about `mme`.

    A flag is written out: a beginning of one would mean another flag once there are two that begin so.
    """

    command: Command | None = None  # whose flags are added when it is asked for

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; nothing is left over."""
        if self.command is not None:
            self.command.add_flags(self)
            self.command = None
        known, others = super().parse_known_args(args, namespace)
        if others:
            meant = difflib.get_close_matches(others[0].partition("=")[0], self._option_string_actions, 1)
            hint = f"did you mean {meant[0]}? " if meant else ""
            if "--model-store" in self._option_string_actions and not others[0].startswith("-"):
                hint = "archives are named by --model-store, a folder of models by --model-repository; "
            told = f"{hint}`{self.prog} --help` lists what there is"
            self.exit(2, f"{self.prog}: unrecognized arguments: {' '.join(others)}; {told}\n")
        return known, others

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage: of some commands it is a hundred lines, and hides the sentence."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


class _Version(argparse.Action):
    """`--version`: looks for the installed version when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"mme {installed_version() or '(not installed)'}{', compiled' if is_compiled() else ''}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="mme",
        description="A serving container for SageMaker multi-model endpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for each in COMMANDS:
        made = commands.add_parser(
            each.name,
            help=each.summary,
            description=f"{each.summary[0].upper()}{each.summary[1:]}.",
            epilog=each.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.command = each
        if each is not serve.COMMAND:  # which has it behind a hundred others
            add_debug(made)
    return parser


if __name__ == "__main__":
    sys.exit(main())
