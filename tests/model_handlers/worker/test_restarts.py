"""The budget of restarts, by its numbers."""

import pytest

from model_handlers.worker.policies import LIMIT, WINDOW, RestartBudget


def test_first_restart_is_at_once():
    """One death costs no wait."""
    assert RestartBudget().next_at(100.0) == 100.0


def test_delays_double():
    """Each restart waits twice as long as the one before, counted from that one."""
    budget, now, delays = RestartBudget(), 100.0, []
    for _ in range(LIMIT):
        at = budget.next_at(now)
        delays.append(round(at - now, 6))
        budget.restarted(at)
        now = at

    assert delays == [0, 0.1, 0.2, 0.4, 0.8]
    assert budget.next_at(now) is None


def test_time_heals():
    """A restart that is long ago counts no more, and a late death need not wait."""
    budget = RestartBudget()
    for i in range(LIMIT):
        budget.restarted(float(i))
    assert budget.next_at(10.0) is None
    assert budget.is_used_up(10.0)
    assert budget.free_at() == WINDOW

    assert budget.next_at(WINDOW) == WINDOW
    assert budget.next_at(5 * WINDOW) == 5 * WINDOW
    assert not budget.is_used_up(WINDOW)


@pytest.mark.parametrize("gap", [WINDOW / LIMIT + 0.1, WINDOW])
def test_rare_deaths_never_use_it_up(gap):
    """Deaths that are far enough apart are always followed by a restart."""
    budget = RestartBudget()
    for i in range(50):
        assert budget.next_at(i * gap) == i * gap
        budget.restarted(i * gap)
