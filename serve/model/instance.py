"""One execution lane of a model: take a batch, have it executed, report; on a thread where that takes long.

Where the handler's process can be sent batches from the event loop, or ahead of the last answer, the lane does that.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from serve.model.execution import (
    Execution,
    all_responses,
    begin_batch,
    execute_batch,
    failure,
    finish_batch,
    stamp,
    timed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from model_handlers.base import Handler, Watch
    from model_handlers.errors import MmeError
    from model_handlers.requests import ModelRequest, ModelResponse
    from serve.model.open_request import Post
    from serve.model.signature import Batch, Signature
    from serve.request import InferenceResponse
    from serve.threads import ThreadPool

_now = time.perf_counter_ns
_POLL_SECONDS = 0.005
# A batch that was sent, as requests, when it began, and when it was sent.
_NOTHING: tuple[Batch, Sequence[ModelRequest], int, int] = ([], (), 0, 0)


class Instance:
    """A lane, which has a thread of a pool while it executes.

    Where the handler can send batches to another process, they are sent and received on the event loop (`send`,
    `receive`), and a thread has what would take long.

    Args:
        name: `<model>_<group>_<index>`.
        handler: what executes; may be shared with other lanes on the same device.
        signature: the model's.
        pull: asks for the next batch; marks the lane idle and returns [] when there is none.
        pull_ahead: asks for one behind the batch that is executed; [] where there is none to be had so early.
        report: takes a finished execution; called on a thread.
        threads: those of all instances.
        post: takes what the model answers unasked; called on any thread. None where nobody would take it.
        number: which of its model's lanes it is.

    Attributes:
        handler: may be replaced at any time; an execution under way goes on with the one it began with.
        turn: counts the beginnings and ends of executions, so that it is odd during one.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        signature: Signature,
        pull: Callable[[Instance], Batch],
        pull_ahead: Callable[[Instance], Batch],
        report: Callable[[Execution], None],
        threads: ThreadPool,
        post: Post | None = None,
        number: int = 0,
    ) -> None:
        self.name = name
        self.number = number
        self.handler = handler
        self.turn = 0
        self._signature = signature
        self._pull = pull
        self._pull_ahead = pull_ahead
        self._report = report
        self._post = post
        self._threads = threads
        self._inbox: list[Callable[[], Execution]] = []  # what a thread begins with
        self._handed: list[bool] = []  # as many as threads have work of this lane; appending and popping are atomic
        self._sent = _NOTHING

    def __repr__(self) -> str:
        return f"<Instance {self.name}>"

    def run(self, batch: Batch) -> None:
        """Have the idle lane execute a batch, then whatever it can pull. On the event loop."""
        self._hand(functools.partial(self._work, batch))

    def _hand(self, work: Callable[[], Execution]) -> None:
        self._handed.append(True)
        self._inbox.append(work)
        self._threads.run(self._main)

    def execute(self, batch: Batch) -> Execution:
        """Execute a batch on the calling thread, while the lane is idle."""
        self.turn += 1  # before the handler is looked up: see Retired
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
        requests = self._signature.present(batch, self._post)
        if not self.handler.send_requests(requests, watch):
            return False
        self._sent = batch, requests, start, _now()
        return True

    def receive(self) -> Execution | None:
        """The execution of the batch that was sent; None where it is for the thread to wait for it: see `wait`."""
        began = _now()
        try:
            answers = self.handler.take_answers()
        except Exception as error:  # noqa: BLE001 - as in `execute_batch`
            return self._answered(error, began)
        return None if answers is None else self._answered(answers, began)

    def wait(self) -> None:
        """Have the thread wait for the batch that was sent, and report its execution."""
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
                results = self._signature.collect(batch, answers)
            except Exception as error:  # noqa: BLE001 - as in `execute_batch`
                results = [failure(self._signature.name, error)] * len(batch)
        size = self._signature.rows(batch)
        times = start, sent, executed, _now()
        timings, several = timed(self._signature, results, size, times)
        stamp(results, timings, requests, apart=several)
        uniform = self._signature.whole(batch) and all_responses(results)
        return Execution(batch, results, size, timings, 0, uniform=uniform, one_by_one=several)

    def rest(self) -> None:
        """Wait until the batch that was sent is answered. Never called on the event loop, which takes the answers.

        Its requests may all be over by then: what a model says unasked, a last response too, overtakes the answers.
        """
        until = time.monotonic() + self.handler.patience
        while self._sent[0] and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Wait until no thread has work of the lane. Never called on the event loop."""
        while self._handed:  # it may have yet to be begun
            time.sleep(_POLL_SECONDS)

    def _main(self) -> None:
        """Execute what was handed over, and what can be pulled then. On a thread."""
        try:
            self._report(self._inbox.pop()())
            while batch := self._pull(self):
                self._report(self._work(batch))
        finally:
            self._handed.pop()


def close_all(handlers: Sequence[Handler], threads: ThreadPool) -> None:
    """Close handlers side by side, each though another raises: their models may have something to say at the end."""
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


class Retired:
    """Handlers that lanes were given others for; the executions that had begun by then still use them."""

    def __init__(self, handlers: Sequence[Handler], lanes: Sequence[Instance]) -> None:
        self._handlers = handlers
        self._turns = [(lane, lane.turn) for lane in lanes]

    def close(self) -> None:
        """Close them when those executions have ended. On a thread that may wait."""
        for lane, turn in self._turns:
            while turn % 2 and lane.turn == turn:
                time.sleep(_POLL_SECONDS)
        for handler in self._handlers:
            handler.close()
