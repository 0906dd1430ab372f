"""The process that workers are forked from: small, single-threaded, with their common imports done.

The serving process has threads and must not fork, and a fresh interpreter is slow to import numpy. A worker's leash
tells its pid and exit code; it is killed when the other end closes or says anything, so that whatever ends the serving
process ends every worker. The standard library's forkserver leaves a socket behind, is kept alive by its children, and
imports the serving process's `__main__` again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from model_handlers.registry import BACKENDS
from model_handlers.system import memory
from model_handlers.system.threads import children, family_of, found_family, usual_priority
from model_handlers.worker.main import run
from model_handlers.worker.wire import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# An order is one packet of JSON on the command socket, {"name": "…", "fds": n, "program": null or its fields}, with the
# worker's descriptors: its sockets (control, events), then leash, stdout, stderr.
MAX_ORDER = 64 << 10  # bytes of a packet
_NOT_EXECUTED = 127  # the exit code by which shells say so


@dataclass(frozen=True, slots=True)
class Program:
    """An executable and what surrounds it."""

    arguments: Sequence[str]  # the executable, by its path, and its arguments
    directory: str = ""  # where it runs, "" for where the server runs
    # environment variables to set, on top of the server's own; `removed` are taken away
    variables: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()
    # search paths (PATH, …) and what is looked at before all that is in them
    in_front: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0  # its priority; workers have 0
    # whether it gets the sockets, by their numbers behind the arguments. Otherwise it gets its output alone.
    speaks: bool = False

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in inherited.items() if name not in self.removed}
        paths = {name: os.pathsep.join(filter(None, (path, kept.get(name)))) for name, path in self.in_front.items()}
        return {**kept, **paths, **self.variables}

    def execute(self, sockets: Sequence[int]) -> NoReturn:
        """Become it. What the system has against that goes to standard error."""
        arguments = list(self.arguments)
        if self.speaks:
            for fd in sockets:
                os.set_inheritable(fd, True)
            arguments += map(str, sockets)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
            if self.directory:
                os.chdir(self.directory)
            os.execve(arguments[0], arguments, self.environ(os.environ))  # noqa: S606 - no shell is what we want
        except OSError as error:
            sys.stderr.write(f"{arguments[0]} can't be executed: {error.strerror}\n")
            os._exit(_NOT_EXECUTED)


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A request to the fork server: a process by its name, with so many descriptors; a fork, or `program`."""

    name: str
    fds: int
    program: Program | None = None

    def packet(self) -> bytes:
        """Return the order as bytes. Raises OSError: it is too long."""
        data = dumps({"name": self.name, "fds": self.fds, "program": self.program and asdict(self.program)})
        if len(data) > MAX_ORDER:
            raise OSError(errno.E2BIG, f"what it takes to start '{self.name[:200]}' is {len(data)} bytes long")
        return data

    @classmethod
    def of(cls, packet: bytes) -> ForkOrder:
        fields = loads(memoryview(packet))
        program = fields["program"]
        return cls(fields["name"], fields["fds"], program and Program(**program))


# On the leash: the pid or, where the system refused one, -errno; then the exit code, -n for signal n.
REPORT = struct.Struct("<q")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 8
_OTHER_FDS = 64  # numbers that are free below those of leashes, which a child closes all at once
_SWEEP_SECONDS = 1.0
_LOOK_SECONDS = 1.0  # between two looks at the machine's memory of one that has no children
_WORTH = 2  # times what was imported takes: it is kept where so much memory is free
_libc = ctypes.CDLL(None)


