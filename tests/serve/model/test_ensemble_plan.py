"""The graph of an ensemble and the way through it: which step runs when, and when a response is due."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_handlers.config.model_config import EnsembleStep
from model_handlers.errors import MmeError
from serve.model.ensemble_plan import ABSENT, EnsemblePlan, Graph, ResponseScope


def step(name, inputs, outputs):
    """A step whose model calls its tensors as the ensemble does: "a b" are two of them."""
    return EnsembleStep(name, -1, {t: t for t in inputs.split()}, {t: t for t in outputs.split()})


def graph(*steps, decoupled=()):
    """An ensemble of steps; `decoupled` names those that answer any number of times."""
    return Graph("e", steps, [each.model_name in decoupled for each in steps])


class Follow:
    """Runs steps by hand and remembers what came out; a tensor is (the name that its maker has for it, a value)."""

    def __init__(self, graph, wanted, **tensors):
        self.graph = graph
        given = tensors or {"IN": "in"}
        self.plan = EnsemblePlan(graph, list(given), wanted.split())
        self.root = ResponseScope(
            self.plan, [ABSENT if value is None else (name, value) for name, value in given.items()]
        )
        self.waiting = [(self.root, planned) for planned in self.plan.first]
        self.responses = []

    def name(self, running):
        """The model of a step that can run."""
        return self.graph.steps[running[1].index].model_name

    @property
    def running(self):
        """The models of the steps that run."""
        return [self.name(each) for each in self.waiting]

    @property
    def inputs(self):
        """What each of them is given, by the names of its model."""
        return [self.held(scope, planned.inputs) for scope, planned in self.waiting]

    @property
    def outputs(self):
        """Those of the one response, once nothing runs."""
        assert self.plan.responds_once
        assert not self.waiting
        return self.held(self.root, self.plan.wanted)

    def held(self, scope, places):
        """The tensors in some places."""
        tensors = {name: scope.tensors[place] for name, place in places}
        return {name: tensor[1] for name, tensor in tensors.items() if tensor is not ABSENT}

    def pick(self, model, inputs=None):
        """The first running step of a model, or the one that is given that."""
        among = zip(self.waiting, self.inputs, strict=True)
        return next(each for each, given in among if self.name(each) == model and inputs in (None, given))

    def answer(self, running, **outputs):
        """One response of a step."""
        scope, planned = running
        for each in scope.descendants(planned):
            for ready in each.deliver(planned, list(outputs.items())):
                if ready.responds:
                    self.responses.append(self.held(each, ready.inputs))
                    each.ended()
                else:
                    self.waiting.append((each, ready))

    def end(self, running):
        """A step answers no more."""
        self.waiting.remove(running)
        running[0].ended()

    def finish(self, model, inputs=None, **outputs):
        """Its one response."""
        running = self.pick(model, inputs)
        self.answer(running, **outputs)
        self.end(running)


def test_a_chain_runs_step_by_step():
    """Each with the tensors that the one before it made."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT")), "OUT")
    assert follow.running == ["a"]
    follow.finish("a", x=1)
    assert follow.inputs == [{"x": 1}]
    follow.finish("b", OUT=2)

    assert follow.outputs == {"OUT": 2}


def test_a_join_waits_for_all_that_it_needs():
    """A step runs when its last tensor comes, whichever that is, and once."""
    steps = step("a", "IN", "x w"), step("b", "IN", "y"), step("c", "x y w IN", "OUT")
    follow = Follow(graph(*steps), "OUT")
    assert sorted(follow.running) == ["a", "b"]
    follow.finish("a", x=1, w=2)
    assert follow.running == ["b"]
    follow.finish("b", y=3)
    assert follow.inputs == [{"x": 1, "y": 3, "w": 2, "IN": "in"}]


def test_only_what_is_wanted_runs():
    """And an output that is an input as well needs no step at all."""
    steps = graph(step("a", "IN", "x"), step("b", "x", "B"), step("c", "x", "C"), step("d", "IN", "D"))
    follow = Follow(steps, "B")
    follow.finish("a", x=1)
    assert follow.running == ["b"]

    assert Follow(steps, "IN").outputs == {"IN": "in"}


def test_names_are_mapped():
    """A model's own names on one side, the ensemble's on the other."""
    steps = [EnsembleStep("a", -1, {"model_in": "IN"}, {"model_out": "OUT"})]
    follow = Follow(Graph("e", steps, [False]), "OUT")
    assert follow.inputs == [{"model_in": "in"}]
    follow.finish("a", model_out=7)

    assert follow.outputs == {"OUT": 7}


def test_what_is_absent_is_left_out():
    """An input that the request lacks, and an output that a step did not return: whoever wants it runs without it."""
    follow = Follow(graph(step("a", "IN OPT", "x y"), step("b", "x y", "OUT z")), "OUT z", IN="in", OPT=None)
    assert follow.inputs == [{"IN": "in"}]
    follow.finish("a", x=1, unasked=9)
    assert follow.inputs == [{"x": 1}]
    follow.finish("b", OUT=2)

    assert follow.outputs == {"OUT": 2}


