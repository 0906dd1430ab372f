"""What executes the batches of a model: threads of this process and the event loop itself, or worker processes.

An `Executor` stands for one instance. It is given a batch on the event loop, and tells there what became of it, with
one wake-up a batch: how the batch gets to its framework, and what that costs, is the executor's business alone.

- `InProcessExecutor` runs what will be done sooner than a thread hand-off pays for on the loop itself, all else on a
  thread of a pool. While batches are quick it takes the next one ahead, so as not to idle until the loop turns.
- `PipelinedExecutor` has a worker process begin a batch before it has answered the last one.
- `WorkerExecutor` submits batches of requests to a worker process, from the loop.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.worker.limits import EXECUTION_TIMEOUT, Deadlines
from model_handlers.worker.policies import BatchLinger
from serve.model.dispatch import InlinePolicy, InputMeter, OverrunWatch
from serve.model.execution import begin_batch, execute_batch, finish_batch, requests_executed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from model_handlers.base import LoadedModel
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.requests import ModelRequest, ModelResponse
    from serve.model.dispatch import LoopPoller
    from serve.model.execution import BegunBatch, Execution
    from serve.model.replies import Post
    from serve.model.tensors import Batch, TensorMap
    from serve.threads import ThreadPool

    Done = Callable[["Executor", Execution], None]

_now = time.perf_counter_ns
_POLL_SECONDS = 0.005
_QUICK_NS = 2_000_000  # an execution behind which another batch may wait


class Surroundings:
    """What the executors of one model share."""

    def __init__(
        self,
        signature: TensorMap,
        loop: asyncio.AbstractEventLoop,
        threads: ThreadPool,
        poll: LoopPoller,
        post: Post,  # takes what the model answers unasked; called on any thread
    ) -> None:
        self.signature = signature
        self.loop = loop
        self.threads = threads
        self.poll = poll
        self.post = post


class Executor:
    """What executes the batches of one instance. On the event loop, where nothing else is said.

    Attributes:
        depth: batches that it may have at once; those behind the first wait in it.
        pending: those that it has; the model counts them.
        turn: counts the beginnings and ends of executions on threads, so that it is odd during one.
    """

    def __init__(self, name: str, number: int, handler: LoadedModel, around: Surroundings) -> None:
        self.name = name
        self.number = number
        self.handler = handler  # may be replaced at any time; an execution under way goes on with the one it began with
        self.depth = 1
        self.pending = 0
        self.turn = 0
        self._around = around

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.pending} batches>"

    def submit(self, batch: Batch, done: Done) -> Execution | None:
        """Have a batch executed. Return what became of it, if that is known; else `done` is told, on the loop."""
        raise NotImplementedError

    def together(self) -> int:
        """How many requests that are executed one by one it is submitted at once."""
        return 1

    def stop(self) -> None:
        """Wait until nothing executes. Never on the event loop."""
        raise NotImplementedError


class ThreadExecutor(Executor):
    """Executes batches on a thread of a pool, as long as it is given any."""

    def __init__(self, name: str, number: int, handler: LoadedModel, around: Surroundings) -> None:
        super().__init__(name, number, handler, around)
        self._inbox: deque[tuple[Batch, Done]] = deque()
        # whether a thread looks into the inbox: set on the loop, and taken back by the thread that found nothing more
        self._works = False

    def submit(self, batch: Batch, done: Done) -> Execution | None:
        self._around.poll.disarm()
        self._inbox.append((batch, done))
        self._begin()
        return None

    def _begin(self) -> None:
        if self._inbox and not self._works:
            self._works = True
            self._around.threads.run(self._main)

    def stop(self) -> None:
        while self._works:  # it may have yet to be begun
            time.sleep(_POLL_SECONDS)

    # -- on a thread -----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._execute_all()
        except BaseException:
            self._works = False
            raise

    def _execute_all(self) -> None:
        """Execute what lies in the inbox; `_works` ends before the last of it is told."""
        raise NotImplementedError

    def _execute(self, batch: Batch) -> Execution:
        self.turn += 1  # before the handler is looked up: see RetiredHandlers
        execution = execute_batch(self.handler, self._around.signature, batch, self._around.post)
        self.turn += 1
        return execution

    def _tell(self, execution: Execution, done: Done) -> None:
        self._around.poll.disarm()
        self._around.loop.call_soon_threadsafe(self._ended, execution, done)

    # -- on the loop -----------------------------------------------------------------------------------------------

    def _ended(self, execution: Execution, done: Done) -> None:
        self._begin()
        done(self, execution)
        self._around.poll.arm()


class InProcessExecutor(ThreadExecutor):
    """Executes batches in this process, the quickest of them on the event loop."""

    def __init__(
        self,
        name: str,
        number: int,
        handler: LoadedModel,
        around: Surroundings,
        costs: InlinePolicy,
        executed: InputMeter,
        overruns: OverrunWatch | None,
    ) -> None:
        super().__init__(name, number, handler, around)
        self._costs = costs
        self._executed = executed
        self._overruns = overruns

    def submit(self, batch: Batch, done: Done) -> Execution | None:
        alone = self.pending < 2  # else the instance executes on its thread, and this one waits behind that
        if alone and self._costs.limit_ns:
            size = 0
            for request in batch:
                size += request.layout.nbytes
            if self._costs.should_inline(size):
                # no turn: handlers are swapped on the loop as well, so never meanwhile
                execution = execute_batch(self.handler, self._around.signature, batch, self._around.post)
                self._costs.observe(size, execution.processor_ns)
                self._executed.add(size)
                self._around.poll.arm()
                return execution
        return super().submit(batch, done)

    def _begin(self) -> None:
        if self._overruns is not None and self._inbox and not self._works:
            self._overruns.watch(self.number, self._inbox[0][0])
        super()._begin()

    def _execute_all(self) -> None:
        given: tuple[Batch, Done] | None = self._inbox.popleft()
        while given is not None:
            given = self._execute_one(*given)

    def _execute_one(self, batch: Batch, done: Done) -> tuple[Batch, Done] | None:
        """Execute a batch; return the one behind it. A frame of its own, which ends with what it holds."""
        execution = self._execute(batch)
        following = self._inbox.popleft() if self._inbox else None
        if self._overruns is not None:  # before the instance is idle: the loop may give it a batch at once
            self._overruns.begun(self.number, following[0] if following is not None else [])
        if following is None:
            self._works = False
        self._tell(execution, done)
        return following

    def _ended(self, execution: Execution, done: Done) -> None:
        size = sum([request.layout.nbytes for request in execution.batch])
        if self._costs.limit_ns:
            self._costs.observe(size, execution.processor_ns)
            self.depth = 2 if execution.timings.compute_infer < _QUICK_NS else 1
        self._executed.add(size)
        super()._ended(execution, done)


class PipelinedExecutor(ThreadExecutor):
    """Executes batches in a worker process, which has the next one before it has answered the last."""

    def __init__(self, name: str, number: int, worker: Any, around: Surroundings) -> None:
        super().__init__(name, number, worker, around)
        self._worker = worker  # a `TensorWorker`
        self.depth = 3  # one that is executed, one that lies behind it in the process, one to take that one's place

    def _execute_all(self) -> None:
        if not self._joins():
            batch, done = self._inbox.popleft()
            execution = self._execute(batch)
            self._works = False
            self._tell(execution, done)
            return
        self.turn += 1
        ended = 0
        begun = self._begin_next()
        while begun is not None:
            begun, ended = self._finish_one(*begun, ended)

    def _begin_next(self) -> tuple[BegunBatch, Done] | None:
        if not (self._inbox and self._joins()):
            return None
        batch, done = self._inbox.popleft()
        return begin_batch(self._worker, self._around.signature, batch), done

    def _finish_one(self, begun: BegunBatch, done: Done, ended: int) -> tuple[tuple[BegunBatch, Done] | None, int]:
        """Finish a batch, once the one behind it has begun; return that, and when the one was finished (ns)."""
        behind = self._begin_next()
        execution = finish_batch(self._worker, self._around.signature, begun, ended)
        ended = _now()
        if behind is None:
            self.turn += 1
            self._works = False
        self._tell(execution, done)
        return behind, ended

    def _joins(self) -> bool:
        proof = self._around.signature.proof
        return proof is None or proof.joins


class WorkerExecutor(Executor):
    """Executes requests in a worker process, which is submitted them on the event loop."""

    def __init__(self, name: str, number: int, worker: Any, around: Surroundings, linger: BatchLinger) -> None:
        super().__init__(name, number, worker, around)
        self._worker = worker  # a `RequestsWorker`
        self._linger = linger
        self._done: Done | None = None
        self._batch: Batch = []
        self._requests: Sequence[ModelRequest] = ()
        self._start = 0
        worker.answer_to(self._answered, self._ended)

    def submit(self, batch: Batch, done: Done) -> Execution | None:
        start, signature = _now(), self._around.signature
        try:
            requests = signature.to_model_requests(batch, self._around.post)
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return requests_executed(signature, batch, (), error, (start, start, start))
        self._batch, self._requests, self._start, self._done = batch, requests, start, done
        self._worker.submit(requests)
        return None

    def together(self) -> int:
        return int(self._worker.together())

    def stop(self) -> None:
        # Its requests may all be over by now: what a model says unasked, a last response too, overtakes the answers.
        while self._done is not None and not self._around.loop.is_closed():
            time.sleep(_POLL_SECONDS)

    def _answered(self, answers: list[ModelResponse | MmeError | None] | Exception, sent: int, came: int) -> Execution:
        """What became of the batch. Where its answers came."""
        return requests_executed(
            self._around.signature, self._batch, self._requests, answers, (self._start, sent, came)
        )

    def _ended(self, execution: Execution) -> None:
        done, self._done = self._done, None
        self._batch, self._requests = [], ()
        assert done is not None  # noqa: S101 - it was submitted
        self._linger.batch_done(len(execution.batch))
        done(self, execution)


class Executors:
    """The executors of one version of a model. Any thread may ask for memory, while handlers are swapped or closed."""

    def __init__(
        self,
        executors: Sequence[Executor] = (),
        threads: ThreadPool | None = None,
        *,
        linger: BatchLinger | None = None,
        coalesces: bool = False,  # whether several requests that are executed one by one are submitted together
        overruns: OverrunWatch | None = None,
        executed: InputMeter | None = None,
    ) -> None:
        self.each = list(executors)  # by the number of the instance
        self.handlers = list(dict.fromkeys([executor.handler for executor in executors]))
        # whether they execute in processes of their own
        self.apart = bool(self.handlers) and all(handler.apart for handler in self.handlers)
        self.executed = executed or InputMeter(None)  # bytes of all inputs that were executed in this process
        self._threads = threads
        self.coalesces = coalesces
        self.lingers = linger is not None  # whether it may not be ready
        self._linger = linger
        self._overruns = overruns

    def ready(self, waiting: int) -> bool:
        """Whether waiting requests are submitted now, rather than joined by others in a turn of the loop."""
        linger = self._linger
        return linger is None or not linger.turns or linger.ready(waiting, _now())

    def most(self, number: int, waiting: int) -> int:
        """How many of so many requests that are executed one by one an idle executor takes at once."""
        if waiting < 2:
            return 1
        return min(self.each[number].together(), -(-waiting // len(self.each)))

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
        threads, handlers, self.handlers = self._threads, self.handlers, []
        closing = [(handler, threads.submit(handler.close)) for handler in handlers[1:] if threads is not None]
        with ExitStack() as ends:
            for handler, closed in closing:
                ends.callback(_await_closed, handler, closed)
            for handler in handlers[:1]:
                ends.callback(handler.close)


def _await_closed(handler: LoadedModel, closed: Future[None]) -> None:
    if closed.cancel():  # no thread was free for it
        handler.close()
    else:
        closed.result()


def executors_for(
    handlers: Sequence[tuple[str, LoadedModel]],
    config: ModelConfig,
    around: Surroundings,
    *,
    inline_ns: int,
    limited: bool,
    larger: Callable[[], None] | None,
    late: Callable[[Batch, MmeError], None],
) -> Executors:
    """The executors of a model, one an instance; for the arguments see `Model`. `late` is told on the loop."""
    loop, each_handler = around.loop, [handler for _, handler in handlers]
    costs = InlinePolicy(inline_ns if all(handler.inline for handler in each_handler) else 0)
    linger = BatchLinger(joins=config.joins) if any(handler.submits for handler in each_handler) else None
    executed = InputMeter(larger)
    overruns: OverrunWatch | None = None
    if EXECUTION_TIMEOUT in config.parameters and not all(handler.apart for handler in each_handler):
        overruns = OverrunWatch(Deadlines.of(config).execution, loop, functools.partial(_overran, config, late))
    executors: list[Executor] = []
    for number, (name, handler) in enumerate(handlers):
        if handler.submits and linger is not None:
            executors.append(WorkerExecutor(name, number, handler, around, linger))
        elif handler.ahead:
            executors.append(PipelinedExecutor(name, number, handler, around))
        else:
            executors.append(InProcessExecutor(name, number, handler, around, costs, executed, overruns))
    coalesces = config.one_by_one and linger is not None and not limited
    return Executors(
        executors, around.threads, linger=linger, coalesces=coalesces, overruns=overruns, executed=executed
    )


def _overran(config: ModelConfig, late: Callable[[Batch, MmeError], None], batch: Batch) -> None:
    limit = f"{Deadlines.of(config).execution:g} s ({EXECUTION_TIMEOUT})"
    what = f"model '{config.name}': its execution takes longer than {limit}; it goes on, and what it makes is dropped"
    late(batch, MmeError(Kind.TIMED_OUT, what))


class RetiredHandlers:
    """Handlers that instances were given others for; the executions that had begun by then still use them."""

    def __init__(self, handlers: Sequence[LoadedModel], executors: Sequence[Executor]) -> None:
        self._handlers = handlers
        self._turns = [(executor, executor.turn) for executor in executors]

    def close(self) -> None:
        """Close them when those executions have ended. On a thread that may wait."""
        for executor, turn in self._turns:
            while turn % 2 and executor.turn == turn:
                time.sleep(_POLL_SECONDS)
        for handler in self._handlers:
            handler.close()
