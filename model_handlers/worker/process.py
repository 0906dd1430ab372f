"""One life of a worker as the serving process sees it: start, calls, death; and workers that several models share.

A call waits for control socket and leash together until its deadline, so that a death is noticed at once even where
something that the model started keeps the socket open. A worker that died, hung or spoke nonsense is over: the caller
gets a `ChildDiedError` that says what happened, and `close` only gives back.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from model_handlers.errors import ChildDiedError, ChildOutgrownError, Kind, MmeError
from model_handlers.system import memory
from model_handlers.system.memory import folders
from model_handlers.system.threads import advised
from model_handlers.worker.fork_client import (
    FORKS,
    OF_OTHERS,
    Leash,
    ProcessOutput,
    forks_with,
    milliseconds,
    signal_name,
)
from model_handlers.worker.wire import MessageSplitter, ProtocolError, encode_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.worker.fork_server import Program
    from model_handlers.worker.wire import Message


_FILES = ("memory.events", "memory.oom_control")  # as version 2 calls them, and version 1
_WORD = "oom_kill"


def counters(membership: str) -> list[Path]:
    """Where the kernel may count, the nearest first. `membership` is the text of /proc/self/cgroup."""
    return [*(folder / name for folder in folders(membership) for name in _FILES), Path("/proc/vmstat")]


def read_count(paths: list[Path]) -> int:
    """Kills counted by the first of `paths` that counts any; 0 where none does."""
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            word, _, number = line.partition(" ")
            if word == _WORD:
                return int(number)
    return 0


class OomKills:
    """The kernel's kills for memory, by control group or machine: a SIGKILL does not say why, a grown count does."""

    def __init__(self, paths: list[Path] | None = None) -> None:
        self._paths = paths

    def count(self) -> int:
        if self._paths is None:
            self._paths = counters(Path("/proc/self/cgroup").read_text())
        return read_count(self._paths)


OOM_KILLS = OomKills()

_CHUNK = 16 << 10  # most messages are shorter by far; larger blocks cost the allocator more than a second read
_DONTWAIT = int(socket.MSG_DONTWAIT)
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_AT_ONCE = 64 << 10  # bytes that go into an empty socket, whose buffer is three times as large
_END_SECONDS = 2.0  # for the fork server to tell the exit code of a process that closed its socket
_ENDING_SECONDS = 0.2  # for the sockets of one process to close, which do so one after another
_WORDS = 3000  # characters of standard error in an error message
_LOOK_MILLISECONDS = 20  # between two looks at a process that is waited for
_OUT_OF_MEMORY_CODE = 137  # 128 + SIGKILL: what shells and containers make of a kill


