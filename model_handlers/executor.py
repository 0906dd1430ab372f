"""The seam below a model's queue: what executes its batches, in this process or in worker processes.

An `Executor` stands for one instance. It is submitted a batch on the event loop, and tells there when that is over,
with one wake-up a batch: how the batch gets to its framework, and what that costs, is the executor's business alone.

- `in_process.InProcessExecutor` runs what will be done sooner than a thread hand-off pays for on the loop itself, all
  else on a thread of a pool.
- `worker.executor.PipelinedExecutor` has a worker process begin a batch before it has answered the last one.
- `worker.executor.RequestsExecutor` sends batches of requests to a worker process, from the loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from model_handlers.base import Ambient, Footprint
from model_handlers.worker.policies import BusyPoll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from model_handlers.base import LoadedModel
    from model_handlers.errors import MmeError
    from model_handlers.in_process import OverrunWatch
    from model_handlers.requests import ModelRequest, ModelResponse

    Answers = list[ModelResponse | MmeError | None]
    Done = Callable[["Executor", Any], None]  # told of the `Submission` that is over, on the loop

R = TypeVar("R")

_log = logging.getLogger("mme.model")
_now = time.perf_counter_ns
POLL_SECONDS = 0.005  # between two looks at what ends without a word
_HOLD_NS = 5_000_000  # after a thread of ours was given work, or brought it back
_READY_SECONDS = 5.0  # for a model to say whether it is ready, as in Triton


class Threads(Protocol):
    """A pool of threads, which have work done soon."""

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread do something that tells its result itself."""

    def submit(self, fn: Callable[[], R], /) -> Future[R]:
        """Have a thread do something; return what tells the result."""


class ExecutorLoop:
    """The event loop that executors are used on, the threads for what it can't wait for, and when it stays awake.

    It stays awake where its next piece of work is likely to come at once: see `BusyPoll`. It turns without waiting as
    long as a callback asks for the next turn, and looks at its sockets in each. It also takes Python's lock in each, so
    it does not do so while threads execute batches, or `others_work`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, threads: Threads, others_work: Callable[[], bool] = lambda: False
    ) -> None:
        self.loop = loop
        self.threads = threads
        self.run = threads.run
        self._others_work = others_work
        self._poll = BusyPoll()
        self._until = 0
        self._held_until = 0
        self._awake = False
        self._turned = False  # since something was last expected

    def __repr__(self) -> str:
        return f"<ExecutorLoop {'awake' if self._awake else 'asleep'}, {self._poll!r}>"

    def arm(self) -> None:
        """Expect an answer, or the next request, to what was sent just now."""
        if not BusyPoll.longest:
            return
        now = _now()
        if self._awake:
            if self._turned:  # else this is one of several things in one turn
                self._turned = False
                self._poll.caught()
                self._until = now + BusyPoll.longest
        elif now >= self._held_until and (longest := self._poll.begin()) and not self._others_work():
            self._awake, self._turned, self._until = True, False, now + longest
            self.loop.call_soon(self._turn)

    def disarm(self) -> None:
        """Leave Python's lock to a thread for a while."""
        self._held_until = _now() + _HOLD_NS
        self._until = 0

    def _turn(self) -> None:
        now = _now()
        if now < self._until:
            self._turned = True
            os.sched_yield()
            if not self._poll.lost(_now() - now):
                self.loop.call_soon(self._turn)
                return
        elif self._until:
            self._poll.missed()
        self._awake = False


_home: Ambient[ExecutorLoop] = Ambient("the loop of the processes that the load under way starts")
at_home = _home.given  # what is loaded inside may start processes, which are heard on this loop
home_of_load = _home.get


