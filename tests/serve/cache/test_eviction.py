"""Whom to evict: rule by rule, and any residents against what must always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.base import Footprint
from serve.cache import eviction
from serve.cache.eviction import FOR_EVER, Candidate, Plan, Policy, Rules, worth
from tests.serve.cache.listed import Listed, bytes_of

NOTHING = Footprint()


def host(name, size, used, **state):
    """A resident of so many bytes on the host."""
    return Candidate(name, Footprint(size), used, **state)


def plan(residents, reserved, need, budget, policy=Policy.LRU, now=0.0):
    """The plan for a list of residents."""
    return eviction.plan(Listed(lambda: residents, budget, policy), reserved, need, budget, policy, now)


def relief(residents, need, budget, policy=Policy.LRU):
    """Who leaves of a list of residents, whatever is free."""
    return eviction.relief(Listed(lambda: residents, budget, policy), need, budget, policy)


def evict(*residents, need, budget=100, reserved=0, policy=Policy.LRU, now=0.0):
    """The plan for so many bytes on the host."""
    return plan(residents, Footprint(reserved), Footprint(need), Footprint(budget), policy, now)


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


def test_what_an_heir_takes_over_is_not_freed():
    """Who is charged for what others map as well makes room for no more than its own; all of them together do."""
    first = host("first", 60, 1, shared={"w": 50}, charged=50)
    other = host("other", 30, 2)
    heir = host("heir", 10, 3, shared={"w": 50})

    assert evict(first, heir, other, need=30).victims == ("other",)
    assert evict(first, heir, other, need=60).victims == ("first", "heir")
    pinned = host("heir", 10, 2, shared={"w": 50}, keep_until=FOR_EVER)
    assert evict(first, pinned, need=50) == Plan((), fits=False, possible=False)
    leased = host("heir", 10, 2, shared={"w": 50}, leased=True)
    assert evict(first, leased, need=50) == Plan((), fits=False, possible=True)


def test_who_is_charged_for_all_is_worth_no_less_than_the_others():
    """GreedyDual-Size-Frequency takes what several share for each one's in part."""
    state = {"uses": 5, "reload_seconds": 1.0}
    first = host("first", 60, 2, shared={"w": 50}, charged=50, part=25, **state)
    heir = host("heir", 10, 3, shared={"w": 50}, part=25, **state)
    alone = host("alone", 35, 1, **state)

    assert worth(first, Footprint(100)) == worth(heir, Footprint(100)) == worth(alone, Footprint(100))


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
        Candidate("on the host", Footprint(40, ()), 1),
        Candidate("on the device", Footprint(10, (60,)), 2),
        Candidate("on both", Footprint(20, (30,)), 3),
    ]
    budget = Footprint(100, (100,))

    assert plan(residents, NOTHING, Footprint(10, (50,)), budget).victims == ("on the device",)
    assert plan(residents, NOTHING, Footprint(60, (10,)), budget).victims == ("on the host",)
    assert plan(residents, NOTHING, Footprint(1, (101,)), budget) == Plan((), fits=False, possible=False)


def test_a_full_budget_is_still_possible():
    """A model of exactly the budget fits into an empty one."""
    assert evict(host("a", 1, 1), need=100) == Plan(("a",), fits=True, possible=True)


def test_over_budget_whoever_needs_any_makes_room():
    """When models measured more than was estimated, a small one that comes makes room for that as well."""
    assert evict(host("a", 70, 1), host("b", 60, 2), need=1).victims == ("a",)
    assert evict(host("a", 70, 1), host("b", 60, 2), need=0) == Plan((), fits=True, possible=True)


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [(Policy.LRU, ("cheap", "dear", "hot", "large")), (Policy.LFU, ("cheap", "large", "dear", "hot"))],
    ids=["lru", "lfu"],
)
def test_use_decides(policy, order):
    """LRU goes by the last use alone; LFU by the number of uses, and among equals by the last."""
    residents = [
        host("large", 40, 4, uses=1, reload_seconds=9.0),
        host("hot", 20, 3, uses=8, reload_seconds=1.0),
        host("dear", 20, 2, uses=2, reload_seconds=9.0),
        host("cheap", 20, 1, uses=1, reload_seconds=0.1),
    ]

    assert evict(*residents, need=100, policy=policy).victims == order


@pytest.mark.parametrize(
    "better",
    [{"uses": 3}, {"reload_seconds": 3.0}, {"footprint": Footprint(45)}, {"age": 11.0}, {"last_used": 2.0}],
    ids=["used more", "dearer to reload", "smaller", "used later in the age", "used later"],
)
def test_each_thing_that_makes_a_model_precious_to_gdsf(better):
    """Of two models that differ in one thing, the one that is worth less goes, whichever is named first."""
    base = {"name": "base", "footprint": Footprint(50), "last_used": 1.0, "uses": 2, "reload_seconds": 2.0, "age": 1.0}
    worse, dearer = Candidate(**base), Candidate(**{**base, "name": "better", **better})

    for residents in ([worse, dearer], [dearer, worse]):
        assert evict(*residents, need=50, policy=Policy.GDSF).victims == ("base",)


