"""The clients that a batch answers may join the requests that wait, for a moment."""

import pytest

from model_handlers.worker.policies import BatchLinger

NOW = 10**15  # ns


def after(size: int, *, joins: bool = True) -> BatchLinger:
    """When so many were executed, and are answered next."""
    linger = BatchLinger(joins=joins)
    linger.batch_done(size)
    return linger


def after_four() -> BatchLinger:
    """When four have just been answered, and none waits."""
    linger = after(4)
    assert not linger.ready(0, NOW)
    assert linger.ready(0, NOW)
    return linger


def turns(linger: BatchLinger, waiting: int, now: int = NOW) -> int:
    """For how many turns of the loop so many wait for others to join them."""
    count = 0
    while not linger.ready(waiting, now):
        count += 1
    return count


@pytest.mark.parametrize(
    ("waiting", "size", "first"),
    [(0, 1, False), (3, 3, False), (4, 3, True), (4, 4, True), (4, 5, False), (20, 19, True), (19, 20, False)],
)
def test_many_go_before_the_answers(waiting: int, size: int, first: bool) -> None:  # noqa: FBT001 - a table
    """Where as many wait as are answered, or more, and there are more than a few."""
    assert after(size).ready(waiting, NOW) is first


def test_requests_that_are_no_batch_go_first() -> None:
    """None can join them."""
    assert after(1, joins=False).ready(0, NOW)


def test_fewer_than_were_answered_wait_for_three_turns() -> None:
    """Once: behind these they are sent, and so is what comes later."""
    assert turns(BatchLinger(joins=True), 1) == 0
    linger = after_four()
    assert turns(linger, 3) == 3
    assert turns(linger, 3) == 0


def test_as_many_as_were_answered_wait_no_longer() -> None:
    """And what was left of their turns is gone."""
    linger = after_four()
    assert not linger.ready(3, NOW)
    assert linger.ready(4, NOW)
    assert turns(linger, 1) == 0


def test_turns_begin_with_the_first_that_waits() -> None:
    """The loop may turn meanwhile, with none there."""
    linger = after_four()
    assert turns(linger, 0) == 0
    assert turns(linger, 1) == 3


def test_turns_that_take_long_are_not_waited_for() -> None:
    """Those of a loop that has much to do."""
    linger = after_four()
    assert not linger.ready(1, NOW + 299_999)
    assert linger.ready(1, NOW + 300_000)
    linger.batch_done(2)
    assert not linger.ready(1, NOW + 400_000)  # answered first
    assert turns(linger, 1, NOW + 400_000) == 3
