"""One life of one model's process, as the serving process sees it: start, calls, death.

Theory of operation. Four things connect us to a child: the control socket (batches), the leash (the fork server
tells the pid and the exit code on it, and kills the child when we let go), the pipes of its output, and the socket of
its events, which is not our business. A call waits for the control socket and the leash together, until its deadline,
so that a death is noticed at once, even where something the model started keeps the control socket open. A child that
died, hung or spoke nonsense is over: whoever called gets a `ChildDiedError` that says what happened, and `close` has
nothing left to do but to give back.

Called by one thread at a time; `memory` by any.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from array import array
from typing import TYPE_CHECKING

from model_handlers.errors import Kind
from model_handlers.system import devices
from model_handlers.system.system_limits import advised
from model_handlers.worker.fork_client import (
    FORKS,
    OF_OTHERS,
    ChildDiedError,
    ChildOutgrownError,
    Leash,
    forks_with,
    milliseconds,
    signal_name,
)
from model_handlers.worker.framing import MessageReader, ProtocolError, encode_message
from model_handlers.worker.oom import LEDGER
from model_handlers.worker.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.worker.fork_server import Program
    from model_handlers.worker.framing import Message
    from model_handlers.worker.hosts import GuestLeash, Host

_CHUNK = 16 << 10  # most messages are shorter by far; larger blocks cost the allocator more than a second read
_DONTWAIT = int(socket.MSG_DONTWAIT)
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_AT_ONCE = 64 << 10  # bytes that go into an empty socket, whose buffer is three times as large
_END_SECONDS = 2.0  # for the fork server to tell the exit code of a process that closed its socket
_WORDS = 3000  # characters of standard error in an error message
_LOOK_MILLISECONDS = 20  # between two looks at a process that is waited for
_OUT_OF_MEMORY_CODE = 137  # 128 + SIGKILL: what shells and containers make of a kill


class Child:
    """A process that was asked for. It may not run yet when this is made; the first call waits for it.

    Args:
        model, lane: what it is for.
        program: what it executes, `exec_child` in the end; None for a fork.
        preload: what its fork server has called before, see `forks_with`; "" for nothing.
        host: the process that it is a guest of, see `hosts`; None for one of its own.

    Attributes:
        alive: whether it can be called.
        killed: whether somebody ended it, whatever it did; known once it was told how it ended.
        descriptors: those that it is heard on.
        output: what it writes.
        host: as given.
    """

    def __init__(
        self, model: str, lane: str, program: Program | None = None, preload: str = "", host: Host | None = None
    ) -> None:
        self.host = host
        self._subject = f"model '{model}': the process of '{lane}'"
        self.alive = True
        self.killed = False
        self._fate: tuple[Kind, str] | None = None
        self._outgrown = False
        self._messages = MessageReader()
        self._at_start = LEDGER.count()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self.output = Output(model, lane) if host is None else host.output
            if host is None:
                undo.callback(self.output.close)
            ends = []
            for _ in range(3):
                ours, end = socket.socketpair()
                undo.callback(ours.close)
                ends.append((ours, theirs.enter_context(end)))
            (self._control, control), (self._events, events), (held, leash) = ends
            self._leash: Leash | GuestLeash
            if host is None:
                self._leash = Leash(held)
                fds = [control.fileno(), events.fileno(), leash.fileno(), *self.output.writers]
                (forks_with(preload) if preload else FORKS).fork(lane, fds, program)
                self.output.start()
            else:
                self._leash = host.take_in(lane, held, [control, events, leash])
            undo.pop_all()
        self.descriptors: tuple[int, ...] = (self._control.fileno(), self._leash.fileno())
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
        """Its id, 0 until known."""
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
            self._fate = Kind.EXECUTION_FAILED, f"was killed by {signal_name(signal.SIGKILL)}"  # ours
            self.killed = True
        self._leash.drop()
        self.alive = False

    def outgrow(self, why: str) -> None:
        """Have it ended for the memory that it takes, without waiting for that. On any thread.

        A thread that waits for an answer, or finds it ended, is told why: OUT_OF_MEMORY.
        """
        self._outgrown = True
        self._fate = self._fate or (Kind.OUT_OF_MEMORY, f"was ended, since {why},")
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
        """Send a message and wait for the answer.

        Args:
            message: what to send.
            fds: descriptors that go with it.
            seconds: how long the answer may take.
            doing: what the process does meanwhile, for the error: "while it …".
            look: called every now and then until the answer is there; what it raises ends the process.

        Raises:
            ChildDiedError: there will be no answer. EXECUTION_FAILED; TIMED_OUT where it took too long; OUT_OF_MEMORY
                where the system ended it for that.
            MmeError: the message can't be sent; the process is as it was.
        """
        self.prepare(message, fds, seconds)
        return self.answer(doing, look=look)

    def prepare(self, message: Message, fds: Sequence[int], seconds: float) -> None:
        """Have a message sent when its answer is waited for, which then may take so long.

        Raises:
            MmeError: the message can't be sent at all.
        """
        self._unsent, self._unsent_fds = memoryview(encode_message(message)), fds
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def begin(self, message: Message, fds: Sequence[int], seconds: float) -> bool:
        """Send a message as `call` does, but wait for nothing; False where it can't be sent so, and was not.

        Raises:
            MmeError: the message can't be sent at all.
        """
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
        """Wait for the answer to what was begun, for so long, 0 for what is left of the time that it was given then.

        Errors, and `look`, are those of `call`.
        """
        if seconds:
            self._seconds, self._deadline = seconds, time.monotonic() + seconds
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
            raise self._died(*self.fate(), doing) from None
        except BaseException:
            self._leash.let_go()
            self.alive = False
            raise

    def broke(self, error: Exception, doing: str) -> ChildDiedError:
        """End a process that answered what it can't have meant; returns what to raise."""
        return self.end(f"it sent {error}", doing)

    def end(self, why: str, doing: str, kind: Kind = Kind.EXECUTION_FAILED) -> ChildDiedError:
        """End a process that can't be worked with; returns what to raise, of that kind."""
        self._leash.let_go()
        return self._died(kind, f"was ended, since {why},", doing)

    def take_events(self) -> socket.socket:
        """Our end of the socket for what either side says unasked; the caller's to read and to close from now on."""
        return socket.socket(fileno=self._events.detach())

    def death(self, doing: str) -> ChildDiedError:
        """What to raise of a process whose sockets have closed by themselves."""
        return self._died(*self.fate(), doing)

    def has_died(self) -> bool:
        """Whether it died while nobody called; waits for nothing but the news of a death that is on its way."""
        if self.alive and (ready := dict(self._poll.poll(0))):
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
            return devices.unshared_memory(self.pid)
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
        if not self.pid:  # who answers has one: the news is on its way
            self._leash.read()
        return message

    def _closed_control(self) -> bool:
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionError:
            return True

    def fate(self) -> tuple[Kind, str]:
        """How it ended, once its end of the socket is closed: found out once, for whoever asks."""
        if self._fate is None:
            self._fate = self._death()
        return self._fate

    def _death(self) -> tuple[Kind, str]:
        self._leash.wait(_END_SECONDS)
        if not self._leash.over:
            self._leash.let_go()
            return Kind.EXECUTION_FAILED, "was ended, since it closed its connection"
        if self.host is not None and self.host.died():
            fate = self.host.fate()
            self.killed = self.host.killed
            return fate
        if self._leash.refused:
            return Kind.UNAVAILABLE, f"can't be started: {advised(self._leash.refused)}"
        if self._leash.code is None:
            return Kind.EXECUTION_FAILED, "ended together with the process that it was forked from, or never began"
        if self._leash.code >= 0:
            kind = Kind.OUT_OF_MEMORY if self._leash.code == _OUT_OF_MEMORY_CODE else Kind.EXECUTION_FAILED
            return kind, f"ended with exit code {self._leash.code}"
        number = -self._leash.code
        if number == signal.SIGKILL and LEDGER.claim(self._at_start):
            return Kind.OUT_OF_MEMORY, "was killed by the system, which ran out of memory,"
        self.killed = number in OF_OTHERS
        return Kind.EXECUTION_FAILED, f"was killed by {signal_name(number)}"

    def _died(self, kind: Kind, what: str, doing: str) -> ChildDiedError:
        self.alive = False
        self._fate = self._fate or (kind, what)
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
