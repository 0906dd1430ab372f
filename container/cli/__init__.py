"""What the commands of `mme` share: how one is described, how its flags read numbers, a bar for long work.

A command is one module: its flags, its examples and the function that runs it. The command line imports all of them to
print a help text, so that what is heavy (boto3, numpy, Flask) is imported by the function, when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_URL = "http://127.0.0.1:8080"
DAY = 86400  # seconds
ARCHIVE_SUFFIX = ".tar.gz"  # as of serve.sources.store, which takes 30 ms to import

Number = TypeVar("Number", int, float)


class Command(NamedTuple):
    """A command: its name, a line of help, examples, its flags, and what runs it."""

    name: str
    summary: str
    examples: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def whole(least: int, most: int) -> Callable[[str], int]:
    """How a flag reads a whole number: what argparse takes for a type."""
    return functools.partial(_within, int, "a whole number", least, most)


def number(least: float, most: float) -> Callable[[str], float]:
    return functools.partial(_within, float, "a number", least, most)


def _within(read: Callable[[str], Number], what: str, least: Number, most: Number, text: str) -> Number:
    with contextlib.suppress(ValueError):
        value = read(text)
        if least <= value <= most:
            return value
    raise argparse.ArgumentTypeError(f"expected {what} from {least} to {most}, got '{text}'")


seconds = number(0.1, DAY)


def pairs(flag: str, texts: Sequence[str] | None) -> dict[str, str]:
    """What a repeatable NAME=VALUE says."""
    found = [text.partition("=") for text in texts or ()]
    for name, equals, value in found:
        if not (name and equals):
            raise invalid_argument(f"{flag} '{name}{equals}{value}' is not NAME=VALUE")
    return {name: value for name, _, value in found}


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_identity(parser: argparse.ArgumentParser) -> None:
    text = "certificates in PEM that vouch for a server of https://; by default those that the system trusts"
    parser.add_argument("--ca", type=Path, metavar="FILE", help=text)
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="a key that the server knows, made by `mme key`")


def add_region(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", help="the AWS region; boto3's own choice by default")


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done since the last call, from any thread.

    It moves a bar where rich is installed and standard error is a terminal.
    """
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and 100 ms
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    except ImportError:
        yield lambda _count: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)
