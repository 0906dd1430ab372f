"""Pools of threads that grow with the work there is, and what the threads of loads and the event loop tell each other.

`Thread.start` waits until the new thread runs, which takes milliseconds where the processors are busy: nothing for an
event loop. So pools leave that to a thread which does nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, ParamSpec, TypeVar, cast

from model_handlers.errors import MmeError
from model_handlers.system.threads import CancelToken, advised, start_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

    from _typeshed import WriteableBuffer


P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("mme.threads")
_cache_log = logging.getLogger("mme.cache")
_AGAIN_SECONDS = 0.1  # until a thread is tried again for which the system had no room
_IDLE_SECONDS = 10.0  # after which a thread without work ends
_SLICE_SECONDS = 0.0001
_REST_SECONDS = 0.001  # no less is known to the loop's timers
LOAD_PATIENCE_SECONDS = 10.0  # that a load waits for its thread


def _nothing() -> None: ...


class ThreadPool(Executor):
    """Threads for work that takes long: as many as there is work at the moment. Work is handed over on any thread.

    The thread that became idle last takes the next piece of work, since its memory is warm; so the others end in time.
    Where none is idle one is started. Until it runs, the work waits for it or for the first that becomes idle: where
    the system has no room for another thread, those that there are do the work.

    Raises:
        MmeError: UNAVAILABLE, there is no room for the one that it keeps.
    """

    def __init__(
        self,
        name: str,  # what threads are called, with a number behind it
        initializer: Callable[[], None] = _nothing,  # called on each thread first
        *,
        most: int = sys.maxsize,
        # whether one thread is there from the beginning and never ends, so that work gets done on a system without room
        # for threads
        keeps_one: bool = False,
        # after which a thread without work ends; 0 for a fresh thread for each piece of work
        idle_seconds: float = _IDLE_SECONDS,
        # seconds that submitted work waits for a thread for which the system has no room; then that is its error
        patience: float = math.inf,
    ) -> None:
        self._name = name
        self._initializer = initializer
        self.most = most
        self._least = int(keeps_one)
        self._idle_seconds = idle_seconds
        self._patience = patience
        self._started = 0
        # What idle threads listen to; the last is the warmest. Appended to under the lock, while no work waits; work
        # that comes takes one without it.
        self._idle: list[SimpleQueue[Callable[[], object]]] = []
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._count = 0  # threads that there are or that were asked for
        self._closed = False
        if keeps_one:
            self._count = 1
            self._start()

    def __repr__(self) -> str:
        return f"<ThreadPool {self._name}: {self._count} threads, {len(self._idle)} idle, {len(self._waiting)} wait>"

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread do something that tells its result itself."""
        try:
            self._idle.pop().put(work)
        except IndexError:
            self._queue(work)

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        task = _Task(functools.partial(fn, *args, **kwargs))
        self.run(task)
        return task.future

    def works(self) -> bool:
        """Whether any work is under way."""
        return self._count > len(self._idle)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the interface
        """Take nothing on any more, and end the threads when they have done what there is."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            with suppress(IndexError):
                while True:
                    self._idle.pop().put(_nothing)  # its thread wakes, and ends
        for work in waiting if cancel_futures else ():
            if isinstance(work, _Task):
                work.future.cancel()
        with self._ended:
            while wait and self._count:
                self._ended.wait()

    def _queue(self, work: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("no work is taken on after the shutdown")
            with suppress(IndexError):  # one has become idle meanwhile
                self._idle.pop().put(work)
                return
            if self._count < self.most:
                STARTER.start(self, time.monotonic() + self._patience)
                self._count += 1
            self._waiting.append(work)

    # -- on the thread that starts them ----------------------------------------------------------------------------

    def start_thread(self) -> None:
        """Start a thread that was asked for, unless the work was done meanwhile. On the thread that starts them.

        Raises:
            MmeError: UNAVAILABLE, there is no room for it.
        """
        with self._lock:
            if not self._waiting:
                self._lessen()
                return
        self._start()

    def refuse_thread(self, error: MmeError) -> None:
        """Start no thread that was asked for: there was no room for it in time."""
        with self._lock:
            self._lessen()
            work = self._waiting.popleft() if self._waiting else None
        if isinstance(work, _Task):
            work.refuse(error)

    def _start(self) -> None:
        start_thread(threading.Thread(target=self._main, name=f"{self._name}_{self._started}", daemon=True))
        self._started += 1

    # -- on each thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        work: Callable[[], object] | None = self._initializer
        while work is not None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - the thread has other work to do
                _log.exception("work on a thread of '%s' failed", self._name)
            del work  # and all that it knows, which would stay until the next comes
            work = self._next(inbox)

    def _next(self, inbox: SimpleQueue[Callable[[], object]]) -> Callable[[], object] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._closed:
                self._lessen()
                return None
            self._idle.append(inbox)
            seconds = self._idle_seconds if self._count > self._least else None
        try:
            return inbox.get(timeout=seconds)
        except Empty:
            return None if self._leaves(inbox) else inbox.get()  # it is the one that is kept, or was just given work

    def _leaves(self, inbox: SimpleQueue[Callable[[], object]]) -> bool:
        with self._lock:
            if self._count <= self._least:
                return False
            try:
                self._idle.remove(inbox)
            except ValueError:
                return False
            self._lessen()
            return True

    def _lessen(self) -> None:
        self._count -= 1
        self._ended.notify_all()


class _Task(Generic[R]):
    def __init__(self, function: Callable[[], R]) -> None:
        self.future: Future[R] = Future()
        self._function = function

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - as executors do
            self.future.set_exception(error)
            del self  # whose error knows this frame: they, and the arguments, would wait for the collector
        else:
            self.future.set_result(result)

    def refuse(self, error: MmeError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Asked(NamedTuple):
    pool: ThreadPool
    until: float


_Queue = SimpleQueue[_Asked | None]


class _Starter:
    """The thread that starts those of all pools. They get the priority of the first thread that asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: _Queue = SimpleQueue()  # of the thread alone; None where it is to end
        self._thread: threading.Thread | None = None
        self._holders = set[object]()
        self.is_copy = False  # whether this process was forked from one with holders, whose threads are not here
        os.register_at_fork(after_in_child=self._note_fork)

    def _note_fork(self) -> None:
        self.is_copy = bool(self._holders)

    def hold(self, engine: object) -> None:
        """Have it there for an engine, until that lets go."""
        with self._lock:
            self._holders.add(engine)

    def let_go(self, engine: object) -> None:
        """Once more does nothing."""
        with self._lock:
            self._holders.discard(engine)

    def start(self, pool: ThreadPool, until: float) -> None:
        with self._lock:
            if self._thread is None:
                asked: _Queue = SimpleQueue()
                thread = threading.Thread(target=self._main, args=(asked,), name="starter", daemon=True)
                start_thread(thread)
                self._asked, self._thread = asked, thread
            self._asked.put(_Asked(pool, until))

    def end(self) -> bool:
        """End the thread, once it has started what was asked for, until the next pool begins one; False while held."""
        with self._lock:
            if self._holders:
                return False
            thread, self._thread = self._thread, None
            if thread is not None:
                self._asked.put(None)
        if thread is not None:
            thread.join()
        return True

    def _main(self, queue: _Queue) -> None:
        full = ends = False
        while not ends or not queue.empty():
            asked = queue.get()
            if asked is None:
                ends = True
            else:
                full = self._is_full_for(asked, queue, full)
            del asked  # and the pool, with the work that waits

    def _is_full_for(self, asked: _Asked, queue: _Queue, before: bool) -> bool:  # noqa: FBT001 - as it was for the one before
        try:
            asked.pool.start_thread()
        except MmeError as error:  # some of those that there are will end
            if not before:
                _log.warning("%s; it is tried again until there is room for it", error)
            if time.monotonic() > asked.until:
                asked.pool.refuse_thread(error)
            else:
                time.sleep(_AGAIN_SECONDS)
                queue.put(asked)
            return True
        return False


