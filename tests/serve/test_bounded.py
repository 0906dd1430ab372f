"""What is remembered stays within its bounds, whatever is put into it."""

from hypothesis import given
from hypothesis import strategies as st

from serve.request import Bounded

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=60)


@given(PAIRS)
def test_neither_number_nor_weight_grows_beyond_the_bounds(pairs):
    """The latest is there, unless it alone is too heavy; a heavy one drives nobody out."""
    kept = Bounded(4, 10)
    for key, (name, weight) in enumerate(pairs):
        before = dict(kept)
        kept.keep(key, (name, weight), weight)
        assert len(kept) <= 4
        assert sum(each for _, each in kept.values()) <= 10
        if weight > 10:
            assert kept == before
        else:
            assert kept[key] == (name, weight)
