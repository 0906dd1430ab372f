"""When a model is hot, and when it is cold again."""

import pytest

from serve.weights.tiering import Heat


@pytest.mark.parametrize(
    ("share", "seconds", "hot"),
    [(0.04, 60, False), (0.06, 4, True), (0.2, 1, True), (1.0, 1, True)],
    ids=["a little", "a twentieth of a core", "a burst", "all the time"],
)
def test_a_model_that_keeps_a_twentieth_of_a_core_busy_is_hot(share, seconds, hot):
    """A steady load warms up to twice its share of a core; a burst is hot in the second in which it comes."""
    heat = Heat(12.0)
    for second in range(1, seconds + 1):
        heat.tick(12.0 + share * second)

    assert heat.is_hot is hot
    assert not heat.is_cold


def test_it_cools_down():
    """What was hot and is not used any more is cold within seconds, however much it executed before."""
    heat = Heat(1000.0)
    assert heat.is_cold
    heat.tick(1001.0)
    ticks = 0
    while not heat.is_cold:
        heat.tick(None)
        ticks += 1

    assert ticks == 10
    assert repr(heat) == "<Heat 0.001 s>"
