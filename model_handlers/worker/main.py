"""What runs inside a worker: load, then receive a batch, execute it, answer, until the socket closes.

The main thread does all of it; `events` has what a model says outside of its batches. Inputs are read where they lie;
outputs are written once, behind them. Whatever the model's code raises becomes an answer, `sys.exit` included; whatever
kills the process is for the other side to see. A model may keep an input beyond its batch: then the segment is left to
it, and the serving process writes into another one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from model_handlers.base import Device, offering
from model_handlers.config.convert import config_fields, config_from
from model_handlers.errors import Kind, LostProcessError, MmeError, out_of_memory
from model_handlers.requests import PUT_BACK, ModelResponse
from model_handlers.system import memory
from model_handlers.system.threads import low_priority, lower_priority_for_good
from model_handlers.worker.events import Events, MetricSender, WorkerModelCalls
from model_handlers.worker.memory import SIZES, FrameReader, Segment
from model_handlers.worker.policies import BusyPoll
from model_handlers.worker.wire import (
    Packing,
    encode_message,
    error_fields,
    pack_answers,
    request_number,
    unpack_requests,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_handlers.base import Handler
    from model_handlers.requests import ModelRequest
    from model_handlers.tensor import Array
    from model_handlers.worker.events import ResponderInChild
    from model_handlers.worker.wire import Answer, Message

    # Executes one request, and never raises. The flag says that the answer, None where the responder has got it or
    # will, is written before the model executes anything else.
    Execute = Callable[[ModelRequest, ResponderInChild, bool], Answer]


def run(control: socket.socket, events: socket.socket) -> int:
    """Serve one model, or as many as are sent, until the other side closes; return the exit code."""
    if logging.lastResort is not None:  # it writes to standard error, where levels are known by name: see `output`
        logging.lastResort.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    side = _Side(control)
    message = side.receive()
    if message is None or message["do"] == "close":
        return 0
    if message["do"] == "host":
        return _host(side)
    if message["do"] == "try":
        return _try(message, side)
    return _serve(message, side, events)


def _host(side: _Side) -> int:
    """Be the process of several models: see `hosts`. What one of them held goes back to the system with it."""
    memory.return_large_blocks()
    side.send({"hosts": True})
    while (asked := side.receive()) is not None and asked["do"] == "guest":
        sockets = [socket.socket(fileno=fd) for fd in side.fds]
        side.fds.clear()
        threading.Thread(target=_guest, args=sockets, name=asked["lane"], daemon=True).start()
        side.send({"hosts": True})
    return 0


def _guest(control: socket.socket, events: socket.socket, life: socket.socket) -> None:
    """Serve one of them. `life` tells the other side by its end that this has ended."""
    with life, control, events:
        side = _Side(control)
        message = side.receive()
        if message is not None and message["do"] == "load":
            _serve(message, side, events)
        memory.trim()


def _serve(message: Message, side: _Side, events: socket.socket) -> int:
    said = Events(events, message["config"]["name"])
    with offering(WorkerModelCalls(said)):
        handler = _load(message, side, said)
    if handler is None:
        return 0
    reports = MetricSender(said)
    worker = _Worker(handler, side, said)
    while (asked := side.receive()) is not None:
        if asked["do"] == "close":
            handler.close()
            reports.tell()
            worker.close()
            return 0
        if asked["do"] == "rest":
            worker.drop(asked["retired"])
            memory.trim()
            side.send({"rested": True})
        else:
            worker.run(asked)
    return 0  # the serving process is gone, and a clean end is not waited for


class _Side:
    """The worker's end of the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ready = select.poll()
        self._ready.register(control, select.POLLIN)
        self._reader = FrameReader()
        self._pid = os.getpid()
        self._poll = BusyPoll()
        self.fds = self._reader.fds  # descriptors that came, for this message and those behind it

    def receive(self) -> Message | None:
        """The next message; None when the other side is gone."""
        while (message := self._reader.messages.next()) is None:
            longest = self._poll.begin()
            if not (longest and self._wait_awake(longest)):
                # What sleeps in `recvmsg` is woken for nothing when the other side takes our last answer off the
                # socket, which makes room in it: twice for each batch, in the middle of what the waker does.
                self._ready.poll()
            if not self._reader.receive(self._control):
                return None
        return message

    def _wait_awake(self, longest: int) -> bool:
        """Wait so many nanoseconds for the next message without sleeping, yielding; return whether there is one."""
        now = time.perf_counter_ns()
        until = now + longest
        while now < until:
            if self._ready.poll(0):
                self._poll.caught()
                return True
            os.sched_yield()
            before, now = now, time.perf_counter_ns()
            if self._poll.lost(now - before):
                return False
        self._poll.missed()
        return False

    def end_copy(self) -> None:
        """End this process, if the model forked and this is the copy that came back from its code."""
        if os.getpid() != self._pid:
            os._exit(0)

    def send(self, message: Message) -> None:
        self.end_copy()
        try:
            data = encode_message(message)
        except MmeError as error:
            facts = {key: value for key, value in message.items() if key in {"ran", "size", "kept"}}
            data = encode_message({**facts, "error": error_fields(error)})
        try:
            self._control.sendall(data)
        except ConnectionError:
            os._exit(0)


