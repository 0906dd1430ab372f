"""Which queue a model's requests wait in, and what its lanes may ask of any of them. PURE.

Times are nanoseconds of one monotonic clock. No queue is thread-safe: its model's lock guards it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from model_handlers.config.model_config import DynamicBatching, OldestStrategy
from serve.model.batch_queue import BatchQueue
from serve.model.sequence_queue import SequenceQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_handlers.config.model_config import ModelConfig
    from serve.model.batch_queue import Take
    from serve.model.queue_level import Queued

R = TypeVar("R", bound="Queued")


class Queue(Protocol[R]):
    """Requests that wait for lanes, which are known by their numbers.

    Attributes:
        hears: whether it is to be told of clients that leave, by `cancel`.
        expiry: what the requests of `Take.expired` are told.
    """

    hears: ClassVar[bool]
    expiry: ClassVar[str]

    def __len__(self) -> int:
        """How many wait."""

    def push(self, request: R, *, first: bool = False) -> None:
        """Accept a request; its `arrival_ns` is set.

        One that was handed out already, and executed by nobody, is the `first` again, however many wait.

        Raises:
            MmeError: it can't be accepted.
        """

    def whole(self) -> bool:
        """Whether a batch waits that nothing could join any more: whoever is to execute it can be given it early."""

    def take(self, now: int, lanes: Sequence[int], most: int = 1) -> Take[R]:
        """The next batch for one of these lanes, which are free, and who is to be dropped.

        `most` is how many requests may be handed out together that are executed one by one.
        """

    def returned(self, lane: int, now: int) -> None:
        """A lane has executed the batch that it was given."""

    def end(self, correlation_id: int | str, now: int) -> None:
        """Nothing more comes of a sequence."""

    def cancel(self, request: R) -> None:
        """The client of a request has left."""

    def next_deadline(self) -> int:
        """When something is over though nothing happens (ns), 0 for never."""

    def take_expired(self, now: int) -> Take[R]:
        """Only those who are to be dropped by now."""

    def clear(self) -> list[R]:
        """Everybody still waiting, who must be told that nobody will run them."""


def queue_for(model: str, config: ModelConfig, lanes: int) -> Queue[Any]:
    """The queue that a configuration asks for."""
    if config.sequence_batching is not None:
        return SequenceQueue(model, config.sequence_batching, config.max_batch_size, lanes)
    return BatchQueue(model, config.max_batch_size, config.dynamic_batching)


def keeps_order(config: ModelConfig, lanes: int) -> bool:
    """Whether responses must leave in the order in which their batches left the queue, and might not."""
    sequences = config.sequence_batching
    strategy = config.dynamic_batching if sequences is None else sequences.strategy
    return lanes > 1 and isinstance(strategy, DynamicBatching | OldestStrategy) and strategy.preserve_ordering
