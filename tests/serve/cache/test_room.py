"""The memory budget promises no byte twice, evicts nobody in vain, and gives back what was not used."""

import asyncio
import time
from dataclasses import replace

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from serve.cache.eviction import FOR_EVER, Candidate, Policy
from serve.cache.room import Room, megabytes
from tests.serve.cache.listed import Listed


def mb(number, device=0):
    """A footprint in megabytes."""
    return Footprint(number * 10**6, (device * 10**6,))


class House:
    """A room of 100 MB with residents of given sizes, least recently used first.

    Attributes:
        evicted: (victim, beneficiary), in order. Their bytes come back when the test says `gone`.
        reasons: why each plan was carried out.
    """

    def __init__(self, *sizes, evicts=True, patience=60.0, budget=None, policy=Policy.LRU):
        self.residents = {
            f"r{index}": Candidate(f"r{index}", mb(size), float(index)) for index, size in enumerate(sizes)
        }
        self.evicted = []
        self.reasons = []
        self.told = asyncio.Event()
        self.listed = Listed(self.residents.values, budget or mb(100), policy)
        self.room = Room(
            budget or mb(100),
            self.listed,
            self._evict,
            policy=policy,
            evicts=evicts,
            patience=patience,
        )

    def _evict(self, plan, beneficiary, reason):
        self.reasons.append(reason)
        self.told.set()
        for name in plan.victims:
            self.evicted.append((name, beneficiary))
            self.change(name, leaving=True)

    def change(self, name, **facts):
        """Another state of a resident."""
        self.residents[name] = replace(self.residents[name], **facts)

    def gone(self, name):
        """A resident's memory was given back."""
        del self.residents[name]
        self.room.settle()

    def moves_in(self, name, footprint, reserved, **facts):
        """A load is committed: the resident's bytes in place of the reservation."""
        self.residents[name] = Candidate(name, footprint, 100.0, **facts)
        self.room.give_back(reserved)
        self.room.settle()


async def claim(house, name, need, idle):
    """A load that reserves, as far as it gets without anybody's doing."""
    task = asyncio.create_task(house.room.reserve(name, need))
    await idle()
    return task


def failure(task):
    """The kind of error that a claim ended with."""
    assert isinstance(task.exception(), MmeError)
    return task.exception().kind


async def test_what_fits_is_promised_at_once(idle):
    """Free bytes are reserved without evicting anybody, and count as used from then on."""
    house = House(30)
    task = await claim(house, "new", mb(70), idle)
    assert (task.result(), house.evicted) == ([], [])
    assert house.room.used() == mb(100)
    house.room.give_back(mb(70))
    assert house.room.used() == mb(30)


async def test_what_fits_looks_at_no_resident():
    """However many there are, bytes that are free are promised, extended and spared by totals alone."""
    house = House(*[1] * 30)
    await house.room.reserve("new", mb(20))
    await house.room.extend("new", mb(20), mb(30))
    assert house.room.spare(mb(10))
    house.room.regain("r0")
    assert (house.room.used(), house.listed.looks) == (mb(70), 0)


async def test_nothing_needs_no_room():
    """A claim of zero bytes is granted though everything is taken."""
    assert await House(100).room.reserve("new", Footprint()) == []


async def test_the_least_recently_used_goes_and_is_named(idle):
    """A claim waits for its victim's bytes, and returns who went for it."""
    house = House(50, 50)
    task = await claim(house, "new", mb(40), idle)
    assert house.evicted == [("r0", "new")]
    assert not task.done()
    house.gone("r0")
    assert await task == ["r0"]
    assert house.room.used() == mb(90)


@pytest.mark.parametrize("evicts", [True, False])
async def test_what_can_not_fit_beside_pinned_models_is_out_of_memory_at_once(idle, evicts):
    """Nobody waits for a pinned model: the sentence says how much is pinned, and nobody else goes for nothing."""
    house = House(50, 30, evicts=evicts)
    house.change("r0", keep_until=FOR_EVER)
    task = await claim(house, "new", mb(51), idle)
    assert failure(task) is Kind.OUT_OF_MEMORY
    assert ("50.0 MB of 100.0 MB are taken by 1 pinned models" in str(task.exception())) == evicts
    assert house.evicted == []
    assert await claim(house, "small", mb(20), idle)