def test_the_age_is_what_the_dearest_victim_was_worth():
    """A plan under GDSF tells the age after it; other policies, and plans that need no victim, know none."""
    residents = [
        host("a", 50, 1, uses=2, reload_seconds=3.0, age=1.5),
        host("b", 50, 2, uses=1, reload_seconds=1.0, age=2.5),
    ]

    assert [worth(resident, Footprint(100)) for resident in residents] == [1.5 + 2 * 3.0 / 0.5, 2.5 + 1 * 1.0 / 0.5]
    assert evict(*residents, need=50, policy=Policy.GDSF) == Plan(("b",), fits=True, possible=True, age=4.5)
    assert evict(*residents, need=60, policy=Policy.GDSF).age == 13.5
    assert evict(*residents, need=0, policy=Policy.GDSF).age == 0.0
    assert evict(*residents, need=50, policy=Policy.LFU).age == 0.0


def test_bytes_of_a_device_count_by_their_share_of_its_memory():
    """Half of a small GPU weighs as much as half of a large host; a model that takes nothing is never worth going."""
    budget = Footprint(1000, (10,))
    on_host, on_device = (
        Candidate("h", Footprint(500, ()), 1.0, 1, 1.0),
        Candidate("d", Footprint(0, (5,)), 1.0, 1, 1.0),
    )

    assert worth(on_host, budget) == worth(on_device, budget) == 2.0
    assert worth(Candidate("both", Footprint(500, (5,)), 1.0, 1, 1.0), budget) == 1.0
    assert worth(Candidate("empty", Footprint(), 1.0, 1, 1.0), budget) == FOR_EVER
    assert worth(Candidate("no GPU", Footprint(500), 1.0, 1, 1.0), Footprint(1000)) == 2.0


# -- those who stay ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
def test_a_pinned_model_stays(policy):
    """Whoever is pinned is no victim, though it be the first in every order."""
    residents = [host("pinned", 40, 1, keep_until=FOR_EVER), host("b", 40, 2, uses=9, reload_seconds=9.0)]

    assert evict(*residents, need=60, policy=policy).victims == ("b",)


def test_what_does_not_fit_beside_the_pinned_can_never_fit():
    """No victim is taken, and no wait is worth it, when pinned models alone leave too little; leases only delay."""
    pinned = host("pinned", 50, 1, keep_until=FOR_EVER, leased=True)
    other = host("b", 30, 2)

    assert evict(pinned, other, need=51) == Plan((), fits=False, possible=False)
    assert evict(pinned, other, need=50).victims == ("b",)
    assert evict(pinned, host("b", 30, 2, leased=True), need=50) == Plan((), fits=False, possible=True)
    leaving = host("pinned", 50, 1, keep_until=FOR_EVER, leaving=True)  # somebody unloads it
    assert evict(leaving, other, need=70).fits


def test_a_model_stays_for_its_time():
    """Before its time is over a model is no victim; the plan says when to ask again; then it is one."""
    residents = [host("new", 60, 1, keep_until=10.0), host("newer", 20, 2, keep_until=20.0), host("old", 20, 3)]

    assert evict(*residents, need=20, now=5.0).victims == ("old",)
    assert evict(*residents, need=21, now=5.0) == Plan((), fits=False, possible=True, again_at=10.0)
    assert evict(*residents, need=21, now=10.0).victims == ("new",)
    assert evict(*residents, need=81, now=10.0) == Plan((), fits=False, possible=True, again_at=20.0)


@pytest.mark.parametrize(
    ("need", "names", "fits"),
    [(0, (), True), (10, ("a",), True), (15, ("b",), True), (35, ("b", "d"), True), (51, ("a", "b", "d"), False)],
    ids=["nothing", "the first", "one that suffices", "two, the first spared", "all, though too few"],
)
def test_relief_counts_what_comes_back_and_not_what_is_free(need, names, fits):
    """Though half of the budget is free, victims hold the bytes together; if all who may go hold less, they all go."""
    residents = [
        host("a", 10, 1),
        host("b", 20, 2),
        host("c", 5, 3, leased=True),
        host("d", 20, 4, uses=1, reload_seconds=1.0),
        host("pinned", 5, 5, keep_until=FOR_EVER),
        host("leaving", 30, 0, leaving=True),
    ]

    made = relief(residents, Footprint(need), Footprint(200))

    assert (made.victims, made.fits) == (names, fits)
    assert relief(residents, Footprint(need), Footprint(200), Policy.GDSF).age == (10.0 if "d" in names else 0.0)


@pytest.mark.parametrize("policy", Policy)
def test_one_goes_whatever_it_holds(policy):
    """Where it is no memory that is short: a model that takes none of the host leaves the disk as well as any."""
    on_gpu = [Candidate(name, Footprint(0, (30,)), used) for name, used in (("b", 2), ("a", 1))]

    assert relief(on_gpu, None, BUDGET, policy) == Plan(("a",), fits=True, possible=True)
    assert relief([host("pinned", 5, 1, keep_until=FOR_EVER)], None, BUDGET, policy) == Plan((), False, True)


