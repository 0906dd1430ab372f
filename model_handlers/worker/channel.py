"""The serving process's ends of the channels: what workers say unasked, what they ask, what they count.

Small frames are taken on a lent event loop (`Listener.lend`); large or wrong ones, and ends, on a thread, and nothing
else of that channel meanwhile, nor, for a second at most, while its unwritten responses take much memory. What came is
handed to the channel's owner on the thread that reads, which must not be kept. Nothing that a worker says is trusted:
metrics' names are checked, counters never fall, nothing grows without bounds.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from model_handlers.errors import Kind, MmeError, invalid_argument
from model_handlers.metrics import MetricKind
from model_handlers.model_calls import Ambient, Caller, ModelCall, Override
from model_handlers.requests import ModelResponse
from model_handlers.system.priority import usual_priority
from model_handlers.tensor import BY_NAME, estimated_size
from model_handlers.worker.memory import Frame, FrameReader
from model_handlers.worker.wire import Packing, ProtocolError, error_fields, unpack

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterator

    from model_handlers.metrics import ModelMetric, ModelMetrics
    from model_handlers.model_calls import Outside
    from model_handlers.requests import Responder
    from model_handlers.tensor import Array, DataType
    from model_handlers.worker.wire import Message


_log = logging.getLogger("mme.isolation")
_MAX_UNSENT = 256 << 20  # bytes of frames that wait for a child to read; what lies in descriptors does not count
_PIECE = 8 << 10  # bytes of a channel that are read in one go: sixty responses, or a millisecond
_IN_A_TURN = 4  # channels of which the loop reads one
_MOST_ALIVE = 64 << 20  # bytes of large responses of a model in memory
_HELD_SECONDS = 1.0


class Poller(Protocol):
    """What may keep the loop awake for what comes next."""

    def arm(self) -> None: ...
    def disarm(self) -> None: ...


class WorkerLoop:
    """The event loop that workers are heard on, and threads for what it can't wait for."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Callable[[Callable[[], object]], None], poll: Poller
    ) -> None:
        self.loop = loop
        self.run = run  # has a thread do something, soon
        self.arm, self.disarm = poll.arm, poll.disarm


_home: Ambient[WorkerLoop] = Ambient("the loop of the processes that the load under way starts")
at_home = _home.given  # what is loaded inside may start processes, which are heard on this loop
home_of_load = _home.get


class DeafError(Exception):
    """The other side does not take what it is told, and this is why."""


