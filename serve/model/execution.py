"""One instance of a model executes one batch: collate it, execute, scatter its outputs.

An `Execution` is submitted to an executor, which has it executed as a whole, or in parts: begun by a process that still
executes the one before, or as requests that a process answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from model_handlers.errors import MmeError, NotBegunError
from model_handlers.executor import Submission
from serve.model.batch_proof import PASSING
from serve.model.replies import DecoupledRequest, failure
from serve.request import InferenceResponse, Timings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.base import LoadedModel
    from model_handlers.executor import Answers
    from model_handlers.requests import ModelRequest
    from model_handlers.tensor import Array
    from serve.model.batch_proof import BatchProof
    from serve.model.replies import Post
    from serve.model.tensors import Batch, TensorMap
    from serve.request import Called, InferenceRequest


_now = time.perf_counter_ns
_BRIEF_NS = 50_000  # below it wall time will do: the system call costs half a microsecond


class Execution(Submission):
    """One batch and, once it is over, what became of each request in it.

    Attributes:
        results: a response or an error for each, in the batch's order; None for one that is answered unasked.
        size: the rows that were executed, also those of no request.
        uniform: whether every result is a response, and every row a request's.
        one_by_one: whether these are several executions of one request each, of which the timings tell the mean.
    """

    batch: Batch
    timings: Timings

    def __init__(self, signature: TensorMap, batch: Batch, post: Post | None = None) -> None:
        self.batch = batch
        self.nbytes = 0
        for request in batch:
            self.nbytes += request.layout.nbytes
        self.begun = False
        self.results: Sequence[InferenceResponse | MmeError | None] = ()
        self.size = 0
        self.uniform = self.one_by_one = False
        self._signature = signature
        self._post = post  # takes what the model answers unasked; called on any thread
        self._requests: Sequence[ModelRequest] = ()
        self._names: tuple[str, ...] = ()  # of outputs that a worker owes
        self._start = self._collated = 0  # ns
        self._owed: Any = None  # what a worker gave for them, or what went wrong

    @property
    def executed(self) -> list[InferenceRequest]:
        """The requests, without those of several executions that never came to theirs."""
        pairs = zip(self.batch, self.results, strict=True)
        return [request for request, result in pairs if not isinstance(result, NotBegunError)]

    def execute(self, handler: LoadedModel, ended: int = 0) -> None:
        signature, batch = self._signature, self.batch
        proof = signature.proof
        if proof is not None and len(batch) > 1 and not (self.begun or proof.joins):
            self._execute_apart(handler, proof)
            return
        start = collated = executed = _now()
        processor = time.thread_time_ns()
        if handler.sees_requests:
            self._execute_requests(handler)
        else:
            self.size = size = batch[0].batch_size if len(batch) == 1 and not signature.pads else signature.rows(batch)
            try:
                if self.begun:
                    start = max(self._start, ended - (self._collated - self._start))
                    collated = executed = start + self._collated - self._start
                    names, arrays = self._names, self._paid(handler)
                else:
                    inputs, names = signature.collate(batch)
                    collated = executed = _now()
                    arrays = handler.execute(inputs, names)
                executed = _now()
                self.results = signature.scatter(batch, names, arrays, size)
                self.uniform = not signature.pads or signature.is_dense(batch)
            except Exception as error:  # noqa: BLE001 - an instance must survive whatever a framework throws, or its model stands still
                self.results = self._failed(error)
            self.timings = Timings(start, collated - start, executed - collated, _now() - executed, size)
            for result in self.results:
                if isinstance(result, InferenceResponse):
                    result.timings = self.timings
        took = _now() - start
        self.processor_ns = time.thread_time_ns() - processor if took > _BRIEF_NS else took
        self.execution_ns = self.timings.compute_infer

    def _execute_requests(self, handler: LoadedModel) -> None:
        requests = self.to_requests()
        if requests is None:
            return
        sent = _now()
        try:
            answers = handler.execute_requests(requests)
        except Exception as error:  # noqa: BLE001 - as in `execute`
            self.answered(error, sent, _now())
        else:
            self.answered(answers, sent, _now())

    def _failed(self, error: Exception) -> list[InferenceResponse | MmeError | None]:
        """What the requests of a failed batch are told; where batches are guessed, to come again one by one."""
        signature = self._signature
        told: MmeError = failure(signature.name, error)
        if signature.proof is not None and len(self.batch) > 1 and told.kind not in PASSING:
            signature.proof.doubt()
            told = NotBegunError(signature.name)
        return [told] * len(self.batch)

    def _execute_apart(self, handler: LoadedModel, proof: BatchProof) -> None:
        """Run requests one by one, and as a batch as well where that may prove that they can share one."""
        start = _now()
        processor = time.thread_time_ns()
        signature, batch = self._signature, self.batch
        ones = [execute_batch(handler, signature, [request]) for request in batch]
        self.results = [one.results[0] for one in ones]
        self.uniform = _all_responses(self.results)
        contents = proof.wants(batch) if self.uniform else None
        if contents is not None:
            joined = []
            try:
                # what comes first may change what follows, but not the other way round
                for order in (batch, batch[::-1]):
                    inputs, names = signature.collate(order)
                    arrays = handler.execute(inputs, names)
                    joined.append(signature.scatter(order, names, arrays, signature.rows(order)))
                proof.judge(contents, cast("list[InferenceResponse]", self.results), [joined[0], joined[1][::-1]])
            except Exception as error:  # noqa: BLE001 - as in `execute`
                proof.failed(len(batch), failure(signature.name, error))
        count = len(ones)
        self.size = signature.rows(batch)
        self.timings = Timings(
            start,
            sum([one.timings.compute_input for one in ones]) // count,
            sum([one.timings.compute_infer for one in ones]) // count,
            sum([one.timings.compute_output for one in ones]) // count,
            self.size,
        )
        self.processor_ns = time.thread_time_ns() - processor
        self.execution_ns = self.timings.compute_infer
        self.one_by_one = True

    # -- by a worker -----------------------------------------------------------------------------------------------

    def begin(self, worker: Any) -> None:
        proof = self._signature.proof
        if proof is not None and not proof.joins:
            return
        self.begun = True
        self._start = self._collated = _now()
        try:
            inputs, self._names = self._signature.collate(self.batch)
            self._collated = _now()
            self._owed = worker.begin(inputs, self._names)
        except Exception as error:  # noqa: BLE001 - as in `execute`
            self._owed = error

    def _paid(self, worker: Any) -> list[Array]:
        owed, self._owed = self._owed, None
        if isinstance(owed, Exception):
            raise owed
        arrays: list[Array] = worker.finish(owed)
        return arrays

    def to_requests(self) -> Sequence[ModelRequest] | None:
        self._start = _now()
        try:
            self._requests = self._signature.to_model_requests(self.batch, self._post)
        except Exception as error:  # noqa: BLE001 - as in `execute`
            self.answered(error, self._start, self._start)
            return None
        return self._requests

    def answered(self, answers: Answers | Exception, sent: int, came: int) -> None:
        signature, batch = self._signature, self.batch
        if isinstance(answers, Exception):
            self.results = self._failed(answers)
        else:
            try:
                self.results = signature.from_model_responses(batch, answers)
                self.uniform = signature.is_dense(batch) and _all_responses(self.results)
            except Exception as error:  # noqa: BLE001 - as in `execute`
                self.results = self._failed(error)
        self.size = signature.rows(batch)
        self._note_times(sent, came)

    def _note_times(self, sent: int, came: int) -> None:
        """Say in each response where the time went, and what other models its model called meanwhile.

        Executions of one request each share the time alike, and have calls of their own. Those of a batch are noted
        with each request, whichever of them it was for.
        """
        start, done = self._start, _now()
        self.one_by_one = self._signature.one_by_one and len(self.batch) > 1
        if self.one_by_one:
            count = len(self.executed) or 1
            timings = Timings(start, (sent - start) // count, (came - sent) // count, (done - came) // count)
        else:
            timings = Timings(start, sent - start, came - sent, done - came, self.size)
            timings.calls = _calls_of(self._requests)
        self.timings = timings
        for result in self.results:
            if isinstance(result, InferenceResponse):
                result.timings = timings
        if self.one_by_one and self._requests:
            for request, result in zip(self._requests, self.results, strict=True):
                if isinstance(result, InferenceResponse) and (calls := _calls_of([request])):
                    result.timings = timings.calling(calls)


def execute_batch(handler: LoadedModel, signature: TensorMap, batch: Batch, post: Post | None = None) -> Execution:
    """Have a handler execute a batch now; never raises: see `Execution.execute`."""
    execution = Execution(signature, batch, post)
    execution.execute(handler)
    return execution


def _all_responses(results: Sequence[InferenceResponse | MmeError | None]) -> bool:
    return all(isinstance(result, InferenceResponse) for result in results)


def _calls_of(requests: Sequence[ModelRequest]) -> Sequence[Called] | None:
    opened = (request.responder for request in requests)
    return next((each.calls for each in opened if isinstance(each, DecoupledRequest)), None)
