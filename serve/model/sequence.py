"""One sequence on its way through a model, and a batch of steps of several. PURE: values that the queue changes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from model_handlers.requests import FLAG_SEQUENCE_START
from serve.model.queue_level import Queued

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class Stepping(Queued, Protocol):
    """What has to be known of a request of a sequence."""

    correlation_id: int | str
    flags: int


R = TypeVar("R", bound=Stepping)
BACKLOG = -1  # instead of a lane


class Sequence(Generic[R]):
    """The requests with one correlation id, from a START to the END.

    Attributes:
        id: the correlation id.
        waiting: its requests that no lane has taken, in the order in which they came.
        executing: the one that a lane executes.
        lane, slot: where it executes; BACKLOG while it waits for a place.
        ending: whether nobody can add to it any more.
        kept: whether it may be idle for as long as it likes: somebody else sees to its end.
        last_ns: its last sign of life: a request that came, or was executed.
        expires_ns: when its time in the backlog is over, 0 for never.
        memory: what its model keeps between two requests, and `form`: the shapes of that, where they are not those that
            a sequence begins with. They belong to whoever executes.
    """

    def __init__(self, correlation_id: int | str) -> None:
        self.id = correlation_id
        self.waiting: deque[R] = deque()
        self.executing: R | None = None
        self.lane = BACKLOG
        self.slot = -1
        self.ending = False
        self.kept = False
        self.last_ns = 0
        self.expires_ns = 0
        self.memory: dict[str, Any] = {}
        self.form: Hashable = None

    def __repr__(self) -> str:
        return f"<Sequence {self.id!r}: lane {self.lane}, slot {self.slot}, {len(self.waiting)} waiting>"

    @property
    def signature(self) -> Hashable:
        """With which others its next request may share a batch."""
        request = self.waiting[0]
        return (request.signature, None if request.flags & FLAG_SEQUENCE_START else self.form)


class SequenceBatch(list[R]):
    """Requests to execute together, each with its row and the sequence that it is a step of.

    Attributes:
        sequences: of each request.
        rows: of each request, ascending.
        height: rows in all; those that are no request's are there for the others to keep their places.
        again: the places in this list of those that the model put back. Whoever executes fills it in.
    """

    def __init__(self, sequences: list[Sequence[R]], rows: Iterable[int]) -> None:
        super().__init__([sequence.waiting.popleft() for sequence in sequences])
        self.sequences = sequences
        self.rows = list(rows)
        self.height = self.rows[-1] + 1
        self.again: set[int] = set()
        for sequence, request in zip(sequences, self, strict=True):
            sequence.executing = request
