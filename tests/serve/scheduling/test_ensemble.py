"""The graph of an ensemble and the way through it: which step runs when, and when a response is due."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_handlers.config import EnsembleStep
from model_handlers.errors import MmeError
from serve.scheduling.ensemble import Graph, Run


def step(name, inputs, outputs):
    """A step whose model calls its tensors as the ensemble does: "a b" are two of them."""
    return EnsembleStep(name, None, {t: t for t in inputs.split()}, {t: t for t in outputs.split()})


def graph(*steps, decoupled=()):
    """An ensemble of steps; `decoupled` names those that answer any number of times."""
    return Graph("e", steps, [each.model in decoupled for each in steps])


class Follow:
    """Runs steps by hand and remembers what came out."""

    def __init__(self, graph, wanted, absent="", **tensors):
        self.graph = graph
        self.run = Run(graph, tensors or {"IN": "in"}, absent.split(), wanted.split())
        self.waiting = []
        self.responses = []
        self.take(self.run.begin())

    def take(self, progress):
        """What follows from a step."""
        self.waiting += progress.ready
        self.responses += progress.responses

    @property
    def running(self):
        """The models of the steps that run."""
        return [self.graph.steps[ready.step].model for ready in self.waiting]

    def pick(self, model):
        """The first running step of a model."""
        return next(ready for ready in self.waiting if self.graph.steps[ready.step].model == model)

    def answer(self, model, **outputs):
        """One response of a step."""
        self.take(self.run.came(self.pick(model), outputs))

    def end(self, model):
        """A step answers no more."""
        ready = self.pick(model)
        self.waiting.remove(ready)
        self.run.ended(ready)

    def finish(self, model, **outputs):
        """Its one response."""
        self.answer(model, **outputs)
        self.end(model)


def test_a_chain_runs_step_by_step():
    """Each with the tensors that the one before it made."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT")), "OUT")
    assert follow.running == ["a"]
    follow.finish("a", x=1)
    assert [ready.inputs for ready in follow.waiting] == [{"x": 1}]
    follow.finish("b", OUT=2)

    assert follow.responses == [{"OUT": 2}]
    assert follow.run.over
    follow.run.check_answered()


def test_independent_steps_run_at_once_and_a_join_waits_for_both():
    """A step runs as soon as all its tensors exist, and once."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "IN", "y"), step("c", "x y IN", "OUT")), "OUT")
    assert sorted(follow.running) == ["a", "b"]
    follow.finish("b", y=2)
    assert follow.running == ["a"]
    follow.finish("a", x=1)
    assert [ready.inputs for ready in follow.waiting] == [{"x": 1, "y": 2, "IN": "in"}]


def test_steps_that_nobody_asked_for_do_not_run():
    """Only those that a wanted output comes from."""
    one = graph(step("a", "IN", "x"), step("b", "x", "B"), step("c", "x", "C"), step("d", "IN", "D"))
    follow = Follow(one, "B")
    follow.finish("a", x=1)

    assert follow.running == ["b"]


def test_names_are_mapped():
    """A model's own names on one side, the ensemble's on the other."""
    steps = [EnsembleStep("a", None, {"model_in": "IN"}, {"model_out": "OUT"})]
    follow = Follow(Graph("e", steps, [False]), "OUT")
    assert follow.waiting[0].inputs == {"model_in": "in"}
    follow.finish("a", model_out=7)

    assert follow.responses == [{"OUT": 7}]


def test_what_is_absent_is_left_out():
    """An optional input that the request lacks, and an output that a step did not return."""
    follow = Follow(graph(step("a", "IN OPT", "x y"), step("b", "x y", "OUT")), "OUT", absent="OPT")
    assert follow.waiting[0].inputs == {"IN": "in"}
    follow.finish("a", x=1)

    assert follow.waiting[0].inputs == {"x": 1}


def test_each_response_of_a_decoupled_step_goes_its_own_way():
    """The steps behind it run once a response; each ends in a response of the ensemble."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT"), decoupled="a"), "OUT")
    for x in range(3):
        follow.answer("a", x=x)
    assert [ready.inputs["x"] for ready in follow.waiting if "x" in ready.inputs] == [0, 1, 2]
    for x in (2, 0, 1):  # whichever is ready first
        ready = next(r for r in follow.waiting if r.inputs.get("x") == x)
        follow.waiting.remove(ready)
        follow.take(follow.run.came(ready, {"OUT": x * 10}))
        follow.run.ended(ready)
    assert not follow.run.over
    follow.end("a")

    assert follow.responses == [{"OUT": 20}, {"OUT": 0}, {"OUT": 10}]
    assert follow.run.over
    follow.run.check_answered()


