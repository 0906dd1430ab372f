"""The command line: `mme serve | pack | …`, and `serve`, the command that SageMaker runs.

Holds the parsers, the start of a server and what an error looks like to a person; the other commands live in modules of
their own, imported when they are run. `mme serve` checks the settings and then *becomes* gunicorn, in this process:
signals reach it without anybody in between, and nothing is imported twice. Exit codes: 1 what was asked failed, 2 what
was asked is wrong.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import runpy
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from container.cli.command import DEFAULT_URL, add_identity, seconds
from container.cli.key import COMMAND as KEY
from container.config.flags import COMMAND as CONFIG
from container.engines.flags import COMMAND as BUILD
from container.local.command import COMMAND as LOCAL
from container.observe.logs import configure
from container.process import garbage
from container.settings import Mode, Settings, choose_single_model, settings_table
from container.settings.address import listening_address
from container.settings.arguments import tritons_words
from container.settings.protocol_values import hosts, keepalive, latencies, restrictions
from container.settings.table import MME_VARIABLES
from container.settings.values import batch_sizes, boolean, names, repositories, resource_limits, trace_levels
from container.ship.bench import COMMAND as BENCH
from container.ship.deploy import COMMANDS as DEPLOY
from container.ship.invoke import COMMAND as INVOKE
from container.ship.pack import COMMAND as PACK
from container.ship.push import COMMAND as PUSH
from container.version import installed_version, is_compiled
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_LISTS = frozenset(
    {names, repositories, resource_limits, batch_sizes, trace_levels, hosts, restrictions, keepalive, latencies}
)
_FLAGS = frozenset(row.flag for row in MME_VARIABLES if row.flag)
_log = logging.getLogger("mme.start")

COMMANDS = (PACK, LOCAL, INVOKE, BENCH, PUSH, *DEPLOY, KEY, CONFIG, BUILD)

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
_SERVE_EXAMPLES = """\
examples:
  mme serve --model-store s3://bucket/models --memory-budget 80%
      archives under an S3 prefix; TargetModel names one, the least used leave memory when it is full
  mme serve --model-store ./archives --load-model bert-0.tar.gz --port 9000
      the same from a folder, one model loaded at start
  mme serve --model-repository ./repository
      a Triton model repository, all models loaded at start
  mme serve --model-repository s3://bucket/repository
      the same from S3: directories of models under a prefix, each downloaded when it is loaded
  mme serve --model-repository ./repository --model-control-mode poll
      a repository, and what is added, changed or removed there later
  mme serve --model-dir ./model
      one model, as SageMaker mounts it on /opt/ml/model

Every flag is also a variable (in brackets); a flag wins. `mme settings` lists all variables. Flags of tritonserver are
understood as well, as far as they mean something here.
"""
_MODELS_EXAMPLES = """\
examples:
  mme models
  mme models --url http://localhost:9000 --stats     with requests, failures, batch sizes and times
  mme models --watch                                 again every two seconds, until interrupted
  mme models --json | jq '.[] | select(.state == "READY") | .name'
"""
_SETTINGS_EXAMPLES = """\
examples:
  mme settings | grep -A 2 BUDGET            what each means, what it may be, and its default
  mme settings --format markdown             the same as a table
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `mme`; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        make_parser().print_help(sys.stderr)
        return 2
    arguments = _serve_arguments(make_parser(), words) if words[:1] == ["serve"] else make_parser().parse_args(words)
    return _guarded(arguments.command, arguments)


def serve_command(argv: Sequence[str] | None = None) -> int:
    """Start the server as SageMaker does: the environment says everything, flags are allowed."""
    parser = _CommandParser(prog="serve", description="Start the server; the same as `mme serve`.")
    _add_serve_flags(parser)
    return _guarded("serve", _serve_arguments(parser, sys.argv[1:] if argv is None else argv))


def _version() -> str:
    return f"mme {installed_version() or '(not installed)'}{', compiled' if is_compiled() else ''}"


def _serve_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Flags of ours, each under its field; those of tritonserver's as words, under `theirs`."""
    theirs, ours = tritons_words(words, _FLAGS)
    return parser.parse_args(ours, argparse.Namespace(theirs=theirs))


