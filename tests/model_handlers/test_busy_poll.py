"""Who stays awake for its next piece of work, and for how long."""

from __future__ import annotations

import pytest

from model_handlers.worker.policies import BusyPoll


@pytest.fixture(autouse=True)
def _longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BusyPoll, "longest", 1000)


def attempts(poll: BusyPoll, waits: int) -> list[int]:
    """Which of so many waits, none of which brings anything, are spent awake."""
    awake = []
    for number in range(waits):
        if poll.begin():
            poll.missed()
            awake.append(number)
    return awake


def test_the_first_wait_is_spent_awake() -> None:
    """Nobody knows yet."""
    assert BusyPoll().begin() == 1000


def test_attempts_that_bring_nothing_become_rare() -> None:
    """Twice as rare after each, and in the end one wait of sixty-four."""
    assert attempts(BusyPoll(), 320) == [0, 2, 6, 14, 30, 62, 126, 190, 254, 318]


def test_one_that_is_caught_has_the_next_spent_awake() -> None:
    """Work comes in quick succession again."""
    poll = BusyPoll()
    attempts(poll, 63)
    while not poll.begin():
        pass
    poll.caught()
    assert poll.begin() == 1000
    assert attempts(poll, 7) == [0, 2, 6]


def test_zero_never_waits_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator may not want it."""
    monkeypatch.setattr(BusyPoll, "longest", 0)
    assert attempts(BusyPoll(), 100) == []


def skipped(poll: BusyPoll) -> int:
    """How many waits are not spent awake before the next one that is."""
    count = 0
    while not poll.begin():
        count += 1
    return count


def test_where_others_keep_the_processor_attempts_become_rare_at_once() -> None:
    """More so each time; what is caught takes that back step by step."""
    poll = BusyPoll()
    assert not poll.lost(300_000)  # somebody who has little to do
    assert poll.begin()
    found = []
    for _ in range(4):
        assert poll.lost(3_000_000)
        found.append(skipped(poll))
    assert found == [7, 63, 1023, 1023]
    poll.caught()
    poll.caught()
    assert poll.lost(1_500_000)
    assert skipped(poll) == 63


def test_a_turn_that_is_lost_brings_no_attempt_forward() -> None:
    """Of one that nothing comes to."""
    poll = BusyPoll()
    for _ in range(6):
        poll.missed()
    assert poll.lost(3_000_000)
    assert skipped(poll) == 63
