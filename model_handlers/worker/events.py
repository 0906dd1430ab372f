"""The worker's end of the channel: what a model says outside of its batches, and what it is told.

Any thread may send; a thread of ours listens once the model wants to be told something. A sender that the model forgot
says so when it is collected, on any thread, in the middle of sending too: so no lock here is one that a thread could
wait for while holding it, and what is to be sent in the middle of sending is sent behind it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import select
import sys
import termios
import threading
import time
import traceback
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from model_handlers.errors import Kind, MmeError
from model_handlers.metrics import METRICS
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BY_NAME
from model_handlers.worker.memory import Frame, FrameReader
from model_handlers.worker.wire import Packing, answer_fields, error_fields, error_from, unpack

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from model_handlers.model_calls import Done, ModelCall, Override
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array
    from model_handlers.worker.wire import Message

    Take = Callable[[Message, Array], None]
    AskReady = Callable[[Callable[[bool], None]], None]

_PASSING = {errno.ETOOMANYREFS, errno.ENOBUFS}  # no more descriptors may be under way, until the other side reads
_PAUSE = 0.001  # seconds
_TURN_NS = 500_000  # of a process that sends and computes: a yield for each frame would have each read alone
_MOST_UNDER_WAY = 64 << 20  # bytes of memory that was sent and not received: of such frames a socket holds hundreds


class Events:
    """One process's channel."""

    def __init__(self, end: socket.socket, model: str) -> None:
        self.model = model
        self._end = end
        self._pid = os.getpid()
        self._sending = threading.RLock()
        self._busy = False
        self._unsent: deque[Frame] = deque()
        self._under_way = 0  # bytes of memory
        self._gave_way = 0  # when
        self._lock = threading.RLock()
        self._listens = False
        self._asked = False  # to be told of clients that leave
        self._told = threading.Event()
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._watching: dict[int, list[Callable[[], None]]] = {}
        self._expected: dict[int, Take] = {}
        self._ask_ready: AskReady | None = None
        # called before the model asks the server anything, on the thread that does; None for nothing
        self.before_calls: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Events of '{self.model}', {self.kept} entries kept>"

    @property
    def kept(self) -> int:
        """How many entries it keeps of requests and questions that are not over, and of frames that are not sent."""
        told = len(self._open) + len(self._cancelled) + len(self._watching)
        return told + len(self._expected) + len(self._unsent)

    def send(self, message: Message, packing: Packing | None = None) -> None:
        """Send a frame, waiting while the other side does not read; a forked copy sends nothing. Raises MmeError."""
        if os.getpid() != self._pid:
            return
        frame = Frame(message, packing)
        with self._sending:
            self._unsent.append(frame)
            while self._unsent and not self._busy:
                self._busy = True
                try:
                    self._put(self._unsent.popleft())
                finally:
                    self._busy = False
        self._give_way()

    def _give_way(self) -> None:
        """Let the serving process, which a frame has woken, run where it was put: behind us, if we go on computing."""
        now = time.perf_counter_ns()
        if now - self._gave_way > _TURN_NS:
            self._gave_way = now
            os.sched_yield()

    def _put(self, frame: Frame) -> None:
        if frame.size:
            self._await_room(frame.size)
        while frame.data:
            try:
                frame.send(self._end)
            except OSError as error:
                if error.errno not in _PASSING:
                    break  # the serving process is gone, and soon we are
                time.sleep(_PAUSE)
        frame.close()

    def _await_room(self, size: int) -> None:
        """Wait while too much memory is under way. The other side looks at what it received before it asks for more."""
        if self._under_way > _MOST_UNDER_WAY:
            while _unread(self._end):
                time.sleep(_PAUSE)
            self._under_way = 0
        self._under_way += size

    # -- requests that we were given -----------------------------------------------------------------------------

    def responders(self, first: int, count: int) -> list[ResponderInChild]:
        """Take the responses to the requests of a batch, which both sides call `first` and the numbers behind it."""
        numbers = range(first, first + count)
        with self._lock:
            self._open.update(numbers)
        return [ResponderInChild(self, number) for number in numbers]

    def forget(self, numbers: Sequence[int]) -> None:
        """These requests have got their last responses."""
        with self._lock:
            self._open.difference_update(numbers)
            self._cancelled.difference_update(numbers)
            if self._watching:
                for number in numbers:
                    self._watching.pop(number, None)

    def is_cancelled(self, number: int) -> bool:
        self._hear_of_clients()
        return number in self._cancelled

    def when_cancelled(self, number: int, tell: Callable[[], None]) -> None:
        """Have `tell` called when the client leaves, at once if it has; never after the request's last response."""
        self._hear_of_clients()
        with self._lock:
            if number not in self._cancelled:
                if number in self._open:
                    self._watching.setdefault(number, []).append(tell)
                return
        tell()

    def _hear_of_clients(self) -> None:
        """Ask to be told of clients that leave, once, and wait until we know of those that have left already."""
        if self._told.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            asks, self._asked = not self._asked, True
        if asks:
            self._listen()
            self.send({"hear": True})
        self._told.wait()

    # -- questions of ours ---------------------------------------------------------------------------------------

    def expect(self, number: int, take: Take) -> None:
        """Have the replies to a question taken. MmeError: none come to a process that the model forked."""
        if os.getpid() != self._pid:
            raise MmeError(
                Kind.UNSUPPORTED, f"model '{self.model}': a process that the model forked can't ask the server anything"
            )
        if self.before_calls is not None:
            self.before_calls()
        with self._lock:
            self._expected[number] = take
        self._listen()

    def expect_no_more(self, number: int) -> bool:
        """Take no more replies to a question; return whether there would have been any."""
        with self._lock:
            return self._expected.pop(number, None) is not None

    def answer_ready(self, ask: AskReady) -> None:
        """Let the other side ask from now on whether the model is ready: see `LoadedModel.ask_ready`."""
        self._ask_ready = ask
        self._listen()

    # -- the thread that listens ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        with self._lock:
            if not self._listens:
                self._listens = True
                threading.Thread(target=self._main, name="mme events", daemon=True).start()

    def _main(self) -> None:
        reader, ready = FrameReader(), select.poll()
        try:
            ready.register(self._end, select.POLLIN)
            while ready.poll() and reader.receive(self._end):  # as the main thread waits: see `child`
                while (frame := reader.next()) is not None:
                    self._take(*frame)
        except (OSError, ValueError):
            if self._end.fileno() >= 0:  # else our own side has closed it: the process of several models goes on
                raise
        finally:
            self._told.set()

    def _take(self, message: Message, shared: Array) -> None:
        try:
            if "reply" in message:
                self._reply(message, shared)
            elif "cancelled" in message:
                self._cancel(message["cancelled"])
            elif "hears" in message:
                self._told.set()
            elif "ready" in message and self._ask_ready is not None:
                self._answer_ready(self._ask_ready)
        except Exception:  # noqa: BLE001 - code of the model's author is told; others wait for this thread too
            traceback.print_exc()

    def _answer_ready(self, ask: AskReady) -> None:
        try:
            ask(self._tell_ready)
        except Exception:
            self._tell_ready(ready=False)  # it is not asked again before there is an answer
            raise

    def _tell_ready(self, ready: bool) -> None:  # noqa: FBT001 - it is the answer
        self.send({"ready": ready})

    def _reply(self, message: Message, shared: Array) -> None:
        number = message["reply"]
        with self._lock:
            take = self._expected.pop(number, None) if message["final"] else self._expected.get(number)
        if take is not None:
            take(message, shared)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._open:
                self._cancelled.add(number)
            told = self._watching.pop(number, [])
        for tell in told:
            tell()


