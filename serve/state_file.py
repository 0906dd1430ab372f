"""Small documents that outlive a worker: read once at the start, replaced as a whole while it runs.

A file holds one JSON object that says what it is. It is written beside its place and renamed, so that whoever reads
finds the old one or the new one. Nothing is synced to the device: a worker that dies loses nothing that was written,
and what is left when the whole machine dies is recognised if it is not whole, and ignored.

`StateFile` is synchronous and runs on a thread. `LazyFile` lives on the event loop and writes on a thread, one write
at a time: many changes become one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

import orjson

from model_handlers.disk import own_directory
from model_handlers.errors import MmeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

_log = logging.getLogger("mme.state")
_FORM = "form"


class StateFile:
    """One such file.

    Args:
        path: where it lies; its directory is made when it is not there.
        form: what the file says that it is, with a version.
    """

    def __init__(self, path: Path, form: str) -> None:
        self._path = path
        self._form = form
        self._writable = True

    def __repr__(self) -> str:
        return f"<StateFile {self._path}>"

    def read(self) -> dict[str, Any]:
        """The document, {} where there is none. One that is torn, or somebody else's, is ignored with a warning."""
        try:
            own_directory(self._path.parent)
            for left in self._path.parent.glob(f".{self._path.name}.*"):  # by a worker that died while it wrote
                left.unlink(missing_ok=True)
            document = orjson.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, MmeError) as error:
            _log.warning("%s is ignored: %s", self._path, error)
            return {}
        if not isinstance(document, dict) or document.pop(_FORM, None) != self._form:
            _log.warning("%s is ignored: it does not say that it is '%s'", self._path, self._form)
            return {}
        return document

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document. What the disk has against it is said once, and nothing else comes of it."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            own_directory(self._path.parent)
            fresh.write_bytes(orjson.dumps({_FORM: self._form, **document}))
            fresh.replace(self._path)
        except (OSError, MmeError) as error:
            with contextlib.suppress(OSError):  # half of it, on a disk that is full
                fresh.unlink()
            if self._writable:
                _log.warning(
                    "%s can't be written; the next worker will not know what this one knows: %s", self._path, error
                )
            self._writable = False
        else:
            self._writable = True


class LazyFile:
    """Writes a state file some time after something changed. On the event loop.

    Args:
        file: where to.
        snapshot: makes the document; called on a thread, so that it has to take what it reads at one stroke.
        pool: threads to write on.
        delay: seconds between a change and its write.
    """

    def __init__(
        self, file: StateFile, snapshot: Callable[[], dict[str, Any]], pool: Executor, *, delay: float
    ) -> None:
        self._file = file
        self._snapshot = snapshot
        self._pool = pool
        self._delay = delay
        self._changes = 0
        self._written = 0  # changes that are in the file
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Something changed; it will be in the file before long."""
        self._changes += 1
        self._write_later()

    async def flush(self) -> None:
        """Return when everything that has changed so far is in the file, or the disk refused it."""
        wanted = self._changes
        while self._written < wanted:
            await asyncio.shield(self._writing or self._begin())

    async def close(self) -> None:
        """Write nothing more, but for what is being written."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _write_later(self) -> None:
        if self._timer is None and self._writing is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._begin)

    def _begin(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write(), name=f"write {self._file!r}")
        return self._writing

    async def _write(self) -> None:
        changes = self._changes
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._take)
        finally:
            self._written = changes
            self._writing = None
        if self._written < self._changes:
            self._write_later()

    def _take(self) -> None:
        self._file.write(self._snapshot())
