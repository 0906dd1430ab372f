"""Turns: no more at a time than there are, first come first served, and none is lost."""

import asyncio
import contextlib

import pytest

from serve.cache.load import Turns


class Line:
    """People who ask for turns."""

    def __init__(self, count):
        self.turns = Turns(count)
        self.having = []
        self._enough = {}

    async def ask(self, name):
        """Have a turn until `leave`."""
        self._enough[name] = asyncio.Event()
        async with self.turns.acquire(name):
            self.having.append(name)
            await self._enough[name].wait()
            self.having.remove(name)

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
    assert line.having == ["a", "b"]
    assert repr(line.turns) == "<Turns: 0 free, 2 waiting>"
    for name, having in (("b", ["a", "c"]), ("a", ["c", "d"]), ("d", ["c"]), ("c", [])):
        line.leave(name)
        await idle()
        assert line.having == having
    await asyncio.gather(*tasks)
    assert repr(line.turns) == "<Turns: 2 free, 0 waiting>"


async def test_who_is_refused_goes_and_the_next_moves_up(idle):
    """The error is the one that was said; whoever has a turn keeps it, and nobody has to wait under that name."""
    line = Line(1)
    a, b, c = line.begin("a", "b", "c")
    await idle()
    for name in ("b", "a", "nobody"):
        line.turns.refuse(name, ValueError(f"not {name}"))
    with pytest.raises(ValueError, match="not b"):
        await b
    line.leave("a")
    await idle()
    assert line.having == ["c"]
    line.leave("c")
    await asyncio.gather(a, c)


@pytest.mark.parametrize("when", ["waiting", "as its turn comes", "at its turn"])
async def test_who_is_cancelled_keeps_no_turn(idle, when):
    """Not even when the turn comes in the very moment."""
    line = Line(1)
    async with line.turns.acquire("a"):
        [b] = line.begin("b")
        await idle()
        if when == "waiting":
            b.cancel()
            await idle()
    if when == "at its turn":
        await idle()
        assert line.having == ["b"]
    b.cancel()
    await idle()
    assert b.cancelled()
    assert repr(line.turns) == "<Turns: 1 free, 0 waiting>"


async def test_a_turn_is_lent_to_whoever_is_waited_for(idle):
    """Then there is one more, until somebody's ends; nobody has to wait for it to come back."""
    line = Line(1)
    a, b, c = line.begin("a", "b", "c")
    await idle()
    with line.turns.lent("b"):  # it has none
        await idle()
        assert line.having == ["a"]
    with line.turns.lent("a"):
        await idle()
        assert line.having == ["a", "b"]
    line.leave("a")
    await idle()
    assert line.having == ["b"]
    line.leave("b")
    await idle()
    assert line.having == ["c"]
    line.leave("c")
    await asyncio.gather(a, b, c)
    assert repr(line.turns) == "<Turns: 1 free, 0 waiting>"


async def test_a_turn_is_lent_once_to_all_who_are_waited_for(idle):
    """They have it one after the other, whichever of them is waited for no longer."""
    line = Line(1)
    tasks = line.begin("a")
    await idle()
    with contextlib.ExitStack() as first:
        first.enter_context(line.turns.lent("a"))
        with line.turns.lent("a"):
            tasks += line.begin("b", "c")
            await idle()
            assert line.having == ["a", "b"]
            line.leave("b")
            await idle()
            first.close()
            assert line.having == ["a", "c"]
            line.leave("c")
            await idle()
            tasks += line.begin("d")
            await idle()
            assert line.having == ["a", "d"]
    for name in "da":
        line.leave(name)
    await asyncio.gather(*tasks)
    assert repr(line.turns) == "<Turns: 1 free, 0 waiting>"
