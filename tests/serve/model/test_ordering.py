"""Results leave in the order in which they were entered."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.model.batcher import InOrder


def entered(count):
    """An order of so many results, by their numbers."""
    order = InOrder()
    for number in range(count):
        order.enter(number)
    return order


def test_a_result_that_overtook_others_waits_for_them():
    """A later result is held until all earlier ones are there, then all leave together, oldest first."""
    order = entered(4)

    assert order.release(2, "c") == []
    assert order.release(1, "b") == []
    assert order.release(0, "a") == ["a", "b", "c"]
    assert order.release(3, "d") == ["d"]


def test_results_in_order_leave_at_once():
    """Nothing is held that has nothing before it."""
    order = entered(3)

    assert [order.release(ticket, ticket) for ticket in range(3)] == [[0], [1], [2]]


@settings(deadline=None)
@given(st.permutations(range(12)))
def test_any_order_of_finishing_becomes_the_order_of_tickets(finished):
    """However instances finish, every result leaves once, in order, as soon as all before it are there."""
    order, left = entered(12), []
    for number, ticket in enumerate(finished):
        left += order.release(ticket, ticket)
        done = set(finished[: number + 1])
        assert left == list(range(next(free for free in range(13) if free not in done)))
    assert left == list(range(12))
