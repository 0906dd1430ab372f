"""What becomes of the requests that a model accepted: each is counted, and gets exactly one end.

Most are answered with their batch. Those of decoupled models are *open* from the end of their batch until their last
response has come. On the event loop only, but for what models put into the `ResponseQueue`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cachetools import TTLCache

from model_handlers.errors import ChildOutgrownError, Kind, MmeError, NotBegunError, out_of_memory
from serve.request import MOST_STEPS, InferenceResponse, Timings
from serve.statistics import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from model_handlers.requests import ModelResponse
    from serve.model.batcher import BatchDecision
    from serve.model.execution import Execution
    from serve.model.model import Model
    from serve.model.tensors import TensorMap
    from serve.request import Called, InferenceRequest, Lease
    from serve.statistics import ModelStats

    Post = Callable[["DecoupledRequest", ModelResponse | MmeError | None, bool], None]
    Retry = Callable[[InferenceRequest, MmeError], bool]
    RetryRequest = Callable[[Model, InferenceRequest, MmeError], bool]
    Relieve = Callable[[Any], Coroutine[Any, Any, tuple[str, ...]]]

_AT_ONCE = 256  # responses in one turn of the loop


class DecoupledRequest:
    """A request of a model that answers unasked, as its `Responder`: any number of responses, on any thread.

    Attributes:
        began_ns: `time.perf_counter_ns()` of the start; responded_ns: of the last response, or of the start.

    Args:
        post: takes each response and whether it is the last; called on any thread.
    """

    def __init__(self, request: InferenceRequest, post: Post) -> None:
        self.request = request
        self.began_ns = self.responded_ns = time.perf_counter_ns()
        # those that its model made of other ones while it was open, of which the first are remembered
        self.calls: list[Called] | None = None
        self._post = post
        self._tell: list[Callable[[], None]] = []

    def send(self, response: ModelResponse | MmeError | None, *, final: bool) -> None:
        self._post(self, response, final)

    def called(self, call: Called) -> None:
        """Note a call of another model, on its behalf or on that of another of its batch. On the event loop."""
        if self.calls is None:
            self.calls = []
        if len(self.calls) < MOST_STEPS:
            self.calls.append(call)

    def is_cancelled(self) -> bool:
        return self.request.cancelled

    def when_cancelled(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the client leaves; at once if it has."""
        with _cancelling:
            self._tell.append(tell)
            self.request.on_cancel = self._cancelled
        if self.request.cancelled:
            self._cancelled()

    def _cancelled(self) -> None:
        with _cancelling:
            tell, self._tell = self._tell, []
        for each in tell:
            each()


_cancelling = threading.Lock()  # one for all: held for a moment, and rarely