def _try(message: Message, side: _Side) -> int:
    try:
        model_file = Path(message["model_file"])
        restrain(model_file.stat().st_size)
        _handler_class(message).try_load(config_from(message["config"]), model_file)
        answer: Message = {"tried": True}
    except BaseException as error:  # noqa: BLE001 - whatever a reader raises
        answer = _refusal(error, message)
    side.send(answer)
    return 0


def _load(message: Message, side: _Side, said: Events) -> Handler | None:
    try:
        config = config_from(message["config"])
        handler_class = _handler_class(message)
        device = Device(*message["device"])
        SIZES.growth = message["growth"]
        BusyPoll.longest = message["busy_poll"]
        with low_priority():
            handler: Handler = handler_class.load(config, Path(message["model_file"]), device, message["lane"])
        if handler.tells_ready:  # the other side may ask at once
            said.answer_ready(handler.ask_ready)
        answer = {"loaded": config_fields(handler.config), "tells_ready": handler.tells_ready}
    except BaseException as error:  # noqa: BLE001 - the model's code may raise anything, SystemExit included
        side.send(_refusal(error, message))
        if isinstance(error, LostProcessError):
            _end(error)
        return None
    side.send(answer)
    return handler


def _end(error: LostProcessError) -> NoReturn:
    """End the process, and all of its guests with it; what it writes last is told to the waiting requests."""
    print(error, file=sys.stderr, flush=True)  # noqa: T201 - see `output`
    os._exit(1)


def _handler_class(message: Message) -> Any:
    module, _, name = message["handler"].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _refusal(error: BaseException, message: Message) -> Message:
    return {
        "error": error_fields(_as_error(error, message["config"]["name"], Kind.INVALID_MODEL, "while it was loaded"))
    }