class Channel:
    """One worker's channel, from `start` to `close`."""

    def __init__(
        self,
        end: socket.socket,  # our end of the socket; closed with the channel
        take: Callable[[Message, Array], None],  # takes each frame that came; what it raises ends the channel
        # told once that nothing more will come, unless `close` was called: None at an end, a `DeafError`, else what was
        # wrong with what came. On any thread, which must not wait.
        lost: Callable[[Exception | None], None],
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._take = take
        self._lost = lost
        self._reader = FrameReader()
        self._alive = 0  # bytes of what was kept, those included that were let go of since they were counted last
        self._let_go: deque[int] = deque()
        self._waits = False  # until memory is free
        self._unsent: deque[Frame] = deque()
        self._unsent_size = 0
        self._lock = threading.Lock()  # of what is sent, and of the end
        self._reading = threading.Lock()
        self._open = True
        self._listened = False
        self._wants_room = False
        self._wrong: Exception | None = None  # with what came, for the thread to tell

    def __repr__(self) -> str:
        return f"<Channel: {'open' if self._open else 'closed'}, {self.unsent} bytes unsent>"

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def unsent(self) -> int:
        return self._unsent_size

    def start(self) -> None:
        """Have frames taken from now on. Raises OSError: the system has no descriptor left; the channel is closed."""
        try:
            with self._lock:  # the first frame may come before this is done
                LISTENER.add(self._end.fileno(), self)
                self._listened = True
        except BaseException:
            self.close()
            raise

    def post(self, frame: Frame) -> None:
        """Send a frame, now or as soon as the other side reads; it is lost if that has gone."""
        error = None
        with self._lock:
            if not self._open:
                frame.close()
                return
            self._unsent.append(frame)
            self._unsent_size += len(frame.data)
            if len(self._unsent) == 1:
                error = self._send()
            elif self._unsent_size > _MAX_UNSENT:
                error = DeafError(f"it does not read what it is told, of which {self._unsent_size >> 20} MiB wait")
        if error is not None:
            self._gone(error)

    def close(self) -> bool:
        """Neither send nor read any more. False if that was so already."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
            if self._listened:
                LISTENER.remove(self._end.fileno())
            self._end.close()
            self._reader.close()
            self._drop_unsent()
            return True

    def has_room(self) -> None:
        """Send on: the socket takes something again. Where channels are read."""
        with self._lock:
            error = self._send() if self._open else None
        if error is not None:
            self._gone(error)

    def read(self) -> None:
        """Take what is there, or the end. On the listening thread."""
        with self._reading:
            self._read()

    def read_small(self) -> bool:
        """Take what is there on an event loop; False leaves the rest to `read`."""
        if not self._reading.acquire(blocking=False):
            return True  # `drain` takes everything
        try:
            with self._lock:
                more = self._open and self._reader.receive(self._end, _PIECE)
            self._take_frames(small=True)
        except BlockingIOError:
            return True
        except Exception as error:  # noqa: BLE001 - as below
            self._wrong = error
            return False
        else:
            return more and not self._reader.keeps_large
        finally:
            self._reading.release()

    def keep(self, owner: object, size: int) -> None:
        """Count so many bytes of memory as long as their owner lives. Where channels are read."""
        self._alive += size
        weakref.finalize(owner, self._freed, size).atexit = False

    def is_full(self) -> bool:
        """Return whether more is kept than may be; if so, the thread is woken whenever that becomes less."""
        self._waits = True  # first: what is let go of from now on is told
        while self._let_go:
            self._alive -= self._let_go.popleft()
        self._waits = self._alive > _MOST_ALIVE
        return self._waits

    def _freed(self, size: int) -> None:
        """On any thread, in the middle of anything."""
        self._let_go.append(size)
        if self._waits:
            LISTENER.wake()

    def drain(self) -> None:
        """Take what has come, to the end of it, and close: for a worker that is gone."""
        with self._reading:
            while self._read():
                pass
        self.close()

    def _read(self) -> bool:
        if self._wrong is not None:
            self._gone(self._wrong)
            return False
        try:
            if self._reader.keeps_large:
                self._take_frames()
                return True
            with self._lock:
                more = self._open and self._reader.receive(self._end, _PIECE)
            self._take_frames()
        except BlockingIOError:
            return False
        except Exception as error:  # noqa: BLE001 - a worker may send anything, and others are read here too
            self._gone(error)
            return False
        if not more:
            self._gone(None)
        return more

    def _take_frames(self, *, small: bool = False) -> None:
        while (frame := self._reader.next(small=small)) is not None:
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
                self._want_room(wants=True)
                return None
            except ConnectionError:  # the other side is gone, which its end of the stream tells
                self._drop_unsent()
                break
            except OSError as error:  # too many descriptors under way, or no memory
                return DeafError(f"nothing can be sent to it: {error}")
            if not frame.data:
                self._unsent.popleft()
        self._want_room(wants=False)
        return None

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft().close()
        self._unsent_size = 0

    def _want_room(self, *, wants: bool) -> None:
        if wants != self._wants_room:
            self._wants_room = wants
            LISTENER.wants_room(self._end.fileno(), wants=wants)


class _Listener:
    """What reads the channels: a thread, started with the first of them, and the event loops that lend themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._bell = -1  # which wakes the thread
        self._thread: threading.Thread | None = None
        self._channels: dict[int, Channel] = {}
        self._masks: dict[int, int] = {}
        self._away: set[int] = set()  # channels that only the thread reads
        self._aside: deque[tuple[int, Channel]] = deque()  # those whose turn there has not come
        self._full: list[tuple[int, Channel, float]] = []  # those that are full, and until when they are not read
        self._lent: list[asyncio.AbstractEventLoop] = []
        self._loops: list[asyncio.AbstractEventLoop] = []  # those of them that have begun to read
        self._process = 0  # that of the last loop

    @property
    def is_copy(self) -> bool:
        """Whether this process was forked from one with loops: nothing is read here."""
        return bool(self._lent) and self._process != os.getpid()

    def lend(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have channels read on a loop, until it is taken back."""
        self._process = os.getpid()
        with self._lock:
            self._lent.append(loop)
            if self._epoll is not None:
                self._ask(loop, self._epoll)

    def take_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have them read without the loop. On the loop."""
        with self._lock:
            if loop in self._lent:
                self._lent.remove(loop)
            if self._epoll is not None and loop in self._loops and loop not in self._lent:
                self._loops.remove(loop)
                loop.remove_reader(self._epoll.fileno())
                os.eventfd_write(self._bell, 1)

    def add(self, fd: int, channel: Channel) -> None:
        with self._lock:
            epoll = self._epoll or self._begin()
            if self._thread is None:
                self._run(epoll)
            if any(loop.is_closed() for loop in self._loops):  # and its engine never was
                self._loops = [loop for loop in self._loops if not loop.is_closed()]
                os.eventfd_write(self._bell, 1)
            epoll.register(fd, select.EPOLLIN)
            self._channels[fd], self._masks[fd] = channel, select.EPOLLIN

    def remove(self, fd: int) -> None:
        with self._lock:
            del self._channels[fd], self._masks[fd]
            if fd in self._away:
                self._away.remove(fd)
            elif self._epoll is not None:
                self._epoll.unregister(fd)

    def wants_room(self, fd: int, *, wants: bool) -> None:
        with self._lock:
            self._masks[fd] = select.EPOLLIN | (select.EPOLLOUT if wants else 0)
            if self._epoll is not None and fd not in self._away:
                self._epoll.modify(fd, self._masks[fd])

    def _begin(self) -> select.epoll:
        self._epoll, self._bell = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC)
        for loop in self._lent:
            self._ask(loop, self._epoll)
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        self._thread = threading.Thread(target=self._main, args=(epoll, self._bell), name="model events", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """End the thread, which the next channel begins again; False where a loop is lent or a channel is left."""
        with self._lock:
            if self._lent or self._channels:
                return False
            thread, self._thread = self._thread, None
        if thread is not None:
            self.wake()
            thread.join()
        return True

    def wake(self) -> None:
        """Have the thread look again. Takes no lock, and may be called in the middle of anything."""
        os.eventfd_write(self._bell, 1)

    # -- on a loop -----------------------------------------------------------------------------------------------

    def _ask(self, loop: asyncio.AbstractEventLoop, epoll: select.epoll) -> None:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._hear, loop, epoll)

    def _hear(self, loop: asyncio.AbstractEventLoop, epoll: select.epoll) -> None:
        with self._lock:
            if loop in self._lent and loop not in self._loops:
                self._loops.append(loop)
                loop.add_reader(epoll.fileno(), self._read_small, epoll)
                os.eventfd_write(self._bell, 1)

    def _read_small(self, epoll: select.epoll) -> None:
        for fd, channel in self._ready(epoll, _IN_A_TURN):
            if not channel.read_small():
                self._set_aside(fd, channel)

    def _set_aside(self, fd: int, channel: Channel) -> None:
        with self._lock:
            if self._epoll is None or self._channels.get(fd) is not channel or fd in self._away:
                return
            self._epoll.unregister(fd)
            self._away.add(fd)
        self._aside.append((fd, channel))
        os.eventfd_write(self._bell, 1)

    def _take_again(self, fd: int, channel: Channel) -> None:
        with self._lock:
            if self._epoll is not None and self._channels.get(fd) is channel and fd in self._away:
                self._away.remove(fd)
                self._epoll.register(fd, self._masks[fd])

    # -- on the thread -------------------------------------------------------------------------------------------

    def _main(self, epoll: select.epoll, bell: int) -> None:
        usual_priority()  # not that of the load that was the first to need it
        lent, alone = select.poll(), select.poll()
        for waits in (lent, alone):
            waits.register(bell, select.POLLIN)
        alone.register(epoll.fileno(), select.POLLIN)
        while self._thread is threading.current_thread():
            if bell in dict((lent if self._loops else alone).poll(self._patience())):
                os.eventfd_read(bell)
            full, self._full = self._full, []
            for each in full:
                self._give_back(*each)
            while self._aside:
                fd, channel = self._aside.popleft()
                self._read(channel)
                self._give_back(fd, channel, time.monotonic() + _HELD_SECONDS)
            if not self._loops:
                for _, channel in self._ready(epoll):
                    self._read(channel)

    def _patience(self) -> int | None:
        """Milliseconds until the first of the full ones is read again in any case."""
        if not self._full:
            return None
        return max(math.ceil((min(until for _, _, until in self._full) - time.monotonic()) * 1e3), 0)

    def _give_back(self, fd: int, channel: Channel, until: float) -> None:
        if channel.is_full() and time.monotonic() < until:
            self._full.append((fd, channel, until))
            return
        for loop in self._loops[:1]:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._take_again, fd, channel)
                return
        self._take_again(fd, channel)

    def _read(self, channel: Channel) -> None:
        with _logged():
            channel.read()

    def _ready(self, epoll: select.epoll, most: int = -1) -> Iterator[tuple[int, Channel]]:
        for fd, events in epoll.poll(0, most):
            channel = self._channels.get(fd)
            if channel is None:
                continue
            if events & select.EPOLLOUT:
                with _logged():
                    channel.has_room()
            if events & ~select.EPOLLOUT:
                yield fd, channel


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - as it says
        _log.exception("a model's channel could not be served")


