"""The requests of one priority level, waiting. PURE: requests and `now` in, who leaves out.

A level has two lines, each in the order in which they came: those who wait, and behind them those whose time is over
but whom their policy delays instead of rejecting. Not thread-safe: the queue that it belongs to is guarded.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from model_handlers.config.model_config import TimeoutAction
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from model_handlers.config.model_config import QueuePolicy


class Queued(Protocol):
    """What the queue has to know of a request."""

    batch_size: int
    arrival_ns: int
    timeout_us: int
    priority: int
    signature: Hashable
    deadline_ns: int

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""


R = TypeVar("R", bound=Queued)
_arrival = attrgetter("arrival_ns")


class Level(Generic[R]):
    """Requests of one level.

    Attributes:
        waiting: those with time left, or without a limit; delayed: those whose time is over. The deques stay the same.

    Args:
        model: the model's name, for messages.
        policy: the level's limits.
    """

    def __init__(self, model: str, policy: QueuePolicy) -> None:
        self._model = model
        self.policy = policy
        self.waiting: deque[R] = deque()
        self.delayed: deque[R] = deque()

    @property
    def limited(self) -> bool:
        """Whether anybody may be refused or run out of time."""
        return self.policy.max_queue_size > 0 or self.policy.default_timeout_microseconds > 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)

    def __iter__(self) -> Iterator[R]:
        return chain(self.waiting, self.delayed)

    def push(self, request: R) -> None:
        """Accept a request; its `arrival_ns` is set.

        Raises:
            MmeError: QUEUE_FULL when `max_queue_size` requests wait already.
        """
        policy = self.policy
        if policy.max_queue_size and len(self) >= policy.max_queue_size:
            raise MmeError(
                Kind.QUEUE_FULL,
                f"Exceeds maximum queue size: model '{self._model}' has {len(self)} requests waiting, "
                f"max_queue_size is {policy.max_queue_size}; try again later",
            )
        timeout_us = policy.default_timeout_microseconds
        if timeout_us and policy.allow_timeout_override and 0 < request.timeout_us < timeout_us:
            timeout_us = request.timeout_us
        request.deadline_ns = request.arrival_ns + timeout_us * 1000 if timeout_us else 0
        self.waiting.append(request)

    def pop(self) -> R:
        """The first of all."""
        return (self.waiting or self.delayed).popleft()

    def next_deadline(self) -> int:
        """The nearest time (ns) at which a request's queue time is over, 0 for none."""
        if not self.policy.default_timeout_microseconds or not self.waiting:
            return 0
        if not self.policy.allow_timeout_override:  # then who came first runs out of time first
            return self.waiting[0].deadline_ns
        return min(request.deadline_ns for request in self.waiting)

    def expire(self, now: int) -> list[R]:
        """Take out whose time is over and who is to be rejected; delay those who are to be delayed."""
        nearest = self.next_deadline()
        if not nearest or nearest > now:
            return []
        late = [request for request in self.waiting if request.deadline_ns <= now]
        in_time = [request for request in self.waiting if request.deadline_ns > now]
        self.waiting.clear()
        self.waiting.extend(in_time)
        if self.policy.timeout_action is TimeoutAction.DELAY:
            in_order = sorted(chain(self.delayed, late), key=_arrival)  # who gave up early is not put before older ones
            self.delayed.clear()
            self.delayed.extend(in_order)
            return []
        return late

    def drop_cancelled(self) -> list[R]:
        """From both fronts; one in the middle is met when a batch is cut or gets to the front in time."""
        dropped = []
        for line in (self.waiting, self.delayed):
            while line and line[0].cancelled:
                dropped.append(line.popleft())
        return dropped

    def clear(self) -> None:
        """Hold nobody any more."""
        self.waiting.clear()
        self.delayed.clear()
