"""The order in which models go is kept, not sorted, and is the same."""

import weakref

from hypothesis import given
from hypothesis import strategies as st

from serve.cache.residents import Order

DEEDS = st.sampled_from(["comes", "grows", "grows", "shrinks", "leaves", "walk"])


@given(st.lists(st.tuples(DEEDS, st.integers(0, 9), st.integers(1, 9)), max_size=60))
def test_any_walk_is_in_order(steps):
    """Whoever came, left, or has another place since the last one, and however far anybody walks."""
    places = {}
    order = Order(lambda thing: (places[thing], thing))
    for deed, thing, size in steps:
        if deed == "comes" and thing not in places:
            places[thing] = size
            order.put(thing)
        elif deed == "grows" and thing in places:
            places[thing] += size
        elif deed == "shrinks" and thing in places:
            places[thing] -= size
            order.put(thing)
        elif deed == "leaves":
            places.pop(thing, None)
            order.remove(thing)
        elif deed == "walk":
            walked = [each for each, _ in zip(order.walk(), range(size), strict=False)]
            assert walked == sorted(places, key=lambda each: (places[each], each))[:size]
    assert list(order.walk()) == sorted(places, key=lambda each: (places[each], each))
    assert repr(order) == f"<Order of {len(places)}>"


def test_a_walk_looks_at_those_in_front():
    """And at those that were used since the last look at them, once; things that come and go leave nothing behind."""
    places = {number: float(number) for number in range(1000)}
    order = Order(lambda thing: (places[thing], 0.0))
    for number in places:
        order.put(number)
    before = order.looks
    for number in range(10):
        places[number] = 2000.0 + number
    assert next(order.walk()) == 10
    assert order.looks - before == 11
    for number in range(100):
        assert next(order.walk()) == 10 + number
        order.remove(10 + number)
    assert order.looks - before < 11 + 3 * 100


def test_an_order_keeps_nothing_that_was_removed():
    """A model that has left has files, and memory of others, that go with the last who knows it."""

    class Thing:
        """Anything."""

    order, thing = Order(lambda _: (0.0, 0.0)), Thing()
    seen = weakref.ref(thing)
    order.put(thing)
    list(order.walk())
    order.put(thing)
    order.remove(thing)
    del thing
    assert seen() is None
