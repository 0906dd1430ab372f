"""One version of one model in memory: its queue, its lanes, its statistics.

Theory of operation. `submit` runs on the event loop: it checks the request's layout (once a layout), queues it and
asks for one `_dispatch` at the end of this turn of the loop, by which time every socket that had data has been read
and requests that arrived together lie in the queue together. `_dispatch` gives a batch to each idle lane. A lane that
has finished pulls its next batch itself, without the loop, and reports with one wake-up a batch. A lane whose model is
in another process is sent its batches by the loop, which hears its answers (`remote_lanes`), and gives those whom it
answers a moment to come again (`rejoining`).

A batch that will be done sooner than a thread hand-off pays for is executed on the loop: how long the last executions
of that size took decides, so a model earns it by being quick and loses it by being slow once.

The queue and the list of idle lanes are the only things that both the loop and the lanes touch; `_lock` guards them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from model_handlers.base import Footprint
from model_handlers.config.model_config import Guess
from model_handlers.errors import Kind, MmeError
from model_handlers.worker.parameters import EXECUTION_TIMEOUT, Deadlines
from serve.decoupled_error import DecoupledError
from serve.model.answers import Answers
from serve.model.batch_proof import BatchProof
from serve.model.batch_queue import BatchQueue
from serve.model.cached_responses import cached_responses
from serve.model.costs import Costs, input_bytes
from serve.model.dispatches import Dispatches
from serve.model.instance import Instance, Retired, close_all
from serve.model.layout_check import CheckedLayouts
from serve.model.loop_poll import LoopPoll
from serve.model.ordering import InOrder
from serve.model.overruns import Overruns
from serve.model.queues import keeps_order, queue_for
from serve.model.readiness import Readiness
from serve.model.rejoining import Rejoining
from serve.model.remote_lanes import RemoteLanes
from serve.model.sequence_tensors import signature_for
from serve.threads import ThreadPool

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from model_handlers.base import Handler
    from model_handlers.config.model_config import ModelConfig
    from model_handlers.tensor import Array
    from serve.model.batch_proof import Batching
    from serve.model.batch_queue import Take
    from serve.model.execution import Execution
    from serve.model.limited_lanes import LimitedLanes
    from serve.model.queues import Queue
    from serve.model.rescue import RescueRequest
    from serve.model.response_cache import ResponseCache
    from serve.model.signature import Batch
    from serve.request import InferenceRequest, InferenceResponse
    from serve.stats import ModelStats

_now = time.perf_counter_ns


class Model:
    """One version of a model, ready to execute.

    Attributes:
        config: the configuration, completed.
        stats: what happened so far.
        readiness: whether its instances are ready.
        input_bytes: bytes of all inputs that were executed.

    Args:
        name: the name it is served under, which responses carry.
        version: its number.
        handlers: (lane name, handler) of each lane; lanes on one device may share a handler.
        stats: where to count.
        loop: the event loop that calls `submit` and is told of results.
        inline_ns: executions expected to take at most this long run on the loop; 0 for none.
        rescue: asked on the loop about a request that ran out of memory; True takes it back. See `Rescue`.
        responses: where responses are kept, if the configuration asks for that; None for nowhere.
        initial_states: state input → what a sequence begins with, for a model that has states.
        limits: its lanes, where they share resources with others; None where each executes as soon as it is free.
        dispatches: gives it its turn to hand out batches, among the models of the loop.
        poll: keeps the loop awake where something is likely to come at once.
        proof: what is known of its batch dimension, where that is guessed; None for nothing yet.
        threads: on which the instances of all models execute; None for a thread for each piece of work.
        turns: whether free lanes take turns, as on several devices; else the one that was busy last goes on, whose
            memory is warm.
        larger: told of each batch with more input bytes than any before.
    """

    def __init__(
        self,
        name: str,
        version: int,
        handlers: list[tuple[str, Handler]],
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        inline_ns: int = 0,
        rescue: RescueRequest | None = None,
        responses: ResponseCache[InferenceResponse] | None = None,
        initial_states: Mapping[str, Array] | None = None,
        limits: LimitedLanes | None = None,
        dispatches: Dispatches | None = None,
        poll: LoopPoll | None = None,
        proof: BatchProof | None = None,
        threads: ThreadPool | None = None,
        *,
        turns: bool = False,
        larger: Callable[[], None] | None = None,
    ) -> None:
        self.input_bytes = self._largest = 0
        self._larger = larger
        self.name, self.version = name, version
        self.config: ModelConfig = handlers[0][1].config
        self.stats = stats
        self._loop = loop
        self._handlers = {id(handler): handler for _, handler in handlers}
        self.readiness = Readiness(name, lambda: list(self._handlers.values()), loop)
        signature = signature_for(name, version, self.config, initial_states or {})
        if self.config.guess is not Guess.NONE:
            signature.proof = proof or BatchProof(self.config)
        self._proof = signature.proof
        self._queue: Queue[InferenceRequest] = queue_for(self.config.own(name), self.config, len(handlers))
        self._order: InOrder[Execution] | None = InOrder() if keeps_order(self.config, len(handlers)) else None
        unasked = any(handler.sees_requests for _, handler in handlers)
        self._decoupled = bool(self.config.decoupled)
        self._answers = Answers(
            signature,
            stats,
            loop,
            self._queue.expiry,
            functools.partial(self._queue_late, first=True),
            # one that changes what comes after it is not executed again
            functools.partial(rescue, self) if rescue is not None and self._order is None else None,
            decoupled=self._decoupled,
            unasked=unasked,
        )
        self._threads = threads = threads or ThreadPool(name, idle_seconds=0)
        self._lanes = [
            Instance(
                lane,
                handler,
                signature,
                self._pull,
                self._pull_ahead,
                self._report,
                threads,
                self._answers.post,
                number,
            )
            for number, (lane, handler) in enumerate(handlers)
        ]
        self._limits = limits
        self._turns = turns
        self._idle = list(range(len(self._lanes))) if limits is None else []
        if limits is not None:
            limits.wake = self._ask_for_dispatch
        self._dispatches = dispatches or Dispatches(loop)
        self._poll = poll or LoopPoll(loop, lambda: False)
        self._remote = RemoteLanes(
            [lane for lane in self._lanes if lane.handler.patience], loop, self._received, threads
        )
        self._overruns: Overruns | None = None
        if EXECUTION_TIMEOUT in self.config.parameters and not all(handler.apart for _, handler in handlers):
            self._overruns = Overruns(Deadlines.of(self.config).execution, loop, self._overran)
        # several requests may be sent to a process of the model's own together; with limits others may be in turn
        self._together = signature.one_by_one and limits is None and any(handler.patience for _, handler in handlers)
        self._rejoining = Rejoining(joins=self.config.joins)
        self._executed: list[Execution] = []
        self._lock = threading.Lock()
        self._checked = CheckedLayouts(self.config, stats)
        self._dispatch_asked = self._looks_up = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0
        self._inline_ns = inline_ns if all(handler.inline for _, handler in handlers) else 0
        self._costs = Costs(self._inline_ns)
        self._tickets: dict[int, int] = {}
        self._ticket = itertools.count()
        stats.keep_first_responses(self.config)
        self._cached = cached_responses(self.config, responses, stats, loop, reads_parameters=unasked)
        self._behind: list[InferenceRequest] = []  # who came while a request of theirs was looked up, in order
        self._overtakes = self.config.dynamic_batching is None or not self.config.dynamic_batching.preserve_ordering
        stats.batching = ""
        if self._proof is not None:
            self._proof.listen(self._learnt)
            self._note_batching()

    def __repr__(self) -> str:
        return (
            f"<Model {self.name}/{self.version}: {len(self._queue)} queued of {self.outstanding} accepted, "
            f"{len(self._idle)} of {len(self._lanes)} lanes idle>"
        )

    @property
    def outstanding(self) -> int:
        """Requests accepted and not answered yet."""
        return self._answers.outstanding

    @property
    def queued(self) -> int:
        """Requests waiting for a lane."""
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
        if self._cached is not None and (self._overtakes or not self.outstanding):
            if self._cached.takes_long(request):
                self._answers.outstanding += 1
                self._looks_up = True
                self._cached.look_up(request, self._looked_up)
                return
            if self._cached.answered(request):
                return
        elif self._looks_up:  # which nobody overtakes here
            self._answers.outstanding += 1
            self._behind.append(request)
            return
        try:
            with self._lock:
                self._queue.push(request)
        except MmeError as error:
            self.stats.failed(error.kind, 0)
            raise
        self._answers.outstanding += 1
        if self._queue.hears:
            request.on_cancel = functools.partial(self._client_left, request)
        self._ask_for_dispatch()

    def _looked_up(self, request: InferenceRequest, response: InferenceResponse | None) -> None:
        """An accepted request was looked up among the responses that are kept."""
        behind, self._behind = self._behind, []
        self._looks_up = False
        if response is None:
            self._queue_late(request)
        else:
            self._answers.outstanding -= 1
            request.resolve(response)
        for later in behind:
            self._queue_late(later)

    def _queue_late(self, request: InferenceRequest, *, first: bool = False) -> None:
        """Queue a request that was accepted before, or put it back in front."""
        try:
            if self._answers.is_going:
                raise self._answers.going()
            with self._lock:
                self._queue.push(request, first=first)
        except MmeError as error:
            self._answers.refuse(request, error)
            return
        if self._queue.hears:
            request.on_cancel = functools.partial(self._client_left, request)
            if request.cancelled:
                self._client_left(request)
        self._ask_for_dispatch()

    def _client_left(self, request: InferenceRequest) -> None:
        """Of a request that may wait for long."""
        with self._lock:
            self._queue.cancel(request)
            take = self._queue.take_expired(_now())
        self._answers.drop(take)
        self._ask_for_dispatch()

    def _learnt(self, _state: Batching) -> None:
        """More is known of its batch dimension. On any thread."""
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
            self._dispatches.ask(self._dispatch)

    def _dispatch(self) -> None:
        """Give a batch to every idle lane while there are both, then answer those that are done. On the loop."""
        if self._rejoining.turns and not self._executed and self._rejoining.waits(len(self._queue), _now()):
            self._loop.call_soon(self._dispatch)  # `_dispatches` would call it before the loop looks at its sockets
            return
        self._dispatch_asked = False
        wake_at = self._give_out() if self._limits is None else self._give_out_in_turn(self._limits)
        if not wake_at:
            with self._lock:
                wake_at = self._queue.next_deadline()
        if wake_at or self._timer is not None:
            self._set_timer(wake_at)
        executed, self._executed = self._executed, []
        for execution in executed:
            self._hand_over(execution)

    def _give_out_in_turn(self, limits: LimitedLanes) -> int:
        """Give a batch to every free lane whose turn it is; others are told when it is theirs."""
        wakes_at = []
        for number in limits.free():
            if not len(self._queue):
                break
            if limits.take(number):
                self._free(number)
                wakes_at.append(self._give_out())
                if number in self._idle:
                    self._idle.remove(number)
                    limits.give_back(number)
        if not len(self._queue):
            limits.rest()
        return min(filter(None, wakes_at), default=0)

    def _give_out(self) -> int:
        """Give a batch to every idle lane while there are both; when to ask again."""
        wake_at = 0
        while len(self._queue):
            take = self._next()
            if take is None:
                with self._lock:
                    wake_at = self._queue.next_deadline()
                break
            wake_at = take.wake_at
            if take.expired or take.cancelled:
                self._answers.drop(take)
            if take.batch:
                self._start(self._lanes[take.lane], take.batch)
            elif not take.cancelled:
                break
        return wake_at

    def _next(self) -> Take[InferenceRequest] | None:
        """What the queue lets go now, its lane not idle any more; None while no lane is idle."""
        with self._lock:
            if not self._idle:
                return None
            take = self._queue.take(_now(), self._idle, self._most() if self._together else 1)
            if take.batch:
                self._idle.remove(take.lane)
                self._ticket_for(take.batch)
            return take

    def _most(self) -> int:
        """How many requests that are executed one by one the next lane gets at once: no more than its share."""
        waiting = len(self._queue)
        if waiting < 2:
            return 1
        return min(self._lanes[self._idle[-1]].handler.together(), -(-waiting // len(self._lanes)))

    def _start(self, lane: Instance, batch: Batch) -> None:
        if self._inline_ns and self._costs.quick(size := input_bytes(batch)):
            execution = lane.execute(batch)
            self._rest(lane)
            self._costs.learn(size, execution.processor_ns)
            self._executed_bytes(size)
            self._hand_over(execution)
        elif self._remote.send(lane, batch):
            self._poll.expect()
        else:
            self._poll.hold()
            if self._overruns is not None:
                self._overruns.watch(lane.number, batch)
            lane.run(batch)

    def _free(self, number: int) -> None:
        """A lane is idle, and the queue gives batches to the last in the list."""
        self._idle.insert(0 if self._turns else len(self._idle), number)

    def _rest(self, lane: Instance) -> None:
        """A lane has nothing to do until it is given a batch."""
        with self._lock:
            self._queue.returned(lane.number, _now())
            if self._limits is None:
                self._free(lane.number)
        if self._limits is not None:
            self._limits.done(lane.number, again=len(self._queue) > 0)
            self._ask_for_dispatch()

    def _received(self, lane: Instance, execution: Execution) -> None:
        """A process has answered. On the loop."""
        self._rest(lane)
        size = len(execution.batch)
        if self._rejoining.goes_first(len(self._queue), size):
            self._executed.append(execution)
        else:
            self._hand_over(execution)
            self._rejoining.answered(size, _now())
        self._ask_for_dispatch()

    def _pull_ahead(self, lane: Instance) -> Batch:
        """A batch for a lane that executes another one; only one that would grow no more by waiting. On its thread."""
        if self._limits is not None:
            return []
        with self._lock:
            if self._idle or not self._queue.whole():  # who is idle executes it at once
                return []
            take = self._queue.take(_now(), (lane.number,))
            if take.batch:
                self._ticket_for(take.batch)
        if take.expired or take.cancelled or take.wake_at:
            self._loop.call_soon_threadsafe(self._pulled, take)
        return take.batch

    def _overran(self, batch: Batch) -> None:
        """A batch executes in this process for too long."""
        limit = f"{Deadlines.of(self.config).execution:g} s ({EXECUTION_TIMEOUT})"
        late = f"model '{self.name}': its execution takes longer than {limit}; it goes on, and what it makes is dropped"
        self._answers.give_up(batch, MmeError(Kind.TIMED_OUT, late))

    def _pull(self, lane: Instance) -> Batch:
        """The lane's next batch; [] makes it idle. On a thread."""
        if self._overruns is None:
            return self._pulled_batch(lane)
        self._overruns.begun(lane.number, [])  # before the lane is idle: the loop may give it a batch at once
        if batch := self._pulled_batch(lane):
            self._overruns.begun(lane.number, batch)
        return batch

    def _pulled_batch(self, lane: Instance) -> Batch:
        """See `_pull`; dropped requests are left to the loop."""
        if self._limits is not None:  # others may be in turn
            self._loop.call_soon_threadsafe(self._rest, lane)
            return []
        if lane.handler.patience:  # the loop sends it its next batch
            self._rest(lane)
            self._loop.call_soon_threadsafe(self._dispatch)
            return []
        with self._lock:
            now = _now()
            self._queue.returned(lane.number, now)
            take = self._queue.take(now, (lane.number,))
            if take.batch:
                self._ticket_for(take.batch)
            else:
                self._free(lane.number)
        if take.expired or take.cancelled or take.wake_at:
            self._loop.call_soon_threadsafe(self._pulled, take)
        return take.batch

    def _pulled(self, take: Take[InferenceRequest]) -> None:
        self._answers.drop(take)
        self._dispatch()

    def _report(self, execution: Execution) -> None:
        """A lane finished. On its thread: one wake-up of the loop for the whole batch."""
        self._poll.hold()
        self._loop.call_soon_threadsafe(self._finished, execution)

    def _finished(self, execution: Execution) -> None:
        size = input_bytes(execution.batch)
        if self._inline_ns:
            self._costs.learn(size, execution.processor_ns)
        self._executed_bytes(size)
        self._hand_over(execution)

    def _executed_bytes(self, size: int) -> None:
        """A batch of so many input bytes was executed."""
        self.input_bytes += size
        if size > self._largest:
            self._largest = size
            if self._larger is not None:
                self._larger()

    def _hand_over(self, execution: Execution) -> None:
        """Answer a batch, or keep it back until those before it are answered."""
        if self._order is None:
            self._answers.resolve(execution)
        else:
            for ready in self._order.release(self._tickets.pop(id(execution.batch)), execution):
                self._answers.resolve(ready)
        self._poll.expect()

    def _ticket_for(self, batch: Batch) -> None:
        """Number the batches in the order in which they leave the queue, where responses must keep it."""
        if self._order is not None:
            self._tickets[id(batch)] = next(self._ticket)

    def fail(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that was taken back and not submitted again."""
        self._answers.fail(request, error)

    def _set_timer(self, wake_at: int) -> None:
        """Wake at that time (ns), never for 0. One that wakes earlier will do: it looks, and sets another."""
        if self._timer is not None:
            if 0 < self._wakes_at <= wake_at:
                return
            self._timer.cancel()
            self._timer = None
        if wake_at:
            self._wakes_at = wake_at
            self._timer = self._loop.call_later(max(wake_at - _now(), 0) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        with self._lock:
            expired = self._queue.take_expired(_now())
        self._answers.drop(expired)
        self._dispatch()

    def end_sequence(self, correlation_id: int | str) -> None:
        """Nothing more comes of a sequence: its place is another's. On the loop."""
        with self._lock:
            self._queue.end(correlation_id, _now())
        self._ask_for_dispatch()

    def refuse_waiting(self) -> None:
        """Tell everybody that the model goes who is queued, or waits for what it will send unasked. On the loop."""
        with self._lock:
            waiting = self._queue.clear()
        self._set_timer(0)
        for request in waiting:
            self._answers.refuse(request, self._answers.going())
        self._answers.refuse_open()

    def swap(self, handler: Handler) -> Retired:
        """Have every lane execute on another handler from its next batch on. On the loop.

        Returns:
            what is to be closed.
        """
        retired, self._handlers = list(self._handlers.values()), {id(handler): handler}
        handler.outside = retired[0].outside
        for lane in self._lanes:
            lane.handler = handler
        return Retired(retired, self._lanes)

    def memory(self) -> Footprint:
        """What its processes take together; nothing for a model that executes in this one. On any thread."""
        return sum((handler.memory() for handler in list(self._handlers.values())), Footprint())

    def handlers(self) -> list[Handler]:
        """What executes it."""
        return list(self._handlers.values())

    @property
    def apart(self) -> bool:
        """Whether it executes in processes of its own."""
        return all(handler.apart for handler in list(self._handlers.values()))

    @property
    def memory_only(self) -> bool:
        """Whether it holds memory and nothing else, so that there is nothing to close where the process ends."""
        return all(handler.memory_only for handler in self._handlers.values())

    def give_back(self, *, idle: bool) -> bool:
        """Give back memory that executions took: see `Handler`. It may be closed meanwhile."""
        given_back = [handler.give_back(idle=idle) for handler in list(self._handlers.values())]
        return all(given_back)

    def close(self) -> None:
        """Stop the lanes and give the memory back. On a load thread, when nothing is queued or executing."""
        for lane in self._lanes:
            lane.rest()
            lane.stop()
        if self._cached is not None:
            self._cached.close()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        handlers, self._handlers = list(self._handlers.values()), {}
        close_all(handlers, self._threads)

    def _end(self) -> None:
        """The loop has nothing to do for it any more. Sequences that are kept would have it look for ever."""
        self.refuse_waiting()
        self._remote.close()
        if self._overruns is not None:
            self._overruns.close()
        if self._limits is not None:  # on the loop, which knew of a lane's last execution no earlier than this
            self._limits.close()
