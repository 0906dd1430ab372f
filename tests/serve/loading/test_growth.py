"""What executions took counts once two looks have seen it, and is charged by the bytes of their inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.loading.measuring import Growth


def looked(*looks):
    """Growth after these looks: bytes beyond what is known, and the inputs of late."""
    growth = Growth()
    for beyond, inputs in looks:
        growth.look(beyond, inputs)
    return growth


@pytest.mark.parametrize(
    ("seen", "counted"),
    [
        ((100,), 0),
        ((100, 100), 100),
        ((100, 60), 60),
        ((60, 100), 60),
        ((100, -5), 0),
        ((100, 100, 0), 0),
        ((100, 0, 100), 0),
        ((100, 150, 170), 150),
    ],
)
def test_growth_counts_once_two_looks_in_a_row_have_seen_it(seen, counted):
    """And what the last one has not seen counts no more."""
    assert looked(*((beyond, {}) for beyond in seen)).counted == counted


def test_growth_is_charged_by_input_bytes():
    """The rest of a division is nobody's."""
    growth = looked((100, {}), (100, {"a": 1, "b": 2}))
    assert growth.charged == {"a": 33, "b": 66}
    assert growth.uncharged == 1


def test_growth_that_nothing_executed_for_is_nobodys_until_something_does():
    """It counts all the same."""
    growth = looked((100, {}), (100, {}))
    assert (growth.counted, growth.uncharged) == (100, 100)
    growth.look(100, {"a": 7})
    assert growth.charged == {"a": 100}


def test_what_goes_is_taken_off_all_who_are_charged():
    """In proportion."""
    growth = looked((100, {}), (100, {"a": 1, "b": 3}), (40, {"b": 9}))
    assert growth.charged == {"a": 10, "b": 30}


def test_what_a_model_leaves_behind_is_nobodys():
    """Until others execute, who are charged for it then, or it goes."""
    growth = looked((100, {}), (100, {"a": 1, "b": 3}))
    growth.keep("a".__eq__)
    assert growth.charged == {"a": 25}
    assert growth.uncharged == 75
    growth.look(25, {})
    assert (growth.charged, growth.uncharged) == ({"a": 25}, 0)


def test_growth_is_pending_while_a_look_saw_more_than_counts():
    """So that the next look is soon."""
    assert looked((100, {})).pending
    assert not looked((100, {}), (100, {})).pending


@given(st.lists(st.tuples(st.integers(-10, 1000), st.dictionaries(st.sampled_from("abc"), st.integers(1, 99)))))
def test_no_look_charges_more_than_counts(looks):
    """Nor less than nothing."""
    growth = Growth()
    for beyond, inputs in looks:
        growth.look(beyond, inputs)
        assert growth.uncharged >= 0
        assert min(growth.charged.values(), default=0) >= 0
        assert growth.counted <= max(beyond, 0)
