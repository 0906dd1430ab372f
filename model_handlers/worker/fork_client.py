"""The serving process's side of the fork servers: starts one when the first child is wanted, asks it for children.

Any thread may ask. A fork server is executed, not forked, so threads do it no harm; it ends with the serving
process, whose end of the command socket the system closes.

A framework whose import takes seconds and a hundred megabytes has a fork server of its own, which has imported it:
its children begin with it, and share its pages. What that import may do wrong is nobody else's business. When it has
had no children for a while it begins anew, as an interpreter that imports nothing before it is asked for the next.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, ClassVar

from model_handlers.worker.fork_server import Order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model_handlers.worker.fork_server import Program

_STOP_SECONDS = 5.0
_IDLE_SECONDS = 30.0  # that a framework is kept for the next model, when there is none of it
_ASKED = (  # imports nothing until it is asked for a process, and ends when nobody can ask any more
    "import os, socket; asked = socket.socket(fileno={}); asked.recv(1, socket.MSG_PEEK) or os._exit(0); "
    "asked.detach(); "
)


class ForkClient:
    """At most one fork server, for as long as this process lives.

    Args:
        preload: `module:function`, called in the fork server before it forks; "" for nothing. One that ends the process
            is not called again: then the models that want it may do so themselves, and tell what happens. The first of
            them is never begun, and has to be asked for again.

    Attributes:
        directory: where fork servers run, and models' processes with them, while it is there; None for where we do.
    """

    directory: ClassVar[Path | None] = None

    def __init__(self, preload: str = "") -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._command: socket.socket | None = None
        self._owner = 0

    def __repr__(self) -> str:
        return f"<ForkClient of {self._server.pid if self._server else 'no server'}>"

    def ensure_running(self) -> None:
        """Start the fork server unless it runs."""
        with self._lock:
            self._running()

    def fork(self, name: str, fds: Sequence[int], program: Program | None = None) -> None:
        """Have a child started that gets `fds`: its sockets, then leash, stdout, stderr. The leash tells its fate.

        It executes `program`, or is a fork that serves a model.

        Raises:
            OSError: there is no fork server to be had.
        """
        packet = Order(name, len(fds), program).packet()
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
        """End the fork server, and with it every child that is left."""
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
        """It ended by itself."""
        server = self._server
        self._stop()
        if server is not None and server.returncode != -signal.SIGKILL:  # which is somebody else's doing
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
                    cwd=self.directory if self.directory and self.directory.is_dir() else None,
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
atexit.register(FORKS.stop)


_WITH: dict[str, ForkClient] = {}


def forks_with(preload: str) -> ForkClient:
    """The fork server that has called `preload`: one a process and framework."""
    return _WITH.setdefault(preload, ForkClient(preload))


@atexit.register
def _stop_all() -> None:
    for client in _WITH.values():
        client.stop()