def main(command_fd: int, preload: str = "", patience: float | None = None) -> NoReturn:
    """Serve until the other end of the command socket is closed, then end every worker and this process.

    `preload` is called before the first fork. After `patience` seconds without workers (None: never), or sooner where
    memory is scarce, the program executes itself again, to give back what was imported.
    """
    environ = dict(os.environ)  # what is imported may change it
    usual_priority()  # not that of the load that needed it first
    _libc.prctl(_PR_SET_NAME, b"mme-forks", 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for backend in BACKENDS:
        if backend.handler:
            # a handler that can't be imported says so where it is used
            with contextlib.suppress(ImportError):
                importlib.import_module(backend.handler.partition(":")[0])
    if preload:
        module, _, function = preload.partition(":")
        with contextlib.suppress(Exception):  # as above: a child calls it too, and tells what it raises
            getattr(importlib.import_module(module), function)()
    gc.collect()
    gc.freeze()  # a collection in a child would touch every object, and so copy every page
    server = _ForkServer(socket.socket(fileno=command_fd), patience)
    if not server.run():
        os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606 - ourselves
    os._exit(0)


class _ForkServer:
    def __init__(self, command: socket.socket, patience: float | None) -> None:
        self._command = command
        self._patience = patience
        self._leashes: dict[int, int] = {}  # pid → our end, a descriptor
        used = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
        self._first_leash = self._last_leash = used + _OTHER_FDS
        self._selector = selectors.DefaultSelector()
        self._wake, wake_writer = socket.socketpair()
        self._wake_writer = wake_writer
        for end in (self._wake, wake_writer):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(command, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> bool:
        """Fork, kill and reap until the other end closes; False where nothing was asked for so long."""
        idle_since = time.monotonic()
        while True:
            ready = self._selector.select(self._rest(idle_since))
            if not ready:
                if self._rest(idle_since) == 0 or _is_scarce():
                    return False
                continue
            idle_since = time.monotonic()
            for key, _ in ready:
                if key.data is not None:
                    self._kill(key.data)
                elif key.fileobj is self._wake:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                elif not self._serve():
                    self._end()
                    return True
            self._reap()

    def _rest(self, idle_since: float) -> float | None:
        if self._leashes or self._patience is None:
            return None
        return max(min(_LOOK_SECONDS, idle_since + self._patience - time.monotonic()), 0)

    def _serve(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._command, MAX_ORDER, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return False
        order = ForkOrder.of(packet)
        if len(fds) != order.fds:
            for fd in fds:
                os.close(fd)
            return True
        leash = fds[-3]
        end = pid = -1
        try:
            end = fcntl.fcntl(leash, fcntl.F_DUPFD_CLOEXEC, self._first_leash)
            pid = os.fork()
        except OSError as error:  # no more processes, descriptors or memory
            _report(leash, -(error.errno or errno.EAGAIN))
        if pid == 0:
            self._become_child(order, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            os.set_blocking(end, False)
            self._last_leash = max(self._last_leash, end)
            self._leashes[pid] = end
            self._selector.register(end, selectors.EVENT_READ, pid)
            _report(end, pid)
        elif end >= 0:
            os.close(end)
        return True

    def _kill(self, pid: int) -> None:
        """The serving process let go of a child. It is a child of ours until it is reaped, so the pid is its own."""
        self._selector.unregister(self._leashes[pid])
        os.kill(pid, signal.SIGKILL)

    # A worker may leave processes behind. The fork server is a subreaper, which gets orphans, and each worker founds a
    # family (`system.threads`): once it is dead, every child that was not forked here and is of no living worker's
    # family is killed, before the exit code is told. Against the death of the fork server workers have the
    # parent-death signal.
    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            leash = self._leashes.pop(pid, None)
            if leash is not None:
                with contextlib.suppress(KeyError):  # it was killed, and is no longer listened to
                    self._selector.unregister(leash)
                self._sweep()
                _report(leash, os.waitstatus_to_exitcode(status))
                os.close(leash)

    def _sweep(self) -> None:
        give_up = time.monotonic() + _SWEEP_SECONDS
        while (orphans := self._orphans()) and time.monotonic() < give_up:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def _orphans(self) -> list[int]:
        orphans = []
        for pid in set(children()) - self._leashes.keys():
            with contextlib.suppress(OSError):  # it was buried meanwhile, or we may not kill it
                if family_of(pid) not in self._leashes:
                    orphans.append(pid)
        return orphans

    def _end(self) -> None:
        for pid in self._leashes:
            os.kill(pid, signal.SIGKILL)
        while self._leashes:
            pid, _ = os.waitpid(-1, 0)
            self._leashes.pop(pid, None)
        self._sweep()

    def _become_child(self, order: ForkOrder, fds: list[int]) -> NoReturn:
        code = 1
        *sockets, leash, stdout, stderr = fds
        try:
            server = os.getppid()
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            signal.set_wakeup_fd(-1)
            self._selector.close()
            for end in (self._command, self._wake, self._wake_writer):
                end.close()
            for fd in (leash, stdout, stderr):
                os.close(fd)
            os.closerange(self._first_leash, self._last_leash + 2)  # the new one is behind the last
            _reset_process(order.name.encode(), server)
            if order.program is not None:
                order.program.execute(sockets)
            code = run(*(socket.socket(fileno=fd) for fd in sockets))
        except BaseException:  # noqa: BLE001 - nothing may unwind into the fork server's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _is_scarce() -> bool:
    """Whether the machine needs the memory of what is unused just now: it is in no model's count."""
    try:
        return memory.free_memory() < _WORTH * memory.private_memory()
    except OSError:  # it is not told
        return False


def _report(leash: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the serving process let go, or is gone
        os.write(leash, REPORT.pack(number))


def _reset_process(name: bytes, server: int) -> None:
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        with contextlib.suppress(OSError, ValueError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the serving process, which ends us in good order
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it died before it could be the signal's sender
        os._exit(1)
    found_family()
    _libc.prctl(_PR_SET_NAME, name[:15], 0, 0, 0)
    usual_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.stdout = _line_writer(1)  # the fork server's own may have been files
    sys.stderr = _line_writer(2)
    faulthandler.enable()  # a crash in native code leaves the Python stack on standard error
    drawing = (sys.modules.get("numpy.random"), getattr(sys.modules.get("torch"), "default_generator", None))
    for generator in filter(None, drawing):  # else every child would draw the same numbers
        generator.seed()


def _line_writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
