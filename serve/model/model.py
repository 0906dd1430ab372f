"""One version of one model in memory: its queue, its instances, its statistics.

`submit` runs on the event loop: it checks the request's layout (once a layout), queues it and asks for one `_dispatch`
at the end of this turn of the loop, by which time every socket that had data has been read and requests that arrived
together lie in the queue together. `_dispatch` submits a batch to the executor of each idle instance, which tells
`_done`, on the loop too, what became of it. Everything here is on the event loop, and needs no lock.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from model_handlers.config.model_config import Guess
from model_handlers.errors import MmeError
from model_handlers.executor import ExecutorLoop
from model_handlers.in_process import executors_for
from serve.model.batch_proof import BatchProof
from serve.model.batcher import BatchQueue, InOrder
from serve.model.execution import Execution
from serve.model.layout_check import ValidatedLayouts
from serve.model.replies import Replies
from serve.model.sequence_batcher import SequenceQueue
from serve.model.tensors import tensor_map_for
from serve.request import DecoupledError
from serve.threads import ThreadPool

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from model_handlers.base import LoadedModel
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.executor import Executor
    from model_handlers.tensor import Array
    from serve.model.batch_proof import Batching
    from serve.model.batcher import BatchDecision
    from serve.model.rate_limiter import LimitedInstances
    from serve.model.replies import RetryRequest
    from serve.model.response_cache import CachedResponses, ResponseCache
    from serve.request import InferenceRequest
    from serve.statistics import ModelStats

    Queue: TypeAlias = BatchQueue[InferenceRequest] | SequenceQueue[InferenceRequest]

_now = time.perf_counter_ns
_LONGEST_NS = 500_000  # then the loop looks at its sockets, however many models there are


class DispatchQueue:
    """Models with requests to hand out, in order; called when what runs on the event loop now has ended.

    A model that hands out batches may answer them at once, and an answer may be the request of another model, as in an
    ensemble. That one's turn comes right behind, in the same turn of the loop: requests on their way through the same
    steps stay together, as one batch, and the loop does not look at its sockets in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._asked = False

    def __repr__(self) -> str:
        return f"<DispatchQueue: {len(self._waiting)} waiting>"

    def schedule(self, dispatch: Callable[[], None]) -> None:
        self._waiting.append(dispatch)
        if not self._asked:
            self._asked = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        waiting, until = self._waiting, _now() + _LONGEST_NS
        try:
            while waiting:
                waiting.popleft()()
                if _now() > until:
                    break
        finally:  # though one has raised, which is the loop's to tell, the others have their turn
            self._asked = bool(waiting)
            if waiting:
                self._loop.call_soon(self._run)


class IdleInstances:
    """The instances of a model without a batch, by number; with `limits` those alone that have their turn."""

    def __init__(self, count: int, limits: LimitedInstances | None, *, turns: bool) -> None:
        self.limits = limits  # its instances, where they share resources with others
        self.numbers: list[int] = list(range(count)) if limits is None else []  # the last of them is next
        # where a free one goes: it is the next, whose memory is warm, or the last where they take turns
        self.add: Callable[[int], None] = functools.partial(self.numbers.insert, 0) if turns else self.numbers.append


