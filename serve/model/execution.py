"""One instance of a model: collate a batch, execute it, scatter its outputs; here, on a thread, or in a process.

`execute_batch` is the whole of an execution and touches nothing but its arguments; `begin_batch` and `finish_batch` are
its halves, for handlers whose process is given a batch before it has answered the last one, `requests_executed` what
becomes of a batch of requests that a process answered.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from model_handlers.errors import MmeError, NotBegunError
from serve.model.batch_proof import PASSING
from serve.model.replies import DecoupledRequest, failure
from serve.request import InferenceResponse, Timings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.base import LoadedModel
    from model_handlers.requests import ModelRequest, ModelResponse
    from model_handlers.tensor import Array
    from serve.model.batch_proof import BatchProof
    from serve.model.replies import Post
    from serve.model.tensors import Batch, TensorMap
    from serve.request import Called, InferenceRequest


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


def execute_batch(handler: LoadedModel, signature: TensorMap, batch: Batch, post: Post | None = None) -> Execution:
    """Run one batch. Never raises: what goes wrong becomes the error of every request in the batch."""
    proof = signature.proof
    if proof is not None and len(batch) > 1 and not proof.joins:
        return _execute_apart(handler, signature, batch, proof)
    start = collated = executed = _now()
    processor = time.thread_time_ns()
    size = batch[0].batch_size if len(batch) == 1 and not signature.pads else signature.rows(batch)
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
            uniform = not signature.pads or signature.is_dense(batch)
    except Exception as error:  # noqa: BLE001 - an instance must survive whatever a framework throws, or its model stands still
        results = _failed(signature, batch, error)
    done, several = _now(), False
    if handler.sees_requests:
        timings, several = timed(signature, results, size, (start, collated, executed, done))
        stamp(results, timings, requests, apart=several)
    else:
        timings = Timings(start, collated - start, executed - collated, done - executed, size)
        for result in results:
            if isinstance(result, InferenceResponse):
                result.timings = timings
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


def _execute_apart(handler: LoadedModel, signature: TensorMap, batch: Batch, proof: BatchProof) -> Execution:
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
        self.begun: Any = None  # what the worker gave for it, or what went wrong


def begin_batch(worker: Any, signature: TensorMap, batch: Batch) -> BegunBatch:
    """Have a `TensorWorker` begin a batch. Never raises: `finish_batch` tells what goes wrong."""
    begun = BegunBatch(batch)
    try:
        inputs, begun.names = signature.collate(batch)
        begun.collated = _now()
        begun.begun = worker.begin(inputs, begun.names)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        begun.begun = error
    return begun


def finish_batch(worker: Any, signature: TensorMap, begun: BegunBatch, ended: int) -> Execution:
    """The execution of a begun batch; the one before it had `ended` then (ns). Never raises."""
    batch = begun.batch
    gathered = begun.collated - begun.start
    start = max(begun.start, ended - gathered)
    executed = start + gathered
    size = signature.rows(batch)
    uniform = False
    results: Sequence[InferenceResponse | MmeError | None]
    try:
        arrays = _finished(worker, begun)
        executed = _now()
        results = signature.scatter(batch, begun.names, arrays, size)
        uniform = signature.is_dense(batch)
    except Exception as error:  # noqa: BLE001 - as in `execute_batch`
        results = _failed(signature, batch, error)
    timings = Timings(start, gathered, executed - start - gathered, _now() - executed, size)
    stamp(results, timings)
    return Execution(batch, results, size, timings, 0, uniform=uniform)


def _finished(worker: Any, begun: BegunBatch) -> list[Array]:
    if isinstance(begun.begun, Exception):
        raise begun.begun
    arrays: list[Array] = worker.finish(begun.begun)
    return arrays


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


def requests_executed(
    signature: TensorMap,
    batch: Batch,
    requests: Sequence[ModelRequest],
    answers: list[ModelResponse | MmeError | None] | Exception,
    times: tuple[int, int, int],
) -> Execution:
    """The execution of requests that a worker process answered: its start, when they were sent, and answered (ns)."""
    results: Sequence[InferenceResponse | MmeError | None]
    if isinstance(answers, Exception):
        results = [failure(signature.name, answers)] * len(batch)
    else:
        try:
            results = signature.from_model_responses(batch, answers)
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            results = [failure(signature.name, error)] * len(batch)
    size = signature.rows(batch)
    timings, several = timed(signature, results, size, (*times, _now()))
    stamp(results, timings, requests, apart=several)
    uniform = signature.is_dense(batch) and all_responses(results)
    return Execution(batch, results, size, timings, 0, uniform=uniform, one_by_one=several)
