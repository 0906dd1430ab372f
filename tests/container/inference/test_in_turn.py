"""What a thread works out for a request keeps its place among whatever happens to it."""

from __future__ import annotations

import asyncio
import functools
import threading

from container.inference.in_turn import InTurn


async def test_events_wait_for_what_is_worked_out_before_them():
    """In their order, and each on the loop, though one of them has something worked out as well, and another fails."""
    happened, go_on = [], threading.Event()
    turn, ended = InTurn(), asyncio.Event()

    def event(name):
        if not turn.waits(functools.partial(event, name)):
            happened.append((name, threading.current_thread() is threading.main_thread()))
            if name == "end":
                ended.set()

    def slow(name, result):
        if turn.waits(functools.partial(slow, name, result)):
            return
        turn.work_out(functools.partial(worked, result), lambda future: event(f"{name}: {future.exception()}"))

    def worked(result):
        assert go_on.wait(60)
        assert threading.current_thread() is not threading.main_thread()
        assert result, "not today"

    event("begin")
    slow("first", result=True)
    event("second")
    slow("third", result=False)
    event("fourth")
    event("end")
    go_on.set()
    await ended.wait()
    names = [name.splitlines()[0] for name, _ in happened]
    assert names == ["begin", "first: None", "second", "third: not today", "fourth", "end"]
    assert all(on_loop for _, on_loop in happened)


async def test_the_end_comes_whatever_came_before_it(caplog):
    """Neither what was worked out nor an event behind it keeps the next from happening by what it raises."""
    happened = []
    turn, ended = InTurn(), asyncio.Event()

    def event(name):
        if not turn.waits(functools.partial(event, name)):
            happened.append(name)
            if name == "end":
                ended.set()
            raise RuntimeError(name)

    turn.work_out(lambda: "first", lambda future: event(future.result()))
    event("second")
    event("end")
    async with asyncio.timeout(60):
        await ended.wait()
    assert happened == ["first", "second", "end"]
    assert len(caplog.records) == 3
