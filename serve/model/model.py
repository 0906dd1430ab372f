"""One version of one model in memory: its queue, its instances, its statistics.

`submit` runs on the event loop: it checks the request's layout (once a layout), queues it and asks for one `_dispatch`
at the end of this turn of the loop, by which time every socket that had data has been read and requests that arrived
together lie in the queue together. `_dispatch` gives a batch to each idle instance. A finished instance pulls its next
batch itself, without the loop, and reports with one wake-up a batch. A worker process is sent its batches by the loop,
which receives its answers (`RemoteInstances`), and gives the answered clients a moment to come again (`BatchLinger`).

A batch that will be done sooner than a thread hand-off pays for is executed on the loop: see `InlinePolicy`. The queue
and the list of idle instances are all that both the loop and the threads of instances touch; `_lock` guards them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from model_handlers.config.model_config import Guess
from model_handlers.errors import Kind, MmeError
from model_handlers.worker.parameters import EXECUTION_TIMEOUT, Deadlines
from serve.model.batch_proof import BatchProof
from serve.model.batcher import BatchLinger, BatchQueue, InOrder
from serve.model.dispatch import (
    DispatchQueue,
    InlinePolicy,
    InputMeter,
    LoopPoller,
    OverrunWatch,
    WakeTimer,
    input_bytes,
)
from serve.model.instance import Handlers, Instance, RemoteInstances, RetiredHandlers
from serve.model.layout_check import ValidatedLayouts
from serve.model.readiness import Readiness
from serve.model.replies import Replies
from serve.model.response_cache import cached_responses
from serve.model.sequence_batcher import keeps_order, queue_for
from serve.model.tensors import tensor_map_for
from serve.request import DecoupledError
from serve.threads import ThreadPool

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array
    from serve.model.batch_proof import Batching
    from serve.model.batcher import BatchDecision
    from serve.model.instance import Execution
    from serve.model.rate_limiter import LimitedInstances
    from serve.model.replies import RetryRequest
    from serve.model.response_cache import ResponseCache
    from serve.model.sequence_batcher import Queue
    from serve.model.tensors import Batch
    from serve.request import InferenceRequest
    from serve.statistics import ModelStats

_now = time.perf_counter_ns


class Model:
    """One version of a model, ready to execute."""

    def __init__(
        self,
        name: str,
        version: int,
        handlers: list[tuple[str, Handler]],  # (instance name, handler); instances on one device may share a handler
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        inline_ns: int = 0,  # executions expected to take at most this long run on the loop; 0 for none
        # asked on the loop about a request that ran out of memory; True takes it back. See `OomRetry`.
        retry: RetryRequest | None = None,
        responses: ResponseCache | None = None,
        initial_states: Mapping[str, Array] | None = None,  # state input → what a sequence begins with
        limits: LimitedInstances | None = None,  # its instances, where they share resources with others
        dispatches: DispatchQueue | None = None,
        poll: LoopPoller | None = None,
        # what is known of its batch dimension, where that is guessed; None for nothing yet
        proof: BatchProof | None = None,
        threads: ThreadPool | None = None,
        *,
        # whether free instances take turns, as on several devices; else the one that was busy last goes on, whose
        # memory is warm
        turns: bool = False,
        larger: Callable[[], None] | None = None,  # told of each batch with more input bytes than any before
    ) -> None:
        self.executed = InputMeter(larger)  # bytes of all inputs that were executed
        self.name, self.version = name, version
        self.config: ModelConfig = handlers[0][1].config
        self.stats = stats  # what happened so far
        self._loop = loop
        self.handlers = Handlers(dict.fromkeys([handler for _, handler in handlers]))  # what executes it
        self.readiness = Readiness(name, self.handlers, loop)  # whether its instances are ready
        signature = tensor_map_for(name, version, self.config, initial_states or {})
        if self.config.guess is not Guess.NONE:
            signature.proof = proof or BatchProof(self.config)
        self._proof = signature.proof
        self._queue: Queue[InferenceRequest] = queue_for(self.config.local_name(name), self.config, len(handlers))
        self._order: InOrder[Execution] | None = InOrder() if keeps_order(self.config, len(handlers)) else None
        unasked = any(handler.sees_requests for _, handler in handlers)
        self._decoupled = bool(self.config.decoupled)
        self._replies = Replies(
            signature,
            stats,
            loop,
            self._queue.timeout_message,
            self._requeue,
            # one that changes what comes after it is not executed again
            functools.partial(retry, self) if retry is not None and self._order is None else None,
            decoupled=self._decoupled,
            unasked=unasked,
        )
        self._threads = threads = threads or ThreadPool(name, idle_seconds=0)
        self._instances = [
            Instance(
                instance,
                handler,
                signature,
                self._pull,
                self._pull_ahead,
                self._report,
                threads,
                self._replies.post,
                number,
            )
            for number, (instance, handler) in enumerate(handlers)
        ]
        self._limits = limits
        self._turns = turns
        self._idle = list(range(len(self._instances))) if limits is None else []
        if limits is not None:
            limits.on_grant = self._ask_for_dispatch
        self._dispatches = dispatches or DispatchQueue(loop)
        self._poll = poll or LoopPoller(loop, lambda: False)
        self._remote = RemoteInstances(
            [instance for instance in self._instances if instance.handler.patience], loop, self._received, threads
        )
        self._overruns: OverrunWatch | None = None
        if EXECUTION_TIMEOUT in self.config.parameters and not self.handlers.apart:
            self._overruns = OverrunWatch(Deadlines.of(self.config).execution, loop, self._overran)
        # several requests may be sent to a process of the model's own together; with limits others may be in turn
        self._together = signature.one_by_one and limits is None and any(handler.patience for _, handler in handlers)
        self._linger = BatchLinger(joins=self.config.joins)
        self._executed: list[Execution] = []
        self._lock = threading.Lock()
        self._checked = ValidatedLayouts(self.config, stats)
        self._dispatch_asked = False
        self._timer = WakeTimer(loop, self._wake)
        self._inlining = InlinePolicy(inline_ns if all(handler.inline for _, handler in handlers) else 0)
        self._tickets: dict[int, int] = {}
        self._ticket = itertools.count()
        stats.keep_first_responses(self.config)
        self._cached = cached_responses(self.config, responses, stats, loop, reads_parameters=unasked)
        self._overtakes = self.config.dynamic_batching is None or not self.config.dynamic_batching.preserve_ordering
        stats.batching = ""
        if self._proof is not None:
            self._proof.listen(self._learnt)
            self._note_batching()

    def __repr__(self) -> str:
        return (
            f"<Model {self.name}/{self.version}: {len(self._queue)} queued of {self.outstanding} accepted, "
            f"{len(self._idle)} of {len(self._instances)} instances idle>"
        )

    @property
    def outstanding(self) -> int:
        return self._replies.outstanding

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, request: InferenceRequest) -> None:
        """Accept a request, which from now on gets exactly one answer.

        Raises:
            MmeError: INVALID_ARGUMENT when it does not fit the model, QUEUE_FULL. Then it was not accepted.
        """
        if self._decoupled and request.on_response is None:
            raise DecoupledError(f"model '{self.name}'")
        checked = self._checked[request.layout]
        request.batch_size = checked.batch_size
        request.order = checked.order
        request.signature = checked.signature
        request.arrival_ns = _now()
        if self._cached is not None and (self._overtakes or not self.outstanding) and self._cached.answered(request):
            return
        try:
            with self._lock:
                self._queue.push(request)
        except MmeError as error:
            self.stats.failed(error.kind, 0)
            raise
        self._replies.outstanding += 1
        if self._queue.wants_cancellations:
            request.on_cancel = functools.partial(self._client_left, request)
        self._ask_for_dispatch()

    def _requeue(self, request: InferenceRequest) -> None:
        try:
            if self._replies.is_unloading:
                raise self._replies.unloading_error()
            with self._lock:
                self._queue.push(request, first=True)
        except MmeError as error:
            self._replies.refuse(request, error)
            return
        if self._queue.wants_cancellations:
            request.on_cancel = functools.partial(self._client_left, request)
            if request.cancelled:
                self._client_left(request)
        self._ask_for_dispatch()

    def _client_left(self, request: InferenceRequest) -> None:
        with self._lock:
            self._queue.cancel(request)
            take = self._queue.take_expired(_now())
        self._replies.drop(take)
        self._ask_for_dispatch()

    def _learnt(self, _state: Batching) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_batching)

    def _note_batching(self) -> None:
        assert self._proof is not None  # noqa: S101 - something is known of it
        self.stats.batching = self._proof.state.value
        if self._proof.alone and isinstance(self._queue, BatchQueue):
            with self._lock:
                self._queue.part()

    def _ask_for_dispatch(self) -> None:
        if not self._dispatch_asked:
            self._dispatch_asked = True
            self._dispatches.schedule(self._dispatch)

    def _dispatch(self) -> None:
        """Give a batch to every idle instance, then answer the batches that are done."""
        if self._linger.turns and not self._executed and self._linger.should_wait(len(self._queue), _now()):
            self._loop.call_soon(self._dispatch)  # `_dispatches` would call it before the loop looks at its sockets
            return
        self._dispatch_asked = False
        wake_at = self._give_out() if self._limits is None else self._give_out_in_turn(self._limits)
        if not wake_at:
            with self._lock:
                wake_at = self._queue.next_deadline()
        self._timer.set(wake_at)
        executed, self._executed = self._executed, []
        for execution in executed:
            self._hand_over(execution)

    def _give_out_in_turn(self, limits: LimitedInstances) -> int:
        wakes_at = []
        for number in limits.free():
            if not len(self._queue):
                break
            if limits.acquire(number):
                self._free(number)
                wakes_at.append(self._give_out())
                if number in self._idle:
                    self._idle.remove(number)
                    limits.give_back(number)
        if not len(self._queue):
            limits.release_idle()
        return min(filter(None, wakes_at), default=0)

    def _give_out(self) -> int:
        wake_at = 0
        while len(self._queue):
            take = self._next()
            if take is None:
                with self._lock:
                    wake_at = self._queue.next_deadline()
                break
            wake_at = take.wake_at
            if take.expired or take.cancelled:
                self._replies.drop(take)
            if take.batch:
                self._start(self._instances[take.instance], take.batch)
            elif not take.cancelled:
                break
        return wake_at

    def _next(self) -> BatchDecision[InferenceRequest] | None:
        with self._lock:
            if not self._idle:
                return None
            take = self._queue.take(_now(), self._idle, self._most() if self._together else 1)
            if take.batch:
                self._idle.remove(take.instance)
                self._ticket_for(take.batch)
            return take

    def _most(self) -> int:
        waiting = len(self._queue)
        if waiting < 2:
            return 1
        return min(self._instances[self._idle[-1]].handler.together(), -(-waiting // len(self._instances)))

    def _start(self, instance: Instance, batch: Batch) -> None:
        if self._inlining.limit_ns and self._inlining.should_inline(size := input_bytes(batch)):
            execution = instance.execute(batch)
            self._rest(instance)
            self._inlining.observe(size, execution.processor_ns)
            self.executed.add(size)
            self._hand_over(execution)
        elif self._remote.send(instance, batch):
            self._poll.arm()
        else:
            self._poll.disarm()
            if self._overruns is not None:
                self._overruns.watch(instance.number, batch)
            instance.run(batch)

    def _free(self, number: int) -> None:
        self._idle.insert(0 if self._turns else len(self._idle), number)

    def _rest(self, instance: Instance) -> None:
        with self._lock:
            self._queue.release(instance.number, _now())
            if self._limits is None:
                self._free(instance.number)
        if self._limits is not None:
            self._limits.done(instance.number, again=len(self._queue) > 0)
            self._ask_for_dispatch()

    def _received(self, instance: Instance, execution: Execution) -> None:
        self._rest(instance)
        size = len(execution.batch)
        if self._linger.skips(len(self._queue), size):
            self._executed.append(execution)
        else:
            self._hand_over(execution)
            self._linger.batch_done(size, _now())
        self._ask_for_dispatch()

    def _pull_ahead(self, instance: Instance) -> Batch:
        """A batch for an executing instance; only one that would not grow by waiting. On its thread."""
        if self._limits is not None:
            return []
        with self._lock:
            if self._idle or not self._queue.is_full():  # an idle one executes it at once
                return []
            take = self._queue.take(_now(), (instance.number,))
            if take.batch:
                self._ticket_for(take.batch)
        if take.expired or take.cancelled or take.wake_at:
            self._loop.call_soon_threadsafe(self._pulled, take)
        return take.batch

    def _overran(self, batch: Batch) -> None:
        limit = f"{Deadlines.of(self.config).execution:g} s ({EXECUTION_TIMEOUT})"
        late = f"model '{self.name}': its execution takes longer than {limit}; it goes on, and what it makes is dropped"
        self._replies.give_up(batch, MmeError(Kind.TIMED_OUT, late))

    def _pull(self, instance: Instance) -> Batch:
        """The instance's next batch; [] makes it idle. On a thread."""
        if self._overruns is None:
            return self._pulled_batch(instance)
        self._overruns.begun(instance.number, [])  # before the instance is idle: the loop may give it a batch at once
        if batch := self._pulled_batch(instance):
            self._overruns.begun(instance.number, batch)
        return batch

    def _pulled_batch(self, instance: Instance) -> Batch:
        if self._limits is not None:  # others may be in turn
            self._loop.call_soon_threadsafe(self._rest, instance)
            return []
        if instance.handler.patience:  # the loop sends it its next batch
            self._rest(instance)
            self._loop.call_soon_threadsafe(self._dispatch)
            return []
        with self._lock:
            now = _now()
            self._queue.release(instance.number, now)
            take = self._queue.take(now, (instance.number,))
            if take.batch:
                self._ticket_for(take.batch)
            else:
                self._free(instance.number)
        if take.expired or take.cancelled or take.wake_at:
            self._loop.call_soon_threadsafe(self._pulled, take)
        return take.batch

    def _pulled(self, take: BatchDecision[InferenceRequest]) -> None:
        self._replies.drop(take)
        self._dispatch()

    def _report(self, execution: Execution) -> None:
        self._poll.disarm()
        self._loop.call_soon_threadsafe(self._finished, execution)

    def _finished(self, execution: Execution) -> None:
        size = input_bytes(execution.batch)
        if self._inlining.limit_ns:
            self._inlining.observe(size, execution.processor_ns)
        self.executed.add(size)
        self._hand_over(execution)

    def _hand_over(self, execution: Execution) -> None:
        if self._order is None:
            self._replies.complete(execution)
        else:
            for ready in self._order.release(self._tickets.pop(id(execution.batch)), execution):
                self._replies.complete(ready)
        self._poll.arm()

    def _ticket_for(self, batch: Batch) -> None:
        if self._order is not None:
            self._tickets[id(batch)] = next(self._ticket)

    def fail(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that was taken back and not submitted again."""
        self._replies.fail(request, error)

    def _wake(self) -> None:
        with self._lock:
            expired = self._queue.take_expired(_now())
        self._replies.drop(expired)
        self._dispatch()

    def end_sequence(self, correlation_id: int | str) -> None:
        with self._lock:
            self._queue.end(correlation_id, _now())
        self._ask_for_dispatch()

    def refuse_waiting(self) -> None:
        """Refuse what is queued, or waits for responses that come unasked: the model goes. On the loop."""
        with self._lock:
            waiting = self._queue.clear()
        self._timer.set(0)
        for request in waiting:
            self._replies.refuse(request, self._replies.unloading_error())
        self._replies.refuse_open()

    def swap(self, handler: Handler) -> RetiredHandlers:
        """Have every instance execute on another handler from its next batch on. On the loop.

        Returns:
            what is to be closed.
        """
        retired = self.handlers.swap(handler)
        for instance in self._instances:
            instance.handler = handler
        return RetiredHandlers(retired, self._instances)

    def close(self) -> None:
        """Stop the instances and give the memory back. On a load thread, when nothing is queued or executing."""
        for instance in self._instances:
            instance.rest()
            instance.stop()
        if self._cached is not None:
            self._cached.close()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        self.handlers.close(self._threads)

    def _end(self) -> None:
        """End what the loop does for it. Kept sequences would have it look for ever."""
        self.refuse_waiting()
        self._remote.close()
        if self._overruns is not None:
            self._overruns.close()
        if self._limits is not None:  # on the loop, which knew of an instance's last execution no earlier than this
            self._limits.close()
