"""The serving process's side of the fork servers: ask for processes, hold them by leashes, run programs to their end.

Any thread may ask. A fork server is executed, not forked, so threads do it no harm; it ends with the serving process,
whose end of the command socket the system closes. A framework that is slow and large to import has a fork server of its
own that has imported it, whose children share those pages; without children it starts again after a while.

What a process prints is read line by line, and logged. One thread a process reads both of its pipes, so that a model
that prints a lot waits for the log and never for the event loop, and keeps the last lines of standard error for the
obituary.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import Kind, MmeError
from model_handlers.system.threads import advised, start_thread, usual_priority
from model_handlers.worker.fork_server import REPORT, ForkOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from model_handlers.system.threads import CancelToken
    from model_handlers.worker.fork_server import Program


OF_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # which no code brings upon itself
_REAP_SECONDS = 5.0  # for the fork server to tell the exit code of a process that was killed


class Leash:
    """How the serving process holds one process of the fork server: its fate is told on the socket, letting go ends it.

    What it started ends with it. Used by one thread at a time.
    """

    leaving_seconds: ClassVar[float] = 0.0  # for what has closed its other sockets to be gone

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.pid = 0  # the process's id, 0 until it was told
        # its exit code, -n for signal n; None until it was told, and where the fork server ended before
        self.code: int | None = None
        self.refused: OSError | None = None  # why the system let no such process be forked, where it did not
        self.over = False  # whether everything was told: there is no such process any more

    def __repr__(self) -> str:
        return f"<Leash of {self.pid or 'no process yet'}{', over' if self.over else ''}>"

    def fileno(self) -> int:
        return self._end.fileno()

    def read(self) -> None:
        """Take one piece of news; waits for it. An end without a code is the end of the fork server."""
        data = self._end.recv(REPORT.size, socket.MSG_WAITALL)
        if len(data) < REPORT.size:
            self.over = True
        elif self.pid:
            (self.code,) = REPORT.unpack(data)
            self.over = True
        else:
            (number,) = REPORT.unpack(data)
            if number < 0:
                self.refused, self.over = OSError(-number, os.strerror(-number)), True
            else:
                self.pid = number

    def wait(self, seconds: float) -> None:
        """Take the news as they come, for so many seconds or until all was told; with 0 take those that are there."""
        if self.over:
            return
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self, select.POLLIN)
        while not self.over and ready.poll(milliseconds(deadline)):
            self.read()

    def let_go(self) -> None:
        """Have the fork server kill the process, and await its end; one that is not there yet ends unwaited."""
        if self.over or self._end.fileno() < 0:
            return
        self.wait(self.leaving_seconds)
        if not self.over:
            self.drop()
            self.wait(_REAP_SECONDS if self.pid else 0)

    def drop(self) -> None:
        """Have the process ended, without waiting for that."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()


def milliseconds(deadline: float) -> int:
    """From now to a time of the monotonic clock, never less than none, as `poll` wants them."""
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the two that have names
        return f"signal {number}"


_STOP_SECONDS = 5.0
_IDLE_SECONDS = 30.0  # that a framework is kept for the next model, when there is none of it
_ASKED = (  # imports nothing until it is asked for a process, and ends when it can't be asked any more
    "import os, socket; asked = socket.socket(fileno={}); asked.recv(1, socket.MSG_PEEK) or os._exit(0); "
    "asked.detach(); "
)


