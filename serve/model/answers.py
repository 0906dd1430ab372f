"""What becomes of the requests that a model accepted: each is counted, and gets exactly one end.

Most are answered with their batch. Those of models that answer unasked are *open* from the end of their batch until
their last response has come. On the event loop only, but for what is posted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from model_handlers.errors import GivenBackError, Kind, MmeError, NotBegunError
from serve.model.execution import failure
from serve.model.open_request import Posts
from serve.request import InferenceResponse, Timings
from serve.stats import Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from model_handlers.requests import ModelResponse
    from serve.model.batch_queue import Take
    from serve.model.execution import Execution
    from serve.model.open_request import OpenRequest, Post
    from serve.model.signature import Batch, Signature
    from serve.request import InferenceRequest
    from serve.stats import ModelStats

    Rescued = Callable[[InferenceRequest, MmeError], bool]

_now = time.perf_counter_ns


class Answers:
    """The accepted requests of one model version.

    Attributes:
        outstanding: those that are not answered yet.
        open: those that were executed, and are to be answered unasked.
        is_going: whether the model goes.

    Args:
        signature: the model's.
        stats: where to count.
        loop: the event loop.
        expiry: what requests are told whose time in the queue is over.
        requeue: takes back a request whose execution never began, though its batch was sent; it is the next one.
        rescue: asked about a request that ran out of memory; True takes it back. None where nobody is asked.
        decoupled: whether requests get any number of responses.
        unasked: whether any answer may come unasked.
    """

    def __init__(
        self,
        signature: Signature,
        stats: ModelStats,
        loop: asyncio.AbstractEventLoop,
        expiry: str,
        requeue: Callable[[InferenceRequest], None],
        rescue: Rescued | None,
        *,
        decoupled: bool,
        unasked: bool,
    ) -> None:
        self.outstanding = 0
        self.open: set[InferenceRequest] = set()
        self._name = signature.name
        self._signature = signature
        self._stats = stats
        self._expiry = expiry
        self._requeue = requeue
        self._rescue = rescue
        self._decoupled = decoupled
        self._unasked = unasked
        self.is_going = False
        self._gave_up = False  # on any batch
        self._posts = Posts(loop, self._respond)

    def __repr__(self) -> str:
        return f"<Answers of {self._name}: {self.outstanding} outstanding, {len(self.open)} open>"

    @property
    def post(self) -> Post:
        """Takes what the model answers unasked; on any thread."""
        return self._posts.post

    def resolve(self, execution: Execution) -> None:
        """Count, then answer everybody in the batch."""
        batch, timings = execution.batch, execution.timings
        done = _now()
        if self._unasked:
            self._posts.take_all()  # what a model sent comes before the end of the batch that sent it
        answered = list(zip(batch, execution.results, strict=True))
        good, size = batch, execution.size
        early = self._unasked or self._gave_up
        if not execution.uniform or (early and any(request.answered for request in batch)):
            answered = [pair for pair in answered if not (pair[0].answered or isinstance(pair[1], GivenBackError))]
            again = self._signature.put_back(batch)
            for request in again:
                self._put_back(request, timings)
            self._leave_open([request for request, result in answered if result is None and request not in again])
            unbegun = [request for request, result in answered if isinstance(result, NotBegunError)]
            for request in reversed(unbegun):  # each goes before all others
                self._requeue(request)
            answered = [pair for pair in answered if not (pair[1] is None or isinstance(pair[1], NotBegunError))]
            good = [request for request, result in answered if not isinstance(result, MmeError)]
            size = sum([request.batch_size for request in good])
        self.outstanding -= len(answered)
        start = self._count_executions(execution)
        if good:
            self._count_answers(good, size, start, done, timings)
        for request, result in answered:
            if isinstance(result, MmeError):
                if result.kind is Kind.OUT_OF_MEMORY and self._is_rescued(request, result):
                    continue
                self._stats.failed(result.kind, done - request.arrival_ns)
            if self._decoupled:
                outcome = Outcome.FAIL if isinstance(result, MmeError) else Outcome.SUCCESS
                self._stats.responded(0, outcome, timings.compute_infer, timings.compute_output)
            if self._decoupled and isinstance(result, InferenceResponse):
                result.final = True
                request.respond(result)
                request.resolve(None)
            else:
                request.resolve(result)

    def _count_executions(self, execution: Execution) -> int:
        """Count what was executed; returns when that began of each request: where one follows another, in the mean."""
        timings = execution.timings
        if not execution.one_by_one:
            self._stats.executed(execution.size, timings)
            return timings.start
        begun = execution.begun
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

    def _put_back(self, request: InferenceRequest, timings: Timings) -> None:
        """Count an execution of a request that waits for the next one now, by the clock of whoever executed."""
        self._stats.computed(1, request.batch_size, timings.start - _queued_since(request), timings)
        request.put_back_ns = timings.start + _computing(timings)

    def _is_rescued(self, request: InferenceRequest, error: MmeError) -> bool:
        """Whether somebody takes the request back, to submit it again; one that changes what comes after it stays."""
        again = not self._decoupled and not request.correlation_id
        return again and self._rescue is not None and self._rescue(request, error)

    def fail(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that was taken back and not submitted again."""
        self._stats.failed(error.kind, _now() - request.arrival_ns)
        request.resolve(error)

    def give_up(self, batch: Batch, error: MmeError) -> None:
        """Answer a batch whose execution takes too long, and goes on: what comes of it is dropped."""
        self._gave_up = True
        for request in batch:
            if not request.answered:
                self.refuse(request, error)

    def _leave_open(self, requests: list[InferenceRequest]) -> None:
        """These have no answer yet, and no lane owes them one."""
        self.open.update(requests)
        if self.is_going:
            self._refuse_open()

    def _respond(self, opened: OpenRequest, response: ModelResponse | MmeError | None, final: bool) -> None:  # noqa: FBT001 - see Post
        """A model has answered unasked."""
        request = opened.request
        if request.answered:
            return
        if isinstance(response, NotBegunError):
            self._requeue(request)
            return
        if self._decoupled:
            self._count_response(opened, response)
        result: InferenceResponse | MmeError | None = None
        if isinstance(response, MmeError):
            result = response
        elif response is not None:
            result = self._made(opened, response)
        elif not self._decoupled:
            result = MmeError(Kind.EXECUTION_FAILED, f"model '{self._name}' ended a request without a response to it")
        if self._decoupled and isinstance(result, InferenceResponse):
            result.final = final
            request.respond(result)
            result = None
        elif isinstance(result, MmeError) and not final and self._decoupled:
            result = self._others_may_follow(request, result)
        if final or result is not None:
            self._finish(opened, result)

    def _made(self, opened: OpenRequest, response: ModelResponse) -> InferenceResponse | MmeError:
        try:
            made = self._signature.response(opened.request, response)
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`; others wait for what was posted behind it
            return failure(self._signature.name, error)
        made.timings = Timings(opened.began_ns, 0, _now() - opened.began_ns, 0, calls=opened.calls)
        return made

    def _others_may_follow(self, request: InferenceRequest, error: MmeError) -> MmeError | None:
        """Tell of an error that is not the last response; to a client that takes none behind it, it is."""
        if request.on_error is None:
            request.cancel()  # the model hears that nobody waits for the rest
            return error
        request.respond(error)
        return None

    def _count_response(self, opened: OpenRequest, response: ModelResponse | MmeError | None) -> None:
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

    def _finish(self, opened: OpenRequest, result: InferenceResponse | MmeError | None) -> None:
        """An open request has got its last response, or none, or an error."""
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
            if not self._decoupled:
                self._stats.began_to_answer(total)
        request.resolve(result)

    def drop(self, take: Take[InferenceRequest]) -> None:
        """Tell those whom the queue let go."""
        for request in take.expired:
            self.refuse(request, MmeError(Kind.QUEUE_TIMEOUT, f"{self._expiry} for model '{self._name}'"))
        for request in take.cancelled:
            left = MmeError(Kind.CANCELLED, f"the client of model '{self._name}' left")
            self.refuse(request, left if not self.is_going else self.going())

    def refuse(self, request: InferenceRequest, error: MmeError) -> None:
        """Count and answer a request that will not be executed."""
        self.outstanding -= 1
        self._stats.failed(error.kind, _now() - request.arrival_ns)
        request.resolve(error)

    def refuse_open(self) -> None:
        """The model goes: tell everybody who waits for what it will send unasked, from now on."""
        self.is_going = True
        self._refuse_open()

    def going(self) -> MmeError:
        """What those are told who come too late."""
        return MmeError(Kind.UNAVAILABLE, f"model '{self._name}' is being unloaded; try again")

    def _refuse_open(self) -> None:
        while self.open:
            request = self.open.pop()
            request.cancel()
            self.refuse(request, self.going())


def _computing(timings: Timings) -> int:
    return timings.compute_input + timings.compute_infer + timings.compute_output


def _queued_since(request: InferenceRequest) -> int:
    """When it came, or was put back."""
    return request.put_back_ns or request.arrival_ns