class _Worker:
    def __init__(self, handler: Handler, side: _Side, events: Events) -> None:
        self._handler = handler
        self._events = events
        self._model = handler.config.name
        self._side = side
        self._segments: dict[int, Segment] = {}
        self._one_by_one = OneByOne(self._execute_alone)
        events.before_calls = self._one_by_one.send_answered

    def run(self, message: Message) -> None:
        segment = self._segment(message)
        try:
            answer = self._answer(message, segment)
        except LostProcessError as error:
            _end(error)
        except BaseException as error:  # noqa: BLE001 - as for the load
            answer = {"error": error_fields(_as_error(error, self._model, Kind.INTERNAL, "while it executed"))}
        kept = segment.busy  # what this batch lent is gone, unless the model kept some of it
        answer |= {"ran": message["batch"], "size": segment.size, "kept": kept}
        if kept:
            del self._segments[segment.id]
            segment.close()
        self._side.send(answer)

    def close(self) -> None:
        """Give back the memory that it shares with the other side: its process may go on."""
        for segment in self._segments.values():
            segment.close()
        for fd in self._side.fds:
            os.close(fd)

    def drop(self, retired: list[int]) -> None:
        """Close segments that the other side uses no more."""
        for id_ in retired:
            segment = self._segments.pop(id_, None)
            if segment is not None:
                segment.close()

    def _segment(self, message: Message) -> Segment:
        self.drop(message["retired"])
        id_, size = message["segment"]
        if id_ not in self._segments:
            self._segments[id_] = Segment(id_, self._side.fds.pop(0), size)
        segment = self._segments[id_]
        segment.follow(size)
        return segment

    def _answer(self, message: Message, segment: Segment) -> Message:
        # Models may write to the tensors of their requests, which are not read again. Frameworks get theirs to read.
        shared = segment.lend(writable=self._handler.sees_requests)
        packing = Packing(message["at"], shared)
        answer = (
            self._execute_requests(message, shared, packing)
            if self._handler.sees_requests
            else self._execute(message, shared, packing)
        )
        segment.ensure(packing.end)
        packing.write(segment.memory())
        answer["end"] = packing.end
        return answer

    def _execute(self, message: Message, shared: Array, packing: Packing) -> Message:
        [request] = unpack_requests(message, shared, self._model)
        names = list(request.outputs)
        handler: Any = self._handler  # which may return anything: compiled code would check a declared type by itself
        arrays = handler.execute(request.inputs, names)
        if not isinstance(arrays, list) or len(arrays) != len(names):
            raise MmeError(
                Kind.EXECUTION_FAILED, f"model '{self._model}' did not return one array for each of {', '.join(names)}"
            )
        return pack_answers([ModelResponse(dict(zip(names, arrays, strict=True)))], packing, self._model)

    def _execute_requests(self, message: Message, shared: Array, packing: Packing) -> Message:
        requests = unpack_requests(message, shared, self._model)
        responders = self._events.responders(request_number(message["batch"], 0), len(requests))
        for request, responder in zip(requests, responders, strict=True):
            request.responder = responder
        if "alone" in message:
            return self._execute_one_by_one(requests, responders, shared, packing)
        try:
            answers = self._handler.execute_requests(requests)
            self._check_count(len(answers), len(responders))
        except BaseException as error:  # noqa: BLE001 - as for the load
            return self._failed(responders, _as_error(error, self._model, Kind.INTERNAL, "while it executed"))
        self._events.forget([r.number for r, answer in zip(responders, answers, strict=True) if answer is not None])
        for responder, answer in zip(responders, answers, strict=True):
            if answer is PUT_BACK and self._handler.config.decoupled:
                responder.put_back()
        return pack_answers(answers, packing, self._model)

    def _execute_one_by_one(
        self,
        requests: Sequence[ModelRequest],
        responders: Sequence[ResponderInChild],
        shared: Array,
        packing: Packing,
    ) -> Message:
        answers, took = self._one_by_one.run(requests, responders, shared)
        self._events.forget([r.number for r, answer in zip(responders, answers, strict=True) if answer is not None])
        fields = pack_answers(answers, packing, self._model)
        fields["took"] = took
        return fields

    def _execute_alone(self, request: ModelRequest, responder: ResponderInChild, last: bool) -> Answer:  # noqa: FBT001 - see Execute
        try:
            answers = self._handler.execute_requests([request])
            self._check_count(len(answers), 1)
            answer = answers[0] if last else _of_its_own(answers[0])
        except BaseException as error:  # noqa: BLE001 - as for the load
            answer = _as_error(error, self._model, Kind.INTERNAL, "while it executed")
            if responder.used:
                responder.send(answer, final=True)  # behind the responses that it has got already
                answer = None
        self._side.end_copy()
        return answer

    def _check_count(self, answers: int, requests: int) -> None:
        if answers != requests:
            raise MmeError(
                Kind.EXECUTION_FAILED, f"model '{self._model}' gave {answers} answers to {requests} requests"
            )

    def _failed(self, responders: list[ResponderInChild], error: MmeError) -> Message:
        """What befell a batch: it comes to each request behind the responses that this has got already."""
        used = [responder.used for responder in responders]
        for responder in responders:
            if responder.used:
                responder.send(error, final=True)
        self._events.forget([responder.number for responder in responders])
        if not any(used):
            return {"error": error_fields(error)}
        return {"answers": [None if sent else {"error": error_fields(error)} for sent in used]}


