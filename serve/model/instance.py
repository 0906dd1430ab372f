"""One instance of a model: collate a batch, execute it, scatter its outputs; here, on a thread, or in a process.

`execute_batch` is the whole of an execution and touches nothing but its arguments; `begin_batch` and `finish_batch` are
its halves, for handlers whose process is given a batch before it has answered the last one. `RemoteInstances` sends
batches to worker processes from the event loop: a thread that only waits for a process costs two hand-offs a batch.
"""

from __future__ import annotations

import functools
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from model_handlers.base import Footprint
from model_handlers.errors import MmeError, NotBegunError
from serve.model.batch_proof import PASSING
from serve.model.replies import DecoupledRequest, failure
from serve.request import InferenceResponse, Timings

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from model_handlers.base import Handler, Watch
    from model_handlers.requests import ModelRequest, ModelResponse
    from model_handlers.tensor import Array
    from serve.model.batch_proof import BatchProof
    from serve.model.replies import Post
    from serve.model.tensors import Batch, TensorMap
    from serve.request import Called, InferenceRequest
    from serve.threads import ThreadPool


_now = time.perf_counter_ns
_BRIEF_NS = 50_000  # below it wall time will do: the system call costs half a microsecond


class Execution:
    """One batch and what became of each request in it."""

    def __init__(
        self,
        batch: Batch,
        results: Sequence[InferenceResponse | MmeError | None],
        size: int,
        timings: Timings,
        processor_ns: int,
        *,
        uniform: bool,
        one_by_one: bool = False,
    ) -> None:
        self.batch = batch
        # a response or an error for each, in the batch's order; None for one that is answered unasked
        self.results = results
        self.size = size  # the rows that were executed, also those of no request
        self.timings = timings
        self.processor_ns = processor_ns  # processor time of the executing thread; wall time where that was brief
        self.uniform = uniform  # whether every result is a response, and every row a request's
        # whether these are several executions of one request each, of which the timings tell the mean
        self.one_by_one = one_by_one

    @property
    def begun(self) -> list[InferenceRequest]:
        """The requests, without those of several executions that never came to theirs."""
        pairs = zip(self.batch, self.results, strict=True)
        return [request for request, result in pairs if not isinstance(result, NotBegunError)]


def execute_batch(handler: Handler, signature: TensorMap, batch: Batch, post: Post | None = None) -> Execution:
    """Run one batch. Never raises: what goes wrong becomes the error of every request in the batch."""
    proof = signature.proof
    if proof is not None and len(batch) > 1 and not proof.joins:
        return _execute_apart(handler, signature, batch, proof)
    start = collated = executed = _now()
    processor = time.thread_time_ns()
    size = signature.rows(batch)
    uniform = False
    requests: Sequence[ModelRequest] = ()
    try:
        results: Sequence[InferenceResponse | MmeError | None]
        if handler.sees_requests:
            requests = signature.to_model_requests(batch, post)
            collated = executed = _now()
            answers = handler.execute_requests(requests)
            executed = _now()
            results = signature.from_model_responses(batch, answers)
            uniform = signature.is_dense(batch) and all_responses(results)
        else:
            inputs, names = signature.collate(batch)
            collated = executed = _now()
            arrays = handler.execute(inputs, names)
            executed = _now()
            results = signature.scatter(batch, names, arrays, size)
            uniform = signature.is_dense(batch)
    except Exception as error:  # noqa: BLE001 - an instance must survive whatever a framework throws, or its model stands still
        results = _failed(signature, batch, error)
    done = _now()
    timings, several = timed(signature, results, size, (start, collated, executed, done))
    stamp(results, timings, requests, apart=several)
    took = done - start
    if took > _BRIEF_NS:
        took = time.thread_time_ns() - processor
    return Execution(batch, results, size, timings, took, uniform=uniform, one_by_one=several)


