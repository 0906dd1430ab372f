"""How many requests cross together that are executed one by one."""

from model_handlers.worker.policies import Pace

US, MS, S = 1_000, 1_000_000, 1_000_000_000


def quick(pace, took=20 * US, size=100, times=200):
    """A pace after so many executions of one request each."""
    for _ in range(times):
        pace.learn(took, 1, size)
    return pace


def test_nobody_has_company_before_the_model_is_known_to_be_quick():
    """A model is expected to be slow until many executions have shown that it is not."""
    pace = Pace()
    assert pace.together(0) == 1
    assert quick(pace, times=10).together(0) == 1
    assert quick(pace).together(0) == 32


def test_as_many_as_take_a_millisecond():
    """By the mean of what was measured, of one request a message or of several."""
    assert quick(Pace(), 100 * US).together(0) == 9  # 10, were the mean quite there
    assert quick(Pace(), 100 * US, times=1000).together(0) in {9, 10}
    pace = quick(Pace(), 100 * US)
    for _ in range(200):
        pace.learn(800 * US, 4, 100)
    assert pace.together(0) in {4, 5}
    assert quick(Pace(), 600 * US).together(0) == 1


def test_one_that_is_far_too_slow_counts_in_full():
    """Only many quick ones after it win back trust; one that is a little slow is an accident."""
    pace = quick(Pace())
    pace.learn(2 * MS, 1, 100)
    assert pace.together(0) > 1
    pace.learn(11 * MS, 1, 100)
    assert pace.together(0) == 1
    assert quick(pace, times=20).together(0) == 1
    assert quick(pace).together(0) == 32


def test_large_inputs_have_no_company():
    """What another thread would have to copy gains little."""
    assert quick(Pace(), size=20 << 10).together(0) == 3
    assert quick(Pace(), size=1 << 20).together(0) == 1
    assert quick(Pace(), size=0).together(0) == 32


def test_nobody_has_company_for_a_minute_after_a_death():
    """However quick the model is meanwhile."""
    pace = quick(Pace())
    pace.died(5 * S)
    quick(pace)
    assert pace.together(64 * S) == 1
    assert pace.together(66 * S) == 32
