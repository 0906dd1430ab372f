"""What the serving process does when it has lost a GPU: it ends, and gunicorn's master starts another one.

That brings the registered models back, and costs those in memory a load; those on the CPU answer what they have
accepted. A GPU that is lost again and again, or that the next process does not see any more, is broken: then /ping
fails instead, so that the platform replaces the instance, and the models on the CPU go on until it does. Workers leave
word for the next one in a file.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from model_handlers.system.devices import first_reason, gpu_uuids
from serve.state_file import StateFile, goes_on

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("mme.worker")
_FORM = "mme lost GPUs 1"
_PREFIX = "lost-gpus-"
_LIMIT = 3  # processes that end within so many seconds
_SECONDS = 600.0


class LostGpus:
    """Looks whether a GPU was lost.

    Args:
        directory: of files that outlive the process.
        life: of the master; its workers share a file.

    Attributes:
        are_broken: whether a new process is no help.
    """

    def __init__(self, directory: Path, life: str) -> None:
        self._file = StateFile(directory / f"{_PREFIX}{life}", _FORM)
        self._ended: list[float] = []
        self.are_broken = False
        for path in directory.glob(f"{_PREFIX}*"):
            if not goes_on(path.name.removeprefix(_PREFIX)):
                path.unlink(missing_ok=True)
        self._read()

    def _read(self) -> None:
        document = self._file.read()
        self._ended = [at for at in document.get("ended", ()) if at > time.time() - _SECONDS]
        before, now = document.get("gpus", 0), len(gpu_uuids())
        if now < before:
            self._give_up(f"of {before} GPUs {now} are left")

    def look(self) -> bool:
        """Whether this process is to end."""
        reason = first_reason()
        if not reason or self.are_broken:
            return False
        if len(self._ended) >= _LIMIT:
            self._give_up(f"{reason}, for the {_LIMIT + 1}th time in {_SECONDS / 60:.0f} minutes")
            return False
        self._file.write({"ended": [*self._ended, time.time()], "gpus": len(gpu_uuids())})
        _log.critical("%s; this process ends, and another one takes its place", reason)
        return True

    def _give_up(self, reason: str) -> None:
        self.are_broken = True
        _log.critical("%s: a new process is no help; /ping fails, so that the instance is replaced", reason)