def test_each_response_of_a_decoupled_step_goes_its_own_way():
    """The steps behind it run once a response; each ends in a response of the ensemble."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT"), decoupled="a"), "OUT")
    first = follow.pick("a")
    for x in range(3):
        follow.answer(first, x=x)
    assert follow.inputs == [{"IN": "in"}, {"x": 0}, {"x": 1}, {"x": 2}]
    for x in (2, 0, 1):  # whichever is ready first
        follow.finish("b", {"x": x}, OUT=x * 10)
    follow.end(first)

    assert follow.responses == [{"OUT": 20}, {"OUT": 0}, {"OUT": 10}]
    assert follow.waiting == []


@pytest.mark.parametrize("late", [0, 1, 2])
def test_scopes_wait_for_steps_beside_the_decoupled_one(late):
    """A join of a decoupled step and a plain one runs for each response once the plain one is done, and so once each."""
    steps = step("a", "IN", "x"), step("b", "IN", "y"), step("p", "y", "q"), step("c", "x y", "z")
    follow = Follow(graph(*steps, decoupled="a"), "q z")
    first = follow.pick("a")
    for x in range(late):
        follow.answer(first, x=x)
    assert follow.running == ["a", "b"]
    follow.finish("b", y="y")
    for x in range(late, 2):
        follow.answer(first, x=x)
    assert sorted(follow.running) == ["a", "c", "c", "p"]
    follow.finish("c", {"x": 0, "y": "y"}, z="z0")
    assert follow.responses == []
    follow.finish("p", q="q")
    follow.finish("c", {"x": 1, "y": "y"}, z="z1")

    assert follow.responses == [{"q": "q", "z": "z0"}, {"q": "q", "z": "z1"}]
    follow.end(first)
    assert follow.root.inner == follow.waiting == []


def test_decoupled_steps_behind_one_another_multiply():
    """Two responses of the one, three of the other to each: six of the ensemble."""
    follow = Follow(graph(step("a", "IN", "x"), step("b", "x", "OUT"), decoupled="ab"), "OUT")
    first = follow.pick("a")
    follow.answer(first, x=1)
    follow.answer(first, x=2)
    follow.end(first)
    for x in (1, 2):
        second = follow.pick("b", {"x": x})
        for i in range(3):
            follow.answer(second, OUT=(x, i))
        follow.end(second)

    assert [r["OUT"] for r in follow.responses] == [(x, i) for x in (1, 2) for i in range(3)]
    assert follow.root.inner == follow.waiting == []


def test_decoupled_steps_beside_one_another_respond_by_themselves():
    """Each response has what belongs to it, and what is around it."""
    steps = step("a", "IN", "A"), step("b", "IN", "B"), step("c", "IN", "C")
    follow = Follow(graph(*steps, decoupled="ab"), "A B C")
    follow.answer(follow.pick("a"), A=1)
    assert follow.responses == []
    follow.finish("c", C=0)
    follow.answer(follow.pick("b"), B=2)
    follow.answer(follow.pick("a"), A=3)

    assert follow.responses == [{"A": 1, "C": 0}, {"B": 2, "C": 0}, {"A": 3, "C": 0}]


def test_a_decoupled_step_may_have_nothing_to_say():
    """Then so has the ensemble."""
    follow = Follow(graph(step("a", "IN", "OUT"), decoupled="a"), "OUT")
    follow.end(follow.pick("a"))

    assert not follow.plan.responds_once
    assert follow.responses == follow.waiting == []


@pytest.mark.parametrize("steps", [1, 2])
def test_scopes_are_forgotten_when_they_are_done(steps):
    """A thousand responses hold no more than those on their way."""
    both = step("a", "IN", "x"), step("b", "x", "OUT")
    follow = Follow(graph(*both[:steps], decoupled="a"), "OUT" if steps == 2 else "x")
    first = follow.pick("a")
    for i in range(1000):
        follow.answer(first, x=i)
        if steps == 2:
            follow.finish("b", OUT=i)
        assert follow.root.inner == []

    assert len(follow.responses) == 1000


def test_circles_are_refused():
    """By the models in them."""
    with pytest.raises(MmeError, match="circle: a, b"):
        graph(step("a", "y IN", "x"), step("b", "x", "y"))


def test_a_step_behind_two_decoupled_ones_is_refused():
    """Which response of the one would belong to which of the other?"""
    with pytest.raises(MmeError, match="'c' receives inputs originated from different decoupled models"):
        graph(step("a", "IN", "x"), step("b", "IN", "y"), step("c", "x y", "OUT"), decoupled="ab")


@given(st.integers(0, 10**9), st.integers(1, 9))
def test_every_graph_runs_each_needed_step_once(seed, count):
    """Random graphs without decoupled steps, finished in random order: each step is given all that was made for it."""
    dice = random.Random(seed)
    tensors, steps = ["IN", "OPT"], []
    for i in range(count):
        reads = dice.sample(tensors, dice.randint(1, len(tensors)))
        writes = [f"t{i}", f"tt{i}"][: dice.randint(1, 2)]
        steps.append(EnsembleStep(f"m{i}", -1, {f"in_{t}": t for t in reads}, {f"o_{t}": t for t in writes}))
        tensors += writes
    dice.shuffle(steps)
    wanted = dice.sample(tensors, dice.randint(1, len(tensors)))
    follow = Follow(Graph("e", steps, [False] * count), " ".join(wanted), IN="in", OPT=None)
    ran, made = [], {"IN": "in"}
    while follow.waiting:
        running = dice.choice(follow.waiting)
        planned = follow.graph.steps[running[1].index]
        ran.append(planned.model_name)
        given_to_it = follow.held(running[0], running[1].inputs)
        assert given_to_it == {name: made[tensor] for name, tensor in planned.input_map.items() if tensor in made}
        returned = {name: (planned.model_name, name) for name in planned.output_map if dice.random() < 0.8}
        made |= {planned.output_map[name]: value for name, value in returned.items()}
        follow.answer(running, **returned)
        follow.end(running)

    assert sorted(ran) == sorted(steps[i].model_name for i in follow.graph.needed(wanted))
    assert follow.outputs == {name: made[name] for name in wanted if name in made}