def _failed(signature: TensorMap, batch: Batch, error: Exception) -> list[InferenceResponse | MmeError | None]:
    """What the requests of a failed batch are told; where batches are guessed, to come again one by one."""
    told: MmeError = failure(signature.name, error)
    if signature.proof is not None and len(batch) > 1 and told.kind not in PASSING:
        signature.proof.doubt()
        told = NotBegunError(signature.name)
    return [told] * len(batch)


def _execute_apart(handler: Handler, signature: TensorMap, batch: Batch, proof: BatchProof) -> Execution:
    """Run requests one by one, and as a batch as well where that may prove that they can share one."""
    start = _now()
    processor = time.thread_time_ns()
    ones = [execute_batch(handler, signature, [request]) for request in batch]
    results = [one.results[0] for one in ones]
    contents = proof.wants(batch) if all_responses(results) else None
    if contents is not None:
        joined = []
        try:
            for order in (batch, batch[::-1]):  # what comes first may change what follows, but not the other way round
                inputs, names = signature.collate(order)
                arrays = handler.execute(inputs, names)
                joined.append(signature.scatter(order, names, arrays, signature.rows(order)))
            proof.judge(contents, cast("list[InferenceResponse]", results), [joined[0], joined[1][::-1]])
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            proof.failed(len(batch), failure(signature.name, error))
    count = len(ones)
    mean = Timings(
        start,
        sum([one.timings.compute_input for one in ones]) // count,
        sum([one.timings.compute_infer for one in ones]) // count,
        sum([one.timings.compute_output for one in ones]) // count,
        signature.rows(batch),
    )
    took = time.thread_time_ns() - processor
    return Execution(batch, results, mean.size, mean, took, uniform=all_responses(results), one_by_one=True)


def timed(
    signature: TensorMap,
    results: Sequence[InferenceResponse | MmeError | None],
    size: int,
    times: tuple[int, int, int, int],
) -> tuple[Timings, bool]:
    """Where the time of an execution went, and whether it was several of one request each, which share it alike.

    `times` are readings of `time.perf_counter_ns()`: of its start, and of when its arrays were made, it was executed
    and its answers made.
    """
    start, collated, executed, done = times
    if len(results) == 1 or not signature.one_by_one:
        return Timings(start, collated - start, executed - collated, done - executed, size), False
    count = sum([not isinstance(result, NotBegunError) for result in results]) or 1
    share = (collated - start) // count, (executed - collated) // count, (done - executed) // count
    return Timings(start, *share), True


