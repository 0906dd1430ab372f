"""Work that takes long, by threads of its own."""

from __future__ import annotations

import asyncio
import threading

from container.inference.limits import MOST_THREADS, by_thread


async def test_threads_are_bounded_and_all_work_is_done():
    """What comes beyond the bound waits for a thread, and its turn comes."""
    under_way, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        go.wait(60)
        with lock:
            under_way -= 1

    works = [asyncio.ensure_future(by_thread(work)) for _ in range(MOST_THREADS + 8)]
    while under_way < MOST_THREADS:  # noqa: ASYNC110 - a thread that works sets no event of the loop
        await asyncio.sleep(0.001)
    go.set()
    await asyncio.gather(*works)

    assert most == MOST_THREADS
