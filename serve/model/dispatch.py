"""Turns on the event loop: in which order models hand out batches, what runs on the loop itself, when it stays awake.

On the event loop only, but for `OverrunWatch.begun`.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from model_handlers.worker.policies import BusyPoll

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from serve.model.rate_limiter import LimitedInstances
    from serve.model.tensors import Batch


_now = time.perf_counter_ns
_LONGEST_NS = 500_000  # then the loop looks at its sockets, however many models there are


class DispatchQueue:
    """Models with requests to hand out, in order; called when what runs on the event loop now has ended.

    A model that hands out batches may answer them at once, and an answer may be the request of another model, as in an
    ensemble. That one's turn comes right behind, in the same turn of the loop: requests on their way through the same
    steps stay together, as one batch, and the loop does not look at its sockets in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._asked = False

    def __repr__(self) -> str:
        return f"<DispatchQueue: {len(self._waiting)} waiting>"

    def schedule(self, dispatch: Callable[[], None]) -> None:
        self._waiting.append(dispatch)
        if not self._asked:
            self._asked = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        waiting, until = self._waiting, _now() + _LONGEST_NS
        try:
            while waiting:
                waiting.popleft()()
                if _now() > until:
                    break
        finally:  # though one has raised, which is the loop's to tell, the others have their turn
            self._asked = bool(waiting)
            if waiting:
                self._loop.call_soon(self._run)


class IdleInstances:
    """The instances of a model without a batch, by number; with `limits` those alone that have their turn."""

    def __init__(self, count: int, limits: LimitedInstances | None, *, turns: bool) -> None:
        self.limits = limits  # its instances, where they share resources with others
        self.numbers: list[int] = list(range(count)) if limits is None else []  # the last of them is next
        # where a free one goes: it is the next, whose memory is warm, or the last where they take turns
        self.add: Callable[[int], None] = functools.partial(self.numbers.insert, 0) if turns else self.numbers.append


_FAR_TOO_LONG = 10  # times the limit of an execution on the loop: it was no accident
_AT_MOST = 3  # times what is known that one execution counts
_FOR_EVER = float("inf")


class InlinePolicy:
    """Which executions run on the event loop: by recent processor time, by input size to the next power of two. PURE.

    A model whose executions are shorter than a thread hand-off earns the loop by being quick and loses it by being slow
    once. Processor time counts, since wall time on an instance also holds what other threads took in between.

    Costs are averages, which one execution moves by an eighth at most and never up by more than a quarter: on a busy
    machine any execution may once take ten times as long. One that would have kept the loop for much longer than the
    limit counts in full. An unknown size is expected to take for ever, so that its first execution runs on a thread.
    """

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self._ns: dict[int, float] = {}

    def should_inline(self, size: int) -> bool:
        """Whether a batch of so many input bytes is expected to take no longer than the limit."""
        return self._ns.get(size.bit_length(), _FOR_EVER) <= self.limit_ns

    def observe(self, size: int, took: int) -> None:
        cost_class = size.bit_length()
        known = self._ns.get(cost_class)
        if known is None or took > _FAR_TOO_LONG * self.limit_ns:
            self._ns[cost_class] = took
        else:
            self._ns[cost_class] = known + (min(took, _AT_MOST * known) - known) / 8


_HOLD_NS = 5_000_000  # after a thread of ours was given work, or brought it back


class LoopPoller:
    """Keeps the event loop awake where its next piece of work is likely to come at once. See `BusyPoll`.

    The loop turns without waiting as long as a callback asks for the next turn; it looks at its sockets in each. It
    also takes Python's lock in each, so it does not do so while threads execute batches or load models.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads_work: Callable[[], bool]) -> None:
        self._loop = loop
        self._threads_work = threads_work
        self._poll = BusyPoll()
        self._until = 0
        self._held_until = 0
        self._awake = False
        self._turned = False  # since something was last expected

    def __repr__(self) -> str:
        return f"<LoopPoller {'awake' if self._awake else 'asleep'}, {self._poll!r}>"

    def arm(self) -> None:
        """Expect an answer, or the next request, to what was sent just now."""
        if not BusyPoll.longest:
            return
        now = _now()
        if self._awake:
            if self._turned:  # else this is one of several things in one turn
                self._turned = False
                self._poll.caught()
                self._until = now + BusyPoll.longest
        elif now >= self._held_until and (longest := self._poll.begin()) and not self._threads_work():
            self._awake, self._turned, self._until = True, False, now + longest
            self._loop.call_soon(self._turn)

    def disarm(self) -> None:
        """Leave Python's lock to a thread for a while."""
        self._held_until = _now() + _HOLD_NS
        self._until = 0

    def _turn(self) -> None:
        now = _now()
        if now < self._until:
            self._turned = True
            os.sched_yield()
            if not self._poll.lost(_now() - now):
                self._loop.call_soon(self._turn)
                return
        elif self._until:
            self._poll.missed()
        self._awake = False


class OverrunWatch:
    """Executions of one model on threads of this process, which may take longer than they should.

    Nothing can end a thread that is inside a framework, so their requests are answered, and the instance takes its next
    batch when the execution has ended.

    Args:
        late: told of a batch that takes longer than `seconds`, once, on the loop.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop, late: Callable[[Batch], None]) -> None:
        self._seconds = seconds
        self._loop = loop
        self._late = late
        self._under_way: dict[int, tuple[Batch, float]] = {}  # by the instance's number; single operations need no lock
        self._told: list[Batch] = []  # late, and still under way
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<OverrunWatch after {self._seconds:g} s: {len(self._under_way)} under way>"

    def watch(self, instance: int, batch: Batch) -> None:
        """An idle instance begins with a batch. On the loop."""
        self.begun(instance, batch)
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def begun(self, instance: int, batch: Batch) -> None:
        """An instance goes on with a batch, or with none. On its thread."""
        if batch:
            self._under_way[instance] = batch, time.monotonic()
        else:
            self._under_way.pop(instance, None)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        next_look = now + self._seconds
        told, self._told = self._told, []
        for batch, began in list(self._under_way.values()):
            if began + self._seconds > now:
                next_look = min(next_look, began + self._seconds)
                continue
            self._told.append(batch)
            if not any(batch is each for each in told):
                self._late(batch)
        if self._under_way:
            self._timer = self._loop.call_later(next_look - now, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class InputMeter:
    """Bytes of all inputs that were executed; `larger` is told of each batch with more than any before."""

    def __init__(self, larger: Callable[[], None] | None) -> None:
        self.bytes = 0
        self.first: Callable[[], None] | None = None  # called, once, by the next batch
        self._largest = 0
        self._larger = larger

    def add(self, size: int) -> None:
        self.bytes += size
        if self.first is not None:
            first, self.first = self.first, None
            first()
        if size > self._largest:
            self._largest = size
            if self._larger is not None:
                self._larger()


class WakeTimer:
    """Wakes at a time (ns), never for 0. An earlier wake-up will do: it looks, and sets another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self.wakes_at = 0  # when, while it is set

    def set(self, wake_at: int) -> None:
        if self._timer is None and not wake_at:
            return
        if self._timer is not None:
            if 0 < self.wakes_at <= wake_at:
                return
            self._timer.cancel()
            self._timer = None
        self.wakes_at = wake_at
        if wake_at:
            self._timer = self._loop.call_later(max(wake_at - _now(), 0) / 1e9, self._run)

    def _run(self) -> None:
        self._timer = None
        self.wakes_at = 0
        self._wake()