def _guarded(command: str, arguments: argparse.Namespace) -> int:
    """Run a command; an error becomes a sentence on standard error and an exit code."""
    module, _, function = _COMMANDS[command].partition(":")
    try:
        run: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), function)
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `mme models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the last stop: a person gets a sentence, --debug shows the rest
        if getattr(arguments, "debug", False):
            traceback.print_exc()
        return _report(command, error)


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


def run_serve(arguments: argparse.Namespace) -> int:
    """Check the settings and become gunicorn; returns only when that fails."""
    given = {row.name: getattr(arguments, row.field) for row in MME_VARIABLES if row.flag}
    flags = {name: ",".join(text) if isinstance(text, list) else text for name, text in given.items() if text}
    with _sigterm_kept():
        environ = {**os.environ, **flags}
        address = listening_address(environ, os.path.exists, os.getpid())
        settings = Settings.from_environ(environ, arguments.theirs, address.host)
        settings.check_paths()
        settings.check_tracing()
        settings.check_grpc()
        settings.check_access()
        configure(settings.log_level, settings.log_format)
        _log.info("listening on %s: %s", settings.host, address.reason)
        for notice in settings.notices:
            _log.warning(notice)
        if settings.mode is Mode.SINGLE:
            model = choose_single_model(settings.model_dir, settings.default_model_name, settings.scripts)
            settings = replace(settings, default_model_name=model.name)
            if model.warning:
                _log.warning(model.warning)
        _become_gunicorn(settings)
    return 1


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep a SIGTERM for gunicorn, where `when_ready` looks for it.

    The first process of a container never sees a signal that it has no handler for: `docker stop` would wait in vain.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_gunicorn(settings: Settings) -> None:
    """As `python -m gunicorn` would, started where we are installed."""
    # Python and gunicorn put the working directory in front of the import path, where a user's serve.py or container/
    # would hide ours; settings hold no relative path any more. Models' code runs where the server was started.
    with contextlib.suppress(FileNotFoundError):
        from model_handlers.worker.fork_client import ForkClient  # noqa: PLC0415 - numpy, 200 ms

        ForkClient.directory = Path.cwd()
    root = str(Path(__file__).parents[2])
    os.chdir(root)
    if not sys.flags.safe_path:
        sys.path[0] = root
    os.environ.update(settings.to_environ())
    sys.argv[:] = ["gunicorn", "-c", "python:container.process.gunicorn_conf", "container.control.app:create_app()"]
    garbage.put_off()
    runpy.run_module("gunicorn", run_name="__main__", alter_sys=True)


def run_settings(arguments: argparse.Namespace) -> int:
    """Print every variable, for people or as a table of Markdown."""
    if arguments.format == "markdown":
        print("| variable | flag | default | allowed | effect |\n|---|---|---|---|---|")
        for name, flag, default, allowed, text in settings_table():
            cells = (f"`{name}`", f"`{flag}`" if flag else "", default, allowed, text)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return 0
    for name, flag, default, allowed, text in settings_table():
        print(f"{name}{f'  ({flag})' if flag else ''}\n    {text}\n    {allowed}; default: {default or '-'}")
    return 0


_COMMANDS = {
    "serve": "container.cli.main:run_serve",
    "settings": "container.cli.main:run_settings",
    "models": "container.cli.models:run",
    **{command.name: command.run for command in COMMANDS},
}


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command, which refuses itself what it does not know: the error is about it, not about `mme`.

    A flag is written out: a beginning of one would mean another flag once there are two that begin so.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; nothing is left over."""
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _CommandParser(
        prog="mme",
        description="A serving container for SageMaker multi-model endpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    _add_serve_flags(_command(commands, "serve", "start the server", _SERVE_EXAMPLES))
    _add_models_flags(_command(commands, "models", "list a server's models", _MODELS_EXAMPLES))
    for each in COMMANDS:
        each.add_flags(_command(commands, each.name, each.summary, each.examples))
    settings = _command(commands, "settings", "list every variable the server reads", _SETTINGS_EXAMPLES)
    settings.add_argument("--format", choices=("text", "markdown"), default="text")
    return parser


def _command(
    commands: argparse._SubParsersAction[_CommandParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name != "serve":
        _add_debug(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every variable of ours that has one; the text stays text, Settings parses it."""
    defaults = {row[0]: row[2] for row in settings_table()}
    for row in MME_VARIABLES:
        if not row.flag:
            continue
        text = f"{row.help} Default: {defaults[row.name] or 'none'} [{row.name}]".replace("%", "%%")
        if row.parse is boolean:
            parser.add_argument(row.flag, dest=row.field, nargs="?", const="true", metavar="true|false", help=text)
            continue
        action = "append" if row.parse in _LISTS else "store"
        metavar = row.flag.rpartition("-")[2].upper()
        parser.add_argument(row.flag, dest=row.field, action=action, metavar=metavar, help=text)
    _add_debug(parser)


def _add_models_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server; default {DEFAULT_URL}")
    parser.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS", help="default 10")
    add_identity(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stats", action="store_true", help="more columns: requests, failures, batches, mean times")
    how.add_argument("--json", action="store_true", help="the server's repository index as it comes")
    parser.add_argument(
        "--watch", type=seconds, nargs="?", const=2.0, metavar="SECONDS", help="print again and again; default 2"
    )


if __name__ == "__main__":
    sys.exit(main())
