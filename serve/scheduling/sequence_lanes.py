"""Which requests of a lane's sequences make a batch: the two strategies of the sequence batcher. PURE.

`SequenceQueue` decides which sequences a lane has, and *offers* it one whenever that has a request that can execute.

*Direct*: a sequence owns a row, its slot, for as long as it lives, so that a model may keep what belongs to it by the
row. Rows of sequences that have nothing to execute are in between, up to the last one that has something.

    slot      0    1    2    3    4 …           batch:  row 0   row 1   row 2   row 3
    offered   A         C    D                          A       (null)  C       D

*Oldest*: sequences hand their requests, each one at a time, to a dynamic batcher of the lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple

from model_handlers.config import DynamicBatching
from serve.scheduling.batch_queue import BatchQueue
from serve.scheduling.sequence import R, Sequence, SequenceBatch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from model_handlers.config import DirectStrategy, OldestStrategy


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
