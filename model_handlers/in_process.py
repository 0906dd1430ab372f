"""Executes batches in this process: the quickest on the event loop itself, all others on threads of a pool.

While batches are quick the next one lies behind the one that a thread executes, so that it does not idle until the loop
turns. On the event loop, where nothing else is said.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from model_handlers.errors import Kind, MmeError
from model_handlers.executor import POLL_SECONDS, Executor, Executors, InputMeter
from model_handlers.worker.limits import EXECUTION_TIMEOUT, Deadlines

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from model_handlers.base import LoadedModel
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.executor import Done, ExecutorLoop, Submission

_QUICK_NS = 2_000_000  # an execution behind which another batch may wait
_FAR_TOO_LONG = 10  # times the limit of an execution on the loop: it was no accident
_AT_MOST = 3  # times what is known that one execution counts
_FOR_EVER = float("inf")


class InlinePolicy:
    """Which executions run on the event loop: by recent processor time, by input size to the next power of two. PURE.

    A model whose executions are shorter than a thread hand-off earns the loop by being quick and loses it by being slow
    once. Processor time counts, since wall time on an instance also holds what other threads took in between.

    Costs are averages, which one execution moves by an eighth at most and never up by more than a quarter: on a busy
    machine any execution may once take ten times as long. One that would have kept the loop for much longer than the
    limit counts in full. An unknown size is expected to take for ever, so that its first execution runs on a thread.
    """

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self._ns: dict[int, float] = {}

    def should_inline(self, size: int) -> bool:
        """Whether a batch of so many input bytes is expected to take no longer than the limit."""
        return self._ns.get(size.bit_length(), _FOR_EVER) <= self.limit_ns

    def observe(self, size: int, took: int) -> None:
        cost_class = size.bit_length()
        known = self._ns.get(cost_class)
        if known is None or took > _FAR_TOO_LONG * self.limit_ns:
            self._ns[cost_class] = took
        else:
            self._ns[cost_class] = known + (min(took, _AT_MOST * known) - known) / 8


class OverrunWatch:
    """Executions of one model on threads of this process, which may take longer than they should.

    Nothing can end a thread that is inside a framework, so their requests are answered, and the instance takes its next
    batch when the execution has ended.

    Args:
        late: told of a batch that takes longer than `seconds`, once, on the loop.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop, late: Callable[[Any], None]) -> None:
        self._seconds = seconds
        self._loop = loop
        self._late = late
        # by the instance's number; single operations need no lock
        self._under_way: dict[int, tuple[Submission, float]] = {}
        # by number and beginning, those that were late at the last look; not they themselves, which hold tensors
        self._told: set[tuple[int, float]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<OverrunWatch after {self._seconds:g} s: {len(self._under_way)} under way>"

    def watch(self, instance: int, submission: Submission) -> None:
        """An idle instance begins with a batch. On the loop."""
        self.begun(instance, submission)
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def begun(self, instance: int, submission: Submission | None) -> None:
        """An instance goes on with a batch, or with none. On its thread."""
        if submission is not None:
            self._under_way[instance] = submission, time.monotonic()
        else:
            self._under_way.pop(instance, None)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        next_look = now + self._seconds
        told, self._told = self._told, set()
        for instance, (submission, began) in list(self._under_way.items()):
            if began + self._seconds > now:
                next_look = min(next_look, began + self._seconds)
                continue
            self._told.add((instance, began))
            if (instance, began) not in told:
                self._late(submission)
        if self._under_way:
            self._timer = self._loop.call_later(next_look - now, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ThreadExecutor(Executor):
    """Executes batches on a thread of a pool, as long as it is submitted any."""

    def __init__(self, name: str, number: int, handler: LoadedModel, home: ExecutorLoop) -> None:
        super().__init__(name, number, handler, home)
        self._inbox: deque[tuple[Submission, Done]] = deque()
        # whether a thread looks into the inbox: set on the loop, and taken back by the thread that found nothing more
        self._works = False

    def submit(self, submission: Submission, done: Done) -> bool:
        self._home.disarm()
        self._inbox.append((submission, done))
        self._begin()
        return False

    def _begin(self) -> None:
        if self._inbox and not self._works:
            self._works = True
            self._home.run(self._main)

    def stop(self) -> None:
        while self._works:  # it may have yet to be begun
            time.sleep(POLL_SECONDS)

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

    def _tell(self, submission: Submission, done: Done) -> None:
        self._home.disarm()
        self._home.loop.call_soon_threadsafe(self._ended, submission, done)

    # -- on the loop -----------------------------------------------------------------------------------------------

    def _ended(self, submission: Submission, done: Done) -> None:
        self._begin()
        done(self, submission)
        self._home.arm()


class InProcessExecutor(ThreadExecutor):
    """Executes batches in this process, the quickest of them on the event loop."""

    def __init__(
        self,
        name: str,
        number: int,
        handler: LoadedModel,
        home: ExecutorLoop,
        costs: InlinePolicy,
        executed: InputMeter,
        overruns: OverrunWatch | None,
    ) -> None:
        super().__init__(name, number, handler, home)
        self._costs = costs
        self._executed = executed
        self._overruns = overruns

    def submit(self, submission: Submission, done: Done) -> bool:
        alone = self.pending < 2  # else the instance executes on its thread, and this one waits behind that
        if alone and self._costs.limit_ns:
            size = submission.nbytes
            if self._costs.should_inline(size):
                # no turn: handlers are swapped on the loop as well, so never meanwhile
                submission.execute(self.handler)
                self._costs.observe(size, submission.processor_ns)
                self._executed.add(size)
                self._home.arm()
                return True
        return super().submit(submission, done)

    def _begin(self) -> None:
        if self._overruns is not None and self._inbox and not self._works:
            self._overruns.watch(self.number, self._inbox[0][0])
        super()._begin()

    def _execute_all(self) -> None:
        given: tuple[Submission, Done] | None = self._inbox.popleft()
        while given is not None:
            submission, done = given
            self.turn += 1  # before the handler is looked up: see RetiredHandlers
            submission.execute(self.handler)
            self.turn += 1
            given = self._inbox.popleft() if self._inbox else None
            if self._overruns is not None:  # before the instance is idle: the loop may submit it a batch at once
                self._overruns.begun(self.number, None if given is None else given[0])
            if given is None:
                self._works = False
            self._tell(submission, done)

    def _ended(self, submission: Submission, done: Done) -> None:
        if self._costs.limit_ns:
            self._costs.observe(submission.nbytes, submission.processor_ns)
            self.depth = 2 if submission.execution_ns < _QUICK_NS else 1
        self._executed.add(submission.nbytes)
        super()._ended(submission, done)


def executors_for(
    handlers: Sequence[tuple[str, LoadedModel]],
    config: ModelConfig,
    home: ExecutorLoop,
    *,
    inline_ns: int,
    limited: bool,
    larger: Callable[[], None] | None,
    late: Callable[[Any, MmeError], None],
) -> Executors:
    """The executors of a model, one an instance; for the arguments see `Model`.

    `limited` says that instances share resources, `late` is told of a submission whose time is over, on the loop.
    """
    first: Any = handlers[0][1]
    if first.apart:
        executors: Executors = first.executors(handlers, home, limited=limited)
        return executors
    costs = InlinePolicy(inline_ns if all(handler.inline for _, handler in handlers) else 0)
    executed, overruns = InputMeter(larger), None
    if EXECUTION_TIMEOUT in config.parameters:
        overruns = OverrunWatch(Deadlines.of(config).execution, home.loop, functools.partial(_overran, config, late))
    each = [
        InProcessExecutor(name, number, handler, home, costs, executed, overruns)
        for number, (name, handler) in enumerate(handlers)
    ]
    return Executors(each, home, overruns=overruns, executed=executed)


def _overran(config: ModelConfig, late: Callable[[Any, MmeError], None], submission: Submission) -> None:
    limit = f"{Deadlines.of(config).execution:g} s ({EXECUTION_TIMEOUT})"
    what = f"model '{config.name}': its execution takes longer than {limit}; it goes on, and what it makes is dropped"
    late(submission, MmeError(Kind.TIMED_OUT, what))
