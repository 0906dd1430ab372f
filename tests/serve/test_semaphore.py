"""Turns: no more at a time than there are, first come first served, and none is lost."""

import asyncio
import threading

import pytest

from serve.threads import FairSemaphore


class Line:
    """Tasks that ask for turns."""

    def __init__(self, count):
        self.turns = FairSemaphore(count)
        self.having = {}  # by name
        self._enough = {}

    async def ask(self, name):
        """Have a turn until `leave`."""
        self._enough[name] = asyncio.Event()
        async with self.turns.taken() as turn:
            self.having[name] = turn
            await self._enough[name].wait()
            del self.having[name]

    def begin(self, *names):
        """Have them ask, one after the other."""
        return [asyncio.create_task(self.ask(name), name=name) for name in names]

    def leave(self, name):
        """End a turn."""
        self._enough[name].set()


async def test_the_first_to_ask_is_the_first_to_have(idle):
    """So many at a time; each that leaves makes way for the one that waits for longest."""
    line = Line(2)
    tasks = line.begin("a", "b", "c", "d")
    await idle()
    assert list(line.having) == ["a", "b"]
    assert repr(line.turns) == "<FairSemaphore: 0 free, 2 waiting>"
    for name, having in (("b", ["a", "c"]), ("a", ["c", "d"]), ("d", ["c"]), ("c", [])):
        line.leave(name)
        await idle()
        assert list(line.having) == having
    await asyncio.gather(*tasks)
    assert repr(line.turns) == "<FairSemaphore: 2 free, 0 waiting>"


@pytest.mark.parametrize("when", ["waiting", "as its turn comes", "at its turn"])
async def test_a_task_that_is_cancelled_keeps_no_turn(idle, when):
    """Not even when the turn comes in the very moment."""
    line = Line(1)
    async with line.turns.taken():
        [b] = line.begin("b")
        await idle()
        if when == "waiting":
            b.cancel()
            await idle()
    if when == "at its turn":
        await idle()
        assert list(line.having) == ["b"]
    b.cancel()
    await idle()
    assert b.cancelled()
    assert repr(line.turns) == "<FairSemaphore: 1 free, 0 waiting>"


async def test_a_turn_that_is_ended_early_goes_to_the_next(idle):
    """Its holder goes on beside that one; the end of its work then ends no other turn."""
    line = Line(1)
    a, b, c = line.begin("a", "b", "c")
    await idle()
    for _ in range(2):
        line.having["a"].end()
        await idle()
        assert list(line.having) == ["a", "b"]
    line.leave("a")
    await idle()
    assert list(line.having) == ["b"]
    for name in "bc":
        line.leave(name)
        await idle()
    await asyncio.gather(a, b, c)
    assert repr(line.turns) == "<FairSemaphore: 1 free, 0 waiting>"


async def test_threads_and_tasks_stand_in_one_line(idle):
    """What takes its turn on a thread has it after the task before it, and before the task after it."""
    line = Line(1)
    a, *_ = line.begin("a")
    await idle()
    on_thread, had = line.turns.ask(), threading.Event()
    on_thread.came.add_done_callback(lambda _: had.set())
    [b] = line.begin("b")
    await idle()
    assert not had.is_set()
    line.leave("a")
    await idle()
    assert (had.is_set(), list(line.having)) == (True, [])
    await asyncio.to_thread(on_thread.end)
    await idle()
    assert list(line.having) == ["b"]
    line.leave("b")
    await asyncio.gather(a, b)
