"""`mme delete`: takes down what `mme deploy` made for an endpoint, whole or half made, and nothing else."""

# ruff: noqa: T201 - a command talks to people
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from container.ship.aws import Aws
from container.ship.deployment import check_name
from container.ship.endpoint import find
from container.ship.inventory import everything
from model_handlers.errors import invalid_argument

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """List what there is, ask, and delete it.

    Raises:
        MmeError: there is nothing of ours, nobody said yes, or AWS refuses.
    """
    aws = Aws(arguments.region or "")
    name = check_name(arguments.name)
    calls = everything(aws, name)
    if not calls:
        theirs = "it was made by somebody else, and stays" if find(aws, name) else "there is no such endpoint"
        raise invalid_argument(f"`mme deploy` has made nothing for '{name}' in {aws.region}: {theirs}")
    for call in calls:
        print(call.made())
    if arguments.dry_run:
        return 0
    if not arguments.yes:
        _ask(len(calls))
    for call in calls:
        aws.call(call.service, call.operation, call.parameters)
        print(f"deleted {call.made()}")
    return 0


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise invalid_argument("nobody can be asked here: --yes deletes what is listed")
    print(f"delete these {count}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise invalid_argument("nothing was deleted")
