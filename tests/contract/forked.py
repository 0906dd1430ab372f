"""Servers that are forked from a process which has imported what they import: that is most of what a start takes.

That process does nothing else. What it forks runs the console script's own function, in a session, a folder and an
environment of its own. Servers whose start, end or memory is tested are begun as people begin them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.005


class Forked:
    """One of them, with what `subprocess.Popen` has."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid = pid
        self._code = code

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with suppress(FileNotFoundError):
            return int(self._code.read_text())
        return None

    def wait(self, timeout: float = 60.0) -> int:
        """The same, once it has."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("serve", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """As `kill` does."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that they are forked from. A context manager."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT)
        self._answers = self._socket.makefile()
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait()

    def start(self, command: list[str], environ: dict[str, str], log: Path) -> Forked:
        """A server that writes into this log."""
        log.touch()
        self._socket.sendall(json.dumps([command, environ, str(log), str(Path.cwd())]).encode() + b"\n")
        return Forked(int(self._answers.readline()), log.with_suffix(".code"))


def _fork_on_demand(channel: socket.socket) -> None:
    """Until nobody asks any more. Each server has a guardian for a parent, who buries it and is buried by the system."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with channel.makefile() as orders:
        for order in orders:
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _guard(channel, *json.loads(order))


def _guard(channel: socket.socket, command: list[str], environ: dict[str, str], log: str, directory: str) -> None:
    """Fork the server; tell its number, and its exit code by a file."""
    server = os.fork()
    if not server:
        channel.detach()  # else whoever unwinds to it at the server's end closes its number, which is another's by then
        _serve(command, environ, log, directory)
    channel.sendall(b"%d\n" % server)
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    Path(log).with_suffix(".end").write_text(str(code))
    Path(log).with_suffix(".end").rename(Path(log).with_suffix(".code"))
    os._exit(0)


def _serve(command: list[str], environ: dict[str, str], log: str, directory: str) -> None:
    """What the console script does."""
    os.setsid()
    os.chdir(directory)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.closerange(3, 100)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = command
    sys.exit({"serve": main.serve_command, "mme": main.main}[Path(command[0]).name]())


if __name__ == "__main__":
    import container.process.master
    import container.process.worker  # noqa: F401
    from container.cli import main

    for name in ("container.grpc.server", "container.observe.otel", "serve.sources.s3"):  # which some of them import
        with suppress(ImportError):
            importlib.import_module(name)

    _fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
