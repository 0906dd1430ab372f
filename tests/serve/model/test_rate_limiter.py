"""Nobody takes more than there is, nobody waits for ever, and turns are had in proportion."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_handlers.errors import Kind, MmeError
from serve.model.rate_limiter import GLOBAL, RateLimiter
from tests.calls import calls_of

R, S = ("r", "0"), ("s", GLOBAL)


def limiter(limits=None, /, **needs):
    """A limiter with instances of these needs of R."""
    made = RateLimiter(limits)
    for name, count in needs.items():
        made.join(name, {R: count})
    return made


def turns(shared, count, *names):
    """How many of so many turns each of these has, which always want one."""
    had, running = Counter(), [granted for name in names for granted in shared.ask(name)]
    for _ in range(count):
        (now,) = running
        had[now] += 1
        running = shared.done(now, again=True)
    return had


def test_there_is_as_much_as_the_neediest_wants():
    """Where nobody says otherwise; small ones may then share it."""
    shared = limiter(large=4, small=2, other=2)

    assert shared.capacity(R) == 4
    assert [shared.ask(name) for name in ("small", "other", "large")] == [["small"], ["other"], []]
    assert [shared.done(name) for name in ("small", "other")] == [[], ["large"]]


def test_what_an_instance_needs_it_gets_together():
    """One that lacks a part of what it needs takes nothing of the rest."""
    shared = RateLimiter({R: 1, S: 1})
    for name, needs in (("r", {R: 1}), ("s", {S: 1}), ("both", {R: 1, S: 1})):
        shared.join(name, needs)

    assert [shared.ask(name) for name in ("r", "both", "s")] == [["r"], [], []]
    assert shared.done("r") == ["both"]
    assert shared.done("both") == ["s"]


def test_the_first_in_line_is_not_passed_for_ever():
    """What it lacks is kept for it, though small ones that came later would fit; who needs something else may go."""
    shared = limiter({R: 2, S: 1}, one=1, two=1, large=2)
    shared.join("else", {S: 1})

    assert [shared.ask(name) for name in ("one", "large", "two", "else")] == [["one"], [], [], ["else"]]
    assert shared.done("one") == ["large"]
    assert shared.done("large") == ["two"]


def test_priorities_are_shares():
    """Of two that always want to execute, the one of priority 2 has half the turns of the other."""
    shared = RateLimiter({R: 1})
    shared.join("often", {R: 1}, 1)
    shared.join("seldom", {R: 1}, 2)

    assert turns(shared, 300, "often", "seldom") == {"often": 200, "seldom": 100}


def test_a_newcomer_does_not_catch_up_with_the_past():
    """It has its share from now on, and no more."""
    shared = limiter({R: 1}, old=1)
    for _ in range(100):
        shared.ask("old")
        shared.done("old")
    shared.join("new", {R: 1})

    assert turns(shared, 6, "new", "old") == {"new": 3, "old": 3}


def test_a_turn_that_is_not_used_is_none():
    """It goes to the next, and does not count."""
    shared = limiter({R: 1}, a=1, b=1)

    assert shared.ask("a") == ["a"]
    assert shared.ask("b") == []
    assert shared.withdraw("a") == ["b"]
    shared.done("b")
    assert [shared.ask("b"), shared.ask("a"), shared.done("b")] == [["b"], [], ["a"]]


def test_who_leaves_gives_back():
    """While it executes or while it waits."""
    shared = limiter({R: 1}, a=1, b=1, c=1)
    shared.ask("a")
    shared.ask("b")
    shared.ask("c")

    assert shared.leave("b") == []
    assert shared.leave("a") == ["c"]
    assert repr(shared) == "<RateLimiter: 1 of 1 instances execute, 0 wait>"


def test_resources_of_devices_are_apart_and_the_servers_are_not():
    """A limit counts for the device that it names, else for each; of the server's resources there is one."""
    shared = RateLimiter({("r", GLOBAL): 1, ("r", "1"): 2, ("s", "0"): 3})

    assert [shared.capacity(("r", device)) for device in ("0", "1", "2")] == [1, 2, 1]
    assert shared.capacity(S) == 3
    for device in ("0", "2"):
        shared.join(device, {("r", device): 1})
    assert shared.ask("0") + shared.ask("2") == ["0", "2"]


def test_what_can_never_be_had_is_refused():
    """In Triton's words."""
    with pytest.raises(MmeError) as caught:
        limiter({R: 3}, large=4)

    assert caught.value.kind is Kind.INVALID_MODEL
    assert caught.value.message == (
        'Resource count for "r" is limited to 3 which will prevent scheduling of one or more model instances, the '
        "minimum required count is 4"
    )