class ResponseQueue:
    """Responses on their way from the threads of models to the event loop, where `take` takes each in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Post) -> None:
        self._loop = loop
        self._take = take
        self._posted: deque[tuple[DecoupledRequest, ModelResponse | MmeError | None, bool]] = deque()
        self._told = False
        self._home = 0  # the thread of the loop, once it is known

    def put(self, opened: DecoupledRequest, response: ModelResponse | MmeError | None, final: bool) -> None:  # noqa: FBT001 - see Post
        """Take one. On any thread: one wake-up of the loop for all that is put until it wakes.

        The loop itself puts no more in a turn than it can take in the next one.
        """
        self._posted.append((opened, response, final))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop is closed, and no request waits any more
                if threading.get_ident() == self._home:
                    self._loop.call_soon(self._take_own)
                else:
                    self._loop.call_soon_threadsafe(self._take_some)

    def drain(self) -> None:
        """Hand over what was put before this call. On the loop."""
        self._hand_over(len(self._posted))

    def _take_own(self) -> None:
        self._told = False
        self.drain()

    def _take_some(self) -> None:
        """A model that sends without end must not keep the loop from all others."""
        self._told = False
        self._home = threading.get_ident()
        self._hand_over(min(len(self._posted), _AT_ONCE))
        if self._posted and not self._told:
            self._told = True
            self._loop.call_soon(self._take_some)

    def _hand_over(self, count: int) -> None:
        while count and self._posted:
            self._take(*self._posted.popleft())
            count -= 1


_now = time.perf_counter_ns


class Replies:
    """The accepted requests of one model version."""

    def __init__(
        self,
        signature: TensorMap,
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        timeout_message: str,  # what requests are told whose time in the queue is over
        # takes back a request whose execution never began, though its batch was sent; it is the next one
        requeue: Callable[[InferenceRequest], None],
        retry: Retry | None,  # asked about a request that ran out of memory; True takes it back
        *,
        decoupled: bool,  # whether requests get any number of responses
        unasked: bool,  # whether any answer may come unasked
    ) -> None:
        self.outstanding = 0  # those that are not answered yet
        self.open: set[InferenceRequest] = set()  # those that were executed, and are to be answered unasked
        self._name = signature.name
        self.signature = signature
        self._stats = stats
        self._timeout_message = timeout_message
        self._requeue = requeue
        self._retry = retry
        self.decoupled = decoupled
        self._unasked = unasked
        self.is_unloading = False
        self._gave_up = False  # on any batch
        self._posts = ResponseQueue(loop, self._respond)
        self.post: Post = self._posts.put  # takes what the model answers unasked; on any thread

    def __repr__(self) -> str:
        return f"<Replies of {self._name}: {self.outstanding} outstanding, {len(self.open)} open>"

    def complete(self, execution: Execution) -> None:
        """Count, then answer every request in the batch."""
        batch, timings = execution.batch, execution.timings
        done = _now()
        if self._unasked:
            self._posts.drain()  # what a model sent comes before the end of the batch that sent it
        answered = list(zip(batch, execution.results, strict=True))
        good, size = batch, execution.size
        early = self._unasked or self._gave_up
        if not execution.uniform or (early and any(request.answered for request in batch)):
            answered = [pair for pair in answered if not pair[0].answered]
            again = self.signature.rescheduled(batch)
            for request in again:
                self._reschedule(request, timings)
            self._leave_open([request for request, result in answered if result is None and request not in again])
            unbegun = [request for request, result in answered if isinstance(result, NotBegunError)]
            for request in reversed(unbegun):  # each goes before all others
                self._requeue(request)
            answered = [pair for pair in answered if not (pair[1] is None or isinstance(pair[1], NotBegunError))]
            good = [request for request, result in answered if not isinstance(result, MmeError)]
            size = sum([request.batch_size for request in good])
        self.outstanding -= len(answered)
        if execution.one_by_one:
            start = self._count_one_by_one(execution)
        else:
            start = timings.start
            self._stats.executed(execution.size, timings)
        if good:
            self._count_answers(good, size, start, done, timings)
        for request, result in answered:
            if isinstance(result, MmeError):
                if result.kind is Kind.OUT_OF_MEMORY and self._is_retried(request, result):
                    continue
                self._stats.failed(result.kind, done - request.arrival_ns)
            if self.decoupled:
                outcome = Outcome.FAIL if isinstance(result, MmeError) else Outcome.SUCCESS
                self._stats.responded(0, outcome, timings.compute_infer, timings.compute_output)
            if self.decoupled and isinstance(result, InferenceResponse):
                result.final = True
                request.respond(result)
                request.resolve(None)
            else:
                request.resolve(result)

    def _count_one_by_one(self, execution: Execution) -> int:
        """Return when the execution of each request began, in the mean."""
        timings, begun = execution.timings, execution.executed
        for request in begun:
            self._stats.executed(request.batch_size, timings)
        return timings.start + (len(begun) - 1) * _computing(timings) // 2

    def _count_answers(
        self, good: Sequence[InferenceRequest], size: int, start: int, done: int, timings: Timings
    ) -> None:
        arrivals = sum([request.arrival_ns for request in good])
        count = len(good)
        since = sum([_queued_since(request) for request in good]) if self._unasked else arrivals
        self._stats.succeeded(count, size, start * count - since, done * count - arrivals, timings)
        if self._stats.first_response is not None:
            for request in good:
                self._stats.began_to_answer(done - request.arrival_ns)
        if self._stats.summaries is not None and count > 1:
            for request in good:
                self._stats.summarise(start - _queued_since(request), done - request.arrival_ns, timings)

    def _reschedule(self, request: InferenceRequest, timings: Timings) -> None:
        """Count an execution of a request that waits for the next one now."""
        self._stats.succeeded(1, request.batch_size, timings.start - _queued_since(request), None, timings)
        request.put_back_ns = timings.start + _computing(timings)

    def _is_retried(self, request: InferenceRequest, error: MmeError) -> bool:
        again = not self.decoupled and not request.correlation_id
        return again and self._retry is not None and self._retry(request, error)

    def fail(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that was taken back and not submitted again."""
        self._stats.failed(error.kind, _now() - request.arrival_ns)
        request.resolve(error)

    def give_up(self, execution: Execution, error: MmeError) -> None:
        """Answer a batch whose execution takes too long, and goes on: what comes of it is dropped."""
        self._gave_up = True
        for request in execution.batch:
            if not request.answered:
                self.refuse(request, error)

    def _leave_open(self, requests: list[InferenceRequest]) -> None:
        self.open.update(requests)
        if self.is_unloading:
            self._refuse_open()

    def _respond(self, opened: DecoupledRequest, response: ModelResponse | MmeError | None, final: bool) -> None:  # noqa: FBT001 - see Post
        request = opened.request
        if request.answered:
            return
        if self.decoupled:
            self._count_response(opened, response)
        result: InferenceResponse | MmeError | None = None
        if isinstance(response, MmeError):
            result = response
        elif response is not None:
            result = self._made(opened, response)
        elif not self.decoupled:
            result = MmeError(Kind.EXECUTION_FAILED, f"model '{self._name}' ended a request without a response to it")
        if self.decoupled and isinstance(result, InferenceResponse):
            result.final = final
            request.respond(result)
            result = None
        elif isinstance(result, MmeError) and not final and self.decoupled:
            result = self._others_may_follow(request, result)
        if final or result is not None:
            self._finish(opened, result)

    def _made(self, opened: DecoupledRequest, response: ModelResponse) -> InferenceResponse | MmeError:
        try:
            made = self.signature.response(opened.request, response)
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`; others wait for what was posted behind it
            return failure(self.signature.name, error)
        made.timings = Timings(opened.began_ns, 0, _now() - opened.began_ns, 0, calls=opened.calls)
        return made

    def _others_may_follow(self, request: InferenceRequest, error: MmeError) -> MmeError | None:
        """Tell of an error that is not the last response; to a client that takes none behind it, it is."""
        if request.on_error is None:
            request.cancel()  # the model hears that its client is gone
            return error
        request.respond(error)
        return None

    def _count_response(self, opened: DecoupledRequest, response: ModelResponse | MmeError | None) -> None:
        outcome = Outcome.SUCCESS if response is not None else Outcome.EMPTY
        if isinstance(response, MmeError):
            cancelled = opened.request.cancelled or response.kind is Kind.CANCELLED
            outcome = Outcome.CANCEL if cancelled else Outcome.FAIL
        now, request = _now(), opened.request
        if not request.responses and outcome is Outcome.SUCCESS:
            self._stats.began_to_answer(now - request.arrival_ns)
        self._stats.responded(request.responses, outcome, now - opened.responded_ns)
        request.responses += 1
        opened.responded_ns = now

    def _finish(self, opened: DecoupledRequest, result: InferenceResponse | MmeError | None) -> None:
        request, done = opened.request, _now()
        self.open.discard(request)
        self.outstanding -= 1
        total = done - request.arrival_ns
        if isinstance(result, MmeError):
            self._stats.failed(result.kind, total)
        else:
            timings = Timings(opened.began_ns, 0, done - opened.began_ns, 0)
            waited = opened.began_ns - _queued_since(request)
            self._stats.succeeded(1, request.batch_size, waited, total, timings)
            if not self.decoupled:
                self._stats.began_to_answer(total)
        request.resolve(result)

    def drop(self, take: BatchDecision[InferenceRequest]) -> None:
        """Tell the requests that the queue let go."""
        for request in take.expired:
            self.refuse(request, MmeError(Kind.QUEUE_TIMEOUT, f"{self._timeout_message} for model '{self._name}'"))
        for request in take.cancelled:
            left = MmeError(Kind.CANCELLED, f"the client of model '{self._name}' left")
            self.refuse(request, left if not self.is_unloading else self.unloading_error())

    def refuse(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that will not be executed."""
        self.outstanding -= 1
        self._stats.failed(error.kind, _now() - request.arrival_ns)
        request.resolve(error)

    def refuse_open(self) -> None:
        """Refuse what waits for unasked responses, from now on: the model goes."""
        self.is_unloading = True
        self._refuse_open()

    def unloading_error(self) -> MmeError:
        return MmeError(Kind.UNAVAILABLE, f"model '{self._name}' is being unloaded; try again")

    def _refuse_open(self) -> None:
        while self.open:
            request = self.open.pop()
            request.cancel()
            self.refuse(request, self.unloading_error())


def _computing(timings: Timings) -> int:
    return timings.compute_input + timings.compute_infer + timings.compute_output


def _queued_since(request: InferenceRequest) -> int:
    return request.put_back_ns or request.arrival_ns


_log = logging.getLogger("mme.rescue")
_instance_log = logging.getLogger("mme.instance")
_MODELS = 1024
_FAILED_SECONDS = 60.0


class _RetriedLease:
    def __init__(self, lease: Lease) -> None:
        self.release = lease.release


class OomRetry:
    """Requests that ran out of memory: room is made, and they run once more. On the event loop.

    A framework takes memory for an execution that no budget counts, so it may find none though every model fits. Then
    the request is taken back with its inputs, other models leave until about as much is free as its own model holds,
    and it is queued again. It runs twice at most. A model whose second try failed moves no other for a while, or a
    client whose requests are simply too large would empty the cache again and again.

    Args:
        relieve: evicts others for the model whose lease it is given; returns which, when their memory is back.
    """

    def __init__(self, relieve: Relieve) -> None:
        self._relieve = relieve
        self._reliefs: dict[str, asyncio.Task[tuple[str, ...]]] = {}  # under way, by the model they are for
        self._recently_failed: TTLCache[str, bool] = TTLCache(_MODELS, _FAILED_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, model: Model, request: InferenceRequest, error: MmeError) -> bool:
        """Whether the request was taken back: then it is answered later, by the model or with `error`."""
        if isinstance(request.lease, _RetriedLease):
            self._recently_failed[model.name] = True
            return False
        if request.lease is None or request.cancelled or model.name in self._recently_failed:
            return False
        if isinstance(error, ChildOutgrownError):  # no model's leaving helps
            return False
        relief = self._relief(model.name, request.lease)
        request.lease = _RetriedLease(request.lease)
        task = asyncio.get_running_loop().create_task(self._try_again(relief, model, request, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _relief(self, name: str, lease: Lease) -> asyncio.Task[tuple[str, ...]]:
        relief = self._reliefs.get(name)
        if relief is None:
            relief = asyncio.get_running_loop().create_task(self._relieve(lease), name=f"make room for {name}")
            self._reliefs[name] = relief
            relief.add_done_callback(lambda _: self._reliefs.pop(name))
        return relief

    async def _try_again(
        self, relief: asyncio.Task[tuple[str, ...]], model: Model, request: InferenceRequest, error: MmeError
    ) -> None:
        try:
            victims = await asyncio.shield(relief)
        except Exception:  # noqa: BLE001 - the client must be answered whatever keeps others from leaving
            _log.exception("no room could be made", extra={"target_model": model.name})
            victims = ()
        if not victims:
            model.fail(request, error)
            return
        _log.info("running once more without %s: %s", ", ".join(victims), error, extra={"target_model": model.name})
        try:
            model.submit(request)
        except MmeError as refused:
            request.resolve(refused)


def failure(model: str, error: Exception) -> MmeError:
    """What the requests of a batch, or of a step, are told of an exception, whose frames hold them."""
    if isinstance(error, MmeError):
        return error.bare()
    if isinstance(error, MemoryError):  # numpy's too, when a batch is joined
        return out_of_memory(f"model '{model}' ran out of memory: {error}")
    _instance_log.error("model '%s' failed in a way its handler does not know", model, exc_info=error)
    return MmeError(Kind.INTERNAL, f"model '{model}' failed: {type(error).__name__}: {error}")
