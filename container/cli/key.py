"""`mme key`: a new key for clients of a server, and the line of it for the server's file."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from container.cli.command import Command

_BYTES = 32  # of entropy
_EXAMPLES = """\
examples:
  mme key inference
      prints a key, which is for clients, and its line, which is for the file of --key-file/MME_KEY_FILE
  mme key inference,health -o client.key --key-file keys
      the key in a new file that its owner alone may read, its line at the end of the server's
  mme key '*'
      a key for everything
"""


def _roles(text: str) -> str:
    from container.steps.access import parse_roles  # noqa: PLC0415 - its module imports what follows files

    try:
        parse_roles(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from None
    return text


def _add_flags(parser: argparse.ArgumentParser) -> None:
    text = "what it is for: categories of the API, or * for all; default inference"
    parser.add_argument("roles", type=_roles, nargs="?", default="inference", metavar="CATEGORY,…", help=text)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="a new file for the key; printed by default")
    text = "the server's file, to which the line is added; printed on standard error by default"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    import secrets  # noqa: PLC0415 - as above

    from container.steps.access import digest_of  # noqa: PLC0415

    key = secrets.token_urlsafe(_BYTES)
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


COMMAND = Command("key", "make a key for clients, and its line for the server", _EXAMPLES, _add_flags, run)
