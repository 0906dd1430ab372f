"""When the event loop stays awake."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from model_handlers.executor import ExecutorLoop
from model_handlers.worker.policies import BusyPoll
from serve.threads import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 1_000_000  # ns
_YIELD = 100_000  # ns, while others have little to do


class Clock:
    """Time that passes in yields alone: how long this machine takes for its turns decides nothing here."""

    def __init__(self) -> None:
        self.now = 0
        self.each_yield = _YIELD

    def sched_yield(self) -> None:
        """Others have the processor."""
        self.now += self.each_yield


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time, in nanoseconds."""
    made = Clock()
    monkeypatch.setattr(BusyPoll, "longest", _LONGEST)
    monkeypatch.setattr("os.sched_yield", made.sched_yield)
    monkeypatch.setattr("model_handlers.executor._now", lambda: made.now)
    return made


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """One of each kind."""
    made = request.param()
    yield made
    made.close()


def poll_on(loop: asyncio.AbstractEventLoop, *, threads_work: bool = False) -> ExecutorLoop:
    """A poll whose threads have work, or have none."""
    return ExecutorLoop(loop, ThreadPool("unused", idle_seconds=0), lambda: threads_work)


def turns(loop: asyncio.AbstractEventLoop, count: int = 3) -> None:
    """Let the loop turn a few times."""

    async def turn() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    loop.run_until_complete(turn())


def awake(poll: ExecutorLoop) -> bool:
    """Whether it keeps its loop awake."""
    return "awake" in repr(poll)


def until_asleep(loop: asyncio.AbstractEventLoop, poll: ExecutorLoop) -> None:
    """Let the loop turn until it is kept awake no more."""
    deadline = time.monotonic() + 60
    while awake(poll):
        assert time.monotonic() < deadline
        turns(loop)


def test_the_loop_stays_awake_for_a_while(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """And no longer."""
    poll = poll_on(loop)
    poll.arm()
    assert awake(poll)
    until_asleep(loop, poll)
    assert clock.now == _LONGEST
    assert "1 misses" in repr(poll)


def test_what_comes_meanwhile_keeps_it_awake(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """From then on anew."""
    poll = poll_on(loop)
    poll.arm()
    until_asleep(loop, poll)
    poll.arm()  # is skipped
    poll.arm()
    turns(loop)
    poll.arm()
    assert "0 misses" in repr(poll)
    began = clock.now
    until_asleep(loop, poll)
    assert clock.now == began + _LONGEST


def test_several_answers_of_one_turn_are_one_expectation(loop: asyncio.AbstractEventLoop) -> None:
    """The second of them is not what the first waited for."""
    poll = poll_on(loop)
    poll.arm()
    until_asleep(loop, poll)
    poll.arm()  # is skipped
    poll.arm()
    poll.arm()
    assert "1 misses" in repr(poll)


def test_it_sleeps_while_threads_work(loop: asyncio.AbstractEventLoop) -> None:
    """They want Python's lock."""
    poll = poll_on(loop, threads_work=True)
    poll.arm()
    assert not awake(poll)


def test_a_thread_that_gets_work_ends_it(loop: asyncio.AbstractEventLoop) -> None:
    """At once, and that counts as no miss; nothing begins anew right behind it."""
    poll = poll_on(loop)
    poll.arm()
    poll.disarm()
    turns(loop, 1)
    assert not awake(poll)
    assert "0 misses" in repr(poll)


def test_nothing_begins_right_behind_a_hold(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """The thread has only just begun."""
    poll = poll_on(loop)
    poll.disarm()
    clock.now += 4_999_999
    poll.arm()
    assert not awake(poll)
    clock.now += 1
    poll.arm()
    assert awake(poll)


def test_zero_keeps_nothing_awake(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator may not want it."""
    monkeypatch.setattr(BusyPoll, "longest", 0)
    poll = poll_on(loop)
    poll.arm()
    assert not awake(poll)


def test_a_processor_that_others_keep_is_given_up(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """The loop sleeps at once, this time and the next times."""
    clock.each_yield = 3_000_000
    poll = poll_on(loop)
    poll.arm()
    turns(loop)
    assert not awake(poll)
    for _ in range(7):
        poll.arm()
        assert not awake(poll)
    poll.arm()
    assert awake(poll)
