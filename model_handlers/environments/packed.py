"""Environments that conda-pack and venv-pack packed: unpacked, and told where they lie now. Runs on load threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_handlers.digests import DIGITS
from model_handlers.environments.environment import NICENESS, check_interpreter
from model_handlers.environments.unpacking import unpack
from model_handlers.errors import MmeError
from model_handlers.isolation import command

if TYPE_CHECKING:
    from model_handlers.digests import Digests
    from model_handlers.environments.environment import Environment
    from model_handlers.environments.patience import Patience
    from model_handlers.environments.wanted import Given


def name_of(wanted: Given, digests: Digests, patience: Patience) -> str:
    """What the folder of a packed environment is called: it tells what is in it.

    Raises:
        OSError: the file can't be read.
    """
    return f"packed-{digests.of(wanted.path, patience.check)[:DIGITS]}"


def make(environment: Environment, wanted: Given, patience: Patience) -> None:
    """Unpack a packed environment into its empty folder. What is in it after a failure is the caller's to remove.

    Raises:
        MmeError: INVALID_MODEL when it is refused; what `patience` raises.
        OSError: what the disk says.
    """
    subject = f"model '{patience.model}': {wanted.subject}"
    unpack(wanted.path, environment.prefix, subject, patience.check)
    check_interpreter(environment, subject)
    script = environment.prefix / "bin/conda-unpack"  # conda's scripts name their environment by its path
    if script.is_file():
        program = environment.program(str(script), niceness=NICENESS)
        ended = command.run(program, patience.model, script.name, patience.check)
        if ended.code != 0:
            raise MmeError(ended.kind, f"{subject} can't be moved to its place: {script.name} {ended}")
