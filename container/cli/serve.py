"""`mme serve`, and `serve`, the command that SageMaker runs: from flags and variables to a server.

It checks the settings and then *becomes* gunicorn's master, in this process: signals reach it without anything in
between, and nothing is imported twice.
"""

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

from container.cli.command import Command, add_debug

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
_ROOT = str(Path(__file__).parents[2])
_AGAIN = f"import sys; sys.path.insert(0, {_ROOT!r}); from container.cli.main import serve_command as s; sys.exit(s())"
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

    again = (sys.executable, "-P", "-c", _AGAIN, *words, f"--host={settings.host}")
    Server(settings, again).run()


COMMAND = Command("serve", "start the server", _EXAMPLES, add_flags, run)
