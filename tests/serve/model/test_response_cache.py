"""The cache of responses never takes more than it may, and forgets who was not asked for longest."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.model.response_cache import ResponseCache


def filled(budget, *sizes, owner="m"):
    """A cache in which r0, r1, … of these sizes were kept."""
    cache = ResponseCache(budget)
    for index, size in enumerate(sizes):
        cache.keep(owner, f"k{index}", f"r{index}", size)
    return cache


def test_what_was_kept_is_found():
    """By owner and key."""
    cache = filled(10, 4, 5)

    assert [cache.find("m", f"k{index}") for index in range(3)] == ["r0", "r1", None]
    assert cache.find("other", "k0") is None
    assert (cache.currsize, len(cache)) == (9, 2)


def test_the_least_recently_used_goes_first():
    """A look-up that finds something is a use."""
    cache = filled(10, 4, 4)
    cache.find("m", "k0")
    cache.keep("m", "new", "r", 4)

    assert [cache.find("m", key) for key in ("k0", "k1", "new")] == ["r0", None, "r"]


def test_what_does_not_fit_is_not_kept_and_costs_nobody_a_place():
    """A response larger than the whole cache."""
    cache = filled(10, 4, 11)

    assert (cache.find("m", "k0"), cache.find("m", "k1"), cache.currsize) == ("r0", None, 4)


def test_a_key_is_kept_once():
    """The later value is the one that is found, and the bytes of the former come back."""
    cache = filled(10, 4)
    cache.keep("m", "k0", "again", 6)

    assert (cache.find("m", "k0"), cache.currsize, len(cache)) == ("again", 6, 1)


def test_an_owner_is_forgotten_whole():
    """Others keep theirs."""
    cache = filled(100, 4, 5)
    cache.keep("other", "k0", "theirs", 6)
    cache.forget("m")
    cache.forget("nobody")

    assert (cache.find("m", "k0"), cache.find("m", "k1"), cache.find("other", "k0")) == (None, None, "theirs")
    assert (cache.currsize, len(cache)) == (6, 1)


def test_a_cache_tells_what_it_holds():
    """Its `repr` is fit for a log line."""
    assert repr(filled(10, 4, 5)) == "<ResponseCache: 2 responses of 1 models, 9 of 10 bytes>"


OWNERS, KEYS = st.sampled_from("abc"), st.integers(0, 3)
DEEDS = st.lists(
    st.tuples(st.just("keep"), OWNERS, KEYS, st.integers(0, 12))
    | st.tuples(st.just("find"), OWNERS, KEYS)
    | st.tuples(st.just("forget"), OWNERS),
    max_size=40,
)


@settings(deadline=None)
@given(DEEDS)
@pytest.mark.parametrize("budget", [0, 10, 30])
def test_it_is_a_list_in_the_order_of_use(budget, deeds):
    """Whatever is kept, found and forgotten, it behaves as the plainest list of what there is would."""
    cache, plain = ResponseCache(budget), OrderedDict()
    for number, (deed, owner, *rest) in enumerate(deeds):
        if deed == "find":
            assert cache.find(owner, rest[0]) == plain.get((owner, rest[0]), (None,))[0]
            if (owner, rest[0]) in plain:
                plain.move_to_end((owner, rest[0]))
        elif deed == "forget":
            cache.forget(owner)
            plain = OrderedDict((key, value) for key, value in plain.items() if key[0] != owner)
        else:
            key, size = rest
            cache.keep(owner, key, number, size)
            plain.pop((owner, key), None)
            while size <= budget and sum(taken for _, taken in plain.values()) + size > budget:
                plain.popitem(last=False)
            if size <= budget:
                plain[owner, key] = number, size
        assert cache.currsize == sum(taken for _, taken in plain.values()) <= budget
        assert len(cache) == len(plain)
        assert f"{len(plain)} responses of {len({each for each, _ in plain})} models" in repr(cache)
