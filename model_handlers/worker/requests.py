"""The requests of one worker: as batches in memory shared with its process, and as what is open of them.

A request is *open* from the sending of its batch to its last response, in the batch's answer or by frames of the
channel, before or long after.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING

from model_handlers.config.model_config import all_outputs
from model_handlers.errors import ChildDiedError, Kind, MmeError, NotBegunError
from model_handlers.metrics import METRICS
from model_handlers.requests import PUT_BACK, ModelResponse
from model_handlers.tensor import BYTES
from model_handlers.worker.channel import Channel, DeafError, MetricReceiver, ModelCallServer
from model_handlers.worker.instance import EXECUTING, IDLE, NONSENSE, InstanceProcess
from model_handlers.worker.main import PROGRESS
from model_handlers.worker.memory import INLINE, Frame, memory_refusal
from model_handlers.worker.policies import Pace
from model_handlers.worker.wire import (
    Packing,
    ProtocolError,
    answer_from,
    check_tensors,
    error_from,
    pack_requests,
    request_number,
    unpack_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from model_handlers.executor import Answers, ExecutorLoop
    from model_handlers.requests import ModelRequest, Responder
    from model_handlers.tensor import Array
    from model_handlers.worker.executor import Worker
    from model_handlers.worker.memory import Segment
    from model_handlers.worker.process import Child
    from model_handlers.worker.wire import Message

    # Looks after descriptors that a worker will be heard on. The same tuple, by identity, means the same descriptors.
    Watch = Callable[[tuple[int, ...]], None]

_RESPONDING = "while it had requests to answer"
_FEW_STRINGS = 128 << 10  # bytes of a batch, its inputs included, whose strings the event loop takes apart itself
_ALL = 1 << 20  # requests: more than a batch has
_EVER = float("inf")


class SentBatch:
    """Requests that are not yet answered, and the process that they were sent to.

    Attributes:
        segment: where they lie; None for those that were begun ahead, and could not be sent yet.
        reply: an answer that came, and is for a thread to take.
    """

    def __init__(
        self, requests: Sequence[ModelRequest], child: Child, numbers: range = range(0), segment: Segment | None = None
    ) -> None:
        self.requests = requests
        self.child = child
        self.numbers = numbers
        self.segment = segment
        self.reply: Message | None = None


class OpenRequests:
    """The requests of one instance that are not over, and the channel on which its processes say things unasked."""

    def __init__(self, worker: Worker, home: ExecutorLoop) -> None:
        self.written: Segment | None = None  # where requests lie that are executed one by one
        self.begun = 0  # requests of the batch that a process died of
        self.heard = 0.0  # when a batch was sent, or a response came, for the last time (monotonic)
        self.pace = Pace()
        self._worker = worker
        self._home = home
        self._open: dict[int, ModelRequest] = {}  # single operations need no lock
        self._hears = False
        self._loading = False
        self._error: tuple[Child, Exception | None] | None = None  # the end of a channel that is not mourned yet
        self._channel: Channel
        self._calls: ModelCallServer
        self._metrics: MetricReceiver
        self._asking: list[Callable[[bool], None]] = []  # told whether the model is ready; as `_open`

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    # -- a batch ---------------------------------------------------------------------------------------------------

    def open(self, batch: int, requests: Sequence[ModelRequest]) -> range:
        """Have the requests of a batch answered; return their numbers."""
        numbers = range(request_number(batch, 0), request_number(batch, len(requests)))
        self.heard = time.monotonic()
        for number, request in zip(numbers, requests, strict=True):
            if request.responder is not None:
                self._open[number] = request
                if self._hears:
                    self._watch(number, request.responder)
        return numbers

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)

    def ends(self, number: int, request: ModelRequest, answer: ModelResponse | MmeError | None) -> bool:
        """Take a request's answer; False if it had its last response before, sent unasked."""
        if answer is None or request.responder is None or (answer is PUT_BACK and self._worker.config.decoupled):
            return True
        return self._open.pop(number, None) is not None

    def count_begun(self) -> int:
        """How many requests of the batch that is under way were begun, one at least."""
        if self.written is None or not self.written.out:
            return _ALL
        begun: int = PROGRESS.unpack_from(self.written.memory())[0]
        return max(begun, 1)

    def due(self) -> float:
        """When another response is owed to clients that wait (monotonic seconds); endless where none is."""
        waits = any(
            request.responder is not None and not request.responder.is_cancelled()
            for request in list(self._open.values())
        )
        return self.heard + self._worker.process.deadlines.execution if waits else _EVER

    def end_overdue(self) -> None:
        """End the process if it has let clients wait for too long; a batch under way has a limit of its own."""
        process = self._worker.process
        if not process.lock.acquire(blocking=False):
            return
        try:
            if process.child.alive and self.due() <= time.monotonic():
                why = f"it gave no answer within {self._worker.process.deadlines.execution:g} s"
                process.mark_dead(process.child.end(why, _RESPONDING, Kind.TIMED_OUT))
        finally:
            process.lock.release()

    # -- lives of the process --------------------------------------------------------------------------------------

    def connected(self, child: Child) -> None:
        """There is a new process, which is to load the model next."""
        name = self._worker.config.name
        self._loading = True
        self._channel = Channel(child.take_events(), self._home, self._take, functools.partial(self._lost, child))
        self._calls = ModelCallServer(name, self._channel)
        self._metrics = MetricReceiver(METRICS, name)
        self._hears = False
        self._channel.start()

    def loaded(self) -> None:
        """It has loaded the model, or could not."""
        self._loading = False

    def dying(self) -> None:
        """It is over, but its memory is still there: what it had not begun of a batch, it owes nothing."""
        self.begun = self.count_begun()
        if self.written is not None and self.begun < _ALL:
            first = request_number(self.written.batch, self.begun)
            self.forget([number for number in list(self._open) if number >= first])
        self.pace.died(time.perf_counter_ns())
        self.written = None  # whose memory goes

    def ended(self, why: MmeError) -> None:
        """It is gone, and nothing more is to be heard of it."""
        self._channel.drain()
        self._calls.drop_all()
        self._metrics.close()
        self._told_ready(ready=False)
        while self._open:
            _respond(self._open.popitem()[1], why, final=True)

    @property
    def is_lost(self) -> bool:
        """Whether the channel of the process has ended."""
        return self._error is not None and self._error[0] is self._worker.process.child

    def _lost(self, child: Child, error: Exception | None) -> None:
        """The channel ended, and with it the process. Can't wait: a batch, or the load, hears of it itself."""
        self._error = child, error
        process = self._worker.process
        if child.alive and not process.closed.is_set() and not self._loading:
            self._home.run(self._on_death)

    def _on_death(self) -> None:
        process = self._worker.process
        with process.lock:
            if not process.segments.under_way:  # else the first of those hears of it itself
                self.mark_lost()

    def mark_lost(self) -> None:
        """End the process whose channel has ended. Under the process's lock."""
        if self._error is None:
            return
        (child, error), self._error = self._error, None
        process = self._worker.process
        if child is not process.child or not child.alive:
            return
        doing = _RESPONDING if self._open else IDLE
        if error is None:
            process.mark_dead(child.death(doing))
        elif isinstance(error, DeafError):
            process.mark_dead(child.end(str(error), doing))
        elif isinstance(error, ProtocolError):
            process.mark_dead(child.broke(error, doing))
        else:
            process.mark_dead(child.end(f"it sent a frame of another form: {error!r}", doing))

    # -- the channel -----------------------------------------------------------------------------------------------

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        child = self._worker.child
        if not child.alive:  # it is started again by the next request
            done(True)
            return
        self._asking.append(done)
        self._channel.post(Frame({"ready": True}))
        if not child.alive:  # it may have parted before it could be asked, and there may be another by now
            self._told_ready(ready=False)

    def _told_ready(self, *, ready: bool) -> None:
        with contextlib.suppress(IndexError):  # nothing waits any more
            self._asking.pop()(ready)

    def _take(self, message: Message, shared: Array) -> None:
        """A frame came. What it raises ends the channel."""
        if "respond" in message:
            self._responded(message, shared)
        elif "metrics" in message:
            self._metrics.take(message["metrics"])
        elif "hear" in message:
            self._hear()
        elif "ready" in message:
            self._told_ready(ready=bool(message["ready"]))
        elif {"call", "ask", "drop"} & message.keys():
            under_way = [] if "drop" in message else self._under_way()
            # the models that wait for what the process does: for an answer to any of its requests
            callers = dict.fromkeys(caller for request in under_way for caller in request.callers)
            waiting = tuple(request.responder for request in under_way if request.responder is not None)
            self._calls.take(message, shared, self._worker.outside, (*callers, self._worker.config.name), waiting)
        else:
            raise ProtocolError(f"a frame about nothing: {str(message)[:200]}")

    def _under_way(self) -> list[ModelRequest]:
        """The open requests, without those of a batch that are executed one by one and not begun yet."""
        begun = self.count_begun()
        if self.written is None or begun == _ALL:
            return list(self._open.values())
        end = request_number(self.written.batch, begun)
        return [request for number, request in list(self._open.items()) if number < end]

    def _responded(self, message: Message, shared: Array) -> None:
        says = "error" in message or "outputs" in message
        response = answer_from(message if says else None, shared, self._worker.config.name)
        final = bool(message["final"]) or not self._worker.config.decoupled
        number = message["respond"]
        self.heard = time.monotonic()
        if self._worker.config.decoupled:
            self._worker.child.extend(self._worker.process.limit)
        request = self._open.pop(number, None) if final else self._open.get(number)
        if request is not None and "again" not in message:  # else it will be executed once more
            if shared.nbytes > INLINE and isinstance(response, ModelResponse):
                self._channel.keep(_owner(response, shared), shared.nbytes)
            _respond(request, response, final=final)

    def _hear(self) -> None:
        """From now on the process wants to be told of clients that leave, and now of those that have left."""
        self._hears = True
        for number, request in list(self._open.items()):
            if request.responder is not None:
                self._watch(number, request.responder)
        self._channel.post(Frame({"hears": True}))

    def _watch(self, number: int, responder: Responder) -> None:
        responder.when_cancelled(functools.partial(self._tell_cancelled, number, self._channel))

    def _tell_cancelled(self, number: int, channel: Channel) -> None:
        if number in self._open:
            channel.post(Frame({"cancelled": number}))


