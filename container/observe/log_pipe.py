"""Lines for a pipe that nothing may be reading: no thread waits for it but one of its own.

A write to a full pipe waits until something reads, and what collects a container's output may stand still for as long
as its disk or network does (Docker's blocking drivers). A line is written at once where the pipe has room; else it is
kept, up to a bound, for a thread that lives until all of it is written. Lines beyond the bound are dropped, counted,
and told in the place where they would have been.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from model_handlers.system.priority import usual_priority
from model_handlers.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

_MOST_BYTES = 1 << 20  # kept, some thousands of lines
_FLUSH_SECONDS = 1.0  # that the end of the process waits for a pipe that is full
_LOGGER = "mme.log"


class LinePipe:
    """One descriptor. Thread-safe; a fork leaves the child one without lines.

    Attributes:
        dropped: lines, so far.

    Args:
        fd: where lines go.
        told: makes the line that says how many were dropped; b"" for none.
        most_bytes: of lines that are kept.
    """

    def __init__(self, fd: int, told: Callable[[int], bytes], *, most_bytes: int = _MOST_BYTES) -> None:
        self.dropped = 0
        self._fd = self._of_our_own(fd)
        self._told = told
        self._most_bytes = most_bytes
        # A pipe that is ready takes so many bytes without a wait. A file takes any number, and a line is one write.
        self._ready_bytes = most_bytes if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._begin()
        forked = weakref.WeakMethod(self._begin)
        os.register_at_fork(after_in_child=lambda: (begin := forked()) and begin())

    def __repr__(self) -> str:
        return f"<LinePipe {self._fd}, {self._bytes} bytes kept, {self.dropped} lines dropped>"

    def _begin(self) -> None:
        self._changed = threading.Condition()  # guards all of these
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._untold = 0  # lines dropped behind the last one that is kept
        self._thread: threading.Thread | None = None

    def _of_our_own(self, fd: int) -> int:
        """The same pipe, opened so that no write to it waits; other processes that write to it may want to."""
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            with contextlib.suppress(OSError):  # it may be another user's
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                weakref.finalize(self, os.close, own).atexit = False  # the end of the process has lines, too
                return own
        return fd

    def write(self, line: bytes) -> None:
        """Write a line, or keep it, or drop it. Waits for nothing.

        Raises:
            OSError: nothing will ever read it.
        """
        with self._changed:
            rest = line if self._thread or self._kept else self._written(line)
            if rest:
                self._keep(rest, begun=rest is not line)

    def flush(self) -> None:
        """Wait for what is kept, but no longer than a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, _FLUSH_SECONDS)

    def _written(self, line: bytes) -> bytes:
        """Write what the pipe takes at once; the rest."""
        with contextlib.suppress(BlockingIOError):
            while line and self._poll.poll(0):
                line = line[os.write(self._fd, line[: self._ready_bytes]) :]
        return line

    def _keep(self, line: bytes, *, begun: bool) -> None:
        """For the thread; a line that is begun is ended in any case."""
        if self._bytes + len(line) > self._most_bytes and not begun:
            self.dropped += 1
            self._untold += 1
            return
        self._tell()
        self._append(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="log", daemon=True)
            try:
                start_thread(self._thread)
            except MmeError:  # the next line tries again
                self._thread = None

    def _append(self, line: bytes) -> None:
        self._kept.append(line)
        self._bytes += len(line)

    def _tell(self) -> None:
        if self._untold:
            self._append(self._told(self._untold))
            self._untold = 0

    def _drain(self) -> None:
        """The thread: write what is kept, and end."""
        usual_priority()
        while True:
            with self._changed:
                if not self._kept:
                    self._tell()
                if not self._kept:
                    self._thread = None
                    self._changed.notify_all()
                    return
                line = self._kept.popleft()
                self._bytes -= len(line)
            with contextlib.suppress(OSError):  # the next line finds out
                while line:
                    self._poll.poll()
                    line = self._written(line)


class PipeHandler(logging.StreamHandler["TextIO"]):
    """A stream whose lines go through a `LinePipe`, where there is a descriptor behind it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._pipe: LinePipe | None = None
        with contextlib.suppress(OSError, ValueError):  # as a stream in memory says
            self._pipe = LinePipe(stream.fileno(), self._line_of_dropped)

    @property
    def dropped(self) -> int:
        """Lines that were dropped."""
        return self._pipe.dropped if self._pipe else 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if self._pipe is None:
            super().emit(record)
            return
        try:
            self._pipe.write(self._line(record))
        except Exception:  # noqa: BLE001 - as any handler of logging's
            self.handleError(record)

    def flush(self) -> None:
        """Write what is left, as far as it is read."""
        if self._pipe is None:
            super().flush()
        else:
            self._pipe.flush()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + self.terminator).encode(errors="backslashreplace")

    def _line_of_dropped(self, count: int) -> bytes:
        says = "%d lines of the log were dropped here, since nothing read it"
        return self._line(logging.LogRecord(_LOGGER, logging.WARNING, __file__, 0, says, (count,), None))
