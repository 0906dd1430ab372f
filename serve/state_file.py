"""Small documents that outlive a worker: read once at the start, kept while it runs at the cost of what changed.

A file holds one JSON object that says what it is, and after it a line for each change: [section, key, value], null for
a key that went. The first write of a process makes it whole again, and so does one that finds it twice as large. Whole,
it is written beside its place and renamed, so that whoever reads finds the old one or the new one; of a line that is
torn nothing is read. Nothing is synced to the device: a worker that dies loses nothing that was written, and what is
left when the whole machine dies is recognised if it is not whole, and ignored.

`StateFile` is synchronous and runs on a thread. `LazyFile` lives on the event loop and writes on a thread, one write
at a time: many changes become one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from model_handlers.errors import MmeError
from model_handlers.system.disk import own_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

Change = tuple[str, str, Any]  # section, key, and what is there now, None for nothing
_log = logging.getLogger("mme.state")
_FORM = "form"
_SLACK = 1 << 16  # bytes of changes that are never too many


class Source(Protocol):
    """What a state file is kept of; asked on a thread, so that it has to take what it reads at one stroke."""

    def snapshot(self) -> dict[str, Any]:
        """The document: sections, each of which has values by keys."""

    def changes(self) -> list[Change]:
        """What has changed since this was asked last."""


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
        self._most = 0  # bytes, from which on it is made whole again

    def __repr__(self) -> str:
        return f"<StateFile {self._path}>"

    def read(self) -> dict[str, Any]:
        """The document, {} where there is none. One that is torn, or somebody else's, is ignored with a warning."""
        try:
            own_directory(self._path.parent)
            for left in self._path.parent.glob(f".{self._path.name}.*"):  # by a worker that died while it wrote
                left.unlink(missing_ok=True)
            whole, *lines = self._path.read_bytes().split(b"\n")
            document = orjson.loads(whole)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, MmeError) as error:
            _log.warning("%s is ignored: %s", self._path, error)
            return {}
        if not isinstance(document, dict) or document.pop(_FORM, None) != self._form:
            _log.warning("%s is ignored: it does not say that it is '%s'", self._path, self._form)
            return {}
        for line in lines:
            try:
                _change(document, *orjson.loads(line))
            except (ValueError, TypeError, AttributeError):  # the end, or torn there
                break
        return document

    def keep(self, changes: Sequence[Change], snapshot: Callable[[], dict[str, Any]]) -> None:
        """Add what has changed; or replace all, which `snapshot` makes."""
        if not self._add(b"".join(orjson.dumps(change) + b"\n" for change in changes)):
            self.write(snapshot())

    def _add(self, lines: bytes) -> bool:
        """Whether the file is there, was made by us, and had room for these."""
        if not self._most:
            return False
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.fstat(fd).st_size + len(lines) <= self._most and os.write(fd, lines) == len(lines)
        except OSError:
            return False
        finally:
            os.close(fd)

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document. What the disk has against it is said once, and nothing else comes of it."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            own_directory(self._path.parent)
            whole = orjson.dumps({_FORM: self._form, **document}) + b"\n"
            fresh.write_bytes(whole)
            fresh.replace(self._path)
        except (OSError, MmeError) as error:
            with contextlib.suppress(OSError):  # half of it, on a disk that is full
                fresh.unlink()
            if self._writable:
                _log.warning(
                    "%s can't be written; the next worker will not know what this one knows: %s", self._path, error
                )
            self._writable = False
            self._most = 0
        else:
            self._writable = True
            self._most = 2 * len(whole) + _SLACK


def _change(document: dict[str, Any], section: str, key: str, value: Any) -> None:
    """What changed last is last: documents are in the order of use."""
    rows = document.setdefault(section, {})
    rows.pop(key, None)
    if value is not None:
        rows[key] = value


class LazyFile:
    """Writes a state file some time after something changed. On the event loop.

    Args:
        file: where to.
        source: of the document.
        pool: threads to write on.
        delay: seconds between a change and its write.
    """

    def __init__(self, file: StateFile, source: Source, pool: Executor, *, delay: float) -> None:
        self._file = file
        self._source = source
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
        self._file.keep(self._source.changes(), self._source.snapshot)
