"""Footprints and devices: the values that handlers and the cache share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.base import CPU, Device, Footprint, total

sizes = st.integers(0, 1 << 50)
footprints = st.builds(Footprint, sizes, st.lists(sizes, max_size=3).map(tuple))


@pytest.mark.parametrize(
    ("need", "room", "fits"),
    [
        (Footprint(1, (1,)), Footprint(1, (1,)), True),
        (Footprint(2, ()), Footprint(1, (9,)), False),
        (Footprint(0, (2,)), Footprint(9, (1,)), False),
        (Footprint(), Footprint(), True),
        (Footprint(), Footprint(-1, (-1,)), True),
        (Footprint(1, (0, 2)), Footprint(1, (-5, 2)), True),
        (Footprint(1, (0, 2)), Footprint(1, (9, 1)), False),
        (Footprint(1, (2,)), Footprint(1, (-5,)), False),
        (Footprint(1, (0, 2)), Footprint(1, (9,)), False),
    ],
    ids=str,
)
def test_a_footprint_fits_in_each_memory_that_it_takes_any_of(need, room, fits):
    """Room on the host, or on another GPU, is no use; where it takes nothing, there may be less than none."""
    assert need.fits(room) is fits


@settings(deadline=None)
@given(footprints, footprints)
def test_sum_and_difference_undo_each_other(one, other):
    """Bytes that were added and taken away again leave no trace."""
    assert one + other - other == one
    assert one + other == other + one
    assert one + Footprint() == one
    assert one.fits(one + other)


@settings(deadline=None)
@given(footprints, footprints)
def test_what_lies_beyond_makes_up_the_difference(one, other):
    """`beyond` is what is missing of one in the other, kind by kind, never less than nothing."""
    beyond = one.beyond(other)

    assert one.fits(other + beyond)
    assert Footprint().fits(beyond)
    assert (beyond == Footprint()) == one.fits(other)


@settings(deadline=None)
@given(st.lists(footprints, max_size=5), footprints)
def test_a_total_is_the_sum(several, first):
    """Memory by memory, whichever of them have any."""
    assert total(several, first) == sum(several, first)
    assert total(several).device == sum(one.device for one in several)


def test_footprints_are_compared_memory_by_memory():
    """What is the most of both, what of one is within the other, and what is left on some GPUs."""
    one, other = Footprint(5, (1, 0, 7)), Footprint(3, (2, 9))

    assert one.most(other) == Footprint(5, (2, 9, 7))
    assert one.within(other) == Footprint(3, (1,))
    assert one.on({2}) == Footprint(5, (0, 0, 7))
    assert one.on(()) == Footprint(5, (0, 0)) == Footprint(5)


def test_a_factor_scales_both_kinds():
    """Estimates are whole bytes."""
    assert Footprint(3, (10,)).scaled(1.5) == Footprint(4, (15,))
    assert Footprint(3, (10,)).scaled(0) == Footprint()


def test_a_device_is_called_what_people_call_it():
    """Its name goes into messages."""
    assert str(CPU) == "cpu"
    assert str(Device("gpu", 1)) == "gpu:1"
    assert Device("gpu", 1) == Device("gpu", 1) != Device("gpu", 0)
