"""The serving process's ends of the channels: what workers say unasked, what they ask, what they count.

The event loop takes small frames, a thread large ones, and nothing else of that channel is read meanwhile, nor, for a
second at most, while its unwritten responses take much memory. What came is handed to the channel's owner where it was
read, which must not wait. Nothing that a worker says is trusted: metrics' names are checked, counters never fall,
nothing grows without bounds.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.metrics import MetricKind
from model_handlers.model_calls import Caller, ModelCall, Override
from model_handlers.requests import ModelResponse
from model_handlers.tensor import BY_NAME, estimated_size
from model_handlers.worker.memory import Frame, FrameReader
from model_handlers.worker.wire import Packing, ProtocolError, error_fields, unpack

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from model_handlers.executor import ExecutorLoop
    from model_handlers.metrics import ModelMetric, ModelMetrics
    from model_handlers.model_calls import Outside
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array, DataType
    from model_handlers.worker.wire import Message


_log = logging.getLogger("mme.isolation")
_MAX_UNSENT = 256 << 20  # bytes of frames that wait for a child to read; what lies in descriptors does not count
_PIECE = 4 << 10  # bytes of a channel that are read in one turn of the loop: thirty responses, or half a millisecond
_MOST_ALIVE = 64 << 20  # bytes of large responses of a model in memory
_HELD_SECONDS = 1.0


class DeafError(Exception):
    """The other side does not take what it is told, and this is why."""


class Channel:
    """One worker's channel, from `start` to `close`. What it watches is changed on the loop alone."""

    def __init__(
        self,
        end: socket.socket,  # our end of the socket; closed with the channel
        home: ExecutorLoop,
        # takes each frame that came, and its tensors' bytes: on the loop, large ones on a thread, in their order. What
        # it raises ends the channel.
        take: Callable[[Message, Array], None],
        # told once that nothing more will come, unless `close` was called: None at an end, a `DeafError`, else what was
        # wrong with what came. On any thread, which must not wait.
        lost: Callable[[Exception | None], None],
    ) -> None:
        end.setblocking(False)
        self.home = home
        self._end = end
        self._ends = select.poll()  # tells whether the other side has closed
        self._ends.register(end, 0)
        self._take = take
        self._lost = lost
        self._reader = FrameReader()
        self._reading = threading.Lock()
        self._held: asyncio.TimerHandle | None = None  # while nothing is read
        self._alive = 0  # bytes of what was kept, those included that were let go of since they were counted last
        self._let_go: deque[int] = deque()
        self._waits = False  # until memory is free
        self._unsent: deque[Frame] = deque()
        self._unsent_size = 0
        self._lock = threading.Lock()  # of what is sent, and of the end
        self._open = True

    def __repr__(self) -> str:
        return f"<Channel: {'open' if self._open else 'closed'}, {self.unsent} bytes unsent>"

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def unsent(self) -> int:
        return self._unsent_size

    def start(self) -> None:
        """Have frames taken from now on."""
        self._on_loop(self._listen)

    def post(self, frame: Frame) -> None:
        """Send a frame, now or as soon as the other side reads; it is lost if that has gone. On any thread."""
        error = None
        with self._lock:
            if not self._open:
                frame.close()
                return
            self._unsent.append(frame)
            self._unsent_size += len(frame.data)
            if len(self._unsent) == 1:
                error = self._send()
                if self._unsent:
                    self._on_loop(self._await_room)
            elif self._unsent_size > _MAX_UNSENT:
                error = DeafError(f"it does not read what it is told, of which {self._unsent_size >> 20} MiB wait")
        if error is not None:
            self._gone(error)

    def close(self) -> bool:
        """Neither send nor read any more. False if that was so already. On any thread."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
            self._drop_unsent()
        self._on_loop(self._unwatch)
        return True

    def keep(self, owner: object, size: int) -> None:
        """Count so many bytes of memory as long as their owner lives. Where it is read."""
        self._alive += size
        weakref.finalize(owner, self._freed, size).atexit = False

    def drain(self) -> None:
        """Take what has come, to the end of it, and close: for a worker that is gone. On a thread that may wait."""
        error = None
        with self._reading:
            try:
                self._take_frames()
                while self._receive():
                    self._take_frames()
            except BlockingIOError:  # something else holds the other side
                self.close()
            except Exception as wrong:  # noqa: BLE001 - a worker may send anything
                error = wrong
        self._gone(error)

    def _on_loop(self, work: Callable[[], None]) -> None:
        try:
            self.home.loop.call_soon_threadsafe(work)
        except RuntimeError:  # it is closed, and watches nothing any more
            if not self._open:
                self._close_end()

    def _close_end(self) -> None:
        with self._lock:
            self._end.close()
            self._reader.close()

    # -- on the loop -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._open:
            try:
                self.home.loop.add_reader(self._end.fileno(), self._read)
            except OSError as error:  # the system has no descriptor left
                self._gone(error)

    def _unwatch(self) -> None:
        if self._held is not None:
            self._held.cancel()
        self.home.loop.remove_reader(self._end.fileno())
        self.home.loop.remove_writer(self._end.fileno())
        self._close_end()

    def _await_room(self) -> None:
        if self._open:
            self.home.loop.add_writer(self._end.fileno(), self._send_on)

    def _send_on(self) -> None:
        """The socket takes something again."""
        with self._lock:
            error = self._send() if self._open else None
            if not self._unsent:
                self.home.loop.remove_writer(self._end.fileno())
        if error is not None:
            self._gone(error)

    def _read(self) -> None:
        """Take small frames that are there; a large one is left to a thread, and nothing is read meanwhile."""
        if not self._reading.acquire(blocking=False):
            return  # `drain` takes everything
        error = None
        try:
            more = self._receive()
            self._take_frames(small=True)
        except BlockingIOError:
            return
        except Exception as wrong:  # noqa: BLE001 - as in `drain`
            error, more = wrong, False
        finally:
            self._reading.release()
        if error is not None or not (more or self._reader.keeps_large):
            self._gone(error)
        elif self._reader.keeps_large:
            self.home.loop.remove_reader(self._end.fileno())
            self.home.run(self._take_large)
        elif self._ends.poll(0):  # which uvloop may tell once alone, whatever is still there
            self.home.loop.call_soon(self._read)

    def _hold(self) -> None:
        """Read on once what was kept is no longer too much, a second from now in any case."""
        if self._open:
            self._held = self.home.loop.call_later(_HELD_SECONDS, self._read_on)
            self._read_on_if_free()

    def _read_on_if_free(self) -> None:
        if self._held is not None and not self._is_full():
            self._read_on()

    def _read_on(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self._listen()

    def _is_full(self) -> bool:
        """Whether more is kept than may be; if so, whatever is let go of has the loop look again."""
        self._waits = True  # first: what is let go of from now on is told
        while self._let_go:
            self._alive -= self._let_go.popleft()
        self._waits = self._alive > _MOST_ALIVE
        return self._waits

    # -- anywhere ----------------------------------------------------------------------------------------------------

    def _freed(self, size: int) -> None:
        """On any thread, in the middle of anything."""
        self._let_go.append(size)
        if self._waits:
            with suppress(RuntimeError):  # the loop is closed
                self.home.loop.call_soon_threadsafe(self._read_on_if_free)

    def _take_large(self) -> None:
        """Take what came on a thread of its own: long messages would keep the event loop from others."""
        error = None
        with self._reading:
            try:
                self._take_frames()
            except Exception as wrong:  # noqa: BLE001 - as in `drain`
                error = wrong
        if error is not None:
            self._gone(error)
        else:
            self._on_loop(self._hold)

    def _receive(self) -> bool:
        with self._lock:
            return self._open and self._reader.receive(self._end, _PIECE)

    def _take_frames(self, *, small: bool = False) -> None:
        while self._open and (frame := self._reader.next(small=small)) is not None:
            self._take(*frame)

    def _gone(self, error: Exception | None) -> None:
        if self.close():
            self._lost(error)

    def _send(self) -> DeafError | None:
        """As much as the socket takes; what is wrong with it, if anything is. Under the lock."""
        while self._unsent:
            frame = self._unsent[0]
            try:
                self._unsent_size -= frame.send(self._end)
            except BlockingIOError:
                return None
            except ConnectionError:  # the other side is gone, which its end of the stream tells
                self._drop_unsent()
                return None
            except OSError as error:  # too many descriptors under way, or no memory
                return DeafError(f"nothing can be sent to it: {error}")
            if not frame.data:
                self._unsent.popleft()
        return None

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft().close()
        self._unsent_size = 0


_LARGE = 1 << 20  # bytes: half a millisecond


class ModelCallServer:
    """What one worker has asked and is not answered yet. `take` waits for nothing."""

    def __init__(self, model: str, channel: Channel) -> None:
        self._model = model
        self._channel = channel
        self._calls: dict[int, _ReplySender] = {}  # single operations of a dict need no lock

    def __len__(self) -> int:
        return len(self._calls)

    def take(
        self,
        message: Message,
        shared: Array,
        outside: Outside | None,
        callers: tuple[str, ...],
        waiting: tuple[Responder, ...] = (),
    ) -> None:
        """Take a question of a worker, or the news that nothing waits for the answer to one; `outside` may be None.

        `callers` wait for what the worker executes, its own model the last. Raises ProtocolError, LookupError,
        TypeError, ValueError, OverflowError: no worker of ours asks so.
        """
        if "drop" in message:
            self._drop(int(message["drop"]))
        elif outside is None:
            number = message["call"] if "call" in message else message["ask"]
            error = MmeError(Kind.UNSUPPORTED, f"model '{self._model}' is served where it can call no other model")
            self._channel.post(Frame({"reply": number, "final": True, "error": error_fields(error)}))
        elif "call" in message:
            call = _call_in(message, shared, callers, waiting)
            replier = _ReplySender(int(message["call"]), self._channel, self._calls)
            self._calls[replier.number] = replier
            outside.infer(call, replier)
        else:
            _put(message, shared, outside, callers, self._channel)

    def drop_all(self) -> None:
        for number in list(self._calls):
            self._drop(number)

    def _drop(self, number: int) -> None:
        replier = self._calls.pop(number, None)
        if replier is not None:
            replier.cancel()


class _ReplySender(Caller):
    """Sends what a called model answers to the worker that called it. Called by one thread at a time.

    A thread writes a large answer, since the caller is an event loop, and what comes behind it.
    """

    def __init__(self, number: int, channel: Channel, calls: dict[int, _ReplySender]) -> None:
        super().__init__()
        self.number = number
        self._channel = channel
        self._calls = calls
        self._lock = threading.Lock()
        self._left: deque[tuple[ModelResponse | MmeError | None, bool]] = deque()  # what a thread writes, the first now

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if final:
            self._calls.pop(self.number, None)
            self._ended()
        with self._lock:
            begins = not self._left
            leaves = not begins or _is_large(response)
            if leaves:
                self._left.append((response, final))
        if not leaves:
            self._post(response, final=final)
        elif begins:
            self._channel.home.run(self._write)

    def _write(self) -> None:
        """Post responses on a thread until none is left: writing one may wait for the model's process."""
        more = True
        while more:
            response, final = self._left[0]
            try:
                self._post(response, final=final)
            except Exception:  # noqa: BLE001 - it is heard of nowhere else
                _log.exception("an answer could not be handed to the model that called")
            with self._lock:
                self._left.popleft()
                more = bool(self._left)

    def _post(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if self._cancelled:
            return
        try:
            frame = self._frame(response, final=final)
        except Exception as error:  # noqa: BLE001 - the caller must be answered, whatever can't be sent
            frame = self._frame(_unsendable(error), final=True)
            self._calls.pop(self.number, None)
            self.cancel()
        self._channel.post(frame)

    def _frame(self, response: ModelResponse | MmeError | None, *, final: bool) -> Frame:
        message: Message = {"reply": self.number, "final": final}
        if isinstance(response, MmeError):
            return Frame(message | {"error": error_fields(response)})
        if response is None:
            return Frame(message)
        packing = Packing()
        message["outputs"] = {name: packing.add(array, f"output '{name}'") for name, array in response.outputs.items()}
        message["types"] = {name: kind.name for name, kind in response.data_types.items()}
        message["parameters"] = dict(response.parameters)
        return Frame(message, packing)


def _is_large(response: ModelResponse | MmeError | None) -> bool:
    return isinstance(response, ModelResponse) and sum(map(estimated_size, response.outputs.values())) > _LARGE


def _unsendable(error: Exception) -> MmeError:
    if isinstance(error, MmeError):
        return error
    return MmeError(Kind.UNAVAILABLE, f"a response can't be handed to the model that called: {error}")


def _put(message: Message, shared: Array, outside: Outside, callers: tuple[str, ...], channel: Channel) -> None:
    number, what, model = int(message["ask"]), message["what"], str(message["model"])

    def done(answer: bool | MmeError) -> None:  # noqa: FBT001 - see Done
        reply = {"error": error_fields(answer)} if isinstance(answer, MmeError) else {"value": answer}
        channel.post(Frame({"reply": number, "final": True, **reply}))

    if what == "load":
        outside.load(model, _override_in(message, shared, model), callers, done)
    elif what == "unload":
        outside.unload(model, bool(message.get("dependents")), callers, done)
    elif what == "ready":
        outside.is_ready(model, _version(message["version"]), done)
    else:
        raise ProtocolError(f"a question about nothing: {str(what)[:200]}")


def _override_in(message: Message, shared: Array, model: str) -> Override | None:
    if "config" not in message:
        return None
    files = {str(key): _bytes_in(shared, model, str(key), place) for key, place in dict(message["files"]).items()}
    return Override(str(message["config"]), files)


def _bytes_in(shared: Array, model: str, name: str, place: Any) -> bytes:
    array = unpack(shared, place, name, model)
    if array.dtype != np.uint8:
        raise ProtocolError(f"file '{name[:200]}' of model '{model[:200]}' in the form of {place[0]}")
    return array.tobytes()


def _version(version: Any) -> int | None:
    return None if version is None else int(version)


def _call_in(message: Message, shared: Array, callers: tuple[str, ...], waiting: tuple[Responder, ...]) -> ModelCall:
    model = str(message["model"])
    correlation_id = message["correlation_id"]
    return ModelCall(
        model,
        _version(message["version"]),
        tuple(_input_in(shared, model, *fields) for fields in message["inputs"]),
        tuple(map(str, message["outputs"])),
        bool(message["decoupled"]),
        callers,
        str(message["id"]),
        dict(message["parameters"]),
        int(message["timeout_us"]),
        correlation_id if isinstance(correlation_id, str) else int(correlation_id),
        int(message["flags"]),
        waiting,
        str(message["trace"]),
    )


def _input_in(shared: Array, model: str, name: Any, kind: Any, place: Any) -> tuple[str, DataType, Array]:
    data_type, array = BY_NAME[kind], unpack(shared, place, name, model)
    if array.dtype != data_type.dtype:  # it would be joined with other clients' inputs of that type
        raise ProtocolError(f"input '{str(name)[:200]}' of model '{model[:200]}' as {kind} in the form of {place[0]}")
    return str(name), data_type, array


_metrics_log = logging.getLogger("mme.metrics")
_MOST_SHOWN = 1000  # metrics of one process
_MOST_KNOWN = 20_000  # twice as many as a process makes
_MOST_WARNINGS = 10


class MetricReceiver:
    """The metrics of one process, where they stand there."""

    def __init__(self, metrics: ModelMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._known: dict[int, _ToldMetric | None] = {}  # None: refused
        self._warnings = 0

    def take(self, told: Any) -> None:
        """Add what it tells: `ModelMetrics.changes`. LookupError, TypeError, ValueError, OverflowError: malformed."""
        for number, value, more, *description in told:
            if description:
                if len(self._known) >= _MOST_KNOWN:
                    raise ValueError(f"more than {_MOST_KNOWN} metrics")
                self._known[int(number)] = self._met(*description[0])
            known = self._known[number]
            if known is not None:
                known.take(float(value), more)

    def close(self) -> None:
        self._metrics.release(self)

    def _met(self, name: Any, description: Any, kind: Any, labels: Any, buckets: Any) -> _ToldMetric | None:
        try:
            if len(self._known) >= _MOST_SHOWN:
                raise invalid_argument(f"'{name}' is one too many: {_MOST_SHOWN} metrics of a process are shown")
            family = self._metrics.family(name, description, MetricKind(kind))
            metric = self._metrics.metric(family, dict(labels), tuple(map(float, buckets)), self)
        except MmeError as error:
            self._warnings += 1
            if self._warnings <= _MOST_WARNINGS:
                _metrics_log.warning("a metric is not shown: %s", error, extra={"target_model": self._model})
            return None
        return _ToldMetric(metric, self)


class _ToldMetric:
    """A metric that several processes tell of, and where it stood in one of them when that told of it last."""

    def __init__(self, metric: ModelMetric, owner: MetricReceiver) -> None:
        self._metric = metric
        self._owner = owner
        self._value = 0.0
        self._sets: Any = 0
        self._counts = [0] * len(metric.counts)

    def take(self, value: float, more: Any) -> None:
        metric, kind = self._metric, self._metric.family.kind
        grown = value - self._value if math.isfinite(value) else value
        if kind is MetricKind.COUNTER and not 0 <= grown < math.inf:
            raise ValueError(f"a counter that comes to {str(value)[:50]}")
        if kind is MetricKind.GAUGE and more != self._sets:
            metric.set(value)
            self._sets = more
        elif kind is MetricKind.HISTOGRAM:
            counted = [now - before for now, before in zip(more, self._counts, strict=True)]
            if any(type(count) is not int or count < 0 for count in counted):
                raise ValueError(f"a histogram that counted {str(more)[:200]}")
            metric.add(grown, self._owner, counted)
            self._counts = more
        else:
            metric.add(grown, self._owner)
        self._value = value
