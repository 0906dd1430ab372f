"""What is expected of a model never seen, by what was seen of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cache.estimates import REMEMBERED, SMALLEST, learned_factor, ratio


@pytest.mark.parametrize(
    ("ratios", "expected"),
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
def test_the_factor_is_what_nine_of_ten_do_not_exceed(ratios, expected):
    """A handler's own idea counts until a few models were seen; after that, those do."""
    assert learned_factor(ratios, 1.5) == expected
    assert learned_factor(ratios[::-1], 1.5) == expected


@given(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=REMEMBERED))
def test_most_models_take_no_more_than_expected(ratios):
    """Whatever was seen, at most a tenth of it exceeds the factor, and the factor is one that was seen."""
    factor = learned_factor(ratios, 1.5)

    assert factor in ratios
    assert sum(ratio > factor for ratio in ratios) <= len(ratios) / 10


def test_small_models_teach_nothing():
    """What a framework takes for itself says nothing about weights."""
    assert ratio(10_000_000, SMALLEST - 1) is None
    assert ratio(10_000_000, 0) is None
    assert ratio(3 * SMALLEST, SMALLEST) == 3.0