class Batches:
    """Batches of requests in the memory shared with a process, and what comes back. Under the process's lock."""

    def __init__(self, process: InstanceProcess, opened: OpenRequests, *, sees_requests: bool) -> None:
        self.alone = sees_requests and process.config.one_by_one  # whether requests are executed one by one
        self.number = 0  # of the last one, over all lives of the process
        self._sees_requests = sees_requests
        self._model = process.config.name
        self._process = process
        self._opened = opened
        self._answers_text = any(spec.data_type is BYTES for spec in all_outputs(process.config))
        self._input_bytes = 0  # of a request of the last batch
        self._ahead = 0  # batches that were begun ahead, and are not finished
        self._unsent = 0  # those of them that are still to be sent; no other may be sent before them

    def execute(self, requests: Sequence[ModelRequest]) -> Answers:
        """See `LoadedModel.execute_requests`. On a thread that may wait, without the lock."""
        with self._process.lock:
            return self._execute(requests)

    def begin_ahead(self, requests: Sequence[ModelRequest]) -> SentBatch:
        """Have a batch executed behind those that were begun before. On a thread that may wait, without the lock."""
        process = self._process
        with process.lock:
            if not self._ahead:
                self._revive()  # else `finish` of the first of them tells what became of the process
            sent = None if self._unsent else self.begin(requests, process.limit)
            self._ahead += 1
            self._unsent += sent is None
            return sent or SentBatch(requests, process.child)

    def finish(self, begun: SentBatch) -> Answers:
        """Wait for the answers to a batch that was begun ahead; those are finished in their order. As `execute`."""
        process = self._process
        with process.lock:
            self._ahead -= 1
            self._unsent -= begun.segment is None
            if begun.segment is None or begun.child is not process.child or process.is_marked_dead:
                return self._execute(begun.requests)
            return self.wait(begun, process.limit)

    def _execute(self, requests: Sequence[ModelRequest]) -> Answers:
        process = self._process
        message, packing = self._packed(requests)
        self._revive()
        sent, fds = self._write(requests, message, packing)
        try:
            process.child.prepare(message, fds, process.limit)
        except BaseException:
            self._unwrite(sent, message, fds)
            raise
        return self.wait(sent, process.limit)

    def _revive(self) -> None:
        self._opened.mark_lost()
        self._process.revive()

    def begin(self, requests: Sequence[ModelRequest], seconds: float, watch: Watch | None = None) -> SentBatch | None:
        """Send a batch without waiting for anything; None where that can't be done, and nothing was sent.

        `watch` is told the descriptors first, and may raise OSError: one of them becomes readable when there are
        answers or something is wrong.
        """
        child = self._process.child
        if not child.alive or self._opened.is_lost:
            return None
        message, packing = self._packed(requests)
        if watch is not None:
            watch(child.descriptors)
        sent, fds = self._write(requests, message, packing)
        begun = False
        try:
            begun = child.begin(message, fds, seconds)
        finally:
            if not begun:
                self._unwrite(sent, message, fds)
        return sent if begun else None

    def take(self, sent: SentBatch) -> Answers | None:
        """The answers, as `execute` returns and raises; None where `wait` is to get them, since it may take a while."""
        reply = self._process.child.heard()
        if reply is None:
            return None
        if self._takes_long(reply):
            sent.reply = reply
            return None
        try:
            return self._taken(sent, reply)
        except NONSENSE:
            sent.reply = reply
            return None
        except BaseException:
            self._opened.forget(sent.numbers)
            raise

    def _packed(self, requests: Sequence[ModelRequest]) -> tuple[Message, Packing]:
        packing = Packing(PROGRESS.size if self.alone else 0)
        message = pack_requests(requests, packing)
        if self.alone:
            message["alone"] = True
            self._input_bytes = packing.end // len(requests)
        return message, packing

    def _write(
        self, requests: Sequence[ModelRequest], message: Message, packing: Packing
    ) -> tuple[SentBatch, list[int]]:
        """Write a batch, and in its message where it lies; open its requests. Return the descriptors to send, too."""
        segments = self._process.segments
        try:
            segment, fresh = segments.take(packing.end)
        except OSError as error:
            sentence = f"model '{self._model}': {packing.end} bytes of shared memory can't be had: {error}"
            raise memory_refusal(error, sentence) from error
        packing.write(segment.memory())
        self.number += 1
        segment.batch, segment.out = self.number, True
        message |= {
            "do": "run",
            "batch": self.number,
            "segment": [segment.id, segment.size],
            "retired": segments.take_retired(),
            "at": packing.end,
        }
        if self.alone:
            segment.memory()[: PROGRESS.size] = bytes(PROGRESS.size)
            self._opened.written = segment
        numbers = self._opened.open(self.number, requests)
        return SentBatch(requests, self._process.child, numbers, segment), [segment.fd] if fresh else []

    def _unwrite(self, batch: SentBatch, message: Message, fds: list[int]) -> None:
        """It was not sent."""
        assert batch.segment is not None  # noqa: S101 - it was written
        self._opened.forget(batch.numbers)
        batch.segment.out = False
        self._process.segments.retired += message["retired"]
        if fds:
            self._process.segments.retire(batch.segment)

    def _takes_long(self, reply: Message) -> bool:
        """Whether an answer is not for the event loop to take: it would have to take many strings apart."""
        end = reply.get("end", 0)
        return self._answers_text and not (type(end) is int and end <= _FEW_STRINGS)

    def wait(self, sent: SentBatch, seconds: float = 0.0) -> Answers:
        """The answers to a batch, waited for so long, 0 for what is left of its time. Raises as `execute`."""
        process = self._process
        try:
            reply = sent.reply or process.child.answer(EXECUTING, seconds, self._give_time())
            return self._taken(sent, reply)
        except NONSENSE as error:
            return self._over(process.broken(error), sent.numbers, self._opened.begun)
        except ChildDiedError as death:
            process.mark_dead(death)
            return self._over(death, sent.numbers, self._opened.begun)
        except BaseException:
            self._opened.forget(sent.numbers)
            raise

    def _give_time(self) -> Callable[[], None] | None:
        """Have each request of those that are executed one by one its own time."""
        if self._opened.count_begun() == _ALL:
            return None
        counted = 1

        def look() -> None:
            nonlocal counted
            begun = self._opened.count_begun()
            if begun > counted:
                counted = begun
                self._process.child.extend(self._process.limit)

        look()
        return look

    def _taken(self, sent: SentBatch, reply: Message) -> Answers:
        """The answers in a reply. Raises MmeError: every request's error; others: it is no reply."""
        opened, numbers = self._opened, sent.numbers
        assert sent.segment is not None  # noqa: S101 - it was sent
        try:
            shared = self._accept(reply, sent.segment)
            answers = unpack_answers(reply, shared, len(numbers), self._model)
            if not self._sees_requests:
                check_tensors(answers, sent.requests)
        except MmeError as error:
            return self._over(error, numbers)
        if self.alone:
            outputs = reply["end"] // len(answers) - self._input_bytes
            opened.pace.learn(int(reply["took"]), len(answers), max(self._input_bytes, outputs))
        # those of requests that had their last response before are dropped
        return [
            answer if opened.ends(number, request, answer) else None
            for number, request, answer in zip(numbers, sent.requests, answers, strict=True)
        ]

    def _accept(self, reply: Message, segment: Segment) -> Array:
        """Follow what became of the segment; return its bytes. Raises MmeError: what the handler inside raised."""
        segments = self._process.segments
        if reply["ran"] != segment.batch:
            raise ProtocolError(f"an answer to batch {reply['ran']} instead of {segment.batch}")
        segment.out = False
        error = error_from(reply["error"]) if "error" in reply else None
        segment.follow(reply["size"])
        shared = segment.lend()
        if reply["kept"]:
            segments.give_up(segment)
        if error is not None:
            raise error
        segments.used(reply["end"])  # which may give the segment back, now that its bytes are lent
        return shared

    def _over(self, error: MmeError, numbers: range, begun: int = _ALL) -> Answers:
        """What becomes of a batch that fails as a whole, `begun` of it. MmeError: every request's error."""
        self._opened.forget(numbers)
        if begun >= len(numbers):
            raise error
        never = [NotBegunError(self._model) for _ in numbers[begun:]]
        return [*[error.bare()] * begun, *never]


def _respond(request: ModelRequest, response: ModelResponse | MmeError | None, *, final: bool) -> None:
    if request.responder is not None:
        request.responder.send(response, final=final)


def _owner(response: ModelResponse, shared: Array) -> Array:
    """What lives as long as a response's tensors are used: those of strings are copies."""
    arrays = list(response.outputs.values())
    if any(not array.dtype.hasobject for array in arrays):
        return shared
    return arrays[0] if arrays[0].base is None else arrays[0].base
