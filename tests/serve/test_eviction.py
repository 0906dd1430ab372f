"""Whom to evict: rule by rule, and any residents against what must always hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.base import Footprint
from serve.eviction import Plan, Resident, plan

NOTHING = Footprint()


def host(name, size, used, **state):
    """A resident of so many bytes on the host."""
    return Resident(name, Footprint(size), used, **state)


def evict(*residents, need, budget=100, reserved=0):
    """The plan for so many bytes on the host."""
    return plan(residents, Footprint(reserved), Footprint(need), Footprint(budget))


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("residents", "need", "expected"),
    [
        ([], 100, Plan((), fits=True, possible=True)),
        ([host("a", 60, 1)], 40, Plan((), fits=True, possible=True)),
        ([host("a", 60, 1)], 41, Plan(("a",), fits=True, possible=True)),
        ([], 101, Plan((), fits=False, possible=False)),
        ([host("a", 60, 1)], 101, Plan((), fits=False, possible=False)),
        ([host("new", 40, 2), host("old", 40, 1)], 40, Plan(("old",), fits=True, possible=True)),
        ([host("new", 40, 2), host("old", 40, 1)], 61, Plan(("old", "new"), fits=True, possible=True)),
        ([host("old", 40, 1, leased=True), host("new", 40, 2)], 40, Plan(("new",), fits=True, possible=True)),
        ([host("a", 60, 1, leased=True)], 50, Plan((), fits=False, possible=True)),
        ([host("a", 60, 1, leased=True), host("b", 30, 2)], 50, Plan((), fits=False, possible=True)),
        ([host("gone", 60, 1, leaving=True), host("a", 30, 2)], 70, Plan((), fits=True, possible=True)),
        ([host("gone", 60, 1, leaving=True), host("a", 30, 2)], 71, Plan(("a",), fits=True, possible=True)),
    ],
    ids=[
        "empty",
        "room",
        "a byte too many",
        "never",
        "never, whoever is there",
        "least recently used",
        "both",
        "leased stays",
        "all leased",
        "not enough unleased",
        "leaving counts as gone",
        "leaving and one more",
    ],
)
def test_the_least_recently_used_make_room(residents, need, expected):
    """Who goes, whether that is enough, and whether it could ever be: a budget of 100 bytes."""
    assert evict(*residents, need=need) == expected


def test_nobody_goes_for_nothing():
    """If even all unleased models together do not make room now, none of them is evicted."""
    residents = [host("a", 30, 1), host("b", 30, 2), host("c", 40, 3, leased=True)]

    assert evict(*residents, need=61) == Plan((), fits=False, possible=True)


def test_a_large_victim_spares_a_small_one():
    """Whoever turns out not to be needed, since a later victim is large enough by itself, stays."""
    residents = [host("small", 10, 1), host("large", 80, 2)]

    assert evict(*residents, need=80).victims == ("large",)


def test_who_was_used_last_is_spared_first():
    """Where either of two could stay, it is the more recently used one."""
    residents = [host("a", 10, 1), host("b", 10, 2), host("large", 75, 3)]

    assert evict(*residents, need=90).victims == ("a", "large")


def test_reserved_bytes_cannot_be_evicted():
    """What was promised to loads under way is not there, and coming back later makes it possible, not fitting."""
    assert evict(host("a", 40, 1), need=40, reserved=30).victims == ("a",)
    assert evict(host("a", 40, 1), need=40, reserved=70) == Plan((), fits=False, possible=True)


def test_both_kinds_of_memory_count():
    """A model needs room on the host and on the device; whoever holds neither kind that is short stays."""
    residents = [
        Resident("on the host", Footprint(40, 0), 1),
        Resident("on the device", Footprint(10, 60), 2),
        Resident("on both", Footprint(20, 30), 3),
    ]
    budget = Footprint(100, 100)

    assert plan(residents, NOTHING, Footprint(10, 50), budget).victims == ("on the device",)
    assert plan(residents, NOTHING, Footprint(60, 10), budget).victims == ("on the host",)
    assert plan(residents, NOTHING, Footprint(1, 101), budget) == Plan((), fits=False, possible=False)


def test_a_full_budget_is_still_possible():
    """A model of exactly the budget fits into an empty one."""
    assert evict(host("a", 1, 1), need=100) == Plan(("a",), fits=True, possible=True)


def test_over_budget_even_nothing_needs_room():
    """When models measured more than was estimated, a small one that comes makes room for that as well."""
    assert evict(host("a", 70, 1), host("b", 60, 2), need=0).victims == ("a",)


# -- whatever is there -----------------------------------------------------------------------------------------------

footprints = st.builds(Footprint, st.integers(0, 60), st.sampled_from([0, 0, 20, 50]))
crowds = st.lists(
    st.tuples(footprints, st.integers(0, 5), st.booleans(), st.booleans()),
    max_size=8,
).map(
    lambda rows: [
        Resident(f"m{index}", footprint, used, leased=leased, leaving=leaving)
        for index, (footprint, used, leased, leaving) in enumerate(rows)
    ]
)
BUDGET = Footprint(100, 80)


def total(residents):
    """Their bytes together."""
    return sum((resident.footprint for resident in residents), NOTHING)


@settings(deadline=None, max_examples=400)
@given(crowds, footprints, st.builds(Footprint, st.integers(0, 120), st.integers(0, 90)))
def test_a_plan_is_enough_and_not_more(residents, reserved, need):
    """Victims are neither leased nor leaving, in order of use, enough, each of them needed; and none if it is in vain."""
    result = plan(residents, reserved, need, BUDGET)
    by_name = {resident.name: resident for resident in residents}
    victims = [by_name[name] for name in result.victims]
    staying = [resident for resident in residents if not resident.leaving]
    free = BUDGET - reserved - total(staying)
    unleased = [resident for resident in staying if not resident.leased]

    assert len(set(result.victims)) == len(victims)
    assert not any(victim.leased or victim.leaving for victim in victims)
    assert [victim.last_used for victim in victims] == sorted(victim.last_used for victim in victims)
    assert result.possible == need.fits(BUDGET)
    assert result.fits == (result.possible and need.fits(free + total(unleased)))
    if not result.fits:
        assert victims == []
        return
    assert need.fits(free + total(victims))
    for victim in victims:
        assert not need.fits(free + total(victims) - victim.footprint)
    # Nobody is evicted before those that were used less recently had been tried: all of them would not do.
    if victims:
        newest = max(victim.last_used for victim in victims)
        assert not need.fits(free + total(r for r in unleased if r.last_used < newest))