def test_each_gpu_is_relieved_of_what_it_can_give():
    """Where those on one hold less than is needed there, all of them go, and on another no more than it takes."""
    residents = [
        Candidate("none", Footprint(50), 1),
        Candidate("a", Footprint(1, (30,)), 2),
        Candidate("b", Footprint(1, (0, 30)), 3),
        Candidate("c", Footprint(1, (0, 30)), 4),
    ]

    assert relief(residents, Footprint(0, (40, 40)), BUDGET).victims == ("a", "b", "c")
    assert relief(residents, Footprint(0, (40, 20)), BUDGET).victims == ("a", "b")
    assert relief(residents, Footprint(0, (0, 20)), BUDGET) == Plan(("b",), fits=True, possible=True)


@pytest.mark.parametrize(
    ("pins", "pinned"),
    [
        ((), ""),
        (("bert",), "bert"),
        (("bert", "gpt"), "bert gpt"),
        (("bert*",), "bert bert-0.tar.gz"),
        (("*",), "bert bert-0.tar.gz tenant/a gpt"),
        (("tenant/*",), "tenant/a"),
        (("[bg]*t",), "bert gpt"),
        (("BERT",), ""),
    ],
)
def test_pins_are_names_or_patterns(pins, pinned):
    """A pin is the whole name, or a pattern of it; letter case counts."""
    names = ("bert", "bert-0.tar.gz", "tenant/a", "gpt")

    assert [name for name in names if Rules(pins=pins).pins_name(name)] == pinned.split()


# -- whatever is there -----------------------------------------------------------------------------------------------


def sharing(name, before, own, used, uses, seconds, keep, leased, left, pieces):
    """A resident that is charged for what none of those `before` it maps; each piece is called by its size."""
    charged = sum(piece for piece in pieces if not any(piece in row[-1] for row in before))
    state = {"age": used / 2, "keep_until": keep, "leased": leased, "leaving": left}
    shared = {piece: piece for piece in pieces}
    return Candidate(name, own + Footprint(charged), used, uses, seconds, **state, shared=shared, charged=charged)


on_gpus = st.sampled_from([(), (), (20,), (50,), (0, 20), (0, 50), (20, 20)])
footprints = st.builds(Footprint, st.integers(0, 60), on_gpus)
needs = st.builds(Footprint, st.integers(0, 120), st.tuples(st.integers(0, 90), st.integers(0, 50)))
crowds = st.lists(
    st.tuples(
        footprints,
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from([0.1, 2.0]),
        st.sampled_from([0.0, 0.0, 3.0, 9.0, FOR_EVER]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([(), (), (), (5,), (20,), (40,), (5, 20), (20, 40)]),
    ),
    max_size=8,
).map(lambda rows: [sharing(f"m{index}", rows[:index], *row) for index, row in enumerate(rows)])
BUDGET = Footprint(100, (80, 40))
NOW = 3.0
ORDERS = {
    Policy.LRU: lambda resident: resident.last_used,
    Policy.LFU: lambda resident: (resident.uses, resident.last_used),
    Policy.GDSF: lambda resident: (worth(resident, BUDGET), resident.last_used),
}


def without(residents, gone):
    """The bytes of those that are left."""
    return bytes_of(resident for resident in residents if resident not in gone)


@given(crowds, footprints, needs, st.sampled_from(list(Policy)))
def test_a_plan_is_enough_and_not_more(residents, reserved, need, policy):
    """Victims are those who may go, in the policy's order, enough, each of them needed; and none if it is in vain."""
    result = plan(residents, reserved, need, BUDGET, policy, NOW)
    by_name = {resident.name: resident for resident in residents}
    victims = [by_name[name] for name in result.victims]
    staying = [resident for resident in residents if not resident.leaving]
    may_go = [resident for resident in staying if not resident.leased and resident.keep_until <= NOW]
    order = ORDERS[policy]

    assert len(set(result.victims)) == len(victims)
    assert all(victim in may_go for victim in victims)
    assert [order(victim) for victim in victims] == sorted(order(victim) for victim in victims)
    assert result.possible == need.fits(BUDGET - bytes_of(r for r in staying if r.keep_until == FOR_EVER))
    assert result.fits == (result.possible and need.fits(BUDGET - reserved - without(staying, may_go)))
    if not result.fits:
        assert victims == []
        return
    assert result.again_at == 0.0
    assert need.fits(BUDGET - reserved - without(staying, victims))
    for spared in victims:
        assert not need.fits(BUDGET - reserved - without(staying, [one for one in victims if one is not spared]))
    # Nobody is evicted before those in front of it had been tried: all of them would not do.
    if victims:
        last = max(order(victim) for victim in victims)
        assert not need.fits(BUDGET - reserved - without(staying, [r for r in may_go if order(r) < last]))
