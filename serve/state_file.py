"""Small documents that outlive a worker: read once at the start, kept while it runs at the cost of what changed.

A file holds one JSON object that says what it is, and after it a line for each change: [section, key, value], null for
a key that went. The first write of a process makes it whole again, and so does one that finds it twice as large. Whole,
it is written beside its place and renamed; of a line that is torn nothing is read. Nothing is synced to the device: a
worker that dies loses nothing that was written, and what a dead machine leaves is ignored if it is not whole.

`StateFile` is synchronous and runs on a thread. `LazyFile` lives on the event loop and writes on a thread, one write at
a time: many changes become one. `Journal` is what is registered: it belongs to one life of the process that starts
workers, whose next worker finds what the one before it knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from model_handlers.errors import MmeError
from model_handlers.system.disk import own_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from serve.cache.entry import Entry


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
    """One such file. `form` is what it says that it is, with a version."""

    def __init__(self, path: Path, form: str) -> None:
        self._path = path
        self._form = form
        self._writable = True
        self._most = 0  # bytes, from which on it is made whole again

    def __repr__(self) -> str:
        return f"<StateFile {self._path}>"

    def read(self) -> dict[str, Any]:
        """The document, {} where there is none. One that is torn, or of another form, is ignored with a warning."""
        try:
            own_directory(self._path.parent)
            for left in self._path.parent.glob(f".{self._path.name}.*"):
                if not (_PROC / left.suffix[1:]).exists():  # by a worker that died while it wrote
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
        """Whether the file is there, was made here, and had room for these."""
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
        """Replace the document. An error of the disk is logged once, and nothing else comes of it."""
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
    rows = document.setdefault(section, {})
    rows.pop(key, None)  # what changed last is last: documents are in the order of use
    if value is not None:
        rows[key] = value


def rows_of(document: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    """Keys and values of a section, as far as it is one: a document may be of another version."""
    rows = document.get(section)
    return list(rows.items()) if isinstance(rows, dict) else []


class LazyFile:
    """Writes a state file `delay` seconds after something changed. On the event loop."""

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


_PROC = Path("/proc")
_START = 19  # the field of /proc/<pid>/stat that says when it started, counted behind the name of the program


def life_of(pid: int) -> str:
    """A name for the life of a process, of all that ever had its number, fit for a file; "" if it does not live.

    A process is known by its number and the tick of its start, in one run of the system.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        # The program's name stands in brackets and may hold anything, brackets too.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return f"{boot}-{pid}-{int(fields[_START])}"
    except (OSError, IndexError, ValueError):
        return ""


def began(life: str) -> float:
    """When that life began, as `time.time()` counts; now for ""."""
    if not life:
        return time.time()
    up = time.clock_gettime(time.CLOCK_BOOTTIME) - int(life.split("-")[2]) / os.sysconf("SC_CLK_TCK")
    return time.time() - up


def is_followed(parent: int) -> bool:
    """Whether that process has started another one since it started the calling one."""
    ours = life_of(os.getpid())
    try:
        children = (_PROC / f"{parent}/task/{parent}/children").read_text().split()
    except OSError:  # it has ended, or the kernel does not tell
        return False
    return any(life != ours and began(life) > began(ours) for life in map(life_of, map(int, children)) if life)


def goes_on(life: str) -> bool:
    pid = life.split("-")[1] if life.count("-") == 2 else ""
    return pid.isdigit() and life_of(int(pid)) == life


def remove_ended(directory: Path, prefix: str) -> None:
    """Remove the state files `<prefix><life>…` of lives that are over, with what those were writing."""
    for path in (*directory.glob(f"{prefix}*"), *directory.glob(f".{prefix}*")):
        if not goes_on(path.name.removeprefix(".").removeprefix(prefix).partition(".")[0]):
            path.unlink(missing_ok=True)


JOURNAL_FORM = "mme journal 2"
_PREFIX = "journal-"
_JOURNAL_SECONDS = 1.0  # seconds from a change to the file, where no client waits


