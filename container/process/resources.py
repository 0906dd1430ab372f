"""Resources of the serving process that are looked at about once a second: open files, garbage, followed files.

`QuietCollector.look` and `OpenFiles.look` are called on the event loop, about once a second. Left alone, Python
collects all garbage when models come and go, which keeps every request waiting: 50 ms with a thousand models.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import time
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from model_handlers.system.disk import identity_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.system.disk import FileIdentity


_access_log = logging.getLogger("mme.access")


class Followed:
    """Files that are read again when one changes; where one can't be read, what was read before stays in force."""

    def __init__(self, what: str, paths: Sequence[Path]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._seen = self._signature()

    def read(self) -> None:
        raise NotImplementedError

    def look(self) -> bool:
        """Read the files if one has changed; return whether something else is in force now."""
        seen = self._signature()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.read()
        except (MmeError, OSError) as error:
            _access_log.error("%s: what was read before stays in force: %s", self._what, error)
            return False
        _access_log.info("%s: read again, and in force", self._what)
        return True

    def _signature(self) -> tuple[FileIdentity | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> FileIdentity | None:
    try:
        return identity_of(path.stat())
    except OSError:
        return None


_log = logging.getLogger("mme.worker")
_ENOUGH = 65_536  # more only makes those slower that close every file there may be
_RESERVE = 4096  # for a few hundred models
_LOOKS = 60  # from one warning to the next


def raise_limit() -> None:
    """Let this process, and those that it starts, have as many files open as it may have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class OpenFiles:
    """Warns when no file can be opened any more: new connections are closed then without a word."""

    def __init__(self) -> None:
        self._silent = 0  # looks until it may be said again

    def look(self) -> None:
        """Try it; a few microseconds."""
        if self._silent:
            self._silent -= 1
            return
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._silent = _LOOKS
                _log.warning(
                    "all %d files that the server may have open are open, and new connections are closed without an "
                    "answer: raise the limit of open files (ulimit -n)",
                    resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                )


def most_connections() -> int:
    """How many connections leave enough files for the rest: half of few, 4,096 of many."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    return max(limit - min(limit // 2, _RESERVE), 1)


_QUIET = 0.1  # of a processor
_DUE = 10  # collections of the young between two of all, as Python has it
_OVERDUE = 1000
_NEVER = 1 << 30


def put_off() -> None:
    """Collect nothing until `keep_all`: what is imported meanwhile would be looked at again and again."""
    gc.disable()


def keep_all() -> None:
    """Never look again at what there is. Before a fork: a collection would write to, and so copy, every shared page."""
    gc.freeze()
    gc.enable()


class QuietCollector:
    """Collects all garbage when the process has little else to do, and once in a while though it has. One a process."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what start-up left behind lives as long as we do: it need not be looked at again and again
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._looked_at = time.monotonic()
        self._used = time.process_time()

    def look(self) -> None:
        now, used = time.monotonic(), time.process_time()
        quiet = used - self._used < _QUIET * (now - self._looked_at)
        if gc.get_count()[2] >= (_DUE if quiet else _OVERDUE):
            gc.collect()
        self._looked_at, self._used = now, time.process_time()