LISTENER = _Listener()


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
        self._left = self._written = 0  # answers left to the other thread, and those that it has written

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        if final:
            self._calls.pop(self.number, None)
            self._ended()
        if self._left > self._written or _is_large(response):
            self._left += 1
            WRITER.submit(self._write, response, final=final)
        else:
            self._post(response, final=final)

    def _write(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        try:
            self._post(response, final=final)
        except Exception:  # noqa: BLE001 - it is heard of nowhere else
            _log.exception("an answer could not be handed to the model that called")
        finally:
            self._written += 1

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


class _Writer:
    """The thread on which large replies are written, begun with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[..., None], *arguments: Any, **named: Any) -> None:
        with self._lock:
            if self._thread is None:  # not with the priority of the load that was the first to need it
                self._thread = ThreadPoolExecutor(1, "model replies", usual_priority)
            self._thread.submit(function, *arguments, **named)

    def end(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


WRITER = _Writer()


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
        if kind is MetricKind.HISTOGRAM:
            counted = [now - before for now, before in zip(more, self._counts, strict=True)]
            if any(type(count) is not int or count < 0 for count in counted):
                raise ValueError(f"a histogram that counted {str(more)[:200]}")
            metric.merge(counted, grown)
            self._counts = more
        elif kind is MetricKind.GAUGE and more != self._sets:
            metric.set(value)
            self._sets = more
        elif kind is MetricKind.COUNTER and not 0 <= grown < math.inf:
            raise ValueError(f"a counter that comes to {str(value)[:50]}")
        else:
            metric.add(grown, self._owner)
        self._value = value
