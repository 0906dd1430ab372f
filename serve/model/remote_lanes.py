"""Lanes whose model executes in another process: batches are sent from the event loop, and answers received on it.

A thread that only waits for a process costs two hand-offs a batch, one to it and one back. So the loop sends a batch
itself, where the handler says that this takes microseconds, and looks after the descriptors on which its answers will
be heard. All else is left to a thread: batches that are not sent so, and whatever is heard that is not
simply the answers: the death of the process, or a part of a message. A batch without an answer when its time is over
is left to it as well. A process that owes responses of its own accord has as much time for each of them.

Descriptors are looked after as copies, which belong to the loop: they stay what they are, whatever becomes of the
process and of the handler's own on other threads. Everything here runs on the loop.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from serve.model.execution import Execution
    from serve.model.instance import Instance
    from serve.model.signature import Batch
    from serve.threads import ThreadPool


class RemoteLanes:
    """The lanes of one model that batches can be sent to.

    Args:
        lanes: those whose handlers have patience.
        loop: the event loop.
        finished: takes a lane's execution; the lane is idle then.
        threads: those of all instances.
    """

    def __init__(
        self,
        lanes: Iterable[Instance],
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Instance, Execution], None],
        threads: ThreadPool,
    ) -> None:
        self._loop = loop
        self._finished = finished
        self._threads = threads
        self._ears = {lane: _Ears(loop, functools.partial(self._heard, lane)) for lane in lanes}
        self._out: dict[Instance, float] = {}  # whose batch is under way, and when its time is over
        self._timer: asyncio.TimerHandle | None = None

    def send(self, lane: Instance, batch: Batch) -> bool:
        """Have an idle lane's process execute a batch; False leaves the batch to a thread."""
        ears = self._ears.get(lane)
        if ears is None:
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(lane.handler.patience, self._look)
        if not lane.send(batch, ears.listen):
            ears.close()
            return False
        self._out[lane] = time.monotonic() + lane.handler.patience
        return True

    def _heard(self, lane: Instance) -> None:
        if lane not in self._out:  # who was sent nothing has nothing to say: this is an end, which the next batch meets
            self._ears[lane].close()
            return
        execution = lane.receive()
        if execution is None:
            self._leave(lane)
        else:
            del self._out[lane]
            self._finished(lane, execution)

    def _leave(self, lane: Instance) -> None:
        """Have a thread wait for what is still to come."""
        del self._out[lane]
        self._ears[lane].close()
        lane.wait()

    def _look(self) -> None:
        """Whose time is over? One timer looks for all, and goes on as long as any batch or response is owed."""
        self._timer = None
        now = time.monotonic()
        for lane in [lane for lane, until in self._out.items() if until <= now]:
            self._leave(lane)
        looks_at = list(self._out.values())
        for lane in self._ears:
            due = lane.handler.due()
            if 0.0 < due <= now:
                self._threads.run(lane.handler.end_overdue)
                due = now + lane.handler.patience  # or a batch is under way, whose own limit ends it
            if due:
                looks_at.append(due)
        if looks_at:
            self._timer = self._loop.call_later(min(looks_at) - now, self._look)

    def close(self) -> None:
        """Look after nothing any more. No batch is under way."""
        for ears in self._ears.values():
            ears.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Ears:
    """Descriptors that the loop looks after."""

    def __init__(self, loop: asyncio.AbstractEventLoop, heard: Callable[[], None]) -> None:
        self._loop = loop
        self._heard = heard
        self._descriptors: tuple[int, ...] = ()
        self._copies: list[int] = []

    def listen(self, descriptors: tuple[int, ...]) -> None:
        """See `model_handlers.base.Watch`."""
        if descriptors is self._descriptors:
            return
        self.close()
        for descriptor in descriptors:
            copy = os.dup(descriptor)
            self._copies.append(copy)
            self._loop.add_reader(copy, self._heard)
        self._descriptors = descriptors

    def close(self) -> None:
        """Look after nothing."""
        self._descriptors = ()
        while self._copies:
            copy = self._copies.pop()
            self._loop.remove_reader(copy)
            os.close(copy)
