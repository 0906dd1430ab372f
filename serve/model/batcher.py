"""The dynamic batcher: queue, priority levels, ordered results, linger. PURE: requests and `now` in, batches out.

Instances *pull*: a free one calls `take(now)`, so a batch forms while all are busy, and no timer is needed unless
`max_queue_delay` asks for one. `take` looks at the front of the queue and

1. drops cancelled requests and those that waited longer than their queue policy allows (REJECT), or moves the latter
   behind all of their level that still have time (DELAY);
2. walks on while requests fit together: same shapes apart from the batch dimension, at most `max_batch_size` in all;
3. remembers the last point at which the size was a preferred one;
4. hands out the preferred batch if it met one and the oldest can still wait; else all it walked over, if no more can
   join, if the largest preferred size is reached, or if the oldest has waited long enough; else it says when to ask
   again.

    the front                                              the back     behind it
    |<-- walked over, fits together -->|
    [r1 r2 r3 r4 r5 r6 | r7: other shape or too many, r8 ...]           [d1 d2: delayed]
                  ^ preferred size reached here: cut

With priority levels the front is that of the first level in which a request waits, and behind the delayed of each
level begins the next one. Times are nanoseconds of one monotonic clock. On the event loop.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from model_handlers.config.model_config import DynamicBatching, TimeoutAction
from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

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
        """Whether its client has left."""


R = TypeVar("R", bound=Queued)
_arrival = attrgetter("arrival_ns")


class PriorityLevel(Generic[R]):
    """Requests of one level: `waiting`, and behind them the `delayed`. The queue holds on to both deques."""

    def __init__(self, model: str, policy: QueuePolicy) -> None:
        self._model = model
        self.policy = policy
        self.waiting: deque[R] = deque()
        self.delayed: deque[R] = deque()

    @property
    def limited(self) -> bool:
        return self.policy.max_queue_size > 0 or self.policy.default_timeout_microseconds > 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)

    def __iter__(self) -> Iterator[R]:
        return chain(self.waiting, self.delayed)

    def push(self, request: R) -> None:
        """Accept a request, or raise QUEUE_FULL; its `arrival_ns` is set."""
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
        return (self.waiting or self.delayed).popleft()

    def next_deadline(self) -> int:
        """The nearest time (ns) at which a request's queue time is over, 0 for none."""
        if not self.policy.default_timeout_microseconds or not self.waiting:
            return 0
        if not self.policy.allow_timeout_override:  # then the oldest runs out of time first
            return self.waiting[0].deadline_ns
        return min(request.deadline_ns for request in self.waiting)

    def expire(self, now: int) -> list[R]:
        """Take out the late requests that are to be rejected; delay those that are to be delayed."""
        nearest = self.next_deadline()
        if not nearest or nearest > now:
            return []
        late = [request for request in self.waiting if request.deadline_ns <= now]
        in_time = [request for request in self.waiting if request.deadline_ns > now]
        self.waiting.clear()
        self.waiting.extend(in_time)
        if self.policy.timeout_action is TimeoutAction.DELAY:
            in_order = sorted(
                chain(self.delayed, late), key=_arrival
            )  # one that gave up early is not put before older ones
            self.delayed.clear()
            self.delayed.extend(in_order)
            return []
        return late

    def drop_cancelled(self) -> list[R]:
        """From both fronts; one in the middle is met when a batch is cut."""
        dropped = []
        for line in (self.waiting, self.delayed):
            while line and line[0].cancelled:
                dropped.append(line.popleft())
        return dropped

    def clear(self) -> None:
        self.waiting.clear()
        self.delayed.clear()


_NONE_WAITING: deque[Any] = deque()
UNBATCHED = DynamicBatching(preferred_batch_size=(1,))


class BatchDecision(Generic[R]):
    """What one `take` decided."""

    def __init__(self, instance: int = 0) -> None:
        self.batch: list[R] = []  # requests for `instance` to execute together, [] when there is nothing to do now
        self.instance = instance
        self.wake_at = 0  # when to ask again (ns), 0 for: when something changes
        self.expired: list[R] = []  # requests whose time in the queue is over; each is owed a Kind.QUEUE_TIMEOUT
        self.cancelled: list[R] = []  # requests whose clients left


