"""Models in worker processes: what the engine sees of each, and what executes batches there.

A worker is made of its process (`InstanceProcess`), batches in shared memory, and requests that are open. Batches of
tensors, each of which crosses as a batch of one request, are executed by a thread (`PipelinedExecutor`). Batches of
requests are sent and answered on the event loop if they are small (`RequestsExecutor`); whatever could take long, a
death above all, is left to a thread.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, ClassVar

from model_handlers.base import LoadedModel
from model_handlers.errors import MmeError
from model_handlers.executor import POLL_SECONDS, Executor, Executors
from model_handlers.in_process import ThreadExecutor
from model_handlers.requests import ModelRequest
from model_handlers.tensor import size_of
from model_handlers.worker.policies import BatchLinger
from model_handlers.worker.requests import Batches, OpenRequests

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from model_handlers.base import Footprint
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.executor import Answers, Done, ExecutorLoop, Submission
    from model_handlers.tensor import Array
    from model_handlers.worker.instance import InstanceProcess
    from model_handlers.worker.process import Child
    from model_handlers.worker.requests import SentBatch

_now = time.perf_counter_ns
_SMALL = 64 << 10  # bytes of inputs that the event loop copies itself
_EVER = float("inf")


class Worker(LoadedModel):
    """One model in one process, for one instance. Made by `start.start_isolated`."""

    apart: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, process: InstanceProcess, home: ExecutorLoop, *, sees_requests: bool, uses_gpu: bool
    ) -> None:
        super().__init__(config)
        self.process = process
        self.opened = OpenRequests(self, home)
        process.start(self.opened, uses_gpu=uses_gpu)
        self.config = process.config
        self.tells_ready = process.tells_ready
        self.sees_requests = sees_requests
        self.batches = Batches(process, self.opened, sees_requests=sees_requests)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.process!r}>"

    @property
    def child(self) -> Child:
        """The process that the model is in; another one after a death."""
        return self.process.child

    @property
    def open_requests(self) -> int:
        return len(self.opened)

    @property
    def open_calls(self) -> int:
        return self.opened.open_calls

    def executors(self, workers: Sequence[tuple[str, Worker]], home: ExecutorLoop, *, limited: bool) -> Executors:
        """The executors of a model whose first instance this is; see `in_process.executors_for`."""
        if not self.sees_requests:
            ahead = [PipelinedExecutor(name, i, worker, home) for i, (name, worker) in enumerate(workers)]
            return Executors(ahead, home)
        linger = BatchLinger(joins=self.config.joins)
        each = [RequestsExecutor(name, i, worker, home, linger) for i, (name, worker) in enumerate(workers)]
        return RequestsExecutors(each, home, linger, takes_several=self.config.one_by_one and not limited)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run one batch in the process; returns read-only views of memory shared with it.

        Raises MmeError: as the handler inside; EXECUTION_FAILED, TIMED_OUT or OUT_OF_MEMORY when the process ended of
        this batch, UNAVAILABLE when it ended too often before.
        """
        return _arrays(self.batches.execute([_request(inputs, outputs)]), outputs)

    def execute_requests(self, requests: Sequence[ModelRequest]) -> Answers:
        return self.batches.execute(requests)

    def begin(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> SentBatch:
        """Send a batch to the process, which executes it behind the one that it has."""
        return self.batches.begin_ahead([_request(inputs, outputs)])

    def finish(self, begun: SentBatch) -> list[Array]:
        """Wait for it; one that the process never began, since it died of another, is begun again.

        Batches are finished in the order in which they were begun. Returns and raises what `execute` does.
        """
        return _arrays(self.batches.finish(begun), begun.requests[0].outputs)

    def ask_ready(self, done: Callable[[bool], None]) -> None:
        self.opened.ask_ready(done)

    def warm(self, *, begins: bool) -> None:
        self.process.warming = begins

    def is_down(self) -> bool:
        return self.process.is_down()

    def memory(self) -> Footprint:
        return self.process.footprint()

    def give_back(self, *, idle: bool) -> bool:
        return self.process.trim(idle=idle)

    def growth(self) -> int:
        """Bytes of the host that its process takes beyond what it took when it had loaded, as last measured."""
        return self.process.growth()

    def outgrow(self, budget: str) -> None:
        """End its process for what that takes; `budget` says what is passed. Its requests are told: OUT_OF_MEMORY.

        The next request starts it again, a few times.
        """
        self.process.outgrow(budget)

    def close(self) -> None:
        self.process.close()


class PipelinedExecutor(ThreadExecutor):
    """Executes batches in a worker process, which has the next one before it has answered the last."""

    def __init__(self, name: str, number: int, worker: LoadedModel, home: ExecutorLoop) -> None:
        super().__init__(name, number, worker, home)
        self.depth = 3  # one that is executed, one that lies behind it in the process, one to take that one's place

    def _execute_all(self) -> None:
        ended = 0
        given = self._next()
        while given is not None:
            submission, done = given
            given = self._next() if submission.begun else None
            submission.execute(self.handler, ended)
            ended = _now()
            if given is None:
                self._works = False
            self._tell(submission, done)

    def _next(self) -> tuple[Submission, Done] | None:
        """Take a batch from the inbox, and have it begun."""
        if not self._inbox:
            return None
        submission, done = self._inbox.popleft()
        submission.begin(self.handler)
        return submission, done


class RequestsExecutor(Executor):
    """Has the event loop send batches of requests to a worker, one at a time, and take their answers.

    A thread that only waits for a process costs two hand-offs a batch. All else is left to one: large batches, and
    whatever comes back that is not simply the answers, such as the death of the process. The process's lock is held
    from the sending of a batch until its answers are taken. Sockets are watched as copies, which belong to the loop:
    they stay what they are, whatever becomes of the process and of the worker's own on other threads.
    """

    def __init__(self, name: str, number: int, worker: Worker, home: ExecutorLoop, linger: BatchLinger) -> None:
        super().__init__(name, number, worker, home)
        self._worker = worker
        self._linger = linger
        self._seconds = worker.process.deadlines.execution  # that a batch may take
        self._submission: Submission | None = None
        self._done: Done | None = None
        self._sent: SentBatch | None = None
        self._sent_at = 0  # ns
        self._until = _EVER  # when the time of the batch is over whose answers the loop waits for
        self._timer: asyncio.TimerHandle | None = None
        self._descriptors: tuple[int, ...] = ()  # those whose copies are watched
        self._copies: list[int] = []

    def submit(self, submission: Submission, done: Done) -> bool:
        requests = submission.to_requests()
        if requests is None:
            return True
        self._submission, self._done = submission, done
        if self._timer is None:
            self._timer = self._home.loop.call_later(self._seconds, self._look)
        if self._begins(requests):
            self._sent_at = _now()
            self._until = time.monotonic() + self._seconds
            self._home.arm()
        else:
            self._unwatch()
            self._leave_to_thread(functools.partial(self._worker.batches.execute, requests))
        return False

    def together(self) -> int:
        """How many requests that are executed one by one it should be submitted at once."""
        return self._worker.opened.pace.together(_now())

    def stop(self) -> None:
        # Its requests may all be over by now: what a model says unasked, a last response too, overtakes the answers.
        while self._done is not None and not self._home.loop.is_closed():
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Give back what the loop keeps; nothing will be submitted any more."""
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begins(self, requests: Sequence[ModelRequest]) -> bool:
        """Have a batch begun, where that takes microseconds. False: nothing was sent."""
        if sum([size_of(array) for request in requests for array in request.inputs.values()]) > _SMALL:
            return False
        lock = self._worker.process.lock
        if not lock.acquire(blocking=False):
            return False
        try:
            self._sent = self._worker.batches.begin(requests, self._seconds, self._watch)
        except Exception:  # noqa: BLE001 - `execute` will meet it again, and tell
            return False
        finally:
            if self._sent is None:
                lock.release()
        return self._sent is not None

    def _watch(self, descriptors: tuple[int, ...]) -> None:
        if descriptors is self._descriptors:  # the same tuple means the same process
            return
        self._unwatch()
        for descriptor in descriptors:
            copy = os.dup(descriptor)
            self._copies.append(copy)
            self._home.loop.add_reader(copy, self._readable)
        self._descriptors = descriptors

    def _unwatch(self) -> None:
        self._descriptors = ()
        while self._copies:
            copy = self._copies.pop()
            self._home.loop.remove_reader(copy)
            os.close(copy)

    def _readable(self) -> None:
        if self._until == _EVER or self._sent is None:  # nothing was sent: this is an end, which the next batch meets
            self._unwatch()
            return
        began = _now()
        answers: Answers | Exception | None
        try:
            answers = self._worker.batches.take(self._sent)
        except Exception as error:  # noqa: BLE001 - whatever befell the batch is told of it
            answers = error
        if answers is None:
            self._wait(self._sent)
        else:
            self._answered(answers, began)
            self._ended()

    def _answered(self, answers: Answers | Exception, came: int) -> None:
        """Hand on the answers, or what befell the batch, on the thread where they came."""
        sent_at = self._sent_at
        if self._sent is not None:
            self._until = _EVER
            self._sent = None
            self._worker.process.lock.release()
        assert self._submission is not None  # noqa: S101 - it is under way
        self._submission.answered(answers, sent_at, came)

    def _ended(self) -> None:
        submission, done = self._submission, self._done
        assert submission is not None  # noqa: S101 - it was submitted
        assert done is not None  # noqa: S101 - as above
        self._submission = self._done = None
        self._linger.batch_done(len(submission.batch))
        done(self, submission)
        self._home.arm()

    def _wait(self, sent: SentBatch) -> None:
        """Have a thread wait for the batch that was sent."""
        self._until = _EVER
        self._unwatch()
        self._leave_to_thread(functools.partial(self._worker.batches.wait, sent))

    def _look(self) -> None:
        """End what is overdue. The timer goes on as long as any batch or response is owed."""
        self._timer = None
        now = time.monotonic()
        if self._until <= now and self._sent is not None:
            self._wait(self._sent)
        opened = self._worker.opened
        due = opened.due()
        if due <= now:
            self._home.run(opened.end_overdue)
            due = now + self._seconds  # or a batch is under way, whose own limit ends it
        look_at = min(self._until, due)
        if look_at < _EVER:
            self._timer = self._home.loop.call_later(look_at - now, self._look)

    def _leave_to_thread(self, work: Callable[[], Answers]) -> None:
        self._home.disarm()
        self._home.run(functools.partial(self._work, work))

    def _work(self, work: Callable[[], Answers]) -> None:
        """Do what a batch's answers are waited for by. On a thread."""
        if self._sent is None:
            self._sent_at = _now()
        answers: Answers | Exception
        try:
            answers = work()
        except Exception as error:  # noqa: BLE001 - as above
            answers = error
        self._answered(answers, _now())
        self._home.disarm()
        self._home.loop.call_soon_threadsafe(self._ended)


class RequestsExecutors(Executors):
    """Those of workers that are submitted requests: batches linger, and requests that do not batch cross together."""

    def __init__(
        self, each: list[RequestsExecutor], home: ExecutorLoop, linger: BatchLinger, *, takes_several: bool
    ) -> None:
        super().__init__(each, home)
        self.always_ready, self.takes_several = False, takes_several
        self._workers = each
        self._linger = linger

    def ready(self, waiting: int) -> bool:
        return not self._linger.turns or self._linger.ready(waiting, _now())

    def most(self, number: int, waiting: int) -> int:
        if waiting < 2:
            return 1
        return min(self._workers[number].together(), -(-waiting // len(self._workers)))

    def end(self) -> None:
        for executor in self._workers:
            executor.end()


def _request(inputs: Mapping[str, Array], outputs: Sequence[str]) -> ModelRequest:
    """What stands for a batch of tensors: a batch of one request."""
    return ModelRequest(dict(inputs), tuple(outputs))


def _arrays(answers: Answers, names: Sequence[str]) -> list[Array]:
    [answer] = answers
    if isinstance(answer, MmeError):
        raise answer
    assert answer is not None  # noqa: S101 - see `Batches`
    return [answer.outputs[name] for name in names]
