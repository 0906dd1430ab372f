"""The environments that were made for models: each once, by what is in it, for all models that want the same.

One folder holds them. An environment lies where it was made, since its scripts name it by its path: nothing is renamed,
and what tells that it is complete is a file beside it, written last, after everything before it is on the disk:

    packed-<digest>/            the environment
    packed-<digest>.complete    it is
    packed-<digest>.lock        somebody is making it, or clearing away what was left of it

A folder without that file is what a failure or a crash left, and goes: at once, with the next load that wants it, or
when the folder of them all is taken over. Complete ones stay, wanted or not; who wants the room back removes the folder
while no server runs. Thread-safe; runs on load threads, and shares the folder with other processes.
"""

from __future__ import annotations

import os
import shutil
import threading
from typing import TYPE_CHECKING

from model_handlers.environments import installed, packed
from model_handlers.environments.environment import Environment, check_interpreter
from model_handlers.environments.wanted import Requirements, Wanted
from model_handlers.errors import ElsewhereError, invalid_model
from model_handlers.system.digests import Digests
from model_handlers.system.disk import disk_errors, fsync_directory, own_directory, sync_disk_of
from model_handlers.system.file_lock import locked, locked_now

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.environments.environment import Patience

_COMPLETE, _LOCK = ".complete", ".lock"


class Environments:
    """The environments of one folder, which is made when the first of them is.

    Args:
        directory: the folder.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests = Digests()
        self._guard = threading.Lock()  # of what is done once
        self._taken_over = False

    def __repr__(self) -> str:
        return f"<Environments in {self._directory}>"

    def find(self, wanted: Wanted, patience: Patience) -> Environment | None:
        """The environment that a model wants; None where it is yet to be made.

        Raises:
            MmeError: INVALID_MODEL when what the model names is not there, or no environment, as an `ElsewhereError`
                when the model does not bring it; what `patience` raises.
        """
        subject = f"model '{patience.model}': {wanted.subject}"
        if not isinstance(wanted, Requirements):
            if not os.path.exists(wanted.path):  # noqa: PTH110 - Path.exists raises for a name that is too long
                sentence = f"{subject} is not there: {wanted.remedy}"
                raise invalid_model(sentence) if wanted.brought else ElsewhereError(sentence)
            if wanted.path.is_dir():
                environment = Environment(wanted.path)
                check_interpreter(environment, subject)
                return environment
        with disk_errors(f"{subject} cannot be read"):
            environment = self.place(wanted, patience)
        return environment if _is_complete(environment) else None

    def provide(self, wanted: Wanted, patience: Patience) -> Environment:
        """The environment that a model wants, made if need be; who wants what somebody else is making waits for that.

        Raises:
            MmeError: as `find`; INVALID_MODEL when it can't be made, OUT_OF_MEMORY when the disk is full.
        """
        found = self.find(wanted, patience)
        if found is not None:
            return found
        with disk_errors(f"model '{patience.model}': {wanted.subject} cannot be made in {self._directory}"):
            self._take_over()
            environment = self.place(wanted, patience)
            with locked(_beside(environment, _LOCK), patience):
                if not _is_complete(environment):
                    _make(environment, wanted, patience)
        return environment

    def place(self, wanted: Wanted, patience: Patience) -> Environment:
        """The environment as it is or would be: its place tells what it is made of."""
        recipe = installed if isinstance(wanted, Requirements) else packed
        return Environment(self._directory / recipe.name_of(wanted, self._digests, patience))

    def _take_over(self) -> None:
        """Once: make the folder ours, and clear away what crashes left."""
        with self._guard:
            if self._taken_over:
                return
            own_directory(self._directory.parent)
            own_directory(self._directory)
            names = {path.name.removesuffix(_COMPLETE).removesuffix(_LOCK) for path in self._directory.iterdir()}
            for environment in (Environment(self._directory / name) for name in names):
                with locked_now(_beside(environment, _LOCK)) as held:
                    if held and not _is_complete(environment):
                        _clear(environment)
            self._taken_over = True


def _make(environment: Environment, wanted: Wanted, patience: Patience) -> None:
    """Make it where it is to lie, or leave nothing of it."""
    _clear(environment)
    try:
        environment.prefix.mkdir(mode=0o755)
        if isinstance(wanted, Requirements):
            installed.make(environment, wanted, patience)
        else:
            packed.make(environment, wanted, patience)
        sync_disk_of(environment.prefix)
        _beside(environment, _COMPLETE).touch()
        fsync_directory(environment.prefix.parent)
    except BaseException:
        shutil.rmtree(environment.prefix, ignore_errors=True)
        raise


def _clear(environment: Environment) -> None:
    """Remove what there is of it, so that it is never taken for complete meanwhile."""
    _beside(environment, _COMPLETE).unlink(missing_ok=True)
    if os.path.lexists(environment.prefix):
        shutil.rmtree(environment.prefix)


def _is_complete(environment: Environment) -> bool:
    """Whether it was finished, and its interpreter is still there."""
    return _beside(environment, _COMPLETE).exists() and environment.python.exists()


def _beside(environment: Environment, suffix: str) -> Path:
    return environment.prefix.with_name(environment.prefix.name + suffix)
