"""Whose turn it is to hand out batches, and when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from serve.model.model import DispatchQueue

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """One of each kind."""
    made = request.param()
    yield made
    made.close()


def turn(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop turn once."""
    loop.run_until_complete(asyncio.sleep(0))


def test_those_who_asked_have_their_turns_in_that_order(loop: asyncio.AbstractEventLoop) -> None:
    """And not before the loop comes to it."""
    dispatches, seen = DispatchQueue(loop), []
    for name in "abc":
        dispatches.schedule(lambda name=name: seen.append(name))  # type: ignore[misc]
    assert not seen
    turn(loop)
    assert seen == ["a", "b", "c"]


def test_who_is_asked_for_meanwhile_has_its_turn_behind_them(loop: asyncio.AbstractEventLoop) -> None:
    """In the same turn of the loop: the steps of an ensemble."""
    dispatches, seen = DispatchQueue(loop), []

    def first() -> None:
        seen.append("first")
        dispatches.schedule(lambda: seen.append("third"))

    dispatches.schedule(first)
    dispatches.schedule(lambda: seen.append("second"))
    loop.call_soon(lambda: loop.call_soon(lambda: seen.append("the loop's next turn")))
    turn(loop)
    turn(loop)
    assert seen == ["first", "second", "third", "the loop's next turn"]


def test_the_loop_looks_at_its_sockets_however_often_one_asks(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn comes again in the next one of the loop."""
    monkeypatch.setattr("serve.model.model._LONGEST_NS", -1)
    dispatches, count = DispatchQueue(loop), 0

    def again() -> None:
        nonlocal count
        count += 1
        dispatches.schedule(again)

    dispatches.schedule(again)
    turn(loop)
    first = count
    turn(loop)
    assert 0 < first < count < 10


def test_one_that_fails_takes_nobody_elses_turn(loop: asyncio.AbstractEventLoop) -> None:
    """The loop is told of it."""
    dispatches, seen, told = DispatchQueue(loop), [], []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    dispatches.schedule(lambda: seen.append(1 // 0))
    dispatches.schedule(lambda: seen.append(2))
    turn(loop)
    turn(loop)
    assert seen == [2]
    assert [type(error) for error in told] == [ZeroDivisionError]
    dispatches.schedule(lambda: seen.append(3))
    turn(loop)
    assert seen == [2, 3]
