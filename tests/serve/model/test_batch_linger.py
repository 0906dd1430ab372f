"""Those whom a batch answers may join those who wait, for a moment."""

import pytest

from serve.model.batcher import BatchLinger

NOW = 10**15  # ns


def after_four() -> BatchLinger:
    """When four have just been answered."""
    rejoining = BatchLinger(joins=True)
    rejoining.batch_done(4, NOW)
    return rejoining


def turns(rejoining: BatchLinger, waiting: int, now: int = NOW) -> int:
    """For how many turns of the loop so many wait for others to join them."""
    count = 0
    while rejoining.should_wait(waiting, now):
        count += 1
    return count


@pytest.mark.parametrize(
    ("waiting", "size", "first"),
    [(0, 1, False), (3, 3, False), (4, 3, True), (4, 4, True), (4, 5, False), (20, 19, True), (19, 20, False)],
)
def test_many_go_before_the_answers(waiting: int, size: int, first: bool) -> None:  # noqa: FBT001 - a table
    """Where as many wait as are answered, or more, and there are more than a few."""
    assert BatchLinger(joins=True).skips(waiting, size) is first


def test_requests_that_are_no_batch_go_first() -> None:
    """Nobody can join them."""
    assert BatchLinger(joins=False).skips(0, 1)


def test_fewer_than_were_answered_wait_for_three_turns() -> None:
    """Once: behind these they are sent, and so is whoever comes later."""
    assert turns(BatchLinger(joins=True), 1) == 0
    rejoining = after_four()
    assert turns(rejoining, 3) == 3
    assert turns(rejoining, 3) == 0


def test_as_many_as_were_answered_wait_no_longer() -> None:
    """And what was left of their turns is nobody's."""
    rejoining = after_four()
    assert rejoining.should_wait(3, NOW)
    assert not rejoining.should_wait(4, NOW)
    assert turns(rejoining, 1) == 0


def test_turns_begin_with_the_first_who_waits() -> None:
    """The loop may turn meanwhile, with nobody there."""
    rejoining = after_four()
    assert turns(rejoining, 0) == 0
    assert turns(rejoining, 1) == 3


def test_turns_that_take_long_are_not_waited_for() -> None:
    """Those of a loop that has much to do."""
    rejoining = after_four()
    assert rejoining.should_wait(1, NOW + 299_999)
    assert not rejoining.should_wait(1, NOW + 300_000)
    rejoining.batch_done(2, NOW + 400_000)
    assert turns(rejoining, 1, NOW + 400_000) == 3
