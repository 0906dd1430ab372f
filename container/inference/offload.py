"""Work that takes long, by threads of its own: reading large requests, encoding large responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

MOST = 256  # threads: listings of a store, 64 over HTTP and 64 over gRPC, leave as many
THREADS = ThreadPool("offload", most=MOST, idle_seconds=0)


async def by_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the function returns, or raises, called by a thread."""
    return await asyncio.wrap_future(THREADS.submit(work, *args, **kwargs))
