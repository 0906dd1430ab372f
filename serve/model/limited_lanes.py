"""Lanes that share resources with those of other models: each asks for its turn before every execution.

The rules are `rate_limiter.py`'s. Models are loaded on load threads and executed from the event loop, so a
lock guards the rules; a lane that is given a turn later than it asked for it is told on the loop.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from serve.model.rate_limiter import GLOBAL, RateLimiter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from model_handlers.base import Device
    from model_handlers.config.model_config import InstanceGroup
    from serve.model.rate_limiter import Pool

_log = logging.getLogger("mme.model")


class Lane:
    """One of them.

    Attributes:
        number: which of its model's lanes it is.
        has_turn: whether it holds what an execution needs.
        busy: whether it is being used.
    """

    def __init__(self, model: LimitedLanes, number: int) -> None:
        self.model = model
        self.number = number
        self.has_turn = False
        self.busy = False


class Limits:
    """The resources of a server.

    Args:
        loop: the event loop.
        counts: see `RateLimiter`; None where nobody is limited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, counts: Mapping[Pool, int] | None) -> None:
        self._loop = loop
        self._limiter: RateLimiter[Lane] | None = None if counts is None else RateLimiter(counts)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Limits: {self._limiter!r}>"

    def lanes(
        self, model: str, groups: Sequence[InstanceGroup], lanes: Sequence[tuple[str, Device]]
    ) -> LimitedLanes | None:
        """The lanes of a model that begins to take part; None where none of them needs any resource. On any thread.

        Args:
            model: for the log.
            groups: its instance groups.
            lanes: the name of each lane, `<group>_<index>`, and its device.

        Raises:
            MmeError: INVALID_MODEL, see `RateLimiter.join`.
        """
        by_name = {group.name: group for group in groups}
        of_lanes = [(by_name[name.rpartition("_")[0]], device) for name, device in lanes] if by_name else []
        if not any(group.resources for group, _ in of_lanes):
            return None
        if self._limiter is None:
            _log.info("its rate_limiter changes nothing: rate limiting is off", extra={"target_model": model})
            return None
        joined = LimitedLanes(self)
        try:
            for group, device in of_lanes:
                joined.lanes.append(self._joined(joined, group, device))
        except BaseException:
            joined.close()
            raise
        return joined

    def _joined(self, model: LimitedLanes, group: InstanceGroup, device: Device) -> Lane:
        lane = Lane(model, len(model.lanes))
        with self._lock:
            granted = self._limiter_there().join(lane, _needs(group, device), group.priority)
        self._tell_later(granted)
        return lane

    def leave(self, lanes: Iterable[Lane]) -> None:
        """These take part no longer. On any thread."""
        with self._lock:
            granted = [other for lane in lanes for other in self._limiter_there().leave(lane)]
        self._tell_later(granted)

    def ask(self, lane: Lane) -> None:
        """A lane wants a turn. On the loop, as what follows."""
        with self._lock:
            granted = self._limiter_there().ask(lane)
        _tell(granted, but=lane)

    def withdraw(self, lane: Lane) -> None:
        """A lane wants none any more, and returns one that it did not use."""
        lane.has_turn = False
        with self._lock:
            granted = self._limiter_there().withdraw(lane)
        _tell(granted)

    def done(self, lane: Lane, *, again: bool) -> None:
        """A lane has used its turn, and wants another or not."""
        lane.has_turn = False
        with self._lock:
            granted = self._limiter_there().done(lane, again=again)
        _tell(granted)

    def _limiter_there(self) -> RateLimiter[Lane]:
        assert self._limiter is not None  # noqa: S101 - without limits there are no such lanes
        return self._limiter

    def _tell_later(self, granted: list[Lane]) -> None:
        if granted:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell_holders, granted)

    def _tell_holders(self, granted: list[Lane]) -> None:
        """On the loop, which may have withdrawn some of them meanwhile."""
        with self._lock:
            granted = [lane for lane in granted if self._limiter_there().holds(lane)]
        _tell(granted)


def _tell(granted: list[Lane], but: Lane | None = None) -> None:
    for lane in granted:
        lane.has_turn = True
        if lane is not but:
            lane.model.wake()


def _needs(group: InstanceGroup, device: Device) -> dict[Pool, int]:
    """What an execution on a device needs. Triton counts the host as device 0, and so do limits that name it."""
    return {
        (resource.name.lower(), GLOBAL if resource.is_global else str(device.index)): resource.count
        for resource in group.resources
    }


class LimitedLanes:
    """The lanes of one model. On the event loop.

    Attributes:
        lanes: by their numbers.
        wake: called when a lane has got the turn that it waited for; set by the model.
    """

    def __init__(self, limits: Limits) -> None:
        self.lanes: list[Lane] = []
        self.wake: Callable[[], None] = lambda: None
        self._limits = limits

    def free(self) -> list[int]:
        """The lanes that are not being used, those first that hold what they need."""
        return [lane.number for lane in sorted(self.lanes, key=lambda lane: not lane.has_turn) if not lane.busy]

    def take(self, number: int) -> bool:
        """Whether a free lane may execute now; if not, it waits for its turn."""
        lane = self.lanes[number]
        if not lane.has_turn:
            self._limits.ask(lane)
        lane.busy = lane.has_turn
        return lane.busy

    def give_back(self, number: int) -> None:
        """A lane that was taken has nothing to execute."""
        lane = self.lanes[number]
        lane.busy = False
        self._limits.withdraw(lane)

    def done(self, number: int, *, again: bool) -> None:
        """A lane has executed, and is to do so again or not."""
        lane = self.lanes[number]
        lane.busy = False
        self._limits.done(lane, again=again)

    def rest(self) -> None:
        """There is nothing to execute: no lane waits for a turn."""
        for lane in self.lanes:
            if not lane.busy:
                self._limits.withdraw(lane)

    def close(self) -> None:
        """Take part no longer."""
        lanes, self.lanes = self.lanes, []
        self._limits.leave(lanes)