@dataclass(frozen=True, slots=True)
class Row:
    """One registered model."""

    name: str
    url: str = ""  # the folder that it came from, "" where store or repository have it
    body: bool = False  # whether its input is a request's body as it came
    used: float = 0.0  # when it was used last, in seconds since 1970
    config: str = ""  # the configuration that a client loaded it with, as JSON; "" for its own
    folder: str = ""  # the name of the folder with the files that it was loaded with; "" for its own
    steps: tuple[str, ...] = ()  # names of the served models that it consists of

    def told(self, used: float) -> dict[str, Any]:
        """What the journal says of it. Not `asdict`, which takes ten times as long: there are thousands of rows."""
        return {
            "name": self.name,
            "url": self.url,
            "body": self.body,
            "used": used,
            "config": self.config,
            "folder": self.folder,
            "steps": self.steps,
        }

    def checked(self) -> Row:
        """It; TypeError if its values are not of their types."""
        texts = (self.name, self.url, self.config, self.folder, *self.steps)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.used, int | float):
            raise TypeError(f"a row that is none: {self}")
        return self


class Journal:
    """The registered models and their other names, in a file. Journals of lives that are over are removed."""

    # No `life` keeps none. Entries tell when models were used last; they are read on a thread.
    def __init__(self, directory: Path, life: str, entries: Mapping[str, Entry], pool: Executor) -> None:
        self.rows: dict[str, Row] = {}  # name → what is registered
        self.aliases: dict[str, str] = {}  # other name → name
        self.unloaded: set[str] = set()  # names that were unloaded by name, which a start-up list must not bring back
        self._changed: deque[tuple[str, str]] = deque()  # filled on the loop, emptied on the thread that writes
        self._entries = entries
        self._file: LazyFile | None = None
        if not life:
            return
        remove_ended(directory, _PREFIX)
        file = StateFile(directory / f"{_PREFIX}{life}.json", JOURNAL_FORM)
        self._take(file.read())
        self._file = LazyFile(file, self, pool, delay=_JOURNAL_SECONDS)

    def __repr__(self) -> str:
        return f"<Journal of {len(self.rows)} models, {len(self.aliases)} aliases>"

    @property
    def is_kept(self) -> bool:
        return self._file is not None

    def changed(self, section: str, key: str) -> None:
        """What `section` has under `key` is another by now."""
        if self._file is not None:
            self._changed.append((section, key))
            self._file.changed()

    async def flush(self) -> None:
        if self._file is not None:
            await self._file.flush()

    async def close(self) -> None:
        if self._file is not None:
            await self._file.close()

    def snapshot(self) -> dict[str, Any]:
        """See `Source`. A list of what a dictionary has is made at one stroke."""
        there: dict[str, Iterable[str]]
        there = {"models": self.rows, "aliases": self.aliases, "unloaded": self.unloaded}
        sections = {name: {key: self._value(name, key) for key in list(keys)} for name, keys in there.items()}
        return {name: {key: row for key, row in rows.items() if row is not None} for name, rows in sections.items()}

    def changes(self) -> list[Change]:
        changed = [self._changed.popleft() for _ in range(len(self._changed))]
        return [(section, key, self._value(section, key)) for section, key in dict.fromkeys(changed)]

    def _value(self, section: str, key: str) -> Any:
        if section == "models":
            row = self.rows.get(key)
            return None if row is None else row.told(self._used(row))
        return self.aliases.get(key) if section == "aliases" else key in self.unloaded or None

    def _used(self, row: Row) -> float:
        entry = self._entries.get(row.name)
        return entry.last_used + clock() if entry is not None and entry.last_used else row.used

    def _take(self, document: Mapping[str, Any]) -> None:
        try:
            told = document.get("models", {}).values()
            rows = [Row(**{**row, "steps": tuple(row.get("steps", ()))}).checked() for row in told]
            self.rows = {row.name: row for row in rows}
            self.aliases = dict(document.get("aliases", ()))
            self.unloaded = set(document.get("unloaded", ()))
        except (TypeError, ValueError, AttributeError) as error:
            _log.warning("the journal of the worker before this one is ignored: %s", error)
            self.rows, self.aliases, self.unloaded = {}, {}, set()


def clock() -> float:
    """What the wall clock reads when the one of entries reads 0."""
    return time.time() - time.monotonic()