async def test_a_correction_that_finds_the_rest_pinned_begins_again_and_is_out_of_memory(idle):
    """What a loaded model needs more than was promised, and pinned models hold, is not to be had at any time."""
    house = House(60)
    house.change("r0", keep_until=FOR_EVER)
    await house.room.reserve("grown", mb(30))
    assert await house.room.extend("grown", mb(30), mb(50)) is None
    house.room.give_back(mb(30))
    assert failure(await claim(house, "grown", mb(50), idle)) is Kind.OUT_OF_MEMORY


async def test_a_claim_goes_on_when_a_model_has_stayed_for_its_time(idle):
    """Without a lease ending or anything else happening, a victim goes as soon as it may."""
    house = House(60, 40)
    now = time.monotonic()
    house.change("r0", keep_until=now + 0.02)
    house.change("r1", keep_until=now + 3600)
    task = await claim(house, "new", mb(60), idle)
    assert house.evicted == []
    await house.told.wait()
    assert time.monotonic() >= now + 0.02
    assert house.evicted == [("r0", "new")]
    house.gone("r0")
    assert await task == ["r0"]


async def test_patience_with_models_that_must_stay_ends(idle):
    """A claim that only models could make room for which must stay for longer is UNAVAILABLE, and says why."""
    house = House(60, patience=0.005)
    house.change("r0", keep_until=time.monotonic() + 3600)
    task = await claim(house, "new", mb(60), idle)
    with pytest.raises(MmeError, match="too recently to leave"):
        await task
    assert failure(task) is Kind.UNAVAILABLE


