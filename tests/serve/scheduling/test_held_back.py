"""No more responses of a decoupled step are on their way than may be, and all of them arrive, in order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.config import EnsembleStep
from serve.scheduling.ensemble import Graph
from serve.scheduling.held_back import LimitedRun


def step(name, inputs, outputs):
    """A step whose model calls its tensors as the ensemble does."""
    return EnsembleStep(name, None, {t: t for t in inputs.split()}, {t: t for t in outputs.split()})


class Follow:
    """Runs steps by hand: `a` is decoupled, and `b` runs behind each of its responses."""

    def __init__(self, most, *steps, decoupled="a"):
        self.steps = steps or (step("a", "IN", "x"), step("b", "x", "OUT"))
        self.graph = Graph("e", self.steps, ["IN"], [each.model in decoupled for each in self.steps])
        self.run = LimitedRun(self.graph, {"IN": "in"}, [], ["OUT"], most)
        self.waiting, self.responses = [], []
        self.take(self.run.begin())

    def take(self, progress):
        """What follows from a step."""
        self.waiting += progress.ready
        self.responses += [response["OUT"] for response in progress.responses]

    def of(self, model):
        """The running steps of a model."""
        return [ready for ready in self.waiting if self.steps[ready.step].model == model]

    def answer(self, ready, **outputs):
        """One response of a step."""
        self.take(self.run.came(ready, outputs))

    def end(self, ready):
        """A step answers no more."""
        self.waiting.remove(ready)
        self.take(self.run.ended(ready))


def test_what_is_too_many_waits_for_those_before_it():
    """The third response goes on when one of the first two has arrived, though its step has ended long ago."""
    follow = Follow(2)
    (producer,) = follow.of("a")
    for number in range(4):
        follow.answer(producer, x=number)
    follow.end(producer)
    assert [ready.inputs["x"] for ready in follow.of("b")] == [0, 1]
    assert not follow.run.over
    while follow.of("b"):
        ready = follow.of("b")[0]
        follow.answer(ready, OUT=ready.inputs["x"])
        follow.end(ready)
        assert len(follow.of("b")) <= 2

    assert (follow.responses, follow.run.over) == ([0, 1, 2, 3], True)


def test_a_response_behind_which_nothing_runs_is_never_too_many():
    """It has arrived."""
    follow = Follow(1, step("a", "IN", "OUT"))
    (producer,) = follow.of("a")
    for number in range(3):
        follow.answer(producer, OUT=number)
    follow.end(producer)

    assert (follow.responses, follow.run.over) == ([0, 1, 2], True)


def test_what_is_held_back_is_dropped_when_something_fails():
    """And nothing runs any more once those that run have ended."""
    follow = Follow(1)
    (producer,) = follow.of("a")
    for number in range(3):
        follow.answer(producer, x=number)
    follow.end(producer)
    follow.run.drop()
    follow.end(follow.of("b")[0])

    assert (follow.waiting, follow.run.over) == ([], True)


CHAIN = (step("a", "IN", "x"), step("b", "x", "y"), step("c", "y", "OUT"))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**9), st.integers(1, 3))
@pytest.mark.parametrize("decoupled", ["a", "ab", "abc"])
def test_everything_arrives(decoupled, seed, most):
    """Whatever is decoupled in a chain, and in whatever order steps answer and end: nobody is lost, none are too many."""
    dice, follow, expected = random.Random(seed), Follow(most, *CHAIN, decoupled=decoupled), 0
    answers = {}
    while follow.waiting:
        ready = dice.choice(follow.waiting)
        model = follow.steps[ready.step]
        wanted = dice.randint(0, 4) if model.model in decoupled else 1
        left = answers.setdefault(ready, wanted)
        if left:
            answers[ready] -= 1
            expected += model.model == "c"
            follow.answer(ready, **dict.fromkeys(model.outputs, 0))
        else:
            follow.end(ready)
        for scope in {each.scope.parent: None for each in follow.waiting if each.scope.parent is not None}:
            beneath = [s for s in follow.run._scopes if s.parent is scope and s.running]
            assert len(beneath) <= most

    assert (len(follow.responses), follow.run.over) == (expected, True)