class WakeTimer:
    """Wakes at a time (ns), never for 0. An earlier wake-up will do: it looks, and sets another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self.wakes_at = 0  # when, while it is set

    def set(self, wake_at: int) -> None:
        if self._timer is None and not wake_at:
            return
        if self._timer is not None:
            if 0 < self.wakes_at <= wake_at:
                return
            self._timer.cancel()
            self._timer = None
        self.wakes_at = wake_at
        if wake_at:
            self._timer = self._loop.call_later(max(wake_at - _now(), 0) / 1e9, self._run)

    def _run(self) -> None:
        self._timer = None
        self.wakes_at = 0
        self._wake()


def queue_for(model: str, config: ModelConfig, instances: int) -> Queue:
    """The batcher that a configuration asks for."""
    if config.sequence_batching is not None:
        return SequenceQueue(model, config.sequence_batching, config.max_batch_size, instances)
    return BatchQueue(model, config.max_batch_size, config.dynamic_batching)


class Model:
    """One version of a model, ready to execute."""

    def __init__(
        self,
        name: str,
        version: int,
        handlers: list[
            tuple[str, LoadedModel]
        ],  # (instance name, handler); instances on one device may share a handler
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        inline_ns: int = 0,  # executions expected to take at most this long run on the loop; 0 for none
        # asked on the loop about a request that ran out of memory; True takes it back. See `OomRetry`.
        retry: RetryRequest | None = None,
        responses: ResponseCache | None = None,
        initial_states: Mapping[str, Array] | None = None,  # state input → what a sequence begins with
        limits: LimitedInstances | None = None,  # its instances, where they share resources with others
        dispatches: DispatchQueue | None = None,
        home: ExecutorLoop | None = None,  # where its batches are executed
        # what is known of its batch dimension, where that is guessed; None for nothing yet
        proof: BatchProof | None = None,
        *,
        # whether free instances take turns, as on several devices; else the one that was busy last goes on, whose
        # memory is warm
        turns: bool = False,
        larger: Callable[[], None] | None = None,  # told of each batch with more input bytes than any before
    ) -> None:
        self.name, self.version = name, version
        self.config: ModelConfig = handlers[0][1].config
        self.stats = stats  # what happened so far
        self._loop = loop
        signature = tensor_map_for(name, version, self.config, initial_states or {})
        if self.config.guess is not Guess.NONE:
            signature.proof = proof or BatchProof(self.config)
        self._queue: Queue = queue_for(self.config.local_name(name), self.config, len(handlers))
        self._order: InOrder[Execution] | None = (
            InOrder() if len(handlers) > 1 and self.config.preserves_order else None
        )
        unasked = any(handler.sees_requests for _, handler in handlers)
        self._replies = Replies(
            signature,
            stats,
            loop,
            self._queue.timeout_message,
            self._requeue,
            # one that changes what comes after it is not executed again
            functools.partial(retry, self) if retry is not None and self._order is None else None,
            decoupled=bool(self.config.decoupled),
            unasked=unasked,
        )
        self._hand_over: Callable[[Execution], None] = (  # what became of a batch
            self._replies.complete if self._order is None else functools.partial(self._hand_over_in_order, self._order)
        )
        self.executors = executors_for(  # what executes it
            handlers,
            self.config,
            home or ExecutorLoop(loop, ThreadPool(name, idle_seconds=0)),
            inline_ns=inline_ns,
            limited=limits is not None,
            larger=larger,
            late=self._replies.give_up,
        )
        self._idle = IdleInstances(len(handlers), limits, turns=turns)
        if limits is not None:
            limits.on_grant = self._ask_for_dispatch
        self._dispatches = dispatches or DispatchQueue(loop)
        self._dispatch_asked = False
        self._checked = ValidatedLayouts(self.config, stats)
        self._timer = WakeTimer(loop, self._wake)
        stats.keep_first_responses(self.config)
        self._cached: CachedResponses | None = None
        if responses is not None and self.config.response_cache:
            self._cached = responses.of_model(self.config, stats, loop, reads_parameters=unasked)
        stats.batching = ""
        if signature.proof is not None:
            signature.proof.listen(functools.partial(self._learnt, signature.proof))
            self._note_batching(signature.proof)

    def __repr__(self) -> str:
        return (
            f"<Model {self.name}/{self.version}: {len(self._queue)} queued of {self.outstanding} accepted, "
            f"{len(self._idle.numbers)} of {len(self.executors.each)} instances idle>"
        )

    def is_down(self) -> bool:
        """Whether an instance will execute nothing for a while."""
        return self.executors.is_down()

    async def ask_ready(self) -> bool:
        """Whether its instances are ready, and its code says so if it has a say."""
        return await self.executors.ask_ready(self.name)

    @property
    def outstanding(self) -> int:
        return self._replies.outstanding

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, request: InferenceRequest, at_once: bool = False) -> None:  # noqa: FBT001, FBT002 - on each request's way
        """Accept a request, which from now on gets exactly one answer; `at_once` with no others to wait for.

        Raises:
            MmeError: INVALID_ARGUMENT when it does not fit the model, QUEUE_FULL. Then it was not accepted.
        """
        if self._replies.decoupled and request.on_response is None:
            raise DecoupledError(f"model '{self.name}'")
        checked = self._checked[request.layout]
        request.batch_size = checked.batch_size
        request.order = checked.order
        request.signature = checked.signature
        request.arrival_ns = _now()
        if self._cached is not None and self._cached.answered(request, self.outstanding):
            return
        try:
            self._queue.push(request)
        except MmeError as error:
            self.stats.failed(error.kind, 0)
            raise
        self._replies.outstanding += 1
        if self._queue.has_sequences:
            request.on_cancel = functools.partial(self._client_left, request)
        if at_once:
            self._dispatch()
        elif not self._dispatch_asked:
            self._dispatch_asked = True
            self._dispatches.schedule(self._dispatch)

    def _requeue(self, request: InferenceRequest) -> None:
        try:
            if self._replies.is_unloading:
                raise self._replies.unloading_error()
            self._queue.push(request, first=True)
        except MmeError as error:
            self._replies.refuse(request, error)
            return
        if self._queue.has_sequences:
            request.on_cancel = functools.partial(self._client_left, request)
            if request.cancelled:
                self._client_left(request)
        self._ask_for_dispatch()

    def _client_left(self, request: InferenceRequest) -> None:
        self._queue.cancel(request)
        self._replies.drop(self._queue.take_expired(_now()))
        self._ask_for_dispatch()

    def _learnt(self, proof: BatchProof, _state: Batching) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_batching, proof)

    def _note_batching(self, proof: BatchProof) -> None:
        self.stats.batching = proof.state.value
        if proof.alone and isinstance(self._queue, BatchQueue):
            self._queue.part()

    # -- from the queue to an executor -----------------------------------------------------------------------------

    def _ask_for_dispatch(self) -> None:
        if not self._dispatch_asked:
            self._dispatch_asked = True
            self._dispatches.schedule(self._dispatch)

    def _dispatch(self) -> None:
        """Give a batch to every idle instance, and a whole one to each that takes it ahead."""
        if not (self.executors.always_ready or self.executors.ready(len(self._queue))):
            self._loop.call_soon(self._dispatch)  # `_dispatches` would call it before the loop looks at its sockets
            return
        self._dispatch_asked = False
        wake_at = self._give_out() if self._idle.limits is None else self._give_out_in_turn(self._idle.limits)
        if not wake_at and self._queue.has_deadlines:
            wake_at = self._queue.next_deadline()
        if wake_at or self._timer.wakes_at:
            self._timer.set(wake_at)

    def _give_out_in_turn(self, limits: LimitedInstances) -> int:
        wakes_at = []
        idle = self._idle.numbers
        for number in limits.free():
            if not len(self._queue):
                break
            if limits.acquire(number):
                idle.append(number)
                wakes_at.append(self._give_out())
                if number in idle:
                    idle.remove(number)
                    limits.give_back(number)
        if not len(self._queue):
            limits.release_idle()
        return min(filter(None, wakes_at), default=0)

    def _give_out(self) -> int:
        """Give batches to executors; return when (ns) the queue is to be asked again, 0 for: when something changes."""
        idle = self._idle.numbers
        while len(self._queue):
            take: BatchDecision[InferenceRequest] | None
            if idle:
                most = self.executors.most(idle[-1], len(self._queue)) if self.executors.takes_several else 1
                take = self._queue.take(_now(), idle, most)
                if take.batch:
                    idle.remove(take.instance)
            elif (take := self._ahead()) is None:
                break
            if take.expired or take.cancelled:
                self._replies.drop(take)
            if take.batch:
                if self._order is not None:
                    self._order.enter(id(take.batch))
                executor = self.executors.each[take.instance]
                executor.pending += 1
                execution = Execution(self._replies.signature, take.batch, self._replies.post)
                if executor.submit(execution, self._done):
                    self._finished(executor)
                    self._hand_over(execution)
            elif not take.cancelled:  # else a batch may wait behind one whose clients have left
                return take.wake_at
        return 0

    def _ahead(self) -> BatchDecision[InferenceRequest] | None:
        """Return a batch for an executor that takes another one while all are busy."""
        executor = self.executors.takes_ahead() if self._idle.limits is None else None
        if executor is None or not self._queue.is_full():  # one that is not full may grow meanwhile
            return None
        return self._queue.take(_now(), (executor.number,))

    def _finished(self, executor: Executor) -> None:
        executor.pending -= 1
        if self._queue.has_sequences:
            self._queue.release(executor.number, _now())
        if self._idle.limits is not None:
            self._idle.limits.done(executor.number, again=len(self._queue) > 0)
            self._ask_for_dispatch()
        elif not executor.pending:
            self._idle.add(executor.number)

    def _done(self, executor: Executor, execution: Execution) -> None:
        """Answer a batch; before that give out those that wait for nothing else, so that its executor has work."""
        self._finished(executor)
        waiting = len(self._queue)
        if not self.executors.ready(waiting):
            self._hand_over(execution)
            self._ask_for_dispatch()
            return
        if waiting:
            self._dispatch()
        self._hand_over(execution)

    def _hand_over_in_order(self, order: InOrder[Execution], execution: Execution) -> None:
        for ready in order.release(id(execution.batch), execution):
            self._replies.complete(ready)

    def fail(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that was taken back and not submitted again."""
        self._replies.fail(request, error)

    def _wake(self) -> None:
        self._replies.drop(self._queue.take_expired(_now()))
        self._dispatch()

    def end_sequence(self, correlation_id: int | str) -> None:
        self._queue.end(correlation_id, _now())
        self._ask_for_dispatch()

    def refuse_waiting(self) -> None:
        """Refuse what is queued, or waits for responses that come unasked: the model goes. On the loop."""
        waiting = self._queue.clear()
        self._timer.set(0)
        for request in waiting:
            self._replies.refuse(request, self._replies.unloading_error())
        self._replies.refuse_open()

    def close(self) -> None:
        """Stop the instances and give the memory back. On a load thread, when nothing is queued or executing."""
        self.executors.stop()
        if self._cached is not None:
            self._cached.close()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        self.executors.close()

    def _end(self) -> None:
        """End what the loop does for it. Kept sequences would have it look for ever."""
        self.refuse_waiting()
        self.executors.end()
        if self._idle.limits is not None:  # on the loop, which knew of the last execution no earlier than this
            self._idle.limits.close()
