"""The way through an ensemble whose steps answer once: the same steps, with the same tensors, as by the general way."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.config import EnsembleStep
from serve.scheduling.ensemble import ABSENT, Graph, Run
from serve.scheduling.straight import Course, Plan


def step(name, inputs, outputs):
    """A step whose model calls its tensors as the ensemble does: "a b" are two of them."""
    return EnsembleStep(name, None, {t: t for t in inputs.split()}, {t: t for t in outputs.split()})


class Follow:
    """Runs the steps of a plan by hand; a tensor is (the name that its maker has for it, a value)."""

    def __init__(self, *steps, wanted, **given):
        self.graph = Graph("e", steps, [False] * len(steps))
        self.plan = Plan(self.graph, list(given), wanted.split())
        self.course = Course(self.plan, [ABSENT if value is None else (name, value) for name, value in given.items()])
        self.waiting = list(self.plan.first)

    @property
    def running(self):
        """The models of the steps that can run."""
        return [self.graph.steps[planned.index].model for planned in self.waiting]

    def inputs(self, planned):
        """What a step is given, by the names of its model."""
        held = {name: self.course.tensors[place] for name, place in planned.inputs}
        return {name: tensor[1] for name, tensor in held.items() if tensor is not ABSENT}

    def answer(self, model, **outputs):
        """The response of a step."""
        planned = self.waiting.pop(self.running.index(model))
        self.waiting += self.course.came(planned, list(outputs.items()))

    @property
    def outputs(self):
        """The outputs that there are."""
        held = {name: self.course.tensors[place] for name, place in self.plan.wanted}
        return {name: tensor[1] for name, tensor in held.items() if tensor is not ABSENT}


def test_a_join_waits_for_all_that_it_needs():
    """A step runs when its last tensor comes, whichever that is, and once."""
    follow = Follow(step("a", "IN", "x w"), step("b", "IN", "y"), step("c", "x y w IN", "OUT"), wanted="OUT", IN=0)
    assert sorted(follow.running) == ["a", "b"]
    follow.answer("a", x=1, w=2)
    assert follow.running == ["b"]
    follow.answer("b", y=3)
    assert follow.inputs(follow.waiting[0]) == {"x": 1, "y": 3, "w": 2, "IN": 0}
    follow.answer("c", OUT=4)

    assert (follow.waiting, follow.outputs) == ([], {"OUT": 4})


def test_only_what_is_wanted_runs():
    """And an output that is an input as well needs no step at all."""
    steps = step("a", "IN", "x"), step("b", "x", "B"), step("c", "x", "C")
    follow = Follow(*steps, wanted="B", IN=0)
    follow.answer("a", x=1)
    assert follow.running == ["b"]

    assert (Follow(*steps, wanted="IN", IN=7).running, Follow(*steps, wanted="IN", IN=7).outputs) == ([], {"IN": 7})


def test_what_is_absent_is_left_out():
    """An input that the request lacks, and an output that a step did not return: whoever wants it runs without it."""
    follow = Follow(step("a", "IN OPT", "x y"), step("b", "x y", "OUT z"), wanted="OUT z", IN=0, OPT=None)
    assert follow.inputs(follow.waiting[0]) == {"IN": 0}
    follow.answer("a", x=1, unasked=9)
    assert follow.inputs(follow.waiting[0]) == {"x": 1}
    follow.answer("b", OUT=2)

    assert follow.outputs == {"OUT": 2}


def general(graph, tensors, absent, wanted, dice):
    """What each step is given by the general way, and what comes out of it."""
    run, ran, outputs = Run(graph, tensors, absent, wanted), {}, None
    progress = run.begin()
    waiting = progress.ready
    outputs = progress.responses
    while waiting:
        ready = waiting.pop(dice.randrange(len(waiting)))
        ran[ready.step] = ready.inputs
        progress = run.came(ready, made(graph, ready.step, ready.inputs))
        run.ended(ready)
        waiting += progress.ready
        outputs += progress.responses
    return ran, outputs[0]


def made(graph, index, inputs):
    """What a step returns: not all of its outputs, now and then."""
    names = list(graph.steps[index].outputs)
    return {name: (index, tuple(sorted(inputs))) for name in names if (index + len(name) + len(inputs)) % 5}


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 9))
def test_it_is_the_general_way_made_short(seed, count):
    """Random graphs in random order: the same steps run, each with the same tensors, and the same comes out."""
    dice = random.Random(seed)
    given_names = ["IN", "OPT"]
    tensors, steps = list(given_names), []
    for i in range(count):
        reads = dice.sample(tensors, dice.randint(1, len(tensors)))
        writes = [f"t{i}", f"tt{i}"][: dice.randint(1, 2)]
        steps.append(EnsembleStep(f"m{i}", None, {f"in_{t}": t for t in reads}, {f"o_{t}": t for t in writes}))
        tensors += writes
    dice.shuffle(steps)
    wanted = dice.sample(tensors, dice.randint(1, len(tensors)))
    follow = Follow(*steps, wanted=" ".join(wanted), IN="in", OPT=None)
    ran = {}
    while follow.waiting:
        planned = dice.choice(follow.waiting)
        ran[planned.index] = inputs = follow.inputs(planned)
        follow.answer(steps[planned.index].model, **made(follow.graph, planned.index, inputs))

    assert (ran, follow.outputs) == general(follow.graph, {"IN": "in"}, ["OPT"], wanted, dice)
