"""Pings and ages of connections, by the rules and names of gRPC's settings. On the event loop.

A client is pinged now and then, and a connection that neither answers nor shows another sign of life is ended; a client
that pings too often is told off; and old connections end, so that clients look for a server again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from container.http2 import frames
from container.http2.frames import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    import asyncio

    from container.http2.connection import Connection

_JITTER = 0.1  # of an age: connections that were made together need not end together
_STRICT_SECONDS = 7200.0  # between pings of clients without calls, where these are not permitted
_PAYLOAD = b"mme-ping"


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The rules.

    Attributes:
        loop: the event loop.
        time, timeout: seconds without a word after which a client is pinged, and that it has for the answer.
        permit_without_calls: whether that is done, and may be done by clients, while there are no calls.
        max_pings_without_data: how many of ours may follow one another before something else is sent; 0 for any number.
        min_ping_interval: seconds that clients leave between theirs, as long as nothing else is sent to them.
        max_ping_strikes: how often they may fail to; 0 for any number.
        max_age, grace: seconds after which a connection takes no more calls, and that those have which there are; 0 and
            None for ever.
    """

    loop: asyncio.AbstractEventLoop
    time: float = 7200.0
    timeout: float = 20.0
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval: float = 300.0
    max_ping_strikes: int = 2
    max_age: float = 0.0
    grace: float | None = None

    def watch(self, connection: Connection) -> Watch:
        """Looks after one."""
        return Watch(self, connection)


class Watch:
    """Looks after one connection."""

    def __init__(self, rules: Keepalive, connection: Connection) -> None:
        self._rules = rules
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None
        self._age: asyncio.TimerHandle | None = None
        self._pings = 0  # of ours since anything else was sent
        self._strikes = 0
        self._pinged = float("-inf")
        self._signs = (0, 0)  # of the client, when it was pinged

    def begin(self) -> None:
        """It has been made."""
        rules = self._rules
        self._timer = rules.loop.call_later(rules.time, self.ping)
        if rules.max_age:
            spread = 1 + random.uniform(-_JITTER, _JITTER)  # noqa: S311 - no secret
            self._age = rules.loop.call_later(rules.max_age * spread, self._old)

    def end(self) -> None:
        """It is over."""
        for timer in (self._timer, self._age):
            if timer is not None:
                timer.cancel()
        self._timer = self._age = None

    def sent(self) -> None:
        """Something of a call was sent."""
        self._strikes = 0
        self._pings = 0
        self._pinged = float("-inf")

    def ping(self) -> None:
        """Ask whether the client lives, if it may be asked; it is to answer in time."""
        rules = self._rules
        limit = rules.max_pings_without_data
        if (self._connection.streams or rules.permit_without_calls) and not (limit and self._pings >= limit):
            self._pings += 1
            self._connection.put(frames.frame(frames.PING, 0, 0, _PAYLOAD))
            self._signs = self._connection.signs()
            self._timer = rules.loop.call_later(rules.timeout, self._silent)
        else:
            self._timer = rules.loop.call_later(rules.time, self.ping)

    def answered(self) -> None:
        """Our ping was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._rules.loop.call_later(self._rules.time, self.ping)

    def _silent(self) -> None:
        """Our ping was not answered: it may lie behind much that a slow client has yet to read."""
        signs = self._connection.signs()
        if signs == self._signs:
            self._connection.abort()
            return
        self._signs = signs
        self._timer = self._rules.loop.call_later(self._rules.timeout, self._silent)

    def pinged(self) -> None:
        """The client has sent a ping.

        Raises:
            ConnectionFault: it does so too often.
        """
        rules, now = self._rules, self._rules.loop.time()
        idle = not self._connection.streams and not rules.permit_without_calls
        interval = _STRICT_SECONDS if idle else rules.min_ping_interval
        if now - self._pinged < interval:
            self._strikes += 1
            if rules.max_ping_strikes and self._strikes > rules.max_ping_strikes:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged = now

    def _old(self) -> None:
        self._connection.drain()
        grace = self._rules.grace
        if grace is not None:
            self._age = self._rules.loop.call_later(grace, self._connection.abort)
