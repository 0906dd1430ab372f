"""Long work on the event loop lets all else go on, once a slice of it is over."""

import asyncio

import pytest

from serve.threads import Slices


@pytest.mark.parametrize(("seconds", "rests"), [(0.0, 0), (0.00004, 3), (1.0, 10)])
async def test_the_loop_goes_on_between_slices(seconds, rests):
    """Each look at the clock is so many seconds after the one before."""
    now, others = 0.0, 0

    def clock():
        nonlocal now
        now += seconds
        return now

    async def beside():
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    slices, slept = Slices(clock), 0
    task = asyncio.create_task(beside())
    for _ in range(10):
        before = others
        await slices.rest()
        slept += others > before
    task.cancel()
    assert slept == rests