class BegunBatch:
    """A batch that a handler has begun."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.names: tuple[str, ...] = ()  # the outputs that are to come
        self.start = self.collated = _now()
        self.begun: object = None  # what the handler gave for it, or what went wrong


def begin_batch(handler: Handler, signature: TensorMap, batch: Batch) -> BegunBatch:
    """Have a handler that works ahead begin a batch. Never raises: `finish_batch` tells what goes wrong."""
    begun = BegunBatch(batch)
    try:
        inputs, begun.names = signature.collate(batch)
        begun.collated = _now()
        begun.begun = handler.begin(inputs, begun.names)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        begun.begun = error
    return begun


def finish_batch(handler: Handler, signature: TensorMap, begun: BegunBatch, ended: int) -> Execution:
    """The execution of a begun batch; the one before it had `ended` then (ns). Never raises."""
    batch = begun.batch
    gathered = begun.collated - begun.start
    start = max(begun.start, ended - gathered)
    executed = start + gathered
    size = signature.rows(batch)
    uniform = False
    results: Sequence[InferenceResponse | MmeError | None]
    try:
        arrays = _finished(handler, begun)
        executed = _now()
        results = signature.scatter(batch, begun.names, arrays, size)
        uniform = signature.is_dense(batch)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        results = _failed(signature, batch, error)
    timings = Timings(start, gathered, executed - start - gathered, _now() - executed, size)
    stamp(results, timings)
    return Execution(batch, results, size, timings, 0, uniform=uniform)


def _finished(handler: Handler, begun: BegunBatch) -> list[Array]:
    if isinstance(begun.begun, Exception):
        raise begun.begun
    return handler.finish(begun.begun)


def all_responses(results: Sequence[InferenceResponse | MmeError | None]) -> bool:
    return all(isinstance(result, InferenceResponse) for result in results)


def stamp(
    results: Sequence[InferenceResponse | MmeError | None],
    timings: Timings,
    requests: Sequence[ModelRequest] = (),
    *,
    apart: bool = False,
) -> None:
    """Say in each response where the time went, and what other models its model called meanwhile.

    Calls are noted with each request of a batch, whichever of them it was for; those executed `apart` have their own.
    """
    if not apart:
        timings.calls = _calls_of(requests)
    for result in results:
        if isinstance(result, InferenceResponse):
            result.timings = timings
    if apart and requests:
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, InferenceResponse) and (calls := _calls_of([request])):
                result.timings = timings.calling(calls)


def _calls_of(requests: Sequence[ModelRequest]) -> Sequence[Called] | None:
    opened = (request.responder for request in requests)
    return next((each.calls for each in opened if isinstance(each, DecoupledRequest)), None)


_POLL_SECONDS = 0.005
# A batch that was sent, as requests, when it began, and when it was sent.
_NOTHING: tuple[Batch, Sequence[ModelRequest], int, int] = ([], (), 0, 0)


class Instance:
    """One instance, with a thread of a pool while it executes; batches for worker processes go over the event loop."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        signature: TensorMap,
        # asks for the next batch; marks the instance idle and returns [] when there is none
        pull: Callable[[Instance], Batch],
        # asks for one behind the batch that is executed; [] where there is none to be had so early
        pull_ahead: Callable[[Instance], Batch],
        report: Callable[[Execution], None],  # takes a finished execution; called on a thread
        threads: ThreadPool,
        post: Post | None = None,  # takes what the model answers unasked; called on any thread
        number: int = 0,
    ) -> None:
        self.name = name
        self.number = number
        self.handler = handler  # may be replaced at any time; an execution under way goes on with the one it began with
        self.turn = 0  # counts the beginnings and ends of executions, so that it is odd during one
        self._signature = signature
        self._pull = pull
        self._pull_ahead = pull_ahead
        self._report = report
        self._post = post
        self._threads = threads
        self._inbox: list[Callable[[], Execution]] = []  # what a thread begins with
        self._handed: list[bool] = []  # as many as threads have work of this instance; appending and popping are atomic
        self._sent = _NOTHING

    def __repr__(self) -> str:
        return f"<Instance {self.name}>"

    def run(self, batch: Batch) -> None:
        """Have the idle instance execute a batch, then whatever it can pull. On the event loop."""
        self._hand(functools.partial(self._work, batch))

    def _hand(self, work: Callable[[], Execution]) -> None:
        self._handed.append(True)
        self._inbox.append(work)
        self._threads.run(self._main)

    def execute(self, batch: Batch) -> Execution:
        """Execute a batch on the calling thread, while the instance is idle."""
        self.turn += 1  # before the handler is looked up: see RetiredHandlers
        execution = execute_batch(self.handler, self._signature, batch, self._post)
        self.turn += 1
        return execution

    def _work(self, batch: Batch) -> Execution:
        """Execute a batch, and those behind it that may be begun before it has ended; returns the last one's."""
        proof = self._signature.proof
        if not self.handler.ahead or (proof is not None and not proof.joins):
            return self.execute(batch)
        self.turn += 1
        handler, ended = self.handler, 0
        begun = begin_batch(handler, self._signature, batch)
        while (proof is None or proof.joins) and (following := self._pull_ahead(self)):
            behind = begin_batch(handler, self._signature, following)
            execution = finish_batch(handler, self._signature, begun, ended)
            ended = _now()
            self._report(execution)
            begun = behind
        execution = finish_batch(handler, self._signature, begun, ended)
        self.turn += 1
        return execution

    def send(self, batch: Batch, watch: Watch) -> bool:
        """Send a batch to the handler's process, whose answers `receive` takes; False where it is not sent so."""
        start = _now()
        requests = self._signature.to_model_requests(batch, self._post)
        if not self.handler.send_requests(requests, watch):
            return False
        self._sent = batch, requests, start, _now()
        return True

    def receive(self) -> Execution | None:
        """The execution of the batch that was sent; None where it is for a thread to wait for it: see `wait`."""
        began = _now()
        try:
            answers = self.handler.take_answers()
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return self._answered(error, began)
        return None if answers is None else self._answered(answers, began)

    def wait(self) -> None:
        """Have a thread wait for the batch that was sent, and report its execution."""
        self._hand(self._awaited)

    def _awaited(self) -> Execution:
        try:
            answers = self.handler.await_answers()
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return self._answered(error, _now())
        return self._answered(answers, _now())

    def _answered(self, answers: list[ModelResponse | MmeError | None] | Exception, executed: int) -> Execution:
        (batch, requests, start, sent), self._sent = self._sent, _NOTHING
        results: Sequence[InferenceResponse | MmeError | None]
        if isinstance(answers, Exception):
            results = [failure(self._signature.name, answers)] * len(batch)
        else:
            try:
                results = self._signature.from_model_responses(batch, answers)
            except Exception as error:  # noqa: BLE001 - as in `execute_batch`
                results = [failure(self._signature.name, error)] * len(batch)
        size = self._signature.rows(batch)
        times = start, sent, executed, _now()
        timings, several = timed(self._signature, results, size, times)
        stamp(results, timings, requests, apart=several)
        uniform = self._signature.is_dense(batch) and all_responses(results)
        return Execution(batch, results, size, timings, 0, uniform=uniform, one_by_one=several)

    def rest(self) -> None:
        """Wait until the batch that was sent is answered. Never on the event loop, which takes the answers.

        Its requests may all be over by then: what a model says unasked, a last response too, overtakes the answers.
        """
        until = time.monotonic() + self.handler.patience
        while self._sent[0] and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Wait until no thread has work of the instance. Never on the event loop."""
        while self._handed:  # it may have yet to be begun
            time.sleep(_POLL_SECONDS)

    def _main(self) -> None:
        try:
            self._report(self._inbox.pop()())
            while batch := self._pull(self):
                self._report(self._work(batch))
        finally:
            self._handed.pop()


class Handlers:
    """What executes one version of a model. Its methods may be called on any thread, while it is swapped or closed."""

    def __init__(self, handlers: Iterable[Handler]) -> None:
        self._handlers = list(handlers)
        # whether they execute in processes of their own
        self.apart = bool(self._handlers) and all(handler.apart for handler in self._handlers)

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers)

    def memory(self) -> Footprint:
        """What processes take together; nothing for handlers in this one."""
        return sum((handler.memory() for handler in self._handlers), Footprint())

    @property
    def memory_only(self) -> bool:
        """Whether there is nothing to close where the process ends."""
        return all(handler.memory_only for handler in self._handlers)

    def give_back(self, *, idle: bool) -> bool:
        """Give back memory that executions took: see `Handler`."""
        given_back = [handler.give_back(idle=idle) for handler in self._handlers]
        return all(given_back)

    def swap(self, handler: Handler) -> Sequence[Handler]:
        """Have another one take the place of all; returns those."""
        retired, self._handlers = self._handlers, [handler]
        handler.outside = retired[0].outside
        return retired

    def close(self, threads: ThreadPool) -> None:
        """Close them side by side, each though another raises: their models may have something to say at the end."""
        handlers, self._handlers = self._handlers, []
        closing = [(handler, threads.submit(handler.close)) for handler in handlers[1:]]
        with ExitStack() as ends:
            for handler, closed in closing:
                ends.callback(_await_closed, handler, closed)
            for handler in handlers[:1]:
                ends.callback(handler.close)


def _await_closed(handler: Handler, closed: Future[None]) -> None:
    if closed.cancel():  # no thread was free for it
        handler.close()
    else:
        closed.result()


class RetiredHandlers:
    """Handlers that instances were given others for; the executions that had begun by then still use them."""

    def __init__(self, handlers: Sequence[Handler], instances: Sequence[Instance]) -> None:
        self._handlers = handlers
        self._turns = [(instance, instance.turn) for instance in instances]

    def close(self) -> None:
        """Close them when those executions have ended. On a thread that may wait."""
        for instance, turn in self._turns:
            while turn % 2 and instance.turn == turn:
                time.sleep(_POLL_SECONDS)
        for handler in self._handlers:
            handler.close()


class RemoteInstances:
    """Instances whose batches are sent from the event loop to worker processes, and answers received on it.

    All else is left to a thread: batches that are not sent so, and whatever is heard that is not simply the answers:
    the death of the process, or a part of a message; also a batch without an answer when its time is over. Sockets are
    looked after as copies, which belong to the loop: they stay what they are, whatever becomes of the process and of
    the handler's own on other threads. On the loop.
    """

    def __init__(
        self,
        instances: Iterable[Instance],  # those whose handlers have patience
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Instance, Execution], None],  # takes an instance's execution; the instance is idle then
        threads: ThreadPool,
    ) -> None:
        self._loop = loop
        self._finished = finished
        self._threads = threads
        self._sockets = {
            instance: _WorkerSockets(loop, functools.partial(self._readable, instance)) for instance in instances
        }
        self._out: dict[Instance, float] = {}  # whose batch is under way, and when its time is over
        self._timer: asyncio.TimerHandle | None = None

    def send(self, instance: Instance, batch: Batch) -> bool:
        """Have an idle instance's process execute a batch; False leaves the batch to a thread."""
        sockets = self._sockets.get(instance)
        if sockets is None:
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(instance.handler.patience, self._look)
        if not instance.send(batch, sockets.watch):
            sockets.close()
            return False
        self._out[instance] = time.monotonic() + instance.handler.patience
        return True

    def _readable(self, instance: Instance) -> None:
        if instance not in self._out:  # nothing was sent: this is an end, which the next batch meets
            self._sockets[instance].close()
            return
        execution = instance.receive()
        if execution is None:
            self._leave(instance)
        else:
            del self._out[instance]
            self._finished(instance, execution)

    def _leave(self, instance: Instance) -> None:
        del self._out[instance]
        self._sockets[instance].close()
        instance.wait()

    def _look(self) -> None:
        """End what is overdue. One timer looks for all, as long as any batch or response is owed."""
        self._timer = None
        now = time.monotonic()
        for instance in [instance for instance, until in self._out.items() if until <= now]:
            self._leave(instance)
        looks_at = list(self._out.values())
        for instance in self._sockets:
            due = instance.handler.due()
            if 0.0 < due <= now:
                self._threads.run(instance.handler.end_overdue)
                due = now + instance.handler.patience  # or a batch is under way, whose own limit ends it
            if due:
                looks_at.append(due)
        if looks_at:
            self._timer = self._loop.call_later(min(looks_at) - now, self._look)

    def close(self) -> None:
        """Watch no socket any more. No batch is under way."""
        for sockets in self._sockets.values():
            sockets.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _WorkerSockets:
    def __init__(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> None:
        self._loop = loop
        self._readable = readable
        self._descriptors: tuple[int, ...] = ()
        self._copies: list[int] = []

    def watch(self, descriptors: tuple[int, ...]) -> None:
        if descriptors is self._descriptors:
            return
        self.close()
        for descriptor in descriptors:
            copy = os.dup(descriptor)
            self._copies.append(copy)
            self._loop.add_reader(copy, self._readable)
        self._descriptors = descriptors

    def close(self) -> None:
        self._descriptors = ()
        while self._copies:
            copy = self._copies.pop()
            self._loop.remove_reader(copy)
            os.close(copy)