STARTER = _Starter()


async def on_daemon(name: str, function: Callable[[], R]) -> R:
    """Return what a function returns that may hang; its thread keeps neither the loop nor the process from ending."""
    return await asyncio.wrap_future(ThreadPool(name, idle_seconds=0).submit(function))


class Maintenance:
    """A periodic task with a thread of its own: it looks at something, once at a time. On the event loop."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        look: Callable[[], Awaitable[None]],  # looks once
        # seconds until the next look, asked after each, failed ones too; None for none until `look_in`
        next_delay: Callable[[], float | None],
        initializer: Callable[[], None] = lambda: None,  # called on its thread first
    ) -> None:
        self.looking: asyncio.Task[None] | None = None
        self.closed = False
        self._name = name
        self._loop = loop
        self._look_once = look
        self._next_delay = next_delay
        self._thread = ThreadPool(name, initializer, most=1, keeps_one=True)
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    @property
    def waits(self) -> bool:
        """Whether a next look is due."""
        return self._timer is not None

    def look_in(self, seconds: float) -> None:
        """Look then, if not earlier."""
        due = self._loop.time() + seconds
        if self.closed or (self._timer is not None and self._due <= due):
            return
        self._cancel_timer()
        self._due, self._timer = due, self._loop.call_at(due, self.look)

    def look(self) -> None:
        """Look now, unless a look is under way."""
        self._cancel_timer()
        if self.looking is None and not self.closed:
            self.looking = self._loop.create_task(self._look(), name=self._name)

    async def run_in_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function on the thread."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        self.closed = True
        self._cancel_timer()
        if self.looking is not None:
            await asyncio.wait([self.looking])
        self._thread.shutdown(wait=True)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _look(self) -> None:
        try:
            await self._look_once()
        except OSError as error:  # for want of files or processes: the next look may find some
            _cache_log.warning("%s: a look failed: %s", self._name, advised(error))
        except Exception:  # noqa: BLE001 - it is not awaited, and the next look is as good
            _cache_log.exception("%s: a look failed", self._name)
        finally:
            self.looking = None
        seconds = self._next_delay()
        if seconds is not None:
            self.look_in(seconds)


class Slices:
    """Long work on the event loop, cut where it calls `rest`: all else that the loop has to do goes on between slices.

    The loop sleeps then, if only for a millisecond: else no thread would get Python's lock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + _SLICE_SECONDS

    async def rest(self) -> None:
        """Let others go on, once this slice is over."""
        if self._clock() >= self._end:
            await asyncio.sleep(_REST_SECONDS)
            self._end = self._clock() + _SLICE_SECONDS