@pytest.mark.parametrize("number", [10, 50])
async def test_leases_that_end_are_looked_at_when_they_can_be_enough(idle, number):
    """Who waits for the bytes of five is not looked at for one, nor for one that may not leave, however often."""
    house = House(*[100 // number] * number)
    for name in house.residents:
        house.change(name, leased=True)
    task = await claim(house, "new", mb(100 * 5 // number), idle)
    looks = house.listed.looks
    for _ in range(4):
        house.room.lease_ended(mb(100 // number))
        house.room.lease_ended(Footprint())
    assert house.listed.looks == looks
    for name in ("r1", "r2", "r3", "r4", "r5"):
        house.change(name, leased=False)
    house.room.lease_ended(mb(100 // number))
    await house.told.wait()
    assert (house.listed.looks, len(house.evicted)) == (looks + 1, 5)
    for name in ("r1", "r2", "r3", "r4", "r5"):
        house.gone(name)
    assert await task == ["r1", "r2", "r3", "r4", "r5"]


@pytest.mark.parametrize(("evicts", "expected"), [(True, ("r0", "r1")), (False, ())])
async def test_relief_puts_out_as_much_as_was_asked_for_whatever_is_free(evicts, expected):
    """A model that is short of memory which no budget counts has others leave, where anybody may be put out."""
    house = House(10, 10, 10, evicts=evicts)
    assert house.room.relieve("short", mb(15), "execution") == expected
    assert house.evicted == [(name, "short") for name in expected]
    assert house.reasons == ["execution"] * bool(expected)
    assert house.room.relieve("short", mb(15), "execution") == (("r2",) if evicts else ())
    assert house.room.relieve("short", mb(15), "execution") == ()


async def test_the_policy_decides_and_the_reason_is_told(idle):
    """A room evicts by its policy; a load's claim and a correction have reasons of their own."""
    house = House(50, 40, policy=Policy.LFU)
    house.change("r0", uses=5)
    task = await claim(house, "new", mb(50), idle)
    assert (house.evicted, house.reasons) == ([("r1", "new")], ["load"])
    house.gone("r1")
    await task
    more = asyncio.create_task(house.room.extend("new", mb(50), mb(60)))
    await idle()
    assert (house.evicted[1:], house.reasons) == ([("r0", "new")], ["load", "growth"])
    house.gone("r0")
    assert await more == ["r0"]


@pytest.mark.parametrize(
    ("sizes", "evicts", "expected"),
    [
        ([40, 30, 30], True, []),
        ([40, 30, 50], True, ["r0"]),
        ([10, 30, 80], True, ["r1"]),
        ([30, 30, 95], True, ["r0", "r1"]),
        ([30, 30, 101], True, []),
        ([40, 30, 50], False, []),
    ],
)
async def test_who_grew_in_memory_stays_and_others_leave_if_that_is_enough(sizes, evicts, expected):
    """As many as it takes, least recently used first; nobody in vain, and nobody where the platform decides."""
    house = House(*sizes, evicts=evicts)
    house.room.regain("r2")
    assert [victim for victim, _ in house.evicted] == expected
    assert set(house.reasons) <= {"growth"}
    house.room.regain("r2")  # those bytes are on their way
    assert [victim for victim, _ in house.evicted] == expected


async def test_others_leave_for_what_is_charged_to_none():
    """As what a model grew by that is gone: as many as it takes, or nobody."""
    house = House(30, 30, 30)
    house.room.grown = mb(30)
    house.room.regain("")
    assert (house.evicted, house.reasons) == ([("r0", "")], ["growth"])
    house.room.grown = mb(101)
    house.room.regain("")
    assert house.evicted == [("r0", "")]


@pytest.mark.parametrize("evicts", [True, False])
async def test_what_can_never_fit_is_out_of_memory_and_costs_nobody(idle, evicts):
    """More than the whole budget is refused at once, with nobody evicted and nothing reserved."""
    house = House(50, 50, evicts=evicts)
    task = await claim(house, "huge", mb(101), idle)
    assert failure(task) is Kind.OUT_OF_MEMORY
    assert "needs 101.0 MB, more than the whole memory budget of 100.0 MB" in str(task.exception())
    assert (house.evicted, house.room.reserved) == ([], Footprint())


@pytest.mark.parametrize(
    ("need", "setting"),
    [
        (mb(101), "MME_MEMORY_BUDGET"),
        (mb(1, 51), "MME_GPU_MEMORY_BUDGET"),
        (mb(101, 51), "MME_MEMORY_BUDGET"),
    ],
    ids=["host", "GPU", "both"],
)
async def test_the_setting_is_named_that_gives_more(idle, need, setting):
    """Of the GPUs where it is their memory that does not do, also beside a pinned model."""
    house = House(budget=mb(100, 50))
    assert f"raise {setting} or serve" in str((await claim(house, "huge", need, idle)).exception())
    house.moves_in("pinned", mb(99, 49), Footprint(), keep_until=FOR_EVER)
    part = Footprint(min(need.host, mb(2).host), (min(need.device, mb(2).host),))
    assert f"(MME_PIN), or raise {setting}" in str((await claim(house, "part", part, idle)).exception())


async def test_a_correction_is_judged_by_the_whole_model():
    """A small part of a model that as a whole exceeds the budget is out of memory."""
    house = House()
    with pytest.raises(MmeError) as caught:
        await house.room.extend("grown", mb(100), mb(101))
    assert caught.value.kind is Kind.OUT_OF_MEMORY


async def test_an_extension_does_not_wait_for_models_in_use():
    """Who holds memory and needs more is told at once that it is not to be had; what could be evicted is."""
    house = House()
    await house.room.reserve("loading", mb(50))
    await house.room.reserve("grown", mb(45))
    assert await house.room.extend("grown", mb(45), mb(50)) == []
    assert await house.room.extend("grown", mb(50), mb(51)) is None
    assert house.room.reserved == mb(100)


async def test_who_grew_on_one_gpu_moves_nobody_from_another():
    """Only who holds memory of the GPU that is overdrawn leaves for it."""
    house = House(1, 1, 1, budget=Footprint(100, (50, 50)))
    for name, on in (("r0", (40,)), ("r1", (0, 20)), ("r2", (20, 40))):
        house.change(name, footprint=Footprint(1, on))
    house.room.regain("r1")
    assert house.evicted == [("r2", "r1")]
    assert house.room.spare(Footprint(1, (0, 50))) is False
    house.gone("r2")
    house.room.regain("r1")
    assert house.evicted == [("r2", "r1")]
    assert house.room.spare(Footprint(1, (10, 30)))


async def test_device_memory_has_a_budget_of_its_own(idle):
    """A model that fits the host but not the devices is out of memory, and both are named."""
    house = House(budget=mb(100, 10))
    task = await claim(house, "gpu", mb(1, 11), idle)
    assert failure(task) is Kind.OUT_OF_MEMORY
    assert (
        "needs 1.0 MB and 11.0 MB on GPU 0, more than the whole memory budget of 100.0 MB and 10.0 MB on GPU 0"
        in str(task.exception())
    )
    assert (await claim(house, "gpu", mb(1, 10), idle)).result() == []


async def test_platform_mode_evicts_nobody(idle):
    """Where the platform chooses, a full room is out of memory at once and says what is taken."""
    house = House(50, 50, evicts=False)
    task = await claim(house, "new", mb(40), idle)
    assert failure(task) is Kind.OUT_OF_MEMORY
    assert "needs 40.0 MB, but 100.0 MB of 100.0 MB are taken" in str(task.exception())
    assert house.evicted == []


async def test_platform_mode_waits_for_bytes_that_are_on_their_way(idle):
    """A model being unloaded makes room without anybody's doing, and the next load waits for that."""
    house = House(100, evicts=False)
    house.change("r0", leaving=True)
    task = await claim(house, "new", mb(40), idle)
    assert not task.done()
    house.gone("r0")
    assert await task == []


async def test_a_claim_waits_for_leased_models_and_is_granted_when_the_last_lease_ends(idle):
    """Nobody who is in use is evicted; the moment that a lease ends, somebody can be."""
    house = House(100)
    house.change("r0", leased=True)
    task = await claim(house, "new", mb(40), idle)
    assert (task.done(), house.evicted) == (False, [])
    house.change("r0", leased=False)
    house.room.settle()
    assert house.evicted == [("r0", "new")]
    house.gone("r0")
    assert await task == ["r0"]


async def test_patience_ends(idle):
    """A claim that leased models do not make room for in time is UNAVAILABLE, and is no claim any more."""
    house = House(100, patience=0.005)
    house.change("r0", leased=True)
    with pytest.raises(MmeError, match="by models in use; try again") as caught:
        await house.room.reserve("new", mb(40))
    assert caught.value.kind is Kind.UNAVAILABLE
    house.change("r0", leased=False)
    house.room.settle()
    assert (house.evicted, house.room.reserved) == ([], Footprint())


async def test_a_claimant_that_leaves_is_forgotten(idle):
    """A cancelled claim is not granted later, and evicts nobody later."""
    house = House(100)
    house.change("r0", leased=True)
    task = await claim(house, "new", mb(40), idle)
    task.cancel()
    await idle()
    assert task.cancelled()
    house.change("r0", leased=False)
    house.room.settle()
    assert (house.evicted, house.room.reserved) == ([], Footprint())


async def test_bytes_granted_to_a_claimant_that_leaves_at_that_moment_go_to_the_next(idle):
    """Cancelled between grant and return, a claim gives back, and who waits behind it is granted."""
    house = House(100)
    house.change("r0", leased=True)
    first = await claim(house, "first", mb(60), idle)
    second = await claim(house, "second", mb(60), idle)
    del house.residents["r0"]
    house.room.settle()
    assert house.room.reserved == mb(60)
    first.cancel()
    await idle()
    assert first.cancelled()
    assert second.result() == []
    assert house.room.reserved == mb(60)


async def test_claims_are_served_in_their_order(idle):
    """Of two that fit one at a time, the first comes first."""
    house = House(100)
    first = await claim(house, "first", mb(60), idle)
    second = await claim(house, "second", mb(60), idle)
    house.gone("r0")
    await idle()
    assert (first.done(), second.done()) == (True, False)
    house.moves_in("first", mb(60), mb(60))
    await idle()
    assert house.evicted == [("r0", "first"), ("first", "second")]
    house.gone("first")
    assert await second == ["first"]


async def test_a_small_claim_need_not_wait_behind_one_that_waits_for_leases(idle):
    """What fits now is granted, though a larger claim waits for models in use."""
    house = House(60)
    house.change("r0", leased=True)
    large = await claim(house, "large", mb(80), idle)
    small = await claim(house, "small", mb(30), idle)
    assert (large.done(), small.result()) == (False, [])
    large.cancel()
    await idle()


async def test_bytes_freed_for_one_claim_are_not_taken_by_another(idle):
    """Small claims that keep coming do not starve a large one that has evicted for its room already."""
    house = House(50, 50)
    large = await claim(house, "large", mb(100), idle)
    assert house.evicted == [("r0", "large"), ("r1", "large")]
    small = await claim(house, "small", mb(30), idle)
    house.gone("r0")
    await idle()
    assert not small.done()
    house.gone("r1")
    assert await large == ["r0", "r1"]
    assert not small.done()
    house.room.give_back(mb(100))  # it failed to load
    house.room.settle()
    assert await small == []


async def test_who_waits_behind_a_claim_that_is_given_up_gets_its_bytes(idle):
    """Bytes set aside for a claim whose claimant leaves are free for the next at once."""
    house = House(50, 50)
    large = await claim(house, "large", mb(100), idle)
    small = await claim(house, "small", mb(30), idle)
    house.gone("r0")
    large.cancel()
    await idle()
    assert small.result() == []


async def test_a_load_that_is_given_up_need_not_wait_for_room(idle):
    """Cancelling its claim ends its wait, and no other."""
    house = House(100)
    house.change("r0", leased=True)
    task = await claim(house, "new", mb(40), idle)
    other = await claim(house, "other", mb(100), idle)
    task.cancel()
    await idle()
    assert not other.done()
    house.gone("r0")
    assert await other == []
    assert house.room.reserved == mb(100)


async def test_no_more_is_evicted_while_those_who_leave_make_enough_room(idle):
    """Looking at a waiting claim again does not evict for it again."""
    house = House(50, 50)
    task = await claim(house, "new", mb(40), idle)
    for _ in range(3):
        house.room.settle()
    assert house.evicted == [("r0", "new")]
    house.gone("r0")
    await task


def test_people_read_megabytes():
    """Footprints and rooms print as megabytes."""
    assert megabytes(mb(2)) == "2.0 MB"
    assert megabytes(mb(2, 3)) == "2.0 MB and 3.0 MB on GPU 0"
    assert megabytes(Footprint(0, (0, 10**6, 2 * 10**6))) == "0.0 MB and 1.0 MB on GPU 1, 2.0 MB on GPU 2"
    assert repr(House(30).room) == "<Room 30.0 MB of 100.0 MB taken, 0 claims waiting>"


async def test_spare_memory_is_what_nobody_wants(idle):
    """What is free is promised at once; nobody leaves for it, and nobody who waits is overtaken."""
    house = House(60)
    assert not house.room.spare(mb(41))
    assert house.room.spare(mb(15))
    assert house.room.reserved == mb(15)
    house.change("r0", leased=True)
    waiting = await claim(house, "new", mb(30), idle)
    assert not house.room.spare(mb(1))
    house.room.give_back(mb(15))
    house.room.settle()
    await waiting
    assert house.room.reserved == mb(30)
    assert house.evicted == []


@pytest.mark.parametrize(
    ("names", "need", "fits"), [(["new"], 70, True), (["new"], 71, False), (["r0", "new"], 100, True)]
)
async def test_models_that_are_used_together_have_to_fit_together(names, need, fits):
    """Beside the pinned ones that are none of them; others in memory may leave."""
    house = House(30, 50)
    house.change("r0", keep_until=FOR_EVER)
    if fits:
        house.room.check_together("e", mb(need), names)
    else:
        with pytest.raises(MmeError, match=r"the models of ensemble 'e' need 71\.0 MB together") as caught:
            house.room.check_together("e", mb(need), names)
        assert caught.value.kind is Kind.OUT_OF_MEMORY