def test_scopes_wait_for_steps_beside_the_decoupled_one():
    """A join of a decoupled step and a plain one runs for each response once the plain one is done."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "IN", "y"), step("c", "x y", "OUT"), decoupled="a"), "OUT")
    follow.answer("a", x=1)
    follow.answer("a", x=2)
    assert sorted(follow.running) == ["a", "b"]
    follow.finish("b", y="y")

    assert [ready.inputs for ready in follow.waiting if "y" in ready.inputs] == [{"x": 1, "y": "y"}, {"x": 2, "y": "y"}]


def test_decoupled_steps_behind_one_another_multiply():
    """Two responses of the one, three of the other to each: six of the ensemble."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT"), decoupled="ab"), "OUT")
    follow.answer("a", x=1)
    follow.answer("a", x=2)
    follow.end("a")
    for x in (1, 2):
        ready = next(r for r in follow.waiting if r.inputs.get("x") == x)
        for i in range(3):
            follow.take(follow.run.came(ready, {"OUT": (x, i)}))
        follow.waiting.remove(ready)
        follow.run.ended(ready)

    assert [r["OUT"] for r in follow.responses] == [(x, i) for x in (1, 2) for i in range(3)]
    assert follow.run.over


def test_a_decoupled_step_may_have_nothing_to_say():
    """Then so has the ensemble, which is no error."""
    follow = Follow(graph(step("a", "IN", "OUT"), decoupled="a"), "OUT")
    follow.end("a")

    assert follow.run.over
    assert follow.responses == []
    follow.run.check_answered()


def test_scopes_are_forgotten_when_they_are_done():
    """A thousand responses hold no more than those on their way."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT"), decoupled="a"), "OUT")
    for i in range(1000):
        follow.answer("a", x=i)
        follow.finish("b", OUT=i)

    assert len(follow.responses) == 1000
    assert len(follow.run._scopes) == 1


def test_an_output_that_never_comes_is_a_deadlock():
    """Over without a response: with Triton's words."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT")), "OUT")
    follow.end("a")
    assert follow.run.over
    with pytest.raises(MmeError, match="unexpected deadlock"):
        follow.run.check_answered()


def test_circles_are_refused():
    """By the models in them."""
    with pytest.raises(MmeError, match="circle: a, b"):
        graph(step("a", "y IN", "x"), step("b", "x", "y"))


def test_a_step_behind_two_decoupled_ones_is_refused():
    """Which response of the one would belong to which of the other?"""
    with pytest.raises(MmeError, match="'c' receives inputs originated from different decoupled models"):
        graph(step("a", "IN", "x"), step("b", "IN", "y"), step("c", "x y", "OUT"), decoupled="ab")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 9))
def test_every_graph_runs_each_needed_step_once(seed, count):
    """Random graphs without decoupled steps, finished in random order: one response, nothing left running."""
    dice = random.Random(seed)
    tensors, steps = ["IN"], []
    for i in range(count):
        reads = dice.sample(tensors, dice.randint(1, len(tensors)))
        steps.append(EnsembleStep(f"m{i}", None, {t: t for t in reads}, {f"t{i}": f"t{i}"}))
        tensors.append(f"t{i}")
    dice.shuffle(steps)
    wanted = dice.sample(tensors[1:], dice.randint(1, count))
    follow = Follow(Graph("e", steps, [False] * count), " ".join(wanted))
    ran = []
    while follow.waiting:
        ready = dice.choice(follow.waiting)
        model = follow.graph.steps[ready.step]
        ran.append(model.model)
        assert set(ready.inputs) == set(model.inputs)
        follow.waiting.remove(ready)
        follow.take(follow.run.came(ready, dict.fromkeys(model.outputs, model.model)))
        follow.run.ended(ready)

    assert sorted(ran) == sorted(steps[i].model for i in follow.graph.needed(wanted))
    assert [sorted(response) for response in follow.responses] == [sorted(wanted)]
    assert follow.run.over
