"""Large tensors of a request are read out of shared memory by a thread, before it is decoded. On the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from container.shared_memory import Unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from container.shared_memory import Place, Regions

T = TypeVar("T")


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
