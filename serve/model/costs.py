"""What executions of a model cost of late: who may run on the event loop. PURE.

A model whose executions are shorter than a thread hand-off is worth runs on the loop. It earns that by being quick,
and loses it by being slow once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.model.signature import Batch

_FAR_TOO_LONG = 10  # times the limit of an execution on the loop: it was no accident
_AT_MOST = 3  # times what is known that one execution counts
_FOR_EVER = float("inf")


class Costs:
    """What executions cost of late, by the size of their input to the next power of two.

    The cost is the executing thread's processor time: on a lane, the time on the wall also holds what other threads
    took in between, and a model that waits its turn there would never look quick enough for the loop.

    Costs are averages, which one execution moves by an eighth at most and never up by more than a quarter: on a busy
    machine any execution may once take ten times as long. But one that would have kept the loop for much longer than
    the limit counts in full, and only many quick ones after it win back trust. What was never seen is expected to take
    for ever, so that the first execution of any size runs on a lane.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit = limit_ns
        self._ns: dict[int, float] = {}

    def quick(self, size: int) -> bool:
        """Whether a batch of so many input bytes is expected to take no longer than the limit."""
        return self._ns.get(size.bit_length(), _FOR_EVER) <= self._limit

    def learn(self, size: int, took: int) -> None:
        """Remember what an execution of so many input bytes took, in nanoseconds."""
        cost_class = size.bit_length()
        known = self._ns.get(cost_class)
        if known is None or took > _FAR_TOO_LONG * self._limit:
            self._ns[cost_class] = took
        else:
            self._ns[cost_class] = known + (min(took, _AT_MOST * known) - known) / 8


def input_bytes(batch: Batch) -> int:
    """The size of a batch's input."""
    size = 0
    for request in batch:
        for array in request.inputs:
            size += array.nbytes
    return size
