"""All connections of one event loop: what they share, the sweep that keeps their timeouts, and the drain.

Timeouts cost nothing per request: connections note the time of the last sweep, and each sweep looks at all of them.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import TYPE_CHECKING

from container.http1.connection import HttpProtocol
from container.http1.request import KnownHeads
from container.http1.rules import body_too_large, status_line
from container.inference.limits import ConnectionCap, RequestMemory, Turns
from container.process.resources import most_connections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from container.http1.request import HttpRequest
    from container.http1.rules import Limits, Refusal

    Gate = Callable[[str, bytes, Mapping[str, str], str | None], Refusal | None]


_MEMORY_IN_BODIES = 4  # of the largest size, where no memory of requests is given


class Http1Server:
    """Makes the protocols for `loop.create_server` and looks after them.

    Args:
        handler: called on the loop with each request; must not block; answers by `HttpRequest.respond`, now or later.
        limits: of every connection.
        loop: that all of it runs on.
        too_large: what to answer to a body over the limit: target, bytes that have come or are to come, the limit.
        gate: what to answer to a request that is not let in by its head, None for one that is: method, target, headers
            and the host that it asks, None without one. Called before the body has come, and not again for a head that
            a client repeats, unless a browser sent it.
        turns, memory, cap: shared with connections of other servers; None for its own.

    """

    def __init__(
        self,
        handler: Callable[[HttpRequest], None],
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        too_large: Callable[[bytes, int, int], Refusal] = body_too_large,
        gate: Gate | None = None,
        turns: Turns | None = None,
        memory: RequestMemory | None = None,
        cap: ConnectionCap | None = None,
    ) -> None:
        self.handler = handler
        self.turns = Turns(loop.call_soon) if turns is None else turns
        self.memory = RequestMemory(_MEMORY_IN_BODIES * limits.body) if memory is None else memory
        self.cap = ConnectionCap(most_connections()) if cap is None else cap
        self.too_large = too_large
        self.gate = gate
        self.limits = limits
        self.connections: set[HttpProtocol] = set()
        self.draining = False  # every connection ends with what it has begun, or with its next request
        self.closing_idle = False  # at once
        self.now = loop.time()  # of the last sweep
        self.heads: dict[int, bytes] = {}  # status → status line and Date, for the current second
        self.known_heads = KnownHeads()
        self._loop = loop
        self._date = b""
        self._empty = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tick()

    def protocol_factory(self) -> HttpProtocol:
        return HttpProtocol(self)

    @property
    def in_flight(self) -> int:
        """Requests accepted and not answered, on all connections."""
        return sum(connection.pipeline.in_flight for connection in self.connections)

    @property
    def unsent(self) -> int:
        return sum([connection.unsent for connection in self.connections])

    def head(self, status: int) -> bytes:
        start = self.heads[status] = status_line(status) + self._date
        return start

    def forget(self, connection: HttpProtocol) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def forget_heads(self) -> None:
        """Ask the gate again for every head, those too that clients repeat."""
        self.known_heads.forget()
        for connection in self.connections:
            connection.known = None
            connection.unparsed.whole = False

    def drain(self, patience: float = 0.0) -> None:
        """Close each connection after the requests it has begun. Close the listeners first.

        Args:
            patience: seconds in which idle ones may send one more request, whose answer tells the client to close: a
                connection that is closed while a request is on its way loses it.
        """
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
        if patience > 0:
            self._loop.call_later(patience, self._close_idle)
        else:
            self._close_idle()

    def _close_idle(self) -> None:
        self.closing_idle = True
        for connection in list(self.connections):
            connection.close_if_idle()

    async def wait_closed(self, seconds: float) -> bool:
        """Wait until every connection is gone; False when some are left after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while self.connections:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return False
        self.stop_sweeping()
        return True

    def abort(self) -> None:
        self.stop_sweeping()
        for connection in list(self.connections):
            connection.abort()

    def __repr__(self) -> str:
        state = " draining" if self.draining else ""
        return f"<Http1Server {len(self.connections)} connections, {self.in_flight} in flight{state}>"

    def sweep(self, now: float) -> None:
        """Set the clock that connections read, and look for those that took too long."""
        self.now = now
        date = f"Date: {formatdate(usegmt=True)}\r\n".encode()
        if date != self._date:
            self._date = date
            self.heads.clear()
        for connection in list(self.connections):
            connection.sweep(now)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.limits.sweep, self._tick)
        self.sweep(self._loop.time())

    def stop_sweeping(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