class Submission:
    """One batch, as an executor is submitted it: what its handler is given, and what becomes of that.

    Attributes:
        batch: its requests.
        nbytes: bytes of all their inputs.
        begun: whether a worker has begun it.
        processor_ns: processor time of the thread that executed it, wall time where that was brief.
        execution_ns: what its framework, or a worker, took.
    """

    batch: list[Any]
    nbytes: int
    begun: bool
    processor_ns: int
    execution_ns: int

    def execute(self, handler: LoadedModel, ended: int = 0) -> None:
        """Have a handler execute it; if it has begun, wait for it, the one before having `ended` then (ns).

        Never raises: what goes wrong becomes the error of every request in the batch.
        """
        raise NotImplementedError

    def begin(self, worker: Any) -> None:
        """Have a `Worker` begin it, if its requests may share a batch. Never raises: `execute` tells."""
        raise NotImplementedError

    def to_requests(self) -> Sequence[ModelRequest] | None:
        """What a `Worker` is given; None where that can't be made, and all of it is over."""
        raise NotImplementedError

    def answered(self, answers: Answers | Exception, sent: int, came: int) -> None:
        """Take the answers to the requests, or what befell them; they were sent then, and answered (ns)."""
        raise NotImplementedError


class Executor:
    """What executes the batches of one instance. On the event loop, where nothing else is said.

    Attributes:
        depth: batches that it may have at once; those behind the first wait in it.
        pending: those that it has; the model counts them.
        turn: counts the beginnings and ends of executions on threads of this process, so that it is odd during one.
    """

    def __init__(self, name: str, number: int, handler: LoadedModel, home: ExecutorLoop) -> None:
        self.name = name
        self.number = number
        self.handler = handler  # may be replaced at any time; an execution under way goes on with the one it began with
        self.depth = 1
        self.pending = 0
        self.turn = 0
        self._home = home

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.pending} batches>"

    def submit(self, submission: Submission, done: Done) -> bool:
        """Have a batch executed. Return whether it is over; else `done` is told, on the loop."""
        raise NotImplementedError

    def stop(self) -> None:
        """Wait until nothing executes. Never on the event loop."""
        raise NotImplementedError


class InputMeter:
    """Bytes of all inputs that were executed; `larger` is told of each batch with more than any before."""

    def __init__(self, larger: Callable[[], None] | None) -> None:
        self.bytes = 0
        self.first: Callable[[], None] | None = None  # called, once, by the next batch
        self._largest = 0
        self._larger = larger

    def add(self, size: int) -> None:
        self.bytes += size
        if self.first is not None:
            first, self.first = self.first, None
            first()
        if size > self._largest:
            self._largest = size
            if self._larger is not None:
                self._larger()


