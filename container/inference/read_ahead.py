"""What takes long to read of a request is read by a thread: large tensors out of shared memory, large JSON.

All of it before the request is decoded. On the event loop, but for `_Turns`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from container.steps.shared_memory import Unread
from model_handlers.errors import Kind, MmeError
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.inference.call import Call
    from container.steps.shared_memory import Place, Regions

    Reads = Callable[[bytes, Callable[[], None]], dict[str, Any]]


P = ParamSpec("P")
T = TypeVar("T")

_READERS = ThreadPool("read", idle_seconds=0)
_AT_ONCE = 4  # bodies of JSON that are read; their elements take memory, where others are no more than bodies


async def by_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns, or raises, called by a thread of its own."""
    return await asyncio.wrap_future(_READERS.submit(read, *args, **kwargs))


async def read_ahead(regions: Regions, place: Place, decode: Callable[[Regions], T]) -> T:
    """What `decode` returns, given regions of which everything that it misses has been read.

    Args:
        regions: those that there are, held from now on as they are.
        place: what it has missed already.
        decode: raises `Unread` for what it misses.

    Raises:
        MmeError: what `decode` raises; INVALID_ARGUMENT when a region has become shorter.
    """
    held = regions.held()
    while True:
        held.ahead[place] = await asyncio.to_thread(place.read)
        try:
            return decode(held)
        except Unread as unread:
            place = unread.place


class JsonReading:
    """Reads large JSON, of a few requests at a time, piece by piece in turns: Python runs one thread at a time anyway.

    So whoever needs it for something else waits for one piece, not for one of each request; and a request that is not
    so large does not wait for the end of one that is.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._turns = _Turns()

    async def read(self, read: Reads, body: bytes, length: int, call: Call) -> dict[str, Any] | MmeError | None:
        """What JSON says, or why it can't be read; None when nobody waits for it any more.

        Args:
            read: reads text; calls its argument between pieces, which may raise.
            body: what begins with the JSON.
            length: of the JSON.
            call: for whom.
        """
        async with self._room:
            if call.over:
                return None
            return await by_thread(self._read, read, body, length, call)

    def _read(self, read: Reads, body: bytes, length: int, call: Call) -> dict[str, Any] | MmeError | None:
        def pause() -> None:
            self._turns.leave()
            self._turns.take()
            if call.over:
                raise MmeError(Kind.CANCELLED, "the client left")

        self._turns.take()
        try:
            return read(body[:length], pause)
        except MmeError as error:
            error.__context__ = None  # of both, the frames hold the body, and who keeps the error
            return None if call.over else error.with_traceback(None)
        finally:
            self._turns.leave()


class _Turns:
    """A lock that goes to who has waited longest, though who had it wants it at once again. For threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def take(self) -> None:
        """Wait for the turn."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def leave(self) -> None:
        """The next one's turn."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
