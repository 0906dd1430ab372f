"""The sequence batcher's queue. PURE: requests and `now` in, batches out.

Theory of operation. A sequence begins with a request that has START and takes the first free *slot*: the lowest of all
lanes, so that sequences spread over them. It keeps slot and lane until its request with END was executed, or it has
been idle for too long, or a request of it was cancelled. Sequences without a slot wait in the *backlog*, first come,
first served, with all of their requests; a request's own timeout is the time that its sequence may wait there.

                 push                           take            returned
    request ───► sequence with a slot: waiting ──────► executing ───────► its next request, or the slot's next sequence
           └───► sequence in the backlog ──────────────────────────────────────────────┘

At most one request of a sequence executes at a time: whenever one is back, or comes to a sequence that has none, the
lane is *offered* the sequence, and makes batches of those by the model's strategy (`sequence_lanes`). A request that
its model puts back is the next of its sequence. No step costs more for there being more sequences.

A START of a sequence that lives is queued behind what that has sent: the model is told of a new sequence, and what it
keeps begins anew. A cancelled request is met when it is its sequence's next, or at once in the backlog, where that may
take for ever.

Times are nanoseconds of one monotonic clock. The queue is not thread-safe: its model's lock guards it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple

from model_handlers.config.model_config import ControlKind, DynamicBatching, OldestStrategy
from model_handlers.errors import invalid_argument
from model_handlers.requests import FLAG_SEQUENCE_END, FLAG_SEQUENCE_KEPT, FLAG_SEQUENCE_START
from model_handlers.tensor import BYTES
from serve.model.batch_queue import BatchQueue, Take
from serve.model.sequence import BACKLOG, R, Sequence, SequenceBatch

if TYPE_CHECKING:
    from collections.abc import Hashable
    from collections.abc import Sequence as Numbers

    from model_handlers.config.model_config import DirectStrategy, SequenceBatching


class LaneTake(NamedTuple, Generic[R]):
    """What a lane decided.

    Attributes:
        batch: what to execute now, None for nothing.
        wake_at: when to ask again (ns), 0 for: when something changes.
        cancelled: sequences whose next request nobody waits for. They are not offered any more.
    """

    batch: SequenceBatch[R] | None
    wake_at: int
    cancelled: list[Sequence[R]]


class DirectLane(Generic[R]):
    """The sequences of one lane that can execute something, see `DirectStrategy`. `rows` is how many slots it has."""

    def __init__(self, strategy: DirectStrategy, rows: int) -> None:
        self._offered: dict[int, Sequence[R]] = {}
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000
        self._worth_it = strategy.minimum_slot_utilization * rows

    def offer(self, sequence: Sequence[R], now: int) -> None:  # noqa: ARG002 - who waits how long is told by its request
        """Its next request can execute."""
        self._offered[sequence.slot] = sequence

    def take(self, now: int) -> LaneTake[R]:
        """The next batch, if there are enough rows in it, or if somebody has waited long enough."""
        offered = self._offered
        cancelled = [sequence for sequence in offered.values() if sequence.waiting[0].cancelled]
        for sequence in cancelled:
            del offered[sequence.slot]
        if not offered:
            return LaneTake(None, 0, cancelled)
        oldest = min(offered.values(), key=_arrival)
        send_at = _arrival(oldest) + self._delay_ns
        if self._delay_ns and send_at > now and len(offered) < self._worth_it:
            return LaneTake(None, send_at, cancelled)
        signature = oldest.signature
        rows = [slot for slot in sorted(offered) if offered[slot].signature == signature]
        return LaneTake(SequenceBatch([offered.pop(slot) for slot in rows], rows), 0, cancelled)

    def clear(self) -> None:
        """Nothing is offered any more."""
        self._offered.clear()


class OldestLane(Generic[R]):
    """The same, see `OldestStrategy`."""

    def __init__(self, model: str, strategy: OldestStrategy, max_batch_size: int) -> None:
        batching = DynamicBatching(strategy.preferred_batch_size, strategy.max_queue_delay_microseconds)
        self._queue: BatchQueue[_Step[R]] = BatchQueue(model, max_batch_size, batching)

    def offer(self, sequence: Sequence[R], now: int) -> None:
        """Its next request can execute."""
        self._queue.push(_Step(sequence, now))

    def take(self, now: int) -> LaneTake[R]:
        """What the dynamic batcher gives."""
        take = self._queue.take(now)
        cancelled = [step.sequence for step in take.cancelled]
        if not take.batch:
            return LaneTake(None, take.wake_at, cancelled)
        sequences = [step.sequence for step in take.batch]
        return LaneTake(SequenceBatch(sequences, range(len(sequences))), 0, cancelled)

    def clear(self) -> None:
        """Nothing is offered any more."""
        self._queue.clear()


class _Step(Generic[R]):
    """The next request of a sequence, to the dynamic batcher. It waits from when it may execute on."""

    def __init__(self, sequence: Sequence[R], now: int) -> None:
        self.sequence = sequence
        self.batch_size = 1
        self.timeout_us = self.priority = 0
        self.arrival_ns = now
        self.deadline_ns = 0
        self.signature: Hashable = sequence.signature

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.sequence.waiting[0].cancelled


def _arrival(sequence: Sequence[R]) -> int:
    return sequence.waiting[0].arrival_ns


_log = logging.getLogger("mme.sequences")
_RECHECK_NS = 50_000_000
_UNNAMED = 1 << 63  # where the ids begin of requests that come without one: clients' own rarely are so large


class SequenceQueue(Generic[R]):
    """The requests that wait for one model version's lanes, by their sequences.

    Args:
        model: the model's name, for messages.
        batching: the settings.
        max_batch_size: the largest batch, 0 for a model without a batch dimension.
        lanes: how many there are.
    """

    hears: ClassVar[bool] = True
    expiry: ClassVar[str] = "timeout of the corresponding sequence has been expired"

    def __init__(self, model: str, batching: SequenceBatching, max_batch_size: int, lanes: int) -> None:
        self._model = model
        self._iterative = batching.iterative_sequence
        self._named = [
            (name, control.tensor_type)
            for name, control in batching.controls()
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID
        ]
        self._idle_ns = batching.max_sequence_idle_microseconds * 1000
        strategy, rows = batching.strategy, max(max_batch_size, 1)
        self._lanes: list[DirectLane[R] | OldestLane[R]]
        if isinstance(strategy, OldestStrategy):
            self._lanes = [OldestLane(model, strategy, max_batch_size) for _ in range(lanes)]
            self._slots = (strategy.max_candidate_sequences or rows) * lanes
        else:
            self._lanes = [DirectLane(strategy, rows) for _ in range(lanes)]
            self._slots = rows * lanes
        self._executing: list[SequenceBatch[R] | None] = [None] * lanes
        self._fresh = 0  # slots from here on were never taken; they count through all lanes, lowest slots first
        self._freed: list[int] = []  # a heap of those below
        self._live: dict[int | str, Sequence[R]] = {}  # those that somebody can add to
        self._seated: OrderedDict[Sequence[R], None] = OrderedDict()  # those with a slot, by their last sign of life
        self._backlog: OrderedDict[Sequence[R], None] = OrderedDict()  # those without, in the order of their STARTs
        self._behind: dict[int, Sequence[R]] = {}  # whose request in the backlog is whose
        self._deadlines: list[tuple[int, int, Sequence[R]]] = []  # a heap, with some that do not count any more
        self._dropped: list[R] = []
        self._count = 0
        self._number = itertools.count(_UNNAMED)
        self._closed = False

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return (
            f"<SequenceQueue {self._model}: {self._count} waiting, {len(self._seated)} sequences in "
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
        if request.flags & FLAG_SEQUENCE_END and not sequence.ending:
            sequence.ending = True
            del self._live[sequence.id]
        if sequence.lane == BACKLOG:
            self._behind[id(request)] = sequence
            self._note_deadline(sequence, request)
            return
        self._touch(sequence, request.arrival_ns)
        if sequence.executing is None and len(sequence.waiting) == 1:
            self._lanes[sequence.lane].offer(sequence, request.arrival_ns)

    def whole(self) -> bool:
        """Never: what a lane is given depends on what it has executed."""
        return False

    def take(self, now: int, lanes: Numbers[int], most: int = 1) -> Take[R]:  # noqa: ARG002 - its interface
        """The next batch for one of the lanes, and those whose clients left."""
        take: Take[R] = Take()
        wake_at: list[int] = []
        for lane in reversed(lanes):
            found = self._take_from(lane, now)
            if isinstance(found, SequenceBatch):
                take.batch, take.lane = found, lane
                break
            if found:
                wake_at.append(found)
        self._hand_over_dropped(take)
        if not take.batch and wake_at:
            take.wake_at = min(wake_at)
            if deadline := self.next_deadline():
                take.wake_at = min(take.wake_at, deadline)
        return take

    def returned(self, lane: int, now: int) -> None:
        """A lane has executed its batch: the sequences in it go on, or end."""
        batch, self._executing[lane] = self._executing[lane], None
        if batch is None:
            return
        for place, (sequence, request) in enumerate(zip(batch.sequences, batch, strict=True)):
            sequence.executing = None
            self._touch(sequence, now)
            if place in batch.again:
                request.flags &= ~FLAG_SEQUENCE_START
                sequence.waiting.appendleft(request)
                self._count += 1
            if request.cancelled or (self._closed and sequence.waiting):
                self._cancel(sequence, now)
            elif sequence.waiting:
                self._lanes[lane].offer(sequence, now)
            elif sequence.ending:
                self._release(sequence, now)
            elif self._iterative and not sequence.kept:
                self._forget(sequence)
                self._release(sequence, now)

    def cancel(self, request: R) -> None:
        """The client of a request has left: in the backlog its sequence has, too."""
        sequence = self._behind.get(id(request))
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
        if self._seated:
            idle_at = next(iter(self._seated)).last_ns + self._idle_ns
            nearest = min(nearest, idle_at) if nearest else idle_at
        return nearest

    def take_expired(self, now: int) -> Take[R]:
        """The requests of sequences that were in the backlog for too long; those that idle too long end."""
        take: Take[R] = Take()
        while self._deadlines and (not _counts(self._deadlines[0]) or self._deadlines[0][0] <= now):
            entry = heapq.heappop(self._deadlines)
            if _counts(entry):
                take.expired += self._leave_backlog(entry[2])
        while self._seated:
            sequence = next(iter(self._seated))
            if sequence.last_ns + self._idle_ns > now:
                break
            if sequence.kept or sequence.executing is not None or sequence.waiting:
                # It is the server that it waits for, if it is for anybody: look again, but not all the time.
                self._touch(sequence, max(now, now + _RECHECK_NS - self._idle_ns))
            else:
                self._forget(sequence)
                self._release(sequence, now)
        self._hand_over_dropped(take)
        return take

    def end(self, correlation_id: int | str, now: int) -> None:
        """Nothing more comes of a sequence: it ends as soon as all of it was executed."""
        sequence = self._live.get(correlation_id)
        if sequence is None:
            return
        self._forget(sequence)
        if sequence.lane != BACKLOG and sequence.executing is None and not sequence.waiting:
            self._release(sequence, now)

    def clear(self) -> list[R]:
        """Everybody still waiting, who must be told that nobody will run them. What executes goes on, once."""
        self._closed = True
        everybody, self._dropped = self._dropped, []
        for sequence in (*self._seated, *self._backlog):
            everybody += sequence.waiting
            sequence.waiting.clear()
            sequence.ending = True
        self._live.clear()
        self._backlog.clear()
        self._behind.clear()
        self._deadlines.clear()
        for lane in self._lanes:
            lane.clear()
        for sequence in [sequence for sequence in self._seated if sequence.executing is None]:
            self._release(sequence, 0)
        self._count = 0
        return everybody

    # -- which sequence ------------------------------------------------------------------------------------------

    def _sequence_of(self, request: R) -> Sequence[R]:
        """The sequence that a request belongs to, a new one if it begins one."""
        if request.batch_size != 1:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not request.correlation_id:
            return self._unnamed(request)
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
        """An id must be what the model is told it is."""
        for name, data_type in self._named:
            if isinstance(correlation_id, str) != (data_type is BYTES):
                raise invalid_argument(
                    f"sequence batching control '{name}' data-type is "
                    f"'{'BYTES' if isinstance(correlation_id, str) else 'UINT64'}', but model '{self._model}' expects "
                    f"'{data_type.name}'"
                )

    def _unnamed(self, request: R) -> Sequence[R]:
        """A sequence of one request, which its model may put back."""
        if not self._iterative:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        request.correlation_id = next(self._number)
        request.flags |= FLAG_SEQUENCE_START
        sequence = self._begin(request)
        sequence.ending = True
        return sequence

    def _begin(self, request: R) -> Sequence[R]:
        sequence: Sequence[R] = Sequence(request.correlation_id)
        sequence.kept = bool(request.flags & FLAG_SEQUENCE_KEPT)
        if self._freed or self._fresh < self._slots:
            self._seat(sequence, request.arrival_ns)
        else:
            self._backlog[sequence] = None
        return sequence

    # -- slots and backlog ---------------------------------------------------------------------------------------

    def _seat(self, sequence: Sequence[R], now: int) -> None:
        """Give it the lowest free slot."""
        if self._freed:
            number = heapq.heappop(self._freed)
        else:
            number, self._fresh = self._fresh, self._fresh + 1
        sequence.slot, sequence.lane = divmod(number, len(self._lanes))
        sequence.last_ns = now
        self._seated[sequence] = None
        if sequence.waiting:
            self._lanes[sequence.lane].offer(sequence, now)

    def _release(self, sequence: Sequence[R], now: int) -> None:
        """It is over: its slot is the next one's."""
        del self._seated[sequence]
        heapq.heappush(self._freed, sequence.slot * len(self._lanes) + sequence.lane)
        if self._backlog:
            following, _ = self._backlog.popitem(last=False)
            for request in following.waiting:
                del self._behind[id(request)]
            self._seat(following, now)

    def _touch(self, sequence: Sequence[R], now: int) -> None:
        sequence.last_ns = now
        self._seated.move_to_end(sequence)

    def _forget(self, sequence: Sequence[R]) -> None:
        """Nobody can add to it any more."""
        if not sequence.ending:
            sequence.ending = True
            del self._live[sequence.id]

    def _cancel(self, sequence: Sequence[R], now: int) -> None:
        """A request of a sequence was cancelled, and so is the rest of it. Nothing of it executes."""
        self._dropped += sequence.waiting
        sequence.waiting.clear()
        self._forget(sequence)
        self._release(sequence, now)

    def _hand_over_dropped(self, take: Take[R]) -> None:
        take.cancelled, self._dropped = self._dropped, []
        self._count -= len(take.batch) + len(take.cancelled)

    def _note_deadline(self, sequence: Sequence[R], request: R) -> None:
        """The shortest time of its requests is the time of a sequence."""
        if request.timeout_us:
            deadline = request.arrival_ns + request.timeout_us * 1000
            if not sequence.expires_ns or deadline < sequence.expires_ns:
                sequence.expires_ns = deadline
                heapq.heappush(self._deadlines, (deadline, id(sequence), sequence))

    def _leave_backlog(self, sequence: Sequence[R]) -> list[R]:
        """It gets no slot any more. All of its requests."""
        requests = list(sequence.waiting)
        sequence.waiting.clear()
        del self._backlog[sequence]
        for request in requests:
            del self._behind[id(request)]
        self._forget(sequence)
        self._count -= len(requests)
        return requests

    # -- batches -------------------------------------------------------------------------------------------------

    def _take_from(self, lane: int, now: int) -> SequenceBatch[R] | int:
        """The lane's next batch, or when to ask again. Who leaves makes room for others, who may be in it."""
        while True:
            batch, wake_at, cancelled = self._lanes[lane].take(now)
            for sequence in cancelled:
                self._cancel(sequence, now)
            if batch is not None:
                self._executing[lane] = batch
                return batch
            if not cancelled:
                return wake_at


def _counts(entry: tuple[int, int, Sequence[R]]) -> bool:
    """Whether a deadline is still that of a sequence in the backlog."""
    deadline, _, sequence = entry
    return sequence.lane == BACKLOG and bool(sequence.waiting) and sequence.expires_ns == deadline
