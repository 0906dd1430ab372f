"""What a load may take while it goes on: what is promised to it, and for a moment twice that of what is really free."""

import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.worker import limits
from model_handlers.worker.limits import LoadQuota, ReservationExceededError, allowed, allowing


class Room:
    """Promises what it is asked for and some headroom, up to a budget. `asked` is what it was asked for."""

    def __init__(self, budget, headroom=0):
        self.budget = budget
        self.headroom = headroom
        self.asked = []

    def more(self, need, look):
        """See `LoadQuota`."""
        self.asked.append(need)
        look()
        if need > self.budget:
            raise ReservationExceededError("model 'm' needs too much", need, final=True)
        return min(need + self.headroom, self.budget)


@pytest.fixture
def machine(monkeypatch):
    """A machine of 1,000 bytes, of which so many are free."""
    monkeypatch.setattr(limits, "_OTHERS_LEAST", 0)

    def machine(free):
        monkeypatch.setattr(limits.memory, "host_memory", lambda: 1000)
        monkeypatch.setattr(limits.memory, "free_memory", lambda: free)

    return machine


def must_go_on():
    """Somebody waits for the load."""


@pytest.mark.parametrize(
    ("free", "headroom", "taken", "asked", "may_take"),
    [
        (0, 0, 100, 100, 100),
        (0, 50, 100, 100, 150),
        (50, 0, 100, 100, 100),  # the last of it is for others
        (1000, 0, 100, 50, 100),
        (1000, 50, 100, 50, 200),
        (90, 50, 100, 50, 110),  # a part of what is free: others may take some as well
    ],
)
def test_twice_the_promise_is_allowed_where_it_is_really_free(machine, free, headroom, taken, asked, may_take):
    """Else no more than was promised; what it has taken by then it may take."""
    machine(free)
    room = Room(500, headroom)

    assert LoadQuota(room.more, must_go_on).may_take(taken) == may_take
    assert room.asked == [asked]


def test_nothing_is_asked_for_within_what_is_allowed(machine):
    """The promise covers it, or twice the promise does."""
    machine(1000)
    room = Room(500, headroom=50)
    load = LoadQuota(room.more, must_go_on)
    assert load.may_take(100) == 200
    assert load.may_take(150) == 200
    assert len(room.asked) == 1
    machine(0)
    assert load.may_take(100) == 100
    assert load.may_take(101) == 151

    assert room.asked == [50, 101]


def test_what_other_processes_of_the_load_take_counts(machine):
    """Once they are loaded; a process is told what it may take itself."""
    machine(0)
    room = Room(500)
    load = LoadQuota(room.more, must_go_on)
    assert load.may_take(100) == 100
    load.settle(80)
    assert load.may_take(20) == 20
    assert load.may_take(30) == 30

    assert room.asked == [100, 110]


def test_a_refusal_says_what_it_took(machine):
    """Whether it is final is the room's to know."""
    machine(1000)
    load = LoadQuota(Room(50).more, must_go_on)
    assert load.may_take(100) == 100
    with pytest.raises(
        ReservationExceededError, match=r"model 'm' needs too much; it took 0.0 MB when it was stopped"
    ) as caught:
        load.may_take(102)

    assert caught.value.kind is Kind.OUT_OF_MEMORY
    assert (caught.value.need, caught.value.taken, caught.value.final) == (51, 102, True)


@pytest.mark.parametrize(
    ("before", "after", "grown", "stopped"),
    [
        (1000, 60, 900, False),  # a twentieth is left
        (1000, 40, 900, True),
        (1000, 40, 0, False),  # another process took it
        (40, 30, 10, False),  # half of what was left
        (40, 10, 10, True),
    ],
)
def test_a_load_takes_what_is_left_to_others_not_even_while_it_waits(machine, before, after, grown, stopped):
    """Its process goes on while others leave for it: too fast for them, it is stopped, and may begin again."""
    machine(before)

    def slow(need, look):
        machine(after)
        look()
        return need

    load = LoadQuota(slow, must_go_on)
    if not stopped:
        assert load.may_take(100, lambda: grown) >= 100
        return
    with pytest.raises(ReservationExceededError, match=r"faster than other models left; it took 0\.0 MB") as caught:
        load.may_take(100, lambda: grown)

    assert (caught.value.taken, caught.value.final) == (100 + grown, False)
    assert caught.value.need == (500 if before == 1000 else 110)


def test_other_errors_are_left_as_they_are(machine):
    """A load that was given up is not out of memory."""
    machine(0)

    def gone(_need, _look):
        raise MmeError(Kind.CANCELLED, "gone")

    with pytest.raises(MmeError, match="gone"):
        LoadQuota(gone, must_go_on).may_take(1)


def test_it_holds_for_what_is_loaded_inside():
    """And for nothing else."""
    load = LoadQuota(Room(1).more, must_go_on)
    with allowing(load):
        assert allowed() is load

    assert allowed() is None