class Executors:
    """The executors of one version of a model. Any thread may ask for memory, while handlers are swapped or closed.

    Attributes:
        each: by the number of the instance.
        apart: whether they execute in processes of their own.
        always_ready: whether `ready` needs not be asked.
        takes_several: whether an executor may take several requests that are executed one by one: see `most`.
        executed: bytes of all inputs that were executed in this process.
    """

    def __init__(
        self,
        executors: Sequence[Executor] = (),
        home: ExecutorLoop | None = None,
        *,
        overruns: OverrunWatch | None = None,
        executed: InputMeter | None = None,
    ) -> None:
        self.each = list(executors)
        self.handlers = list(dict.fromkeys([executor.handler for executor in executors]))
        self.apart = bool(self.handlers) and all(handler.apart for handler in self.handlers)
        self.always_ready = True
        self.takes_several = False
        self.executed = executed or InputMeter(None)
        self._home = home
        self._overruns = overruns
        self._asked: dict[LoadedModel, asyncio.Future[bool]] = {}  # whether they are ready, and have yet to say so

    def ready(self, waiting: int) -> bool:  # noqa: ARG002 - for those that may not be
        """Whether so many waiting requests are submitted now, rather than joined by others in a turn of the loop."""
        return True

    def most(self, number: int, waiting: int) -> int:  # noqa: ARG002 - as above
        """How many of so many requests that are executed one by one an idle executor takes at once."""
        return 1

    def takes_ahead(self) -> Executor | None:
        """One that takes another batch, while all are busy."""
        for executor in self.each:
            if executor.pending < executor.depth:
                return executor
        return None

    def footprint(self) -> Footprint:
        """What processes take together; nothing for handlers in this one."""
        return sum((worker.memory() for worker in self.workers), Footprint())

    @property
    def workers(self) -> list[Any]:
        """Those of the handlers that are processes: each is a `Worker`."""
        return [handler for handler in self.handlers if handler.apart]

    def is_down(self) -> bool:
        """Whether an instance will execute nothing for a while: one that fails at once draws requests to it."""
        return any(worker.is_down() for worker in self.workers)

    async def ask_ready(self, name: str) -> bool:
        """Whether none is down, and all models that have a say say so within five seconds.

        All instances are asked at the same time. While one still thinks about it, further questions wait for the same
        answer, so that a model which hangs is asked once, however often it is probed.
        """
        if self.is_down():
            return False
        asked = [self._ask(handler) for handler in self.handlers if handler.tells_ready]
        if not asked:
            return True
        answers, late = await asyncio.wait(asked, timeout=_READY_SECONDS)
        if late:
            what = f"model '{name}': is_ready has not answered within {_READY_SECONDS:.0f} s"
            _log.warning(what, extra={"target_model": name})
        return not late and all(answer.result() for answer in answers)

    def _ask(self, handler: LoadedModel) -> asyncio.Future[bool]:
        answer = self._asked.get(handler)
        if answer is None:
            answer = asyncio.get_running_loop().create_future()
            handler.ask_ready(functools.partial(_tell, answer))
            self._asked[handler] = answer
            answer.add_done_callback(lambda _: self._asked.pop(handler))
        return answer

    @property
    def memory_only(self) -> bool:
        """Whether there is nothing to close where the process ends."""
        return all(handler.memory_only for handler in self.handlers)

    def trim(self, *, idle: bool) -> bool:
        """Give back memory that executions took: see `LoadedModel.give_back`."""
        given_back = [handler.give_back(idle=idle) for handler in self.handlers]
        return all(given_back)

    def swap(self, handler: LoadedModel) -> RetiredHandlers:
        """Have every instance execute on another handler from its next batch on; return what is to be closed."""
        retired, self.handlers = self.handlers, [handler]
        handler.outside = retired[0].outside
        for executor in self.each:
            executor.handler = handler
        return RetiredHandlers(retired, self.each)

    def stop(self) -> None:
        """Wait until nothing executes. Never on the event loop."""
        for executor in self.each:
            executor.stop()

    def end(self) -> None:
        """End what the loop does for them. Nothing executes any more."""
        if self._overruns is not None:
            self._overruns.close()

    def close(self) -> None:
        """Close handlers side by side, each though another raises: their models may have something to say."""
        home, handlers, self.handlers = self._home, self.handlers, []
        closing = [(handler, home.threads.submit(handler.close)) for handler in handlers[1:] if home is not None]
        with ExitStack() as ends:
            for handler, closed in closing:
                ends.callback(_await_closed, handler, closed)
            for handler in handlers[:1]:
                ends.callback(handler.close)


def _tell(answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - see LoadedModel.ask_ready
    with suppress(RuntimeError):  # the loop is closed
        answer.get_loop().call_soon_threadsafe(_resolve, answer, ready)


def _resolve(answer: asyncio.Future[bool], ready: bool) -> None:  # noqa: FBT001 - as above
    if not answer.done():
        answer.set_result(ready)


def _await_closed(handler: LoadedModel, closed: Future[None]) -> None:
    if closed.cancel():  # no thread was free for it
        handler.close()
    else:
        closed.result()


class RetiredHandlers:
    """Handlers that instances were given others for; the executions that had begun by then still use them."""

    def __init__(self, handlers: Sequence[LoadedModel], executors: Sequence[Executor]) -> None:
        self._handlers = handlers
        self._turns = [(executor, executor.turn) for executor in executors]

    def close(self) -> None:
        """Close them when those executions have ended. On a thread that may wait."""
        for executor, turn in self._turns:
            while turn % 2 and executor.turn == turn:
                time.sleep(POLL_SECONDS)
        for handler in self._handlers:
            handler.close()
