"""How long a request may take from its arrival on; the answer to one that takes longer is 504.

Counts from when the whole request has come until it is answered, its decoding, the load of its model and its wait in a
queue included; of a streamed answer, from the last response on. What executes goes on, and what waits is dropped as if
its client had left. Times are noted to a tick of one timer, which looks at those only that are late, and rests while
nothing is under way. On the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from model_handlers.errors import Kind, MmeError

if TYPE_CHECKING:
    import asyncio

_TICKS = 16  # in the limit
_SHORTEST, _LONGEST = 0.02, 1.0  # seconds of a tick


class Limited(Protocol):
    """A request under way."""

    def expire(self, error: MmeError) -> None:
        """Answer with that error, and have the rest of it dropped."""


class RequestLimit:
    """The requests under way, whatever protocol they came by.

    Args:
        seconds: that each may take.
        loop: the event loop.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds = seconds
        self._tick_seconds = min(max(seconds / _TICKS, _SHORTEST), _LONGEST)
        self._loop = loop
        self._now = 0.0  # at the last tick
        self._under_way: dict[Limited, float] = {}  # and when each came or had its last response, in that order
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RequestLimit of {self._seconds:g} s: {len(self._under_way)} under way>"

    def begin(self, request: Limited) -> None:
        """A request has come."""
        if self._timer is None:
            self._now = self._loop.time()
            self._timer = self._loop.call_later(self._tick_seconds, self._tick)
        self._under_way[request] = self._now

    def renew(self, request: Limited) -> None:
        """It had a response, and others may follow."""
        if self._under_way.pop(request, None) is not None:
            self._under_way[request] = self._now

    def over(self, request: Limited) -> None:
        """It is answered, or its client has left."""
        self._under_way.pop(request, None)

    def _tick(self) -> None:
        self._timer = None
        self._now = self._loop.time()
        before = self._now - self._seconds - self._tick_seconds  # what was noted may be later than that by a tick
        while self._under_way:
            request, since = next(iter(self._under_way.items()))
            if since > before:
                self._timer = self._loop.call_later(self._tick_seconds, self._tick)
                return
            del self._under_way[request]
            request.expire(
                MmeError(
                    Kind.TIMED_OUT,
                    f"there was no answer within {self._seconds:g} s, the server's limit of a request "
                    "(MME_REQUEST_TIMEOUT); what executes goes on",
                )
            )
