"""What the policies are worth: a year of requests in a second, by the same plans that the cache carries out.

No model is loaded and no clock is read. Requests come by Zipf's law from a seed, so that every run sees the same.
"""

import bisect
import itertools
import math
import random
from dataclasses import replace

import pytest

from model_handlers.base import Footprint
from serve.cache.eviction import Candidate, Policy, plan
from tests.serve.cache.listed import Listed

NOBODY = Footprint()
WARM_UP = 2_000
SEEDS = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]


class Simulation:
    """A cache of so many bytes, whose clock is the number of requests.

    Attributes:
        hits, requests, seconds: what was counted after the warm-up; seconds are those of all reloads.
    """

    def __init__(self, policy, budget, models):
        self.policy = policy
        self.budget = Footprint(budget)
        self.models = models  # name → (bytes, seconds of a reload)
        self.residents = {}
        self.age = 0.0
        self.now = self.hits = self.requests = 0
        self.seconds = 0.0

    def ask(self, name):
        """One request."""
        self.now += 1
        resident = self.residents.get(name)
        size, seconds = self.models[name]
        counts = self.now > WARM_UP
        self.requests += counts
        if resident is None:
            self.seconds += seconds * counts
            self._make_room(Footprint(size))
            resident = Candidate(name, Footprint(size), 0.0, reload_seconds=seconds)
        else:
            self.hits += counts
        self.residents[name] = replace(resident, last_used=self.now, uses=resident.uses + 1, age=self.age)

    def _make_room(self, need):
        listed = Listed(self.residents.values, self.budget, self.policy)
        made = plan(listed, NOBODY, need, self.budget, self.policy, self.now)
        assert made.fits
        self.age = max(self.age, made.age)
        for victim in made.victims:
            del self.residents[victim]

    @property
    def hit_ratio(self):
        """Of the requests that were counted."""
        return self.hits / self.requests


def zipf(count, exponent):
    """The popularity of `count` models."""
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def simulate(policy, budget, models, shares, requests=12_000, seed=7):
    """Ask for models at random, each as often as its share says."""
    rng = random.Random(seed)
    sums = list(itertools.accumulate(shares))
    simulation = Simulation(policy, budget, models)
    names = list(models)
    for _ in range(requests):
        simulation.ask(names[min(bisect.bisect(sums, rng.random()), len(names) - 1)])
    return simulation


def che(shares, capacity):
    """The hit ratio of LRU for models of one size, by Che's approximation."""

    def occupied(time):
        return sum(1 - math.exp(-share * time) for share in shares)

    low, high = 0.0, 1.0
    while occupied(high) < capacity:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if occupied(middle) < capacity else (low, middle)
    return sum(share * (1 - math.exp(-share * high)) for share in shares)


@pytest.mark.parametrize(
    "capacity", [pytest.param(10, marks=pytest.mark.long), 30, pytest.param(60, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_lru_hits_as_often_as_theory_says(capacity, exponent):
    """For models of one size, the share of requests that find theirs in memory is the one of Che's approximation."""
    shares = zipf(100, exponent)
    models = {str(rank): (1, 1.0) for rank in range(100)}

    assert simulate(Policy.LRU, capacity, models, shares).hit_ratio == pytest.approx(che(shares, capacity), abs=0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_lfu_hits_more_often_than_lru_when_taste_does_not_change(seed):
    """Where popularity stands still, uses tell more than the last use."""
    shares = zipf(100, 0.9)
    models = {str(rank): (1, 1.0) for rank in range(100)}
    lru, lfu = (simulate(policy, 20, models, shares, seed=seed) for policy in (Policy.LRU, Policy.LFU))

    assert lfu.hit_ratio > lru.hit_ratio


@pytest.mark.parametrize("seed", SEEDS)
def test_gdsf_waits_less_than_lru_when_sizes_and_loads_differ(seed):
    """Small models that take long to load stay rather than large ones that are quick: less time goes into reloads."""
    rng = random.Random(100 + seed)
    shares = zipf(100, 0.9)
    models = {str(rank): (rng.randint(1, 40), rng.uniform(0.1, 10.0)) for rank in range(100)}
    budget = sum(size for size, _ in models.values()) // 4
    lru, gdsf = (simulate(policy, budget, models, shares, seed=seed) for policy in (Policy.LRU, Policy.GDSF))

    assert gdsf.seconds < 0.8 * lru.seconds


def test_gdsf_is_no_worse_than_lru_where_all_models_are_alike():
    """With one size and one time to load, it goes by use, and never forgets that use was long ago."""
    shares = zipf(100, 0.9)
    models = {str(rank): (1, 1.0) for rank in range(100)}
    lru, gdsf = (simulate(policy, 20, models, shares) for policy in (Policy.LRU, Policy.GDSF))

    assert gdsf.seconds <= lru.seconds


def test_what_was_precious_once_goes_when_nobody_asks_for_it_any_more():
    """GDSF's age overtakes models of the past; LFU keeps them for ever."""
    models = {f"old{number}": (1, 10.0) for number in range(5)} | {f"new{number}": (1, 1.0) for number in range(10)}
    left = {}
    for policy in (Policy.LFU, Policy.GDSF):
        simulation = Simulation(policy, 8, models)
        for _ in range(20):
            for number in range(5):
                simulation.ask(f"old{number}")
        for _ in range(400):
            for number in range(10):
                simulation.ask(f"new{number}")
        left[policy] = {name for name in simulation.residents if name.startswith("old")}

    assert left == {Policy.LFU: {f"old{number}" for number in range(5)}, Policy.GDSF: set()}
