"""Footprints and devices: the values that handlers and the cache share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.base import CPU, Device, Footprint

sizes = st.integers(0, 1 << 50)
footprints = st.builds(Footprint, sizes, sizes)


@pytest.mark.parametrize(
    ("need", "room", "fits"),
    [
        (Footprint(1, 1), Footprint(1, 1), True),
        (Footprint(2, 0), Footprint(1, 9), False),
        (Footprint(0, 2), Footprint(9, 1), False),
        (Footprint(), Footprint(), True),
        (Footprint(), Footprint(-1, 0), False),
    ],
    ids=str,
)
def test_a_footprint_fits_in_both_kinds_of_memory(need, room, fits):
    """Room on the host is no use to what needs the device, and the other way round."""
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


def test_a_factor_scales_both_kinds():
    """Estimates are whole bytes."""
    assert Footprint(3, 10).scaled(1.5) == Footprint(4, 15)
    assert Footprint(3, 10).scaled(0) == Footprint()


def test_a_device_is_called_what_people_call_it():
    """Its name goes into messages."""
    assert str(CPU) == "cpu"
    assert str(Device("gpu", 1)) == "gpu:1"
    assert Device("gpu", 1) == Device("gpu", 1) != Device("gpu", 0)