class FairSemaphore:
    """So many at a time, in the order of asking, on any thread and on the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Turn] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<FairSemaphore: {self._free} free, {len(self._waiting)} waiting>"

    def ask(self) -> Turn:
        """A turn, which has come if there is one; to be ended in any case."""
        turn = Turn(self)
        with self._lock:
            if self._free:
                self._free -= 1
                turn.came.set_result(None)
            else:
                self._waiting.append(turn)
        return turn

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Turn]:
        """Have a turn, once there is one, on the event loop."""
        turn = self.ask()
        try:
            if not turn.came.done():
                await asyncio.wrap_future(turn.came)
            yield turn
        finally:
            turn.end()

    def end(self, turn: Turn) -> None:
        with self._lock:
            if turn.ended:
                return
            turn.ended = True
            if not turn.came.done():
                self._waiting.remove(turn)
            elif self._waiting:
                self._waiting.popleft().came.set_result(None)
            else:
                self._free += 1


class Turn:
    """One of `FairSemaphore`. It may be ended before its holder is done, which then goes on beside the next."""

    def __init__(self, turns: FairSemaphore) -> None:
        self.came: Future[None] = Future()
        self.came.set_running_or_notify_cancel()  # so that no waiting task can cancel it
        self.ended = False
        self._turns = turns

    def end(self) -> None:
        """Once more does nothing."""
        self._turns.end(self)


class Progress(CancelToken):
    """The token of a load, which its threads also tell whenever bytes come. It may outlive the load."""

    def __init__(self, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(subject)
        self.turns: set[Turn] = set()  # that the load has
        self._clock = clock
        self._moved = clock()
        self._stopped = False

    @property
    def cancelled(self) -> bool:
        return self._stopped

    def cancel(self) -> None:
        self._stopped = True

    def step_aside(self) -> None:
        """End the turns of the load, which waits for another one. On the event loop."""
        for turn in self.turns:
            turn.end()

    def moved(self) -> None:
        """Note that bytes came."""
        self._moved = self._clock()

    @property
    def idle(self) -> float:
        """Seconds since bytes came, or since the beginning."""
        return self._clock() - self._moved


class _Watched(io.RawIOBase):
    def __init__(self, stream: BinaryIO, progress: Progress) -> None:
        super().__init__()
        self._stream = stream
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        size: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        self._progress.moved()
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()


def watched(stream: BinaryIO, token: CancelToken) -> BinaryIO:
    """The stream, whose bytes are told to a `Progress`; as it is where nothing watches."""
    return cast("BinaryIO", _Watched(stream, token)) if isinstance(token, Progress) else stream


def _unheard(_: Iterable[str]) -> None: ...


class UnderWay:
    """Names of the models that are loaded now, told at each change."""

    def __init__(self, tell: Callable[[Iterable[str]], None] = _unheard) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._names: list[str] = []

    def __repr__(self) -> str:
        return f"<UnderWay: {', '.join(self._names)}>"

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """While a model of that name is loaded."""
        with self._lock:
            self._names.append(name)
            self._tell(self._names)
        try:
            yield
        finally:
            with self._lock:
                self._names.remove(name)
                self._tell(self._names)
