"""The dynamic batcher's queue. PURE: requests and `now` in, batches out.

Theory of operation. Instances *pull*: one that is free calls `take(now)`, so a batch forms while all of them are
busy, and no timer is needed unless `max_queue_delay` asks for one. `take` looks at the front of the queue and

1. drops what nobody waits for any more (cancelled), and what waited longer than its queue policy allows (REJECT), or
   moves the latter behind everybody of its level who still has time (DELAY);
2. walks on while requests fit together: same shapes apart from the batch dimension, at most `max_batch_size` in all;
3. remembers the last point at which the size was a preferred one;
4. hands out the preferred batch if it met one and the oldest can still wait; else all it walked over, if no more can
   join, if the largest preferred size is reached, or if the oldest has waited long enough; else it says when to ask
   again.

    the front                                              the back     behind it
    |<-- walked over, fits together -->|
    [r1 r2 r3 r4 r5 r6 | r7: other shape or too many, r8 ...]           [d1 d2: delayed]
                  ^ preferred size reached here: cut

With priority levels the front of the queue is that of the first level in which anybody waits, and behind the delayed
of each level begins the next one: a batch is filled from them in their order.

Times are nanoseconds of one monotonic clock. The queue is not thread-safe: its model's lock guards it.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from model_handlers.config.model_config import DynamicBatching
from serve.model.queue_level import Level, R

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NOBODY: deque[Any] = deque()
UNBATCHED = DynamicBatching(preferred_batch_size=(1,))


class Take(Generic[R]):
    """What one `take` decided.

    Attributes:
        batch: requests to execute together, [] when there is nothing to do now.
        lane: which lane is to execute it.
        wake_at: when to ask again (ns), 0 for: when something changes.
        expired: requests whose time in the queue is over; each is owed a Kind.QUEUE_TIMEOUT.
        cancelled: requests that nobody waits for.
    """

    def __init__(self, lane: int = 0) -> None:
        self.batch: list[R] = []
        self.lane = lane
        self.wake_at = 0
        self.expired: list[R] = []
        self.cancelled: list[R] = []


class BatchQueue(Generic[R]):
    """Requests of one model, waiting to be batched.

    Args:
        model: the model's name, for messages.
        max_batch_size: the sum of batch sizes that one execution may have; 0 and 1 mean one request each.
        batching: the dynamic batcher's settings, None to execute each request alone.
    """

    hears: ClassVar[bool] = False
    expiry: ClassVar[str] = "Request timeout expired"

    def __init__(self, model: str, max_batch_size: int, batching: DynamicBatching | None) -> None:
        self._model = model
        self._batches = batching is not None and max_batch_size > 1
        self._max = max_batch_size
        settings = batching or UNBATCHED
        self._preferred = frozenset(settings.preferred_batch_size)
        self._max_preferred = max(self._preferred, default=max_batch_size)
        self._delay_ns = settings.max_queue_delay_microseconds * 1000
        self._levels: tuple[Level[R], ...] = tuple(Level(model, policy) for policy in settings.policies)
        self._default_level = self._levels[min(max(settings.default_priority_level, 1), len(self._levels)) - 1]
        self._only = self._default_level if len(self._levels) == 1 else None
        self._has_deadlines = any(level.policy.default_timeout_microseconds for level in self._levels)
        self._hurries = not self._delay_ns and not self._has_deadlines
        self._free = self._only.waiting if self._only is not None and not self._only.limited else None

    def __len__(self) -> int:
        return len(self._free) if self._free is not None else sum(map(len, self._levels))

    def __repr__(self) -> str:
        waiting = "+".join(str(len(level.waiting)) for level in self._levels)
        delayed = "+".join(str(len(level.delayed)) for level in self._levels)
        return f"<BatchQueue {self._model}: {waiting} waiting, {delayed} delayed>"

    def push(self, request: R, *, first: bool = False) -> None:
        """See `Queue`.

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

    def _level_of(self, request: R) -> Level[R]:
        """The level that a request names; the default one, if there is no such level."""
        if 1 <= request.priority <= len(self._levels):
            return self._levels[request.priority - 1]
        return self._default_level

    def part(self) -> None:
        """Execute each request alone from now on."""
        self._batches = False

    def whole(self) -> bool:
        """See `Queue`."""
        if not len(self):
            return False
        if not self._batches:
            return True
        _, total, closed, _ = self._walk()
        return closed or total >= self._max

    def take(self, now: int, lanes: Sequence[int] = (0,), most: int = 1) -> Take[R]:
        """The next batch, if it is time for one, for the last of the `lanes`, which are free.

        Of requests that are executed one by one it has as many as wait, but no more than `most`.
        """
        take: Take[R] = Take(lanes[-1])
        if self._hurries:  # then nobody is delayed
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
        """The line in which everybody waits; an empty one where that is no single one."""
        occupied = [level.waiting for level in self._levels if level.waiting]
        return occupied[0] if len(occupied) == 1 else _NOBODY

    def returned(self, lane: int, now: int) -> None:
        """A lane has executed its batch, which concerns nobody who waits."""

    def end(self, correlation_id: int | str, now: int) -> None:
        """Requests have nothing to do with one another here."""

    def cancel(self, request: R) -> None:
        """Nobody is told: it is met when it is its turn, which comes soon."""

    def next_deadline(self) -> int:
        """The nearest time (ns) at which a request's queue time is over, 0 for none."""
        if not self._has_deadlines:
            return 0
        return min((deadline for level in self._levels if (deadline := level.next_deadline())), default=0)

    def take_expired(self, now: int) -> Take[R]:
        """Only those whose time is over, while no lane is free to take a batch."""
        take: Take[R] = Take()
        self._expire(now, take)
        return take

    def clear(self) -> list[R]:
        """Everybody still waiting, who must be told that nobody will run them."""
        everybody = list(self._everybody())
        for level in self._levels:
            level.clear()
        return everybody

    def _expire(self, now: int, take: Take[R]) -> None:
        if self._has_deadlines:
            for level in self._levels:
                take.expired += level.expire(now)

    def _cut(self, now: int, take: Take[R], most: int) -> None:
        count = self._count(now, take) if self._batches else min(most, len(self))
        pop = self._free.popleft if self._free is not None else self._pop
        members = [pop() for _ in range(count)]
        take.cancelled += [request for request in members if request.cancelled]
        take.batch = [request for request in members if not request.cancelled]

    def _count(self, now: int, take: Take[R]) -> int:
        """How many requests make up a batch now; 0 where the take says when to ask again."""
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
        """When the oldest of the first `count` has waited long enough. A delayed one is older than those before it."""
        return self._delay_ns + min(request.arrival_ns for request in islice(self._everybody(), count))

    def _everybody(self) -> Iterator[R]:
        return iter(self._only) if self._only is not None else chain.from_iterable(self._levels)

    def _walk(self) -> tuple[int, int, bool, int]:
        """Over the requests that fit together: how many, their size, whether no more can join, the preferred cut."""
        signature = next(self._everybody()).signature
        count = total = preferred_count = 0
        for request in self._everybody():
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
