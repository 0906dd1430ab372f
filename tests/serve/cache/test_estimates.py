"""What is expected of a model never seen, by what was seen of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cache.footprints import REMEMBERED, SMALLEST, Seen, expected

MB = 1_000_000


def alike(ratios):
    """Models of 100 MB that took so many times that."""
    return [Seen(100 * MB, int(ratio * 100 * MB)) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        ([], 1.5),
        ([1.1], 1.5),
        ([2.0], 2.0),
        ([1.2, 2.5], 2.5),
        ([1.1, 1.2, 1.3], 1.3),
        ([1.0] * 9 + [50.0], 1.0),
        ([1.0] * 8 + [3.0, 3.0], 3.0),
        ([1.0, 2.0] * 16, 2.0),
        ([0.01, 0.01, 0.01], 0.05),
        ([100.0, 100.0, 100.0], 20.0),
        ([100.0], 20.0),
    ],
    ids=["none", "one, lower", "one, higher", "two", "few: the largest", "one strange of ten", "two of ten are no accident",
         "half of them", "bounded below", "bounded above", "one, bounded"],
)  # fmt: skip
def test_the_estimate_is_what_nine_of_ten_do_not_exceed(ratios, wanted):
    """A handler's own idea counts until a few models were seen; after that, those do."""
    assert expected(alike(ratios), 100 * MB, 1.5) == wanted * 100 * MB
    assert expected(alike(ratios[::-1]), 100 * MB, 1.5) == wanted * 100 * MB


@given(st.lists(st.integers(10 * MB, 1000 * MB), min_size=3, max_size=REMEMBERED))
def test_most_models_take_no_more_than_expected(taken):
    """Whatever was seen, at most a tenth of it exceeds the estimate, and the estimate is one that was seen."""
    estimate = expected([Seen(100 * MB, each) for each in taken], 100 * MB, 1.5)

    assert any(abs(each - estimate) <= 1 for each in taken)
    assert sum(each - 1 > estimate for each in taken) <= len(taken) / 10


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_small_models_take_beside_their_weights_is_not_multiplied(count):
    """CUDA's context, or a process, is 500 MB whatever the model: one of 3 GB takes that once, not thirty times."""
    small = [Seen(10 * MB, 510 * MB)] * count

    assert expected(small, 3000 * MB, 1.3) == (20 * 10 + 1.3 * 2990) * MB
    assert expected([Seen(100 * MB, 630 * MB)] * count, 3000 * MB, 1.3) == (630 + 1.3 * 2900) * MB


def test_what_takes_less_than_its_handler_thinks_does_so_at_any_size():
    """Weights that are mapped are shared, small or large."""
    assert expected(alike([0.5] * 3), 1000 * MB, 1.3) == 500 * MB
    assert expected(alike([0.5] * 3), 10 * MB, 1.3) == 5 * MB


@given(
    st.lists(st.tuples(st.integers(SMALLEST, 1 << 34), st.integers(0, 1 << 36)), max_size=REMEMBERED),
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 30),
)
def test_a_larger_model_is_never_expected_to_take_less(seen, on_disk, more):
    """Whatever was seen."""
    models = [Seen(*one) for one in seen]

    assert expected(models, on_disk + more, 1.3) >= expected(models, on_disk, 1.3)
