"""Files that an operator changes while the server runs: certificates and keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from model_handlers.system.disk import identity_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.system.disk import FileIdentity

_log = logging.getLogger("mme.access")


class Followed:
    """Files that are read again when one of them changes. Ones that can't be read leave what was read before in force.

    Args:
        what: that they are, for the log.
        paths: theirs.
    """

    def __init__(self, what: str, paths: Sequence[Path]) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._seen = self._signature()

    def read(self) -> None:
        """Read them, and put what they say in force.

        Raises:
            MmeError: they say nothing that can be; what was in force stays.
        """
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
            _log.error("%s: what was read before stays in force: %s", self._what, error)
            return False
        _log.info("%s: read again, and in force", self._what)
        return True

    def _signature(self) -> tuple[FileIdentity | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> FileIdentity | None:
    try:
        return identity_of(path.stat())
    except OSError:
        return None