class BatchQueue(Generic[R]):
    """Requests of one model, waiting to be batched.

    Args:
        max_batch_size: the sum of batch sizes that one execution may have; 0 and 1 mean one request each.
        batching: None to execute each request alone.
    """

    # whether it is to be told of clients that leave, by `cancel`, and of batches that were executed, by `release`
    has_sequences: ClassVar[bool] = False
    timeout_message: ClassVar[str] = "Request timeout expired"  # what the requests of `BatchDecision.expired` are told

    def __init__(self, model: str, max_batch_size: int, batching: DynamicBatching | None) -> None:
        self._model = model
        self._batches = batching is not None and max_batch_size > 1
        self._max = max_batch_size
        settings = batching or UNBATCHED
        self._preferred = frozenset(settings.preferred_batch_size)
        self._max_preferred = max(self._preferred, default=max_batch_size)
        self._delay_ns = settings.max_queue_delay_microseconds * 1000
        self._levels: tuple[PriorityLevel[R], ...] = tuple(PriorityLevel(model, policy) for policy in settings.policies)
        self._default_level = self._levels[min(max(settings.default_priority_level, 1), len(self._levels)) - 1]
        self._only = self._default_level if len(self._levels) == 1 else None
        self.has_deadlines = any(level.policy.default_timeout_microseconds for level in self._levels)
        self._hurries = not self._delay_ns and not self.has_deadlines
        self._free = self._only.waiting if self._only is not None and not self._only.limited else None

    def __len__(self) -> int:
        return len(self._free) if self._free is not None else sum(map(len, self._levels))

    def __repr__(self) -> str:
        waiting = "+".join(str(len(level.waiting)) for level in self._levels)
        delayed = "+".join(str(len(level.delayed)) for level in self._levels)
        return f"<BatchQueue {self._model}: {waiting} waiting, {delayed} delayed>"

    def push(self, request: R, *, first: bool = False) -> None:
        """Accept a request; its `arrival_ns` is set. One that was handed out and never executed is the `first` again.

        Raises:
            MmeError: QUEUE_FULL when `max_queue_size` requests of its level wait already.
        """
        if first:
            self._level_of(request).waiting.appendleft(request)
        elif self._free is not None:
            request.deadline_ns = 0
            self._free.append(request)
        else:
            self._level_of(request).push(request)

    def _level_of(self, request: R) -> PriorityLevel[R]:
        if 1 <= request.priority <= len(self._levels):
            return self._levels[request.priority - 1]
        return self._default_level

    def part(self) -> None:
        """Execute each request alone from now on."""
        self._batches = False

    def is_full(self) -> bool:
        """Whether a batch waits that nothing could join any more: it can be handed out early."""
        if not len(self):
            return False
        if not self._batches:
            return True
        _, total, closed, _ = self._walk()
        return closed or total >= self._max

    def take(self, now: int, instances: Sequence[int] = (0,), most: int = 1) -> BatchDecision[R]:
        """The next batch, if it is time for one, for the last of the `instances`, which are free.

        Of requests that are executed one by one it has as many as wait, but no more than `most`.
        """
        take: BatchDecision[R] = BatchDecision(instances[-1])
        if self._hurries:  # then none is delayed
            waiting = self._free or self._all_waiting()
            if len(waiting) == 1 and not waiting[0].cancelled:
                take.batch = [waiting.popleft()]  # what the rest comes to for one request, and most of its cost
                return take
        self._expire(now, take)
        if not self._free or self._free[0].cancelled:
            for level in self._levels:
                take.cancelled += level.drop_cancelled()
        if len(self):
            self._cut(now, take, most)
        if not take.batch and (deadline := self.next_deadline()):
            take.wake_at = min(take.wake_at or deadline, deadline)
        return take

    def _all_waiting(self) -> deque[R]:
        occupied = [level.waiting for level in self._levels if level.waiting]
        return occupied[0] if len(occupied) == 1 else _NONE_WAITING

    def release(self, instance: int, now: int) -> None: ...

    def end(self, correlation_id: int | str, now: int) -> None: ...

    def cancel(self, request: R) -> None:
        """It is met when it is its turn, which comes soon."""

    def next_deadline(self) -> int:
        if not self.has_deadlines:
            return 0
        return min((deadline for level in self._levels if (deadline := level.next_deadline())), default=0)

    def take_expired(self, now: int) -> BatchDecision[R]:
        """Only the late requests, while no instance is free to take a batch."""
        take: BatchDecision[R] = BatchDecision()
        self._expire(now, take)
        return take

    def clear(self) -> list[R]:
        """Take out all that wait."""
        waiting = list(self._all())
        for level in self._levels:
            level.clear()
        return waiting

    def _expire(self, now: int, take: BatchDecision[R]) -> None:
        if self.has_deadlines:
            for level in self._levels:
                take.expired += level.expire(now)

    def _cut(self, now: int, take: BatchDecision[R], most: int) -> None:
        count = self._count(now, take) if self._batches else min(most, len(self))
        pop = self._free.popleft if self._free is not None else self._pop
        members = [pop() for _ in range(count)]
        take.cancelled += [request for request in members if request.cancelled]
        take.batch = [request for request in members if not request.cancelled]

    def _count(self, now: int, take: BatchDecision[R]) -> int:
        count, total, closed, preferred_count = self._walk()
        send_at = self._send_at(count) if self._delay_ns else now
        patience_over = send_at <= now
        if preferred_count and not (self._delay_ns and patience_over):
            return preferred_count
        if not (closed or patience_over or total >= self._max_preferred):
            take.wake_at = send_at
            return 0
        return count

    def _pop(self) -> R:
        level = self._only
        return (level if level is not None else next(level for level in self._levels if level)).pop()

    def _send_at(self, count: int) -> int:
        return self._delay_ns + min(request.arrival_ns for request in islice(self._all(), count))

    def _all(self) -> Iterator[R]:
        return iter(self._only) if self._only is not None else chain.from_iterable(self._levels)

    def _walk(self) -> tuple[int, int, bool, int]:
        """Over the requests that fit together: how many, their size, whether no more can join, the preferred cut."""
        signature = next(self._all()).signature
        count = total = preferred_count = 0
        for request in self._all():
            if request.cancelled:
                count += 1
                continue
            joined = total + request.batch_size
            if count and joined > self._max_preferred and not preferred_count:
                preferred_count = count  # it would carry the batch past the largest preferred size: cut before it
            if count and (joined > self._max or request.signature != signature):
                return count, total, True, preferred_count
            count, total = count + 1, joined
            if total in self._preferred:
                preferred_count = count
        return count, total, False, preferred_count


T = TypeVar("T")


class InOrder(Generic[T]):
    """Holds back results that overtook others. Each is entered by a key, and released in that order."""

    def __init__(self) -> None:
        self._entered: deque[int] = deque()
        self._held: dict[int, T] = {}

    def enter(self, key: int) -> None:
        self._entered.append(key)

    def release(self, key: int, result: T) -> list[T]:
        """Take the result of a key; return all that may leave now, oldest first."""
        self._held[key] = result
        ready: list[T] = []
        while self._entered and self._entered[0] in self._held:
            ready.append(self._held.pop(self._entered.popleft()))
        return ready
