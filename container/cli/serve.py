"""`mme serve`, and `serve`, the command that SageMaker runs: from flags and variables to a server.

It checks the settings and then *becomes* gunicorn's master, in this process: signals reach it without anything in
between, and nothing is imported twice.

`mme settings` prints every variable that the server reads, for people or as a table of Markdown. `mme key` makes a key
for clients of a server, and the line of it for the server's file.
"""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from container.cli import Command, add_debug

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from container.settings import Settings

_EXAMPLES = """\
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
_SETTINGS_EXAMPLES = """\
examples:
  mme settings | grep -A 2 BUDGET            what each means, what it may be, and its default
  mme settings --format markdown             the same as a table
"""
_KEY_EXAMPLES = """\
examples:
  mme key inference
      prints a key, which is for clients, and its line, which is for the file of --key-file/MME_KEY_FILE
  mme key inference,health -o client.key --key-file keys
      the key in a new file that its owner alone may read, its line at the end of the server's
  mme key '*'
      a key for everything
"""
_KEY_BYTES = 32  # of entropy
_ROOT = str(Path(__file__).parents[2])
_START = f"import sys; sys.path.insert(0, {_ROOT!r}); from container.cli.main import serve_command as s; sys.exit(s())"
SERVE = (sys.executable, "-P", "-c", _START)  # this very code, whatever lies in the working directory
_log = logging.getLogger("mme.start")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting that has one; the text stays text, the settings parse it."""
    from container.settings.parsers import boolean  # noqa: PLC0415 - what enumerations of the engine come with
    from container.settings.schema import FLAGS  # noqa: PLC0415

    for flag, row in FLAGS.items():
        text = f"{row.help} Default: {row.default} [{row.name}]".replace("%", "%%")
        if row.parse is boolean:
            parser.add_argument(flag, dest=row.field, nargs="?", const="true", metavar="true|false", help=text)
            continue
        action = "append" if row.many else "store"
        metavar = flag.rpartition("-")[2].upper()
        parser.add_argument(flag, dest=row.field, action=action, metavar=metavar, help=text)
    add_debug(parser)


def parse(parser: argparse.ArgumentParser, words: Sequence[str], before: Sequence[str] = ()) -> argparse.Namespace:
    """Flags of ours, each under its field; those of tritonserver as words, under `theirs`; all, under `words`."""
    from container.settings.triton_flags import split_command  # noqa: PLC0415 - as above

    theirs, ours = split_command(words)
    return parser.parse_args([*before, *ours], argparse.Namespace(theirs=theirs, words=words))


def run(arguments: argparse.Namespace) -> int:
    from container.observe.logs import configure  # noqa: PLC0415 - as above
    from container.settings import Mode, choose_single_model, read_settings  # noqa: PLC0415
    from container.settings.places import check_places  # noqa: PLC0415
    from container.settings.reader import listening_address  # noqa: PLC0415
    from container.settings.schema import FLAGS  # noqa: PLC0415

    given = {row.name: getattr(arguments, row.field) for row in FLAGS.values()}
    flags = {name: ",".join(text) if isinstance(text, list) else text for name, text in given.items() if text}
    with _sigterm_kept():
        environ = {**os.environ, **flags}
        address = listening_address(environ, os.path.exists, os.getpid())
        settings = read_settings(environ, arguments.theirs, address.host)
        check_places(settings)
        configure(settings.log_level, settings.log_format)
        _log.info("listening on %s: %s", settings.host, address.reason)
        for notice in settings.notices:
            _log.warning(notice)
        if settings.mode is Mode.SINGLE:
            model = choose_single_model(settings.model_dir, settings.default_model_name, settings.scripts)
            settings = replace(settings, default_model_name=model.name)
            if model.warning:
                _log.warning(model.warning)
        _become_gunicorn(settings, arguments.words)
    return 1


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep a SIGTERM for gunicorn, where `when_ready` looks for it.

    The first process of a container never sees a signal that it has no handler for: `docker stop` would do nothing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_gunicorn(settings: Settings, words: Sequence[str]) -> None:
    """Run gunicorn's master; models' code runs where the server was started."""
    from container.process import resources  # noqa: PLC0415 - as above

    if not sys.flags.safe_path:  # what Python puts in front: a user's container/ or flask.py there would hide ours
        sys.path[0] = _ROOT
    try:
        Path.cwd()
    except FileNotFoundError:  # gunicorn asks for it
        os.chdir(_ROOT)
    resources.put_off()
    from container.process.master import Server  # noqa: PLC0415 - all of the server, without garbage collection

    Server(settings, (*SERVE, *words, f"--host={settings.host}")).run()


def _add_settings_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "markdown"), default="text")


def run_settings(arguments: argparse.Namespace) -> int:
    from container.settings import settings_table  # noqa: PLC0415 - as above

    if arguments.format == "markdown":
        print("| variable | flag | default | allowed | effect |\n|---|---|---|---|---|")
        for name, flag, default, allowed, text in settings_table():
            cells = (f"`{name}`", f"`{flag}`" if flag else "", default, allowed, text)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return 0
    for name, flag, default, allowed, text in settings_table():
        print(f"{name}{f'  ({flag})' if flag else ''}\n    {text}\n    {allowed}; default: {default or '-'}")
    return 0


def _roles(text: str) -> str:
    from container.steps.access import parse_roles  # noqa: PLC0415 - its module imports what follows files

    try:
        parse_roles(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from None
    return text


def _add_key_flags(parser: argparse.ArgumentParser) -> None:
    text = "what it is for: categories of the API, or * for all; default inference"
    parser.add_argument("roles", type=_roles, nargs="?", default="inference", metavar="CATEGORY,…", help=text)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="a new file for the key; printed by default")
    text = "the server's file, to which the line is added; printed on standard error by default"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)


def run_key(arguments: argparse.Namespace) -> int:
    import secrets  # noqa: PLC0415 - as above

    from container.steps.access import digest_of  # noqa: PLC0415

    key = secrets.token_urlsafe(_KEY_BYTES)
    line = f"sha256:{digest_of(key)} {arguments.roles}"
    if arguments.output is None:
        print(key)
    else:
        _write_line(arguments.output, key, os.O_EXCL)
    if arguments.key_file is None:
        print(line, file=sys.stderr)
    else:
        _write_line(arguments.key_file, line, os.O_APPEND)
    return 0


def _write_line(path: Path, line: str, flag: int) -> None:
    """Write the one line of a new file (O_EXCL), or one at the end (O_APPEND), which a server may read at any time."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | flag, 0o600)
    try:
        size = os.fstat(file).st_size
        is_open = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # an editor left the last line without its end
        os.write(file, b"\n" * is_open + f"{line}\n".encode())
    finally:
        os.close(file)


COMMAND = Command("serve", "start the server", _EXAMPLES, add_flags, run)
KEY = Command("key", "make a key for clients, and its line for the server", _KEY_EXAMPLES, _add_key_flags, run_key)
SETTINGS = Command(
    "settings", "list every variable the server reads", _SETTINGS_EXAMPLES, _add_settings_flags, run_settings
)
