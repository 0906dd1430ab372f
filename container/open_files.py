"""How many files the server may have open: connections, a dozen for each model's process, what is being unpacked.

The soft limit of many systems is 1024, which is for programs that use select(); nothing here does. Runs in the worker.
"""

from __future__ import annotations

import errno
import logging
import os
import resource

_log = logging.getLogger("mme.worker")
_ENOUGH = 65_536  # more only makes those slower that close every file there may be
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