def _of_its_own(answer: Answer) -> Answer:
    if not isinstance(answer, ModelResponse):
        return answer
    outputs = {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in answer.outputs.items()}
    return ModelResponse(outputs, dict(answer.parameters), answer.data_types)


def _as_error(error: BaseException, model: str, otherwise: Kind, when: str) -> MmeError:
    """What the other side is told; what it is not told goes to standard error, and so into the log."""
    if isinstance(error, MmeError):
        return error
    if isinstance(error, MemoryError):
        return out_of_memory(f"model '{model}' ran out of memory {when}: {error}")
    if isinstance(error, SystemExit):
        kind = Kind.EXECUTION_FAILED if otherwise is Kind.INTERNAL else otherwise
        return MmeError(kind, f"model '{model}' called sys.exit({error.code!r}) {when}")
    traceback.print_exception(error)
    return MmeError(otherwise, f"model '{model}' failed {when}: {type(error).__name__}: {error}")


_PROC = Path("/proc/self")
_ALWAYS = 512 << 20  # bytes that a file of any size may take
_TIMES_FILE = 64  # XGBoost takes up to 24 bytes for one of JSON
_STACK = 8 << 20  # bytes of a thread's, where there is no limit
_FIRST_TO_GO = "1000"


def restrain(size: int) -> None:
    """Hold this process, as a damaged length may ask for any amount, to little memory beyond `size` bytes."""
    faulthandler.disable()  # its stack is of no use where its death is told
    lower_priority_for_good()
    with contextlib.suppress(OSError):
        (_PROC / "oom_score_adj").write_text(_FIRST_TO_GO)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = _taken() + _ALWAYS + _of_threads() + _TIMES_FILE * size
    limits = [limit for limit in (soft, allowed) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def _of_threads() -> int:
    """Bytes that a library's threads reserve for their stacks: it may start one a processor, whatever it is told."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return (_STACK if stack == resource.RLIM_INFINITY else stack) * (os.cpu_count() or 1)


def _taken() -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


PROGRESS = struct.Struct("<q")  # how many were begun
_now = time.perf_counter_ns


class OneByOne:
    """Executes requests that crossed together, one after another: two messages cost more than many an execution.

    In front of their inputs lies how many were begun, so that a death tells which never were. Answers wait for that of
    the last request, unless the model asks the server anything: a client may have to be answered for that to go on.
    """

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._unsent: deque[tuple[int, ResponderInChild, Answer]] = deque()  # what takes an item owns it

    def run(
        self, requests: Sequence[ModelRequest], responders: Sequence[ResponderInChild], shared: Array
    ) -> tuple[list[Answer], int]:
        """Execute requests that came in `shared`, with room for PROGRESS in front.

        Returns the answers, None for one sent already or later, and the nanoseconds of them all.
        """
        answers: list[Answer] = [None] * len(requests)
        last = len(requests) - 1
        began = _now()
        for index, (request, responder) in enumerate(zip(requests, responders, strict=True)):
            PROGRESS.pack_into(shared.data, 0, index + 1)
            answer = self._execute(request, responder, index == last)
            if index == last:  # not to be sent earlier: it may lie in arrays that the model writes into next
                answers[index] = answer
            elif answer is not None:
                self._unsent.append((index, responder, answer))
        took = _now() - began
        with suppress(IndexError):
            while True:
                index, _, answer = self._unsent.popleft()
                answers[index] = answer
        return answers, took

    def send_answered(self) -> None:
        """Send what is answered, now. On any thread."""
        with suppress(IndexError):
            while True:
                _, responder, answer = self._unsent.popleft()
                responder.send(answer, final=True)
