"""What takes long to read of a request is read by a thread: large tensors out of shared memory, before it is decoded.

On the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from container.shared_memory import Unread
from serve.threads import ThreadPerTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.shared_memory import Place, Regions

P = ParamSpec("P")
T = TypeVar("T")

_READERS = ThreadPerTask("read")


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
