"""How the serving process holds a process that the fork server started for it: by a socket, see `fork_server`.

The process's fate is told on it, and letting go of it ends the process, with all that it started. Used by one thread
at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time

from model_handlers.errors import MmeError
from model_handlers.worker.fork_server import REPORT

OF_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # which no code brings upon itself
_REAP_SECONDS = 5.0  # for the fork server to tell the exit code of a process that was killed


class ChildDiedError(MmeError):
    """A process is no more, and this is why."""


class ChildOutgrownError(ChildDiedError):
    """It was ended for the memory that it took; no other model leaving would help it. Kind OUT_OF_MEMORY."""


class Leash:
    """One process's leash.

    Args:
        end: our end of the socket, which is the leash's from now on.

    Attributes:
        pid: the process's id, 0 until it was told.
        code: its exit code, -n for signal n; None until it was told, and where the fork server ended before.
        refused: why the system let no such process be forked, where it did not.
        over: whether everything was told: there is no such process any more.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.pid = 0
        self.code: int | None = None
        self.refused: OSError | None = None
        self.over = False

    def __repr__(self) -> str:
        return f"<Leash of {self.pid or 'nobody yet'}{', over' if self.over else ''}>"

    def fileno(self) -> int:
        """To poll for news."""
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
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self, select.POLLIN)
        while not self.over and ready.poll(milliseconds(deadline)):
            self.read()

    def let_go(self) -> None:
        """End the process, if it still runs: the fork server kills it, and tells.

        One that is not there yet is not waited for: its fork server may be busy with its imports, and ends it when it
        comes to it, before it does anything.
        """
        if self.over or self._end.fileno() < 0:
            return
        self.wait(0)
        if not self.over:
            self.drop()
            self.wait(_REAP_SECONDS if self.pid else 0)

    def drop(self) -> None:
        """Have the process ended, without waiting for that."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the socket back; the process ends."""
        self._end.close()


def milliseconds(deadline: float) -> int:
    """From now to a time of the monotonic clock, never less than none, as `poll` wants them."""
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


def signal_name(number: int) -> str:
    """What a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the two that have names
        return f"signal {number}"