def _unread(end: socket.socket) -> int:
    """Bytes that the other side has not received, with what the system adds to them; 0 where that has gone."""
    try:
        return int.from_bytes(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


class ResponderInChild:
    """A `requests.Responder`."""

    def __init__(self, events: Events, number: int) -> None:
        self._events = events
        self.number = number  # what both sides call the request
        self.used = False  # whether anything was sent

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        self.used = True
        try:
            self._send(response, final=final)
        except MmeError as error:  # tensors or parameters that can't be sent
            final = True
            self._send(error, final=True)
        if final:
            self._events.forget([self.number])

    def _send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        message: Message = {"respond": self.number, "final": final}
        packing = Packing()
        if isinstance(response, MmeError):
            message["error"] = error_fields(response)
        elif response is not None:
            message |= answer_fields(response, packing, self._events.model)
        self._events.send(message, packing)

    def put_back(self) -> None:
        """This was all, until the request is executed once more."""
        self._events.send({"respond": self.number, "final": True, "again": True})

    def is_cancelled(self) -> bool:
        return self._events.is_cancelled(self.number)

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        self._events.when_cancelled(self.number, tell)


class WorkerModelCalls:
    """The calls that a model makes of the server (`model_calls.Outside`): each is a frame, answered by its number."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._numbers = itertools.count(1)

    def infer(self, call: ModelCall, responder: Responder) -> None:
        number = next(self._numbers)

        def take(reply: Message, shared: Array) -> None:
            responder.send(_response_in(reply, shared, call.model), final=reply["final"])

        def drop() -> None:
            if self._events.expect_no_more(number):
                self._events.send({"drop": number})

        try:
            self._events.expect(number, take)
            self._events.send(*_message_of(call, number))
        except MmeError as error:  # what can't be sent
            self._events.expect_no_more(number)
            responder.send(error, final=True)
        else:
            responder.when_cancelled(drop)

    def load(self, model: str, override: Override | None, callers: tuple[str, ...], done: Done) -> None:  # noqa: ARG002 - the other end knows
        question: Message = {"what": "load", "model": model}
        packing = Packing()
        if override is not None:
            question["config"] = override.config
            question["files"] = {
                key: packing.add(np.frombuffer(content, np.uint8), key) for key, content in override.files.items()
            }
        self._ask(question, done, packing)

    def unload(self, model: str, dependents: bool, callers: tuple[str, ...], done: Done) -> None:  # noqa: ARG002, FBT001 - as above
        self._ask({"what": "unload", "model": model, "dependents": dependents}, done)

    def is_ready(self, model: str, version: int | None, done: Done) -> None:
        self._ask({"what": "ready", "model": model, "version": version}, done)

    def _ask(self, question: Message, done: Done, packing: Packing | None = None) -> None:
        number = next(self._numbers)

        def take(reply: Message, _: Array) -> None:
            done(error_from(reply["error"]) if "error" in reply else bool(reply["value"]))

        try:
            self._events.expect(number, take)
            self._events.send({"ask": number, **question}, packing)
        except MmeError as error:
            self._events.expect_no_more(number)
            done(error)


def _message_of(call: ModelCall, number: int) -> tuple[Message, Packing]:
    packing = Packing()
    message: Message = {
        "call": number,
        "model": call.model,
        "version": call.version,
        "inputs": [[name, kind.name, packing.add(array, f"input '{name}'")] for name, kind, array in call.inputs],
        "outputs": call.outputs,
        "decoupled": call.decoupled,
        "id": call.id,
        "parameters": call.parameters,
        "timeout_us": call.timeout_us,
        "correlation_id": call.correlation_id,
        "flags": call.flags,
        "trace": call.trace,
    }
    return message, packing


def _response_in(reply: Message, shared: Array, model: str) -> ModelResponse | MmeError | None:
    if "error" in reply:
        return error_from(reply["error"])
    if "outputs" not in reply:
        return None
    outputs = {name: unpack(shared, place, name, model) for name, place in reply["outputs"].items()}
    types = {name: BY_NAME[kind] for name, kind in reply["types"].items()}
    return ModelResponse(outputs, reply["parameters"], types)


_REPORT_PAUSE = 0.2  # seconds
_TOLD_TOGETHER = 64  # metrics in a frame, a quarter of a megabyte each at most: see `MAX_MESSAGE`


class MetricSender:
    """Tells the server of changed metrics, five times a second at most."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._due: SimpleQueue[None] = SimpleQueue()
        self._runs = False
        self.tell()
        METRICS.when_dirty(self._soon)

    def tell(self) -> None:
        changes = METRICS.changes()
        for start in range(0, len(changes), _TOLD_TOGETHER):
            self._events.send({"metrics": changes[start : start + _TOLD_TOGETHER]})

    def _soon(self) -> None:
        """There are changes, where there were none. In the middle of anything, a collection of garbage even."""
        self._due.put(None)
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._main, name="mme metrics", daemon=True).start()

    def _main(self) -> None:
        while True:
            self._due.get()
            time.sleep(_REPORT_PAUSE)
            self.tell()
