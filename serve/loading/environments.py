"""The environments that a target's models bring: which they want, which are there, and the making of the others.

On load threads. What an environment is and how it is made: see `model_handlers.environment` and `environment_cache`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model_handlers.base import PLACEMENT, Placement
from model_handlers.environment import Patience, Prebuilt, lack_of
from model_handlers.errors import invalid_model
from model_handlers.system.disk import directory_size, disk_errors
from model_handlers.worker.limits import Deadlines

if TYPE_CHECKING:
    from pathlib import Path

    from model_handlers.environment import Environment, Wanted
    from model_handlers.environment_cache import Environments
    from model_handlers.system.threads import CancelToken
    from serve.sources.repository import ModelDirectory

_log = logging.getLogger("mme.cache")


@dataclass(frozen=True, slots=True)
class Brought:
    """What environments a model's versions bring, by their model files.

    Of those that are `wanted` the server's own packages are enough for `met`; of the others those `there` were made.
    """

    wanted: dict[Path, Wanted]
    met: frozenset[Path]
    there: dict[Path, Environment]

    @property
    def complete(self) -> bool:
        return len(self.met) + len(self.there) == len(self.wanted)

    @property
    def mark(self) -> str:
        """Of footprints of models that share the server's packages: with another image, they may share nothing."""
        return " met" if self.met else ""

    def size_in(self, directory: ModelDirectory) -> int:
        """Bytes that they take in the directories of the model's versions, whose other bytes go into memory."""
        paths = {wanted.path if isinstance(wanted, Prebuilt) else wanted.wheels for wanted in self.wanted.values()}
        inside = (
            path
            for path in paths
            if path is not None and any(path.is_relative_to(version) for version in directory.versions.values())
        )
        return sum(directory_size(path) if path.is_dir() else path.stat().st_size for path in inside)


class EnvironmentStep:
    """What a load does for a model that asks for an environment of its own."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    def look(
        self, wanted: dict[Path, Wanted], directory: ModelDirectory, placement: Placement, token: CancelToken
    ) -> Brought:
        """What of the environments that the model files of its versions want is there. Nothing is made.

        Raises:
            MmeError: INVALID_MODEL when the model can't have an environment, or names what is none; CANCELLED.
        """
        if placement is Placement.INLINE:
            raise invalid_model(
                f"model '{directory.name}' asks for an environment of its own, which only a process of its own can "
                f"have: remove its parameter '{PLACEMENT}'"
            )
        patience = _patience(directory, token)
        met = frozenset(file for file, asked in wanted.items() if _is_met(asked, directory.name))
        found = {file: self._environments.find(asked, patience) for file, asked in wanted.items() if file not in met}
        return Brought(wanted, met, {file: there for file, there in found.items() if there is not None})

    def make(self, brought: Brought, directory: ModelDirectory, token: CancelToken) -> Brought:
        """Make those that are not there yet.

        Raises:
            MmeError: INVALID_MODEL when one can't be made in the time of a load; OUT_OF_MEMORY: the disk; CANCELLED.
        """
        patience = _patience(directory, token)
        missing = {file: asked for file, asked in brought.wanted.items() if file not in brought.met}
        there = {file: self._environments.provide(asked, patience) for file, asked in missing.items()}
        return replace(brought, there=there)


def _is_met(wanted: Wanted, model: str) -> bool:
    if isinstance(wanted, Prebuilt):
        return False
    with disk_errors(f"model '{model}': {wanted.subject} cannot be read"):
        lack = lack_of(wanted.file)
    if lack:
        _log.info("it gets packages and a Python of its own: %s", lack, extra={"target_model": model})
    return not lack


def _patience(directory: ModelDirectory, token: CancelToken) -> Patience:
    return Patience(directory.name, Deadlines.of(directory.config).load, token)