class Child:
    """A process that was asked for. It may not run yet when this is made; the first call waits for it.

    Called by one thread at a time; `memory` by any. `program` is what it executes, None for a fork; `preload` what its
    fork server has called before, "" for nothing; `host` the process that it is a guest of, None for one of its own.
    """

    def __init__(
        self, model: str, lane: str, program: Program | None = None, preload: str = "", host: Host | None = None
    ) -> None:
        self.host = host
        self._subject = f"model '{model}': the process of '{lane}'"
        self.alive = True  # whether it can be called
        self.killed = False  # whether it was ended from outside; known once it was told how it ended
        self._exit_reason: tuple[Kind, str] | None = None
        self._outgrown = False
        self._messages = MessageSplitter()
        self._at_start = OOM_KILLS.count()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self.output = ProcessOutput(model, lane) if host is None else host.output
            if host is None:
                undo.callback(self.output.close)
            ends = []
            for _ in range(3):
                ours, end = socket.socketpair()
                undo.callback(ours.close)
                ends.append((ours, theirs.enter_context(end)))
            (self._control, control), (self._events, events), (held, leash) = ends
            self._leash: Leash
            if host is None:
                self._leash = Leash(held)
                fds = [control.fileno(), events.fileno(), leash.fileno(), *self.output.writers]
                (forks_with(preload) if preload else FORKS).fork(lane, fds, program)
                self.output.start()
            else:
                self._leash = host.take_in(lane, held, [control, events, leash])
            undo.pop_all()
        self.descriptors: tuple[int, ...] = (self._control.fileno(), self._leash.fileno())  # those that it is heard on
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)
        self._unsent = memoryview(b"")
        self._unsent_fds: Sequence[int] = ()
        self._seconds = self._deadline = 0.0

    def __repr__(self) -> str:
        return f"<Child {self.pid}: {'alive' if self.alive else 'over'}>"

    @property
    def pid(self) -> int:
        return self._leash.pid

    @property
    def exit_code(self) -> int | None:
        """How a process ended that is over, -n for signal n; None where its fork server ended before it could tell."""
        return self._leash.code

    @property
    def never_began(self) -> bool:
        """Whether there never was a process, since its fork server ended before."""
        return self._leash.over and not self.pid and not self._leash.refused

    def drop(self) -> None:
        """Have it ended, without waiting for that."""
        self._leash.wait(0)
        if not self._leash.over:
            self._exit_reason = Kind.EXECUTION_FAILED, f"was killed by {signal_name(signal.SIGKILL)}"  # ours
            self.killed = True
        self._leash.drop()
        self.alive = False

    def outgrow(self, why: str) -> None:
        """Have it ended for the memory that it takes, without waiting: OUT_OF_MEMORY for its callers. On any thread."""
        self._outgrown = True
        self._exit_reason = self._exit_reason or (Kind.OUT_OF_MEMORY, f"was ended, since {why},")
        self.alive = False
        self._leash.drop()

    def call(
        self,
        message: Message,
        fds: Sequence[int],
        seconds: float,
        doing: str,
        look: Callable[[], None] | None = None,
    ) -> Message:
        """Send a message with descriptors and wait for the answer; `doing` is for the error: "while it …".

        `look` is called every now and then; what it raises ends the process. Raises ChildDiedError: there will be no
        answer: EXECUTION_FAILED, TIMED_OUT, OUT_OF_MEMORY. MmeError: the message can't be sent; the process is as it
        was.
        """
        self.prepare(message, fds, seconds)
        return self.answer(doing, look=look)

    def prepare(self, message: Message, fds: Sequence[int], seconds: float) -> None:
        """Have a message sent when its answer is waited for, then for so long. MmeError: it can't be sent."""
        self._unsent, self._unsent_fds = memoryview(encode_message(message)), fds
        self.extend(seconds)

    def begin(self, message: Message, fds: Sequence[int], seconds: float) -> bool:
        """Send as `call`, waiting for nothing; False: not sent, it can't be so. MmeError: it can't be sent at all."""
        self.prepare(message, fds, seconds)
        size = len(self._unsent)
        if size <= _AT_ONCE:
            with contextlib.suppress(OSError):
                self._send_some()
        unsent, self._unsent = len(self._unsent), memoryview(b"")
        if 0 < unsent < size:  # the system was short of memory; a process with half a message is good for nothing
            self.drop()
        return not unsent

    def extend(self, seconds: float) -> None:
        """Give what was begun so long from now on: it shows that it goes on. On any thread."""
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def heard(self) -> Message | None:
        """The answer to what was begun, if it is there; None also where something is wrong, for `answer` to tell."""
        try:
            self._messages.feed(self._control.recv(_CHUNK, _DONTWAIT))
            return self._messages.next()
        except (OSError, ProtocolError):
            return None

    def answer(self, doing: str, seconds: float = 0.0, look: Callable[[], None] | None = None) -> Message:
        """Wait for the answer to what was begun, for so long, 0 for what is left of its time. Raises as `call`."""
        if seconds:
            self.extend(seconds)
        try:
            self._send()
            return self._receive(look)
        except TimeoutError:
            self._leash.let_go()
            what = f"was ended, since it gave no answer within {self._seconds:g} s,"
            raise self._died(Kind.TIMED_OUT, what, doing) from None
        except ProtocolError as error:
            raise self.broke(error, doing) from None
        except (EOFError, ConnectionError):
            raise self.death(doing) from None
        except BaseException:
            self._leash.let_go()
            self.alive = False
            raise

    def broke(self, error: Exception, doing: str) -> ChildDiedError:
        """End a process that answered what it can't have meant; return what to raise."""
        return self.end(f"it sent {error}", doing)

    def end(self, why: str, doing: str, kind: Kind = Kind.EXECUTION_FAILED) -> ChildDiedError:
        """End a process that can't be worked with; return what to raise, of that kind."""
        self._leash.let_go()
        return self._died(kind, f"was ended, since {why},", doing)

    def take_events(self) -> socket.socket:
        """Our end of the events' socket; the caller's to read and to close from now on."""
        return socket.socket(fileno=self._events.detach())

    def death(self, doing: str) -> ChildDiedError:
        """What to raise of a process whose sockets have closed by themselves."""
        return self._died(*self.exit_reason(), doing)

    def has_died(self, seconds: float = 0.0) -> bool:
        """Return whether it died while it was not called, or does so within `seconds`; waits for news on their way."""
        if self.alive and (ready := dict(self._poll.poll(seconds * 1000))):
            if self._control.fileno() in ready and self._closed_control():
                self._leash.wait(_END_SECONDS)
            self._leash.wait(0)
            self.alive = not self._leash.over
        return not self.alive

    def close(self, seconds: float) -> None:
        """End the process: let the model clean up for some seconds, then kill it. When this returns it is gone."""
        if self.alive:
            self.alive = False
            with contextlib.suppress(OSError):
                self.prepare({"do": "close"}, (), seconds)
                self._send()
                self._leash.wait(seconds)
        self._leash.let_go()
        self._release()

    def private_memory(self) -> int | None:
        """Bytes that the process takes and no other shares; None when it is not there, or another's."""
        if not (self.alive and self.pid) or self.host is not None:
            return None
        try:
            return memory.unshared_memory(self.pid)
        except OSError:
            return None

    def _send_some(self) -> None:
        if self._unsent_fds:
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self._unsent_fds)
            sent = self._control.sendmsg([self._unsent], [rights], _FLAGS)  # socket.send_fds forgets the flags
        else:
            sent = self._control.send(self._unsent, _FLAGS)
        self._unsent, self._unsent_fds = self._unsent[sent:], ()

    def _send(self) -> None:
        while self._unsent:
            try:
                self._send_some()
            except BlockingIOError:
                ready = select.poll()
                ready.register(self._control, select.POLLOUT)
                if not ready.poll(milliseconds(self._deadline)):
                    raise TimeoutError from None

    def _receive(self, look: Callable[[], None] | None) -> Message:
        while (message := self._messages.next()) is None:
            left_ms = milliseconds(self._deadline)
            ready = dict(self._poll.poll(left_ms if look is None else min(left_ms, _LOOK_MILLISECONDS)))
            if look is not None and left_ms and not ready:
                look()
                continue
            if not ready:
                if milliseconds(self._deadline):  # it was given more time meanwhile
                    continue
                raise TimeoutError
            if self._leash.fileno() in ready:
                self._leash.read()
            if self._control.fileno() in ready:
                data = self._control.recv(_CHUNK)
                if not data:
                    raise EOFError
                self._messages.feed(data)
            elif self._leash.over:
                raise EOFError
        if not self.pid:  # what answers has one: the news is on its way
            self._leash.read()
        return message

    def _closed_control(self) -> bool:
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionError:
            return True

    def exit_reason(self) -> tuple[Kind, str]:
        """How it ended, once its end of the socket is closed: found out once."""
        if self._exit_reason is None:
            self._exit_reason = self._death()
        return self._exit_reason

    def _death(self) -> tuple[Kind, str]:
        self._leash.wait(_END_SECONDS)
        if not self._leash.over:
            self._leash.let_go()
            return Kind.EXECUTION_FAILED, "was ended, since it closed its connection"
        if self.host is not None and self.host.died(_ENDING_SECONDS):
            exit_reason = self.host.exit_reason()
            self.killed = self.host.killed
            return exit_reason
        if self._leash.refused:
            return Kind.UNAVAILABLE, f"can't be started: {advised(self._leash.refused)}"
        if self._leash.code is None:
            return Kind.EXECUTION_FAILED, "ended together with the process that it was forked from, or never began"
        if self._leash.code >= 0:
            kind = Kind.OUT_OF_MEMORY if self._leash.code == _OUT_OF_MEMORY_CODE else Kind.EXECUTION_FAILED
            return kind, f"ended with exit code {self._leash.code}"
        number = -self._leash.code
        if number == signal.SIGKILL and OOM_KILLS.count() > self._at_start:
            return Kind.OUT_OF_MEMORY, "was killed by the system, which ran out of memory,"
        self.killed = number in OF_OTHERS
        return Kind.EXECUTION_FAILED, f"was killed by {signal_name(number)}"

    def _died(self, kind: Kind, what: str, doing: str) -> ChildDiedError:
        self.alive = False
        self._exit_reason = self._exit_reason or (kind, what)
        words = " | ".join(self.output.last_words())
        last = f"; the last it wrote to standard error: {words[-_WORDS:]}" if words else ""
        sentence = f"{self._subject} {what}" if kind is Kind.UNAVAILABLE else f"{self._subject} {what} {doing}{last}"
        return ChildOutgrownError(kind, sentence) if self._outgrown else ChildDiedError(kind, sentence)

    def _release(self) -> None:
        if self.host is None:
            self.output.close()
        self._control.close()
        self._leash.close()
        self._events.close()


