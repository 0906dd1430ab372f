"""How long a model is left alone that keeps failing to load: a table."""

import pytest

from serve.cache.load import retry_pause


@pytest.mark.parametrize(
    ("failures", "seconds", "expected"),
    [
        (0, 9, 0),
        (1, 9, 0),
        (2, 0.01, 1),
        (3, 0.01, 2),
        (6, 0.01, 16),
        (7, 0.01, 30),
        (10**6, 0, 30),
        (2, 9, 9),
        (2, 99, 30),
    ],
)
def test_it_is_longer_each_time_and_as_long_as_the_load(failures, seconds, expected):
    """Never after one failure; a second, twice that, at most half a minute; no less than the load itself took."""
    assert retry_pause(failures, seconds) == expected
