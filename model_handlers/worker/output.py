"""What a model prints: read line by line from the pipes that are its standard output and standard error, and logged.

One thread a worker reads both, so that a model that prints a lot waits for the log and never for the event loop, and
keeps the last lines of standard error for the obituary. A line without an end can't make us grow: it is cut. Of one
that is written over, as progress bars are, the last state counts. A line of standard error that begins with the name of
a level, `WARNING: …`, has that level, as those of `pb_utils.Logger` have.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING

from model_handlers.system.priority import usual_priority
from model_handlers.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("mme.model")
MAX_LINE = 8 << 10  # bytes
_LEVELS = {
    logging.getLevelName(level): level
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
}
_LAST_LINES = 30  # the frames of a traceback are not all the model's
_CHUNK = 64 << 10
_JOIN_SECONDS = 2.0


class LineSplitter:
    """Cuts bytes into lines of text, of which the first MAX_LINE bytes count."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> Iterator[str]:
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._grow(part)
            yield from self.flush()
        self._grow(rest)

    def flush(self) -> Iterator[str]:
        """What came of a line so far, unless it is blank."""
        line = _printable(self._rest.decode(errors="replace").rstrip())
        if line:
            yield f"{line} … (cut)" if self._cut else line
        self._rest.clear()
        self._cut = False

    def _grow(self, part: bytes) -> None:
        written_over = part.rstrip(b"\r").rfind(b"\r") + 1
        if written_over or (part.strip(b"\r") and self._rest.endswith(b"\r")):
            part = part[written_over:]
            self._rest.clear()
            self._cut = False
        room = MAX_LINE - len(self._rest)
        self._rest += part[:room]
        self._cut = self._cut or len(part) > room


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def _leveled(line: str) -> tuple[int, str]:
    name, _, text = line.partition(": ")
    return (_LEVELS[name], text) if text and name in _LEVELS else (logging.INFO, line)


class Output:
    """The two pipes of one worker and the thread that reads them; `writers` are the descriptors for the worker."""

    def __init__(self, model: str, lane: str) -> None:
        self._model = model
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._streams: dict[int, tuple[str, LineSplitter]] = {}
        self._wake = -1
        self.writers: list[int] = []
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            for name in ("stdout", "stderr"):
                reader, writer = os.pipe()
                self._streams[reader] = (name, LineSplitter())
                self.writers.append(writer)
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._read, name=f"output-{lane}", daemon=True)

    def start(self) -> None:
        self.close_writers()
        start_thread(self._thread)

    def last_words(self) -> list[str]:
        """The last lines of standard error, after the worker died: what it wrote before has been read."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        return list(self._last)

    def close(self) -> None:
        """Read what is there and end, though another process may still hold the other end."""
        if self._wake < 0:
            return
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._close_all()

    def close_writers(self) -> None:
        while self.writers:
            os.close(self.writers.pop())

    def _close_all(self) -> None:
        self.close_writers()
        for reader in self._streams:
            os.close(reader)
        self._streams.clear()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _read(self) -> None:
        usual_priority()  # it lives as long as the process, not as long as the load
        poll = select.poll()
        for fd in (*self._streams, self._wake):
            poll.register(fd, select.POLLIN)
        open_streams = set(self._streams)
        while open_streams:
            ready = {fd for fd, _ in poll.poll()}
            for fd in ready & open_streams:
                if not self._drain(fd):
                    poll.unregister(fd)
                    open_streams.discard(fd)
            if ready == {self._wake}:
                break
        for stream, lines in self._streams.values():
            self._tell(stream, lines.flush())

    def _drain(self, fd: int) -> bool:
        data = os.read(fd, _CHUNK)
        stream, lines = self._streams[fd]
        self._tell(stream, lines.feed(data))
        return bool(data)

    def _tell(self, stream: str, lines: Iterator[str]) -> None:
        for line in lines:
            level, text = _leveled(line) if stream == "stderr" else (logging.INFO, line)
            if stream == "stderr" and level > logging.DEBUG:
                self._last.append(line)
            with contextlib.suppress(Exception):  # a broken log must not stop the model, which waits for us to read
                _log.log(level, "%s", text, extra={"target_model": self._model, "stream": stream})
