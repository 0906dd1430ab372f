"""A handler that sees requests, in a process of its own: batches as for any other, and what its model says unasked.

A request is *open* from the sending of its batch to its last response, in the batch's answer or by frames of the
channel, before or long after. Small batches are sent and answered on the event loop (`send_requests`); whatever could
take long, a death above all, is left to a thread (`execute_requests`, `await_answers`). The lock is held from the
sending of a batch until its answers are taken, whichever threads do it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, ClassVar

from model_handlers.config.model_config import all_outputs
from model_handlers.errors import Kind, MmeError, NotBegunError
from model_handlers.metrics import METRICS
from model_handlers.requests import PUT_BACK, ModelResponse
from model_handlers.tensor import BYTES, size_of
from model_handlers.worker.channel import Channel, DeafError, MetricReceiver, ModelCallServer
from model_handlers.worker.fork_client import ChildDiedError
from model_handlers.worker.handler import EXECUTING, IDLE, NONSENSE, IsolatedHandler
from model_handlers.worker.main import PROGRESS
from model_handlers.worker.memory import INLINE, Frame
from model_handlers.worker.policies import Pace
from model_handlers.worker.wire import (
    Packing,
    ProtocolError,
    answer_from,
    pack_requests,
    request_number,
    unpack_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from model_handlers.base import Watch
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.requests import ModelRequest, Responder
    from model_handlers.tensor import Array
    from model_handlers.worker.fork_server import Program
    from model_handlers.worker.memory import Segment
    from model_handlers.worker.process import Child
    from model_handlers.worker.wire import Message

_RESPONDING = "while it had requests to answer"
_SMALL = 64 << 10  # bytes of inputs that the event loop copies itself
_FEW_STRINGS = 2 * _SMALL  # bytes of a batch, its inputs included, whose strings the event loop takes apart itself
_ALL = 1 << 20  # requests: more than a batch has
_NEWS_SECONDS = 10.0  # for what was told before to be read


class _Sent:
    """A batch that was sent and not yet answered; `reply` is an answer that came and is for a thread to take."""

    def __init__(self, requests: Sequence[ModelRequest], numbers: range, segment: Segment) -> None:
        self.requests = requests
        self.numbers = numbers
        self.segment = segment
        self.reply: Message | None = None


class IsolatedRequestsHandler(IsolatedHandler):
    """One model in one process, for one lane, whose handler sees requests."""

    sees_requests: ClassVar[bool] = True
    ahead: ClassVar[bool] = False

    def __init__(
        self,
        load: Message,
        config: ModelConfig,
        lane: str,
        *,
        uses_gpu: bool,
        program: Program | None = None,
        preload: str = "",
        host: str = "",
    ) -> None:
        self._open: dict[int, ModelRequest] = {}  # single operations need no lock
        self._hears = False
        self._loading = False
        self._channel_error: tuple[Child, Exception | None] | None = None
        self._channel: Channel
        self._call_server: ModelCallServer
        self._sent: _Sent | None = None
        self._asking: list[Callable[[bool], None]] = []  # told whether the model is ready; as `_open`
        self._metric_receiver: MetricReceiver
        self._alone = False
        self._pace = Pace()
        self._input_bytes = 0  # of a request of the last batch
        self._written: Segment | None = None  # where that lies
        self._begun = 0  # requests of the batch that a process died of
        self._heard = 0.0  # when a batch was sent, or a response came, for the last time (monotonic)
        super().__init__(load, config, lane, uses_gpu=uses_gpu, program=program, preload=preload, host=host)
        self.patience = self.deadlines.execution
        self._alone = self.config.one_by_one
        self._answers_text = any(spec.data_type is BYTES for spec in all_outputs(self.config))

    def __repr__(self) -> str:
        owed, asked = self.open_requests, self.open_calls
        return f"<IsolatedRequestsHandler {self._lane} in {self.child!r}, {owed} requests and {asked} calls open>"

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_calls(self) -> int:
        return len(self._call_server)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse | MmeError | None]:
        message, packing = self._packed(requests)
        with self._lock:
            self._revive()
            numbers = self._open_requests(self._batch + 1, requests)
            try:
                return self._answers(numbers, requests, *self._run(message, packing))
            except NONSENSE as error:
                return self._over(self._broken(error), numbers, self._begun)
            except ChildDiedError as death:
                return self._over(death, numbers, self._begun)
            except MmeError as error:
                return self._over(error, numbers)
            except BaseException:
                self._forget(numbers)
                raise

    def together(self) -> int:
        return self._pace.together(time.perf_counter_ns()) if self._alone else 1

    def send_requests(self, requests: Sequence[ModelRequest], watch: Watch) -> bool:
        if sum([size_of(array) for request in requests for array in request.inputs.values()]) > _SMALL:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._sent = self._send(requests, watch)
        except Exception:  # noqa: BLE001 - `execute_requests` will meet it again, and tell
            return False
        finally:
            if self._sent is None:
                self._lock.release()
        return self._sent is not None

    def take_answers(self) -> list[ModelResponse | MmeError | None] | None:
        sent = self._batch_sent()
        reply = self.child.heard()
        if reply is None:
            return None
        if self._takes_long(reply):
            sent.reply = reply
            return None
        try:
            answers = self._received(sent, reply)
        except NONSENSE:
            sent.reply = reply
            return None
        except BaseException:
            self._forget(sent.numbers)
            self._take_back()
            raise
        self._take_back()
        return answers

    def await_answers(self) -> list[ModelResponse | MmeError | None]:
        sent = self._batch_sent()
        try:
            return self._received(sent, sent.reply or self.child.answer(EXECUTING, look=self._give_time()))
        except NONSENSE as error:
            return self._over(self._broken(error), sent.numbers, self._begun)
        except ChildDiedError as death:
            self._mark_dead(death)
            return self._over(death, sent.numbers, self._begun)
        except BaseException:
            self._forget(sent.numbers)
            raise
        finally:
            self._take_back()

    def _give_time(self) -> Callable[[], None] | None:
        """Have each request of those that are executed one by one its own time."""
        if self._count_begun() == _ALL:
            return None
        counted = 1

        def look() -> None:
            nonlocal counted
            begun = self._count_begun()
            if begun > counted:
                counted = begun
                self.child.extend(self._limit)

        look()
        return look

    def due(self) -> float:
        """When it owes another response of the requests that are open, for clients that wait."""
        waits = any(
            request.responder is not None and not request.responder.is_cancelled()
            for request in list(self._open.values())
        )
        return self._heard + self._limit if waits else 0.0

    def end_overdue(self) -> None:
        """End the process if it has let them wait for too long; a batch under way has a limit of its own."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.child.alive and 0.0 < self.due() <= time.monotonic():
                why = f"it gave no answer within {self._limit:g} s"
                self._mark_dead(self.child.end(why, _RESPONDING, Kind.TIMED_OUT))
        finally:
            self._lock.release()

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        """Ask the model in the process; one that has died is started again by the next request."""
        child = self.child
        if not child.alive:
            done(True)
            return
        self._asking.append(done)
        self._channel.post(Frame({"ready": True}))
        if not child.alive:  # it may have parted before it could be asked, and there may be another by now
            self._told_ready(ready=False)

    def _told_ready(self, *, ready: bool) -> None:
        with contextlib.suppress(IndexError):  # nothing waits any more
            self._asking.pop()(ready)

    def _send(self, requests: Sequence[ModelRequest], watch: Watch) -> _Sent | None:
        if not self.child.alive or (self._channel_error is not None and self._channel_error[0] is self.child):
            return None
        message, packing = self._packed(requests)
        watch(self.child.descriptors)
        segment, fds = self._write(message, packing)
        numbers = self._open_requests(self._batch, requests)
        begun = False
        try:
            begun = self.child.begin(message, fds, self.patience)
        finally:
            if not begun:
                self._forget(numbers)
                self._unwrite(message, segment, fds)
        return _Sent(requests, numbers, segment) if begun else None

    def _batch_sent(self) -> _Sent:
        if self._sent is None:
            raise MmeError(Kind.INTERNAL, f"model '{self.config.name}': answers without a batch that was sent")
        return self._sent

    def _take_back(self) -> None:
        self._sent = None
        self._lock.release()

    def _received(self, sent: _Sent, reply: Message) -> list[ModelResponse | MmeError | None]:
        try:
            return self._answers(sent.numbers, sent.requests, reply, self._accept(reply, sent.segment))
        except MmeError as error:
            return self._over(error, sent.numbers)

    def _takes_long(self, reply: Message) -> bool:
        """Whether an answer is not for the event loop to take: it would have to wait, or to take many strings apart."""
        end = reply.get("end", 0)
        small = type(end) is int and end <= _FEW_STRINGS
        return ("metrics" in reply and self._metric_receiver.crowded) or (self._answers_text and not small)

    def _accept(self, reply: Message, segment: Segment) -> Array:
        if "metrics" in reply:
            self._metric_receiver.await_room(_NEWS_SECONDS)
            self._metric_receiver.take(reply["metrics"])
            del reply["metrics"]  # an answer that something else is wrong with is looked at once more
        return super()._accept(reply, segment)

    def _packed(self, requests: Sequence[ModelRequest]) -> tuple[Message, Packing]:
        packing = Packing(PROGRESS.size if self._alone else 0)
        message = pack_requests(requests, packing)
        if self._alone:
            message["alone"] = True
            self._input_bytes = packing.end // len(requests)
        return message, packing

    def _write(self, message: Message, packing: Packing) -> tuple[Segment, list[int]]:
        segment, fds = super()._write(message, packing)
        if self._alone:
            segment.memory()[: PROGRESS.size] = bytes(PROGRESS.size)
            self._written = segment
        return segment, fds

    def _mark_dead(self, death: ChildDiedError) -> None:
        """The requests that the process had begun end with it; those behind them are owed nothing by it."""
        self._begun = self._count_begun()
        if self._begun < _ALL:
            first = request_number(self._batch, self._begun)
            self._forget([number for number in list(self._open) if number >= first])
        self._pace.died(time.perf_counter_ns())
        super()._mark_dead(death)
        self._written = None  # whose memory is gone

    def _count_begun(self) -> int:
        """How many requests of the batch that is under way were begun, one at least."""
        if self._written is None or not self._written.out:
            return _ALL
        begun: int = PROGRESS.unpack_from(self._written.memory())[0]
        return max(begun, 1)

    def _over(self, error: MmeError, numbers: range, begun: int = _ALL) -> list[ModelResponse | MmeError | None]:
        """What becomes of a batch that fails as a whole, `begun` of it. MmeError: every request's error."""
        self._forget(numbers)
        if begun >= len(numbers):
            raise error
        never = [NotBegunError(self.config.name) for _ in numbers[begun:]]
        return [*[error.bare()] * begun, *never]

    def _open_requests(self, batch: int, requests: Sequence[ModelRequest]) -> range:
        numbers = range(request_number(batch, 0), request_number(batch, len(requests)))
        self._heard = time.monotonic()
        for number, request in zip(numbers, requests, strict=True):
            if request.responder is not None:
                self._open[number] = request
                if self._hears:
                    self._watch(number, request.responder)
        return numbers

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)

    def _answers(
        self, numbers: range, requests: Sequence[ModelRequest], reply: Message, shared: Array
    ) -> list[ModelResponse | MmeError | None]:
        """The batch's answers, without those of requests that had their last response before."""
        answers = unpack_answers(reply, shared, len(requests), self.config.name)
        if self._alone:
            outputs = reply["end"] // len(answers) - self._input_bytes
            self._pace.learn(int(reply["took"]), len(answers), max(self._input_bytes, outputs))
        return [
            None if answer is not None and request.responder is not None and not self._ends(number, answer) else answer
            for number, request, answer in zip(numbers, requests, answers, strict=True)
        ]

    def _ends(self, number: int, answer: ModelResponse | MmeError) -> bool:
        """Take a request's last response; False if it had that, as where a put-back batch crosses one sent unasked."""
        if answer is PUT_BACK and self.config.decoupled:
            return True
        return self._open.pop(number, None) is not None

    # -- the channel ---------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Child, ModelConfig]:
        self._loading = True
        begun = super()._begin()
        self._loading = False
        return begun

    def _connected(self, child: Child) -> None:
        name = self.config.name
        self._channel = Channel(child.take_events(), self._take, functools.partial(self._lost, child))
        self._call_server = ModelCallServer(name, self._channel)
        self._metric_receiver = MetricReceiver(METRICS, name)
        self._hears = False
        try:
            self._channel.start()
        except OSError as error:
            raise MmeError(Kind.UNAVAILABLE, f"model '{name}': its process can't be heard: {error}") from error

    def _disconnected(self) -> None:
        self._channel.drain()
        self._call_server.drop_all()
        self._metric_receiver.close()
        self._told_ready(ready=False)

    def _revive(self) -> None:
        self._mark_lost()
        super()._revive()

    def _fail_open(self, why: MmeError) -> None:
        self._disconnected()
        while self._open:
            _respond(self._open.popitem()[1], why, final=True)

    def _take(self, message: Message, shared: Array) -> None:
        """A frame came. What it raises ends the channel."""
        if "respond" in message:
            self._responded(message, shared)
        elif "metrics" in message:
            self._metric_receiver.take(message["metrics"])
        elif "hear" in message:
            self._hear()
        elif "ready" in message:
            self._told_ready(ready=bool(message["ready"]))
        elif {"call", "ask", "drop"} & message.keys():
            dropped = "drop" in message
            callers, waiting = ((), ()) if dropped else (self._callers(), self._waiting())
            self._call_server.take(message, shared, self.outside, callers, waiting)
        else:
            raise ProtocolError(f"a frame about nothing: {str(message)[:200]}")

    def _callers(self) -> tuple[str, ...]:
        """The models that wait for what the process does: for an answer to any of its requests."""
        callers = dict.fromkeys(caller for request in self._under_way() for caller in request.callers)
        return (*callers, self.config.name)

    def _waiting(self) -> tuple[Responder, ...]:
        return tuple(request.responder for request in self._under_way() if request.responder is not None)

    def _under_way(self) -> list[ModelRequest]:
        """The open requests, without those of a batch that are executed one by one and not begun yet."""
        begun = self._count_begun()
        if begun == _ALL:
            return list(self._open.values())
        end = request_number(self._batch, begun)
        return [request for number, request in list(self._open.items()) if number < end]

    def _responded(self, message: Message, shared: Array) -> None:
        says = "error" in message or "outputs" in message
        response = answer_from(message if says else None, shared, self.config.name)
        final = bool(message["final"]) or not self.config.decoupled
        number = message["respond"]
        self._heard = time.monotonic()
        if self.config.decoupled:
            self.child.extend(self._limit)
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

    def _lost(self, child: Child, error: Exception | None) -> None:
        """The channel ended, and with it the process. Can't wait: a batch, or the load, hears of it itself."""
        self._channel_error = child, error
        if child.alive and not self._closed.is_set() and not self._loading:
            threading.Thread(target=self._on_death, name="model death", daemon=True).start()

    def _on_death(self) -> None:
        with self._lock:
            self._mark_lost()

    def _mark_lost(self) -> None:
        if self._channel_error is None:
            return
        (child, error), self._channel_error = self._channel_error, None
        if child is not self.child or not child.alive:
            return
        doing = _RESPONDING if self._open else IDLE
        if error is None:
            self._mark_dead(child.death(doing))
        elif isinstance(error, DeafError):
            self._mark_dead(child.end(str(error), doing))
        elif isinstance(error, ProtocolError):
            self._mark_dead(child.broke(error, doing))
        else:
            self._mark_dead(child.end(f"it sent a frame of another form: {error!r}", doing))


def _respond(request: ModelRequest, response: ModelResponse | MmeError | None, *, final: bool) -> None:
    if request.responder is not None:
        request.responder.send(response, final=final)


def _owner(response: ModelResponse, shared: Array) -> Array:
    """What lives as long as a response's tensors are used: those of strings are copies."""
    arrays = list(response.outputs.values())
    if any(not array.dtype.hasobject for array in arrays):
        return shared
    return arrays[0] if arrays[0].base is None else arrays[0].base