@pytest.mark.parametrize("needs", [{("r", GLOBAL): 1}, {("x", "0"): 1, ("x", GLOBAL): 1}])
def test_a_name_is_of_the_devices_or_of_the_server(needs):
    """Not both, in one instance or in two."""
    shared = limiter(one=1)
    with pytest.raises(MmeError, match="is present as both global and device-specific resource"):
        shared.join("other", needs)

    assert shared.ask("one") == ["one"]


def test_what_there_is_follows_who_is_there():
    """The neediest leaves: there is as much as the next one wants, and once none is left its name means nothing."""
    shared = limiter(large=4, other=4, small=2)
    seen = []
    for name in ("large", "other", "small"):
        shared.leave(name)
        seen.append(shared.capacity(R))
    shared.join("global", {("r", GLOBAL): 1})

    assert seen == [4, 2, 0]
    assert shared.ask("global") == ["global"]


def test_an_instance_that_leaves_is_not_waited_for_by_newcomers():
    """Newcomers begin where the least served of those that are there is."""
    shared = limiter({R: 1}, idle=1, old=1)
    for _ in range(10):
        shared.ask("old")
        shared.done("old")
    shared.leave("idle")
    shared.join("new", {R: 1})

    assert turns(shared, 4, "new", "old") == {"new": 2, "old": 2}


@pytest.mark.parametrize("all_wait", [False, True])
def test_a_turn_costs_the_same_however_many_instances_there_are(all_wait):
    """While the others are idle, and while all of them wait for it."""

    def calls(instances):
        shared = RateLimiter({R: 1})
        for instance in range(instances):
            shared.join(instance, {R: 1})
        shared.ask(0)
        for instance in range(1, instances if all_wait else 2):
            shared.ask(instance)
        return calls_of(lambda: shared.done(0, again=True)) + calls_of(lambda: shared.join("new", {R: 1}))

    assert calls(300) == calls(3)


POOLS = [("a", "0"), ("a", "1"), ("g", GLOBAL)]
NEEDS = st.dictionaries(st.sampled_from(POOLS), st.integers(0, 3), max_size=3)


class Sharing(RuleBasedStateMachine):
    """Instances come, ask, execute, change their minds and go, in any order."""

    @initialize(limits=st.dictionaries(st.sampled_from(POOLS), st.integers(3, 5), max_size=2))
    def make(self, limits):
        """Begin with any limits."""
        self.limits = limits
        self.limiter = RateLimiter(limits)
        self.needs, self.holding, self.waiting, self.number = {}, set(), set(), 0

    def granted(self, names):
        """These have a turn now."""
        for name in names:
            assert name in self.waiting
            self.waiting.discard(name)
            self.holding.add(name)

    @rule(needs=NEEDS, priority=st.integers(0, 3))
    def join(self, needs, priority):
        """An instance comes."""
        name, self.number = self.number, self.number + 1
        self.needs[name] = needs
        self.granted(self.limiter.join(name, needs, priority))

    @precondition(lambda self: self.needs)
    @rule(data=st.data(), deed=st.sampled_from(["ask", "ask", "ask", "done", "done", "withdraw", "leave"]))
    def act(self, data, deed):
        """One of them does something that it may do."""
        free = set(self.needs) - self.holding
        candidates = {"ask": free, "done": self.holding}.get(deed, set(self.needs))
        if not candidates:
            return
        name = data.draw(st.sampled_from(sorted(candidates)))
        if deed == "ask":
            self.waiting.add(name)
        else:
            self.waiting.discard(name)
            self.holding.discard(name)
        if deed == "leave":
            del self.needs[name]
        again = {"again": True} if deed == "done" and data.draw(st.booleans()) else {}
        if again:
            self.waiting.add(name)
        self.granted(getattr(self.limiter, deed)(name, **again))

    def used(self, pool, names):
        """What these take of a resource."""
        return sum(self.needs[name].get(pool, 0) for name in names)

    @invariant()
    def nobody_takes_more_than_there_is(self):
        """What is limited is never exceeded."""
        for pool in getattr(self, "limits", {}):
            assert self.used(pool, self.holding) <= self.limits[pool]

    @invariant()
    def nobody_waits_while_nobody_executes(self):
        """With everything free the first in line has its turn."""
        if hasattr(self, "limiter") and self.waiting:
            assert self.holding

    def teardown(self):
        """Everybody who waits has a turn, if those who execute finish."""
        for _ in range(len(getattr(self, "needs", ())) + 1):
            for name in sorted(self.holding) if hasattr(self, "limiter") else ():
                self.holding.discard(name)
                self.granted(self.limiter.done(name))
        if hasattr(self, "limiter"):
            assert not self.waiting


TestSharing = Sharing.TestCase
TestSharing.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
