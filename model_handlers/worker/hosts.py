"""Processes that several models live in: those of one framework on one GPU, where each process costs a CUDA context.

A host is a child like any other, forked on its own leash; for each model it is sent sockets, and a thread of it serves
them as a whole process would. So to the serving process a guest is a child with its own control socket, but it shares
its fate: whoever hangs or crashes ends the host, and all guests are started anew in another one. A guest that is
closed leaves the rest alone; with the last one the host ends.

Called on load threads and lanes' threads. A host's lock is held while it takes a guest in, for microseconds; that of
its name while it starts, which may take long; that of them all for no more than a look.
"""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from model_handlers.worker.fork_client import milliseconds
from model_handlers.worker.process import Child

if TYPE_CHECKING:
    import socket

    from model_handlers.errors import Kind
    from model_handlers.worker.output import Output

_SECONDS = 60.0  # for a host to start, which may have to import the framework first, or to take in a guest
_REAP_SECONDS = 5.0
_LEAVING_SECONDS = 0.5  # for a guest that has closed its socket to be gone
_hosts: dict[str, Host] = {}
_starts: dict[str, threading.Lock] = {}  # by name: as many as there are frameworks on GPUs
_lock = threading.Lock()


class Host:
    """One process of several models. Made by `admit`, and gone with its last guest.

    Args:
        name: what it is called: the framework and the device.
        preload: see `Child`.
    """

    def __init__(self, name: str, preload: str) -> None:
        self.name = name
        self.guests = 0
        self._lock = threading.Lock()
        self._child = _started(name, preload)

    def __repr__(self) -> str:
        return f"<Host {self.name} of {self.guests} in {self._child!r}>"

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def output(self) -> Output:
        """What it writes, all of its guests together."""
        return self._child.output

    @property
    def killed(self) -> bool:
        """Whether somebody ended it: see `Child`."""
        return self._child.killed

    def died(self) -> bool:
        """Whether it is no more, or not to be trusted with another guest."""
        with self._lock:
            return self._child.has_died()

    def fate(self) -> tuple[Kind, str]:
        """How it ended, see `Child.fate`: the same for all of its guests."""
        with self._lock:
            return self._child.fate()

    def private_memory(self) -> int:
        """Bytes that it takes, all guests together, and no other process shares."""
        return self._child.private_memory() or 0

    def take_in(self, lane: str, held: socket.socket, sockets: list[socket.socket]) -> GuestLeash:
        """Have a thread of it serve `sockets`: control, events, and the other end of `held`.

        Raises:
            OSError: it can't.
        """
        try:
            with self._lock:
                fds = [each.fileno() for each in sockets]
                self._child.call({"do": "guest", "lane": lane}, fds, _SECONDS, "while it took in a model")
        except MmeError as error:
            raise OSError(error.message) from error
        return GuestLeash(held, self)

    def kill(self) -> None:
        """End it at once, and all guests with it."""
        with self._lock:
            self._child.drop()

    def close(self) -> None:
        """End it in good order; it has no guests any more."""
        with self._lock:
            self._child.close(_REAP_SECONDS)


class GuestLeash:
    """How a guest is held: as `Leash`, for a thread of a host instead of a process.

    Attributes:
        over: whether its thread has ended, or the host has.
        code: 0, as a thread has none; how a host ended it tells itself.
        refused: None, as no process is forked for it.
    """

    def __init__(self, end: socket.socket, host: Host) -> None:
        self._end = end
        self._host = host
        self.over = False
        self.code: int | None = 0
        self.refused: OSError | None = None

    def __repr__(self) -> str:
        return f"<GuestLeash in {self._host!r}{', over' if self.over else ''}>"

    @property
    def pid(self) -> int:
        """The host's."""
        return self._host.pid

    def fileno(self) -> int:
        """To poll for news."""
        return self._end.fileno()

    def read(self) -> None:
        """Take the one piece of news that there is."""
        self._end.recv(1)
        self.over = True

    def wait(self, seconds: float) -> None:
        """For so many seconds, or until it is over."""
        if self.over:
            return
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self, select.POLLIN)
        if ready.poll(milliseconds(deadline)):
            self.read()

    def let_go(self) -> None:
        """End it, if it still runs. A thread can't be ended but with its process."""
        self.wait(_LEAVING_SECONDS)
        if not self.over:
            self._host.kill()
            self.wait(_REAP_SECONDS)

    def drop(self) -> None:
        """The same, without waiting for it."""
        self._host.kill()

    def close(self) -> None:
        """Give the socket back; the host ends with its last guest. Once more does nothing."""
        if self._end.fileno() >= 0:
            self._end.close()
            leave(self._host)


def admit(name: str, preload: str) -> Host:
    """The host of that name, a new one if there is none; it counts one guest more.

    Raises:
        OSError: no process can be had.
    """
    with _lock:
        starts = _starts.setdefault(name, threading.Lock())
    with starts:
        host = _living(name)
        if host is None:
            try:
                host = Host(name, preload)
            except MmeError as error:
                raise OSError(error.message) from error
            with _lock:
                host.guests = 1
                _hosts[name] = host
        return host


def _started(name: str, preload: str, *, again: bool = False) -> Child:
    """A process to be a host, asked for once more where its fork server ended before there was one."""
    child = Child(name, name, None, preload)
    try:
        child.call({"do": "host"}, (), _SECONDS, "while it started")
    except MmeError:
        child.close(0)
        if again or not child.never_began:
            raise
        return _started(name, preload, again=True)
    return child


def _living(name: str) -> Host | None:
    """The host of that name, if it lives; it counts one guest more."""
    with _lock:
        host = _hosts.get(name)
        if host is not None:
            host.guests += 1
    if host is not None and host.died():
        leave(host)
        return None
    return host


def leave(host: Host) -> None:
    """It counts one guest less, and ends with the last."""
    with _lock:
        host.guests -= 1
        last = host.guests == 0
        if last and _hosts.get(host.name) is host:
            del _hosts[host.name]
    if last:
        host.close()
