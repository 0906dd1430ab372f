"""A request's way through an ensemble that limits how many responses of a decoupled step may be on their way. PURE.

A response is on its way as long as steps behind it run. One that comes while there are as many as may be is held back,
and goes on, in the order in which they came, when another has arrived; until then its step counts as running.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from serve.scheduling.ensemble import Progress, Run, T

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from serve.scheduling.ensemble import Graph, Ready


class LimitedRun(Run[T]):
    """See `Run`; `most` is how many responses of each step may be on their way."""

    def __init__(
        self, graph: Graph, tensors: Mapping[str, T], absent: Iterable[str], wanted: Sequence[str], most: int
    ) -> None:
        super().__init__(graph, tensors, absent, wanted)
        self._most = most
        self._held: dict[Ready[T], deque[Mapping[str, T]]] = {}
        self._ending: set[Ready[T]] = set()  # of those, who will say no more

    def came(self, ready: Ready[T], outputs: Mapping[str, T]) -> Progress[T]:
        """See `Run`."""
        if self._graph.decoupled[ready.step] and (ready in self._held or self._on_their_way(ready) >= self._most):
            self._held.setdefault(ready, deque()).append(outputs)
            return Progress([], [])
        return super().came(ready, outputs)

    def ended(self, ready: Ready[T]) -> Progress[T]:
        """See `Run`; whose turn it is to go on."""
        if ready in self._held:
            self._ending.add(ready)
            return Progress([], [])
        progress = super().ended(ready)
        while self._released(progress):
            pass
        return progress

    def drop(self) -> None:
        """See `Run`."""
        self._held.clear()
        while self._ending:
            super().ended(self._ending.pop())

    def _released(self, progress: Progress[T]) -> bool:
        """Let go on what may; whether a step has ended with that, which may let others go on."""
        ended = False
        for ready, waiting in list(self._held.items()):
            while waiting and self._on_their_way(ready) < self._most:
                more = super().came(ready, waiting.popleft())
                progress.ready += more.ready
                progress.responses += more.responses
            if not waiting:
                del self._held[ready]
                if ready in self._ending:
                    self._ending.discard(ready)
                    super().ended(ready)
                    ended = True
        return ended

    def _on_their_way(self, ready: Ready[T]) -> int:
        """How many responses of a step have steps behind them that run."""
        return sum(
            scope.parent is ready.scope and scope.lineage[-1] == ready.step and scope.running > 0
            for scope in self._scopes
        )