_SECONDS = 60.0  # for a host to start, which may have to import the framework first, or to take in a guest
_REAP_SECONDS = 5.0
_hosts: dict[str, Host] = {}
_starts: dict[str, threading.Lock] = {}  # by name: as many as there are frameworks on GPUs
_lock = threading.Lock()


class Host:
    """A worker that several models of one framework on one GPU share: each process there costs a CUDA context.

    Each guest is a `Child` with a control socket, served by a thread of the host and ending with it; a hang or a crash
    ends the host, and all guests are started again in another. Called on load threads and lanes' threads: a host's lock
    is held for microseconds, its name's while it starts, which may take long, that of them all for no more than a look.
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
        return self._child.pid

    @property
    def output(self) -> ProcessOutput:
        return self._child.output

    @property
    def killed(self) -> bool:
        return self._child.killed

    def died(self, seconds: float = 0.0) -> bool:
        """Return whether it is no more, or not to be trusted with another guest; it may take so long to be gone."""
        with self._lock:
            return self._child.has_died(seconds)

    def exit_reason(self) -> tuple[Kind, str]:
        """How it ended: the same for all of its guests."""
        with self._lock:
            return self._child.exit_reason()

    def private_memory(self) -> int:
        """Bytes that it takes, all guests together, and no other process shares."""
        return self._child.private_memory() or 0

    def take_in(self, lane: str, held: socket.socket, sockets: list[socket.socket]) -> GuestLeash:
        """Have a thread of it serve `sockets`: control, events, and the other end of `held`. OSError: it can't."""
        try:
            with self._lock:
                fds = [each.fileno() for each in sockets]
                self._child.call({"do": "guest", "lane": lane}, fds, _SECONDS, "while it took in a model")
        except MmeError as error:
            raise OSError(error.message) from error
        return GuestLeash(held, self)

    def kill(self) -> None:
        with self._lock:
            self._child.drop()

    def close(self) -> None:
        with self._lock:
            self._child.close(_REAP_SECONDS)


class GuestLeash(Leash):
    """How a guest is held: by a thread of a host, whose process is the only one that can be ended."""

    leaving_seconds: ClassVar[float] = 0.5

    def __init__(self, end: socket.socket, host: Host) -> None:
        super().__init__(end)
        self.pid, self.code = host.pid, 0
        self._host = host

    def read(self) -> None:
        self._end.recv(1)  # which code of a model may write, too
        self.over = True

    def drop(self) -> None:
        self._host.kill()

    def close(self) -> None:
        """Give the socket back; the host ends with its last guest. Once more does nothing."""
        if self._end.fileno() >= 0:
            super().close()
            leave(self._host)


def admit(name: str, preload: str) -> Host:
    """The host of that name, a new one if there is none; it counts one guest more. OSError: no process can be had."""
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
