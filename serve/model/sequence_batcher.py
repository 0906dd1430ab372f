"""The sequence batcher, direct and oldest. PURE: requests and `now` in, batches out.

A sequence begins with a request that has START and takes the first free *slot*: the lowest of all instances, so that
sequences spread over them. It keeps slot and instance until its request with END was executed, it has been idle for
too long, or a request of it was cancelled. Sequences without a slot wait in the *backlog*, in order, with all of their
requests; a request's own timeout is the time that its sequence may wait there.

                 push                           take            release
    request ───► sequence with a slot: waiting ──────► executing ───────► its next request, or the slot's next sequence
           └───► sequence in the backlog ──────────────────────────────────────────────┘

At most one request of a sequence executes at a time: whenever one is back, or comes to a sequence that has none, the
instance is *offered* the sequence, and makes batches by the model's strategy. A request that its model puts back is the
next of its sequence. No step costs more for there being more sequences.

A START of a live sequence is queued behind what that has sent: the model is told of a new sequence, whose state begins
again. A cancelled request is met when it is its sequence's next, or at once in the backlog, where that may take for
ever. Times are nanoseconds of one monotonic clock. On the event loop.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from model_handlers.config.model_config import ControlKind, DynamicBatching, OldestStrategy
from model_handlers.errors import invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_KEPT, FLAG_SEQUENCE_START
from model_handlers.tensor import BYTES
from serve.model.batcher import BatchDecision, BatchQueue, Queued

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from model_handlers.config.model_config import DirectStrategy, SequenceBatching


class Stepping(Queued, Protocol):
    """What has to be known of a request of a sequence."""

    correlation_id: int | str
    flags: int


R = TypeVar("R", bound=Stepping)
BACKLOG = -1  # instead of an instance


class LiveSequence(Generic[R]):
    """The requests with one correlation id, from a START to the END."""

    def __init__(self, correlation_id: int | str) -> None:
        self.id = correlation_id
        self.waiting: deque[R] = deque()  # its requests that no instance has taken, in order
        self.executing: R | None = None  # the one that an instance executes
        # instance, slot: where it executes; BACKLOG while it waits for a slot
        self.instance = BACKLOG
        self.slot = -1
        self.ending = False  # whether no request can join it any more
        self.pinned = False  # whether it may be idle for ever: its end is told
        self.last_ns = 0  # when a request of it came, or was executed
        self.expires_ns = 0  # when its time in the backlog is over, 0 for never
        # its states between two requests, and `state_shapes`: their shapes, where they are not the initial ones. They
        # belong to the thread that executes.
        self.memory: dict[str, Any] = {}
        self.state_shapes: Hashable = None

    def __repr__(self) -> str:
        return f"<Sequence {self.id!r}: instance {self.instance}, slot {self.slot}, {len(self.waiting)} waiting>"

    @property
    def signature(self) -> Hashable:
        """With which others its next request may share a batch."""
        request = self.waiting[0]
        return (request.signature, None if request.flags & FLAG_SEQUENCE_START else self.state_shapes)


class SequenceBatch(list[R]):
    """Requests to execute together, each with its row and its sequence."""

    def __init__(self, sequences: list[LiveSequence[R]], rows: Iterable[int]) -> None:
        super().__init__([sequence.waiting.popleft() for sequence in sequences])
        self.sequences = sequences
        self.rows = list(rows)  # of each request, ascending
        self.height = self.rows[-1] + 1  # rows in all; those without a request keep the others at their places
        # the places in this list of those that the model put back, filled in by the execution
        self.again: set[int] = set()
        for sequence, request in zip(sequences, self, strict=True):
            sequence.executing = request


class CandidateTake(NamedTuple, Generic[R]):
    """What an instance decided."""

    batch: SequenceBatch[R] | None
    wake_at: int  # when to ask again (ns), 0 for: when something changes
    cancelled: list[LiveSequence[R]]  # sequences whose next request is cancelled. They are not offered any more


class DirectCandidates(Generic[R]):
    """Sequences of one instance that can execute something, see `DirectStrategy`; it has `rows` slots."""

    def __init__(self, strategy: DirectStrategy, rows: int) -> None:
        self._offered: dict[int, LiveSequence[R]] = {}
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000
        self._worth_it = strategy.minimum_slot_utilization * rows

    def offer(self, sequence: LiveSequence[R], now: int) -> None:  # noqa: ARG002 - its request says how long it waits
        """Its next request can execute."""
        self._offered[sequence.slot] = sequence

    def take(self, now: int) -> CandidateTake[R]:
        """The next batch, if there are enough rows in it, or if one has waited long enough."""
        offered = self._offered
        cancelled = [sequence for sequence in offered.values() if sequence.waiting[0].cancelled]
        for sequence in cancelled:
            del offered[sequence.slot]
        if not offered:
            return CandidateTake(None, 0, cancelled)
        oldest = min(offered.values(), key=_arrival)
        send_at = _arrival(oldest) + self._delay_ns
        if self._delay_ns and send_at > now and len(offered) < self._worth_it:
            return CandidateTake(None, send_at, cancelled)
        signature = oldest.signature
        rows = [slot for slot in sorted(offered) if offered[slot].signature == signature]
        return CandidateTake(SequenceBatch([offered.pop(slot) for slot in rows], rows), 0, cancelled)

    def clear(self) -> None:
        self._offered.clear()


class OldestCandidates(Generic[R]):
    """The same, see `OldestStrategy`: the dynamic batcher over the next requests of sequences."""

    def __init__(self, model: str, strategy: OldestStrategy, max_batch_size: int) -> None:
        batching = DynamicBatching(strategy.preferred_batch_size, strategy.max_queue_delay_microseconds)
        self._queue: BatchQueue[_Step[R]] = BatchQueue(model, max_batch_size, batching)

    def offer(self, sequence: LiveSequence[R], now: int) -> None:
        self._queue.push(_Step(sequence, now))

    def take(self, now: int) -> CandidateTake[R]:
        take = self._queue.take(now)
        cancelled = [step.sequence for step in take.cancelled]
        if not take.batch:
            return CandidateTake(None, take.wake_at, cancelled)
        sequences = [step.sequence for step in take.batch]
        return CandidateTake(SequenceBatch(sequences, range(len(sequences))), 0, cancelled)

    def clear(self) -> None:
        self._queue.clear()


class _Step(Generic[R]):
    def __init__(self, sequence: LiveSequence[R], now: int) -> None:
        self.sequence = sequence
        self.batch_size = 1
        self.timeout_us = self.priority = 0
        self.arrival_ns = now
        self.deadline_ns = 0
        self.signature: Hashable = sequence.signature

    @property
    def cancelled(self) -> bool:
        return self.sequence.waiting[0].cancelled


def _arrival(sequence: LiveSequence[R]) -> int:
    return sequence.waiting[0].arrival_ns


_log = logging.getLogger("mme.sequences")
_RECHECK_NS = 50_000_000
_UNNAMED = 1 << 63  # where the ids begin of requests that come without one: clients' own rarely are so large


class SequenceQueue(Generic[R]):
    """The requests that wait for the instances of one model version, by their sequences."""

    has_sequences: ClassVar[bool] = True
    has_deadlines: ClassVar[bool] = True
    timeout_message: ClassVar[str] = "timeout of the corresponding sequence has been expired"

    def __init__(self, model: str, batching: SequenceBatching, max_batch_size: int, instances: int) -> None:
        self._model = model
        self._iterative = batching.iterative_sequence
        self._named = [
            (name, control.tensor_type)
            for name, control in batching.controls()
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID
        ]
        self._idle_ns = batching.max_sequence_idle_microseconds * 1000
        strategy, rows = batching.strategy, max(max_batch_size, 1)
        self._instances: list[DirectCandidates[R] | OldestCandidates[R]]
        if isinstance(strategy, OldestStrategy):
            self._instances = [OldestCandidates(model, strategy, max_batch_size) for _ in range(instances)]
            self._slots = (strategy.max_candidate_sequences or rows) * instances
        else:
            self._instances = [DirectCandidates(strategy, rows) for _ in range(instances)]
            self._slots = rows * instances
        self._executing: list[SequenceBatch[R] | None] = [None] * instances
        self._fresh = 0  # slots from here on were never taken; they count through all instances, lowest slots first
        self._freed: list[int] = []  # a heap of those below
        self._live: dict[int | str, LiveSequence[R]] = {}  # those that requests can join
        self._active: OrderedDict[LiveSequence[R], None] = (
            OrderedDict()
        )  # those with a slot, by their last sign of life
        self._backlog: OrderedDict[LiveSequence[R], None] = OrderedDict()  # those without, in the order of their STARTs
        self._backlog_index: dict[int, LiveSequence[R]] = {}  # whose request in the backlog is whose
        self._deadlines: list[tuple[int, int, LiveSequence[R]]] = []  # a heap, with some that do not count any more
        self._dropped: list[R] = []
        self._count = 0
        self._number = itertools.count(_UNNAMED)
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return (
            f"<SequenceQueue {self._model}: {self._count} waiting, {len(self._active)} sequences in "
            f"{self._slots} slots, {len(self._backlog)} in the backlog>"
        )

    def push(self, request: R, *, first: bool = False) -> None:  # noqa: ARG002 - its interface
        """Accept a request; its `arrival_ns` is set.

        Raises:
            MmeError: INVALID_ARGUMENT for one that belongs to no sequence, or for a batch of several.
        """
        sequence = self._sequence_of(request)
        sequence.waiting.append(request)
        self._count += 1
        if request.flags & FLAG_SEQUENCE_END:
            self._forget(sequence)
        if sequence.instance == BACKLOG:
            self._backlog_index[id(request)] = sequence
            self._note_deadline(sequence, request)
            return
        self._mark_active(sequence, request.arrival_ns)
        if sequence.executing is None and len(sequence.waiting) == 1:
            self._instances[sequence.instance].offer(sequence, request.arrival_ns)

    def is_full(self) -> bool:
        """Never: what an instance is given depends on what it has executed."""
        return False

    def take(self, now: int, instances: Sequence[int], most: int = 1) -> BatchDecision[R]:  # noqa: ARG002 - its interface
        """The next batch for one of the instances, and the requests of clients that left."""
        take: BatchDecision[R] = BatchDecision()
        wake_at: list[int] = []
        for instance in reversed(instances):
            found = self._take_from(instance, now)
            if isinstance(found, SequenceBatch):
                take.batch, take.instance = found, instance
                break
            if found:
                wake_at.append(found)
        self._hand_over_dropped(take)
        if not take.batch and wake_at:
            take.wake_at = min(wake_at)
            if deadline := self.next_deadline():
                take.wake_at = min(take.wake_at, deadline)
        return take

    def release(self, instance: int, now: int) -> None:
        """An instance has executed its batch: its sequences go on, or end."""
        batch, self._executing[instance] = self._executing[instance], None
        if batch is None:
            return
        for place, (sequence, request) in enumerate(zip(batch.sequences, batch, strict=True)):
            sequence.executing = None
            self._mark_active(sequence, now)
            if place in batch.again:
                request.flags &= ~FLAG_SEQUENCE_START
                sequence.waiting.appendleft(request)
                self._count += 1
            if request.cancelled or (self._closed and sequence.waiting):
                self._cancel(sequence, now)
            elif sequence.waiting:
                self._instances[instance].offer(sequence, now)
            elif sequence.ending:
                self._release(sequence, now)
            elif self._iterative and not sequence.pinned:
                self._forget(sequence)
                self._release(sequence, now)

    def cancel(self, request: R) -> None:
        """The client of a request has left: a sequence in the backlog goes with it."""
        sequence = self._backlog_index.get(id(request))
        if sequence is not None:
            self._dropped += sequence.waiting
            self._count += len(sequence.waiting)
            self._leave_backlog(sequence)

    def next_deadline(self) -> int:
        """When the next sequence has been idle, or in the backlog, for too long (ns); 0 for never."""
        deadlines = self._deadlines
        while deadlines and not _counts(deadlines[0]):
            heapq.heappop(deadlines)
        nearest = deadlines[0][0] if deadlines else 0
        if self._active:
            idle_at = next(iter(self._active)).last_ns + self._idle_ns
            nearest = min(nearest, idle_at) if nearest else idle_at
        return nearest

    def take_expired(self, now: int) -> BatchDecision[R]:
        """The requests of sequences that were in the backlog for too long; those that idle too long end."""
        take: BatchDecision[R] = BatchDecision()
        while self._deadlines and (not _counts(self._deadlines[0]) or self._deadlines[0][0] <= now):
            entry = heapq.heappop(self._deadlines)
            if _counts(entry):
                take.expired += self._leave_backlog(entry[2])
        while self._active:
            sequence = next(iter(self._active))
            if sequence.last_ns + self._idle_ns > now:
                break
            if sequence.pinned or sequence.executing is not None or sequence.waiting:
                # It waits for the server, if at all: look again, but not all the time.
                self._mark_active(sequence, max(now, now + _RECHECK_NS - self._idle_ns))
            else:
                self._forget(sequence)
                self._release(sequence, now)
        self._hand_over_dropped(take)
        return take

    def end(self, correlation_id: int | str, now: int) -> None:
        """End a sequence as soon as all of it was executed."""
        sequence = self._live.get(correlation_id)
        if sequence is None:
            return
        self._forget(sequence)
        if sequence.instance != BACKLOG and sequence.executing is None and not sequence.waiting:
            self._release(sequence, now)

    def clear(self) -> list[R]:
        """Take out all that wait. What executes goes on, once."""
        self._closed = True
        waiting, self._dropped = self._dropped, []
        for sequence in (*self._active, *self._backlog):
            waiting += sequence.waiting
            sequence.waiting.clear()
            sequence.ending = True
        self._live.clear()
        self._backlog.clear()
        self._backlog_index.clear()
        self._deadlines.clear()
        for instance in self._instances:
            instance.clear()
        for sequence in [sequence for sequence in self._active if sequence.executing is None]:
            self._release(sequence, 0)
        self._count = 0
        return waiting

    # -- which sequence ------------------------------------------------------------------------------------------

    def _sequence_of(self, request: R) -> LiveSequence[R]:
        if request.batch_size != 1:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not request.correlation_id:
            return self._anonymous(request)
        self._check_type(request.correlation_id)
        sequence = self._live.get(request.correlation_id)
        if sequence is None:
            if not request.flags & FLAG_SEQUENCE_START:
                raise invalid_argument(
                    f"inference request for sequence {request.correlation_id} to model '{self._model}' must specify "
                    "the START flag on the first request of the sequence"
                )
            sequence = self._live[request.correlation_id] = self._begin(request)
        elif request.flags & FLAG_SEQUENCE_START:
            _log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                request.correlation_id,
                self._model,
            )
        return sequence

    def _check_type(self, correlation_id: int | str) -> None:
        for name, data_type in self._named:
            if isinstance(correlation_id, str) != (data_type is BYTES):
                raise invalid_argument(
                    f"sequence batching control '{name}' data-type is "
                    f"'{'BYTES' if isinstance(correlation_id, str) else 'UINT64'}', but model '{self._model}' expects "
                    f"'{data_type.name}'"
                )

    def _anonymous(self, request: R) -> LiveSequence[R]:
        if not self._iterative:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        request.correlation_id = next(self._number)
        request.flags |= FLAG_SEQUENCE_START
        sequence = self._begin(request)
        sequence.ending = True
        return sequence

    def _begin(self, request: R) -> LiveSequence[R]:
        sequence: LiveSequence[R] = LiveSequence(request.correlation_id)
        sequence.pinned = bool(request.flags & FLAG_SEQUENCE_KEPT)
        if self._freed or self._fresh < self._slots:
            self._seat(sequence, request.arrival_ns)
        else:
            self._backlog[sequence] = None
        return sequence

    # -- slots and backlog ---------------------------------------------------------------------------------------

    def _seat(self, sequence: LiveSequence[R], now: int) -> None:
        if self._freed:
            number = heapq.heappop(self._freed)
        else:
            number, self._fresh = self._fresh, self._fresh + 1
        sequence.slot, sequence.instance = divmod(number, len(self._instances))
        sequence.last_ns = now
        self._active[sequence] = None
        if sequence.waiting:
            self._instances[sequence.instance].offer(sequence, now)

    def _release(self, sequence: LiveSequence[R], now: int) -> None:
        del self._active[sequence]
        heapq.heappush(self._freed, sequence.slot * len(self._instances) + sequence.instance)
        if self._backlog:
            following, _ = self._backlog.popitem(last=False)
            for request in following.waiting:
                del self._backlog_index[id(request)]
            self._seat(following, now)

    def _mark_active(self, sequence: LiveSequence[R], now: int) -> None:
        sequence.last_ns = now
        self._active.move_to_end(sequence)

    def _forget(self, sequence: LiveSequence[R]) -> None:
        if not sequence.ending:
            sequence.ending = True
            del self._live[sequence.id]

    def _cancel(self, sequence: LiveSequence[R], now: int) -> None:
        self._dropped += sequence.waiting
        sequence.waiting.clear()
        self._forget(sequence)
        self._release(sequence, now)

    def _hand_over_dropped(self, take: BatchDecision[R]) -> None:
        take.cancelled, self._dropped = self._dropped, []
        self._count -= len(take.batch) + len(take.cancelled)

    def _note_deadline(self, sequence: LiveSequence[R], request: R) -> None:
        if request.timeout_us:
            deadline = request.arrival_ns + request.timeout_us * 1000
            if not sequence.expires_ns or deadline < sequence.expires_ns:
                sequence.expires_ns = deadline
                heapq.heappush(self._deadlines, (deadline, id(sequence), sequence))

    def _leave_backlog(self, sequence: LiveSequence[R]) -> list[R]:
        requests = list(sequence.waiting)
        sequence.waiting.clear()
        del self._backlog[sequence]
        for request in requests:
            del self._backlog_index[id(request)]
        self._forget(sequence)
        self._count -= len(requests)
        return requests

    # -- batches -------------------------------------------------------------------------------------------------

    def _take_from(self, instance: int, now: int) -> SequenceBatch[R] | int:
        while True:
            batch, wake_at, cancelled = self._instances[instance].take(now)
            for sequence in cancelled:
                self._cancel(sequence, now)
            if batch is not None:
                self._executing[instance] = batch
                return batch
            if not cancelled:
                return wake_at


def _counts(entry: tuple[int, int, LiveSequence[R]]) -> bool:
    deadline, _, sequence = entry
    return sequence.instance == BACKLOG and bool(sequence.waiting) and sequence.expires_ns == deadline