class ForkClient:
    """At most one fork server, for as long as this process lives.

    `preload` is `module:function`, called in it before it forks, "" for nothing. One that ends the process is not
    called again; the first process asked for with it is never begun, and has to be asked for again.
    """

    def __init__(self, preload: str = "") -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._command: socket.socket | None = None
        self._owner = 0

    def __repr__(self) -> str:
        return f"<ForkClient of {self._server.pid if self._server else 'no server'}>"

    def ensure_running(self) -> None:
        with self._lock:
            self._running()

    def fork(self, name: str, fds: Sequence[int], program: Program | None = None) -> None:
        """Start a process with `fds`: its sockets, then leash, stdout, stderr. OSError: no fork server is to be had."""
        packet = ForkOrder(name, len(fds), program).packet()
        with self._lock:
            command = self._running()
            try:
                socket.send_fds(command, [packet], fds)
            except ConnectionError:  # it died this moment: once more, with a new one
                self._bury()
                socket.send_fds(self._running(), [packet], fds)

    @property
    def pid(self) -> int:
        """The fork server's id, 0 where none was started."""
        with self._lock:
            return self._server.pid if self._server is not None else 0

    def stop(self) -> None:
        """End the fork server, and with it every process that is left."""
        with self._lock:
            self._stop()

    def _running(self) -> socket.socket:
        if self._owner != os.getpid():  # we were forked: that fork server is our parent's
            if self._command is not None:
                self._command.close()
            self._server = self._command = None
            self._owner = os.getpid()
        if self._server is not None and self._server.poll() is not None:
            self._bury()
        if self._command is None:
            self._start()
        command = self._command
        assert command is not None  # noqa: S101 - _start raises otherwise
        return command

    def _bury(self) -> None:
        server = self._server
        self._stop()
        if server is not None and server.returncode != -signal.SIGKILL:  # which comes from outside
            self._preload = ""

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = theirs.fileno(), self._preload, _IDLE_SECONDS if self._preload else None
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "  # first of all: in front there is the directory
            f"{_ASKED.format(theirs.fileno()) if self._preload else ''}"
            f"from model_handlers.worker.fork_server import main; main(*{arguments!r})"
        )
        with theirs:
            try:
                self._server = subprocess.Popen(
                    [sys.executable, "-c", program, "mme-fork-server"],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C at the terminal is not for it
                )
            except BaseException:
                ours.close()
                raise
        self._command = ours

    def _stop(self) -> None:
        if self._command is not None:
            self._command.close()
            self._command = None
        if self._server is not None and self._owner == os.getpid():
            try:
                self._server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = None


FORKS = ForkClient()  # one a process, for all that need no framework

_WITH: dict[str, ForkClient] = {}


def forks_with(preload: str) -> ForkClient:
    """The fork server that has called `preload`: one a process and framework."""
    return _WITH.setdefault(preload, ForkClient(preload))


@atexit.register
def stop_fork_servers() -> None:
    """End every fork server of this process, and every child that is left; the next one that is needed starts again."""
    for client in (FORKS, *_WITH.values()):
        client.stop()


_WORDS = 3  # lines of standard error in an error message


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int | None  # its exit code, -n for signal n, None where it ended together with the fork server
    words: list[str]  # the last lines that it wrote to standard error

    def __str__(self) -> str:
        words = " | ".join(self.words[-_WORDS:])
        return self._how() + (f": {words}" if words else "")

    @property
    def kind(self) -> Kind:
        """What it means where it did not do its work: nothing of the model, where it was killed from outside."""
        others = self.code is None or -self.code in OF_OTHERS
        return Kind.EXECUTION_FAILED if others else Kind.INVALID_MODEL

    def _how(self) -> str:
        if self.code is None:
            return "ended together with the process that it was forked from; load the model again"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        again = "; load the model again" if -self.code in OF_OTHERS else ""
        return f"was killed by {signal_name(-self.code)}{again}"


def run(program: Program, model: str, name: str, token: CancelToken) -> Ended:
    """Execute a program that a model needs to its end, on a leash as a worker; what it prints goes into the log.

    Raises MmeError: UNAVAILABLE when no process can be had; as `CancelToken.check` once cancelled, which ends it.
    """
    with contextlib.ExitStack() as held:
        try:
            output = ProcessOutput(model, name)
            held.callback(output.close)
            ours, theirs = map(held.enter_context, socket.socketpair())
            FORKS.fork(name, [theirs.fileno(), *output.writers], program)
        except OSError as error:
            raise _no_process(model, error) from error
        theirs.close()
        output.start()
        leash = Leash(ours)
        held.callback(leash.let_go)
        token.check()

        def over(seconds: float) -> Leash | None:
            leash.wait(seconds)
            return leash if leash.over else None

        token.wait(over)
        if leash.refused:
            raise _no_process(model, leash.refused)
        return Ended(leash.code, output.last_words())


def _no_process(model: str, error: OSError) -> MmeError:
    return MmeError(Kind.UNAVAILABLE, f"model '{model}': no process can be started for it: {advised(error)}")


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
    """Cuts bytes into lines of text, of which the first MAX_LINE bytes count.

    Of one that is written over, as progress bars are, the last state counts.
    """

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


class ProcessOutput:
    """The two pipes of one worker and the thread that reads them; `writers` are the descriptors for the worker.

    A line of standard error that begins with the name of a level, `WARNING: …`, has that level, as those of
    `pb_utils.Logger` have.
    """

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
