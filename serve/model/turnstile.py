"""How many requests of one step of an ensemble are under way, for all requests of the ensemble together. On the loop.

`max_inflight_requests`: a step's request waits here until another one of that step is over. One that is over keeps its
place until those that follow from it have theirs: else a fast step would run ahead of a slow one behind it without
end, and all that it made would wait between the two. So what waits is at most so much a step, and before the first
ones what clients have sent. A request of which nothing follows, or whose followers have places, gives its own up at
once; tensors go in no circle, so that somebody always does. That holds within one request of the ensemble: another one
that is sent because of its answer follows from none of its steps, and would close the circle if it did.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from model_handlers.errors import Kind, MmeError
from serve.model.execution import failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve.model.ensemble import EnsembleModel
    from serve.model.model import Model
    from serve.request import Completion, InferenceRequest, InferenceResponse

T = TypeVar("T")


class _Place:
    """That of one request at its step; kept while `followers` of it wait for theirs."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile
        self.followers = 0
        self.is_over = False

    def end(self) -> None:
        """Its request is over."""
        self.is_over = True
        self.give_up_if_unused()

    def give_up_if_unused(self) -> None:
        """Let the next one in."""
        if self.is_over and not self.followers:
            self.turnstile.leave()


class Turnstiles:
    """Those of the steps of one ensemble.

    Attributes:
        most: requests under way at each step.
        steps: one turnstile each.
        telling: the place of the request whose answer is being told: what is submitted meanwhile follows from it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: list[Turnstile] = []
        self.telling: _Place | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait, at all steps together."""
        return sum(step.waiting for step in self.steps)

    def begin(self, first_steps: Callable[[], None]) -> None:
        """Submit the first steps of a request of the ensemble: they follow from none whose answer is told now."""
        outer, self.telling = self.telling, None
        try:
            first_steps()
        finally:
            self.telling = outer

    def refuse_waiting(self, error: MmeError) -> None:
        """Tell those who wait that their turn will not come."""
        for step in self.steps:
            step.refuse_waiting(error)


class Turnstile:
    """That of one step.

    Args:
        all_of_them: the ensemble's.
        model: who executes the step.
    """

    def __init__(self, all_of_them: Turnstiles, model: Model | EnsembleModel) -> None:
        self._all = all_of_them
        self._model = model
        self._under_way = 0
        self._waiting: deque[tuple[InferenceRequest, _Place | None]] = deque()
        self._is_letting_in = False
        all_of_them.steps.append(self)

    def __repr__(self) -> str:
        return f"<Turnstile {self._under_way} of {self._all.most}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def submit(self, request: InferenceRequest) -> None:
        """Submit a request, now or when it is its turn; what the model refuses by then is its answer.

        Raises:
            MmeError: what the model raises now.
        """
        if self._under_way < self._all.most and not self._waiting:
            self._enter(request)
            return
        before = self._all.telling
        if before is not None:
            before.followers += 1
        waits = request, before
        self._waiting.append(waits)
        request.on_cancel = functools.partial(self._leave_the_queue, waits)

    def leave(self) -> None:
        """A place is free."""
        self._under_way -= 1
        if self._is_letting_in:
            return  # the loop below is already at it
        self._is_letting_in = True
        while self._waiting and self._under_way < self._all.most:
            request, before = self._waiting.popleft()
            request.on_cancel = None
            try:
                self._enter(request)
            except Exception as error:  # noqa: BLE001 - who submitted it is long gone
                request.resolve(failure(self._model.name, error))
            _has_its_place(before)
        self._is_letting_in = False

    def _enter(self, request: InferenceRequest) -> None:
        place = _Place(self)
        on_complete, on_response = request.on_complete, request.on_response
        request.on_complete = functools.partial(self._complete, place, on_complete)
        if on_response is not None:
            request.on_response = functools.partial(self._tell, place, on_response)
        self._under_way += 1
        try:
            self._model.submit(request)
        except BaseException:
            request.on_complete, request.on_response = on_complete, on_response
            place.end()
            raise

    def _complete(
        self,
        place: _Place,
        on_complete: Completion,
        request: InferenceRequest,
        result: InferenceResponse | MmeError | None,
    ) -> None:
        try:
            self._tell(place, on_complete, request, result)
        finally:
            place.end()

    def _tell(
        self, place: _Place, who: Callable[[InferenceRequest, T], None], request: InferenceRequest, what: T
    ) -> None:
        outer, self._all.telling = self._all.telling, place
        try:
            who(request, what)
        finally:
            self._all.telling = outer

    def refuse_waiting(self, error: MmeError) -> None:
        """Tell those who wait that their turn will not come."""
        while self._waiting:
            self._turn_away(self._waiting.popleft(), error)

    def _leave_the_queue(self, waits: tuple[InferenceRequest, _Place | None]) -> None:
        """A client left, or its request failed elsewhere."""
        self._waiting.remove(waits)
        self._turn_away(waits, MmeError(Kind.CANCELLED, f"the client of model '{self._model.name}' left"))

    def _turn_away(self, waits: tuple[InferenceRequest, _Place | None], error: MmeError) -> None:
        request, before = waits
        request.resolve(error)
        _has_its_place(before)


def _has_its_place(before: _Place | None) -> None:
    """One follower less waits."""
    if before is not None:
        before.followers -= 1
        before.give_up_if_unused()
