"""The child's end of the channel: what a model says outside of its batches, and what it is told.

Any thread of the model may send. A thread of ours listens, from the first time on that the model wants to be told
something: models that never ask do without it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from model_handlers.errors import MmeError
from model_handlers.isolation.channel import Frame, FrameReader
from model_handlers.isolation.framing import Packing, error_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_handlers.base import ModelResponse
    from model_handlers.isolation.framing import Message
    from model_handlers.tensor import Array


class Events:
    """One process's channel.

    Args:
        end: the socket.
        model: the model's name, for messages.
    """

    def __init__(self, end: socket.socket, model: str) -> None:
        self.model = model
        self._end = end
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._sender = 0  # the thread that is sending
        self._deferred: deque[Frame] = deque()
        self._lock = threading.RLock()  # a collection of garbage may let go of a sender anywhere
        self._listens = False
        self._cancelled: set[int] = set()
        self._watching: dict[int, list[Callable[[], None]]] = {}
        self._expected: dict[int, Callable[[Message, Array], None]] = {}

    def send(self, message: Message, packing: Packing | None = None) -> None:
        """Send a frame; waits while the other side does not read. Nothing happens in a process that the model forked.

        Raises:
            MmeError: the frame can't be sent.
        """
        if os.getpid() != self._pid:
            return
        frame = Frame(message, packing)
        if self._sender == threading.get_ident():  # a collection of garbage, in the middle of sending, found a sender
            self._deferred.append(frame)
            return
        with self._sending:
            self._sender = threading.get_ident()
            self._put(frame)
            while self._deferred:
                self._put(self._deferred.popleft())
            self._sender = 0

    def _put(self, frame: Frame) -> None:
        with contextlib.suppress(OSError):  # the serving process is gone, and soon we are
            sent = socket.send_fds(self._end, [frame.data], [frame.fd] if frame.fd >= 0 else [])
            self._end.sendall(memoryview(frame.data)[sent:])
        frame.close()

    def responder(self, number: int) -> ResponderInChild:
        """Takes the responses to a request, whose number both sides know."""
        return ResponderInChild(self, number)

    def is_cancelled(self, number: int) -> bool:
        """Whether the client of a request has left."""
        self._listen()
        return number in self._cancelled

    def when_cancelled(self, number: int, tell: Callable[[], None]) -> None:
        """Have `tell` called when it leaves; at once if it has."""
        self._listen()
        with self._lock:
            if number not in self._cancelled:
                self._watching.setdefault(number, []).append(tell)
                return
        tell()

    def forget(self, number: int) -> None:
        """A request has got its last response."""
        with self._lock:
            self._cancelled.discard(number)
            self._watching.pop(number, None)

    def expect(self, number: int, take: Callable[[Message, Array], None]) -> None:
        """Have the replies to a question of ours taken, until the last one."""
        with self._lock:
            self._expected[number] = take
        self._listen()

    def _listen(self) -> None:
        with self._lock:
            if not self._listens:
                self._listens = True
                threading.Thread(target=self._main, name="mme events", daemon=True).start()

    def _main(self) -> None:
        reader = FrameReader()
        while reader.receive(self._end):
            while (frame := reader.next()) is not None:
                self._take(*frame)

    def _take(self, message: Message, shared: Array) -> None:
        if "reply" in message:
            number = message["reply"]
            with self._lock:
                take = self._expected.pop(number, None) if message["final"] else self._expected.get(number)
            if take is not None:
                take(message, shared)
        elif "cancelled" in message:
            with self._lock:
                self._cancelled.add(message["cancelled"])
                told = self._watching.pop(message["cancelled"], [])
            for tell in told:
                tell()


class ResponderInChild:
    """See `base.Responder`."""

    __slots__ = ("_events", "_number")

    def __init__(self, events: Events, number: int) -> None:
        self._events = events
        self._number = number

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        """One response, or the news that it was the last."""
        try:
            self._send(response, final=final)
        except MmeError as error:  # tensors or parameters that can't be sent
            final = True
            self._send(error, final=True)
        if final:
            self._events.forget(self._number)

    def _send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        message: Message = {"respond": self._number, "final": final}
        packing = Packing()
        if isinstance(response, MmeError):
            message |= {"final": True, "error": error_fields(response)}
        elif response is not None:
            message["outputs"] = {
                name: packing.add(array, f"output '{name}' of model '{self._events.model}'")
                for name, array in response.outputs.items()
            }
            message["parameters"] = dict(response.parameters)
        self._events.send(message, packing)

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        return self._events.is_cancelled(self._number)

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when it leaves; at once if it has."""
        self._events.when_cancelled(self._number, tell)
