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


class ConnectionCap:
    """How many connections there may be, over HTTP and gRPC together: files are left for models, downloads and S3.

    A connection beyond it is told so, and closed: at once where many are.

    Args:
        limit: of their number.
    """

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._crowd = limit + max(limit // 8, 16)

    def __repr__(self) -> str:
        return f"<ConnectionCap: {self.taken} of {self._limit}>"

    def enter(self) -> bool:
        """Count one; tells whether it may stay. Each leaves, too."""
        self.taken += 1
        return self.taken <= self._limit

    def leave(self) -> None:
        """Count one less."""
        self.taken -= 1

    @property
    def is_crowded(self) -> bool:
        """Whether there are so many beyond the limit that no client is waited for."""
        return self.taken > self._crowd

    @property
    def full(self) -> str:
        """What a connection beyond the limit is told."""
        return (
            f"the server has as many connections as it may have ({self._limit}): ask again in a moment, keep fewer "
            "open, or raise MME_MAX_CONNECTIONS"
        )


def most_connections() -> int:
    """How many connections leave enough files for the rest: half of few, 4,096 of many."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    return max(limit - min(limit // 2, _RESERVE), 1)
