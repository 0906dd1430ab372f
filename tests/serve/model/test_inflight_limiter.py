"""No more requests of a step are under way than may be, for all requests of an ensemble together."""

import asyncio
import random

import pytest

from model_handlers.config.model_config import EnsembleStep
from model_handlers.errors import Kind, MmeError, invalid_argument
from serve.model.ensemble import EnsembleModel, InflightLimiters
from serve.model.model import Model
from serve.request import InferenceRequest, InferenceResponse, Layout
from serve.statistics import ModelStats

NOTHING = Layout((), ())


class Stage:
    """A model that answers when the test says so."""

    name = "stage"

    def __init__(self, limiter):
        self._limiter = limiter
        self.inside = []
        self.refuses = False

    def ask(self, request):
        """Submit a request, now or when it is its turn."""
        self._limiter.submit(self, request)

    def submit(self, request):
        """Take it, or not."""
        if self.refuses:
            raise invalid_argument("no")
        self.inside.append(request)

    def answer(self, place=0):
        """Say the last word of one of them."""
        self.inside.pop(place).resolve(InferenceResponse("stage", "1", []))

    @property
    def names(self):
        """Who is inside."""
        return [request.id for request in self.inside]


@pytest.fixture
def stages():
    """Two steps, the second behind the first, that take two at a time; answers of the first go to the second."""
    first, second = InflightLimiters(2, 2).steps
    return Stage(first), Stage(second)


class Clients:
    """Requests of the first step, each of which is followed by one of the second, and what is said of those."""

    def __init__(self, first, second):
        self.first, self.second, self.told = first, second, []

    def ask(self, name):
        """A request of the first step."""
        request = InferenceRequest(NOTHING, [], self._first_is_over, name)
        request.on_response = self.go_on
        self.first.ask(request)
        return request

    def _first_is_over(self, request, result):
        if isinstance(result, MmeError):
            self.told.append((request.id, result.kind))
        elif result is not None:
            self.go_on(request, result)

    def go_on(self, request, _response):
        """A stage has answered: to the next one."""
        self.second.ask(InferenceRequest(NOTHING, [], self.second_is_over, request.id))

    def second_is_over(self, request, result):
        """The last stage has answered."""
        self.told.append((request.id, getattr(result, "kind", None)))


def test_who_is_too_many_waits_and_comes_in_order(stages):
    """The third is let in when one of the first two has its answer."""
    first, second = stages
    clients = Clients(first, second)
    for name in "abcd":
        clients.ask(name)
    assert first.names == ["a", "b"]
    first.answer(1)
    assert (first.names, second.names) == (["a", "c"], ["b"])
    first.answer()
    assert (first.names, second.names) == (["c", "d"], ["b", "a"])


def test_a_fast_step_does_not_run_ahead_of_a_slow_one(stages):
    """Who is over keeps its place until what follows from it has one: so no more wait between two steps than may be."""
    first, second = stages
    clients = Clients(first, second)
    for name in "abcdefg":
        clients.ask(name)
    while first.inside:
        first.answer()
    assert second.names == ["a", "b"]  # c and d have been answered as well, and wait
    second.answer()
    assert (first.names, second.names) == (["e"], ["b", "c"])
    while first.inside or second.inside:
        for stage in stages:
            if stage.inside:
                stage.answer()
    assert clients.told == [(name, None) for name in "abcdefg"]


def test_each_of_several_responses_is_waited_for(stages):
    """A request with three answers keeps its place until all three have gone on."""
    first, second = stages
    clients = Clients(first, second)
    for name in "abc":
        clients.ask(name)
    for _ in range(3):
        first.inside[0].respond(InferenceResponse("stage", "1", []))
    first.inside.pop(0).resolve(None)
    assert (first.names, second.names) == (["b"], ["a", "a"])
    second.answer()
    assert (first.names, second.names) == (["b", "c"], ["a", "a"])


def test_who_leaves_while_waiting_is_told_at_once(stages):
    """Its place in the queue, and the one that was kept for it, are others' then."""
    first, second = stages
    clients = Clients(first, second)
    waiting = [clients.ask(name) for name in "abcd"][2:]
    waiting[0].cancel()
    assert clients.told == [("c", Kind.CANCELLED)]
    first.answer()
    assert first.names == ["b", "d"]
    followers = []
    clients.go_on = lambda request, _: second.ask(
        followers.append(InferenceRequest(NOTHING, [], clients.second_is_over, request.id)) or followers[-1]
    )
    first.answer()
    first.answer()
    assert second.names == ["a", "b"]
    clients.ask("e")
    clients.ask("f")
    assert first.names == ["e"]  # d's follower waits
    followers[1].cancel()
    assert clients.told[1:] == [("d", Kind.CANCELLED)]
    assert first.names == ["e", "f"]


def test_what_a_model_refuses_takes_no_place(stages):
    """At once it is said to who submits; later it is the answer."""
    first, second = stages
    clients = Clients(first, second)
    for name in "abcd":
        clients.ask(name)
    first.refuses = True
    first.answer()
    assert clients.told == [("c", Kind.INVALID_ARGUMENT), ("d", Kind.INVALID_ARGUMENT)]
    with pytest.raises(MmeError, match="no"):
        clients.ask("e")
    first.refuses = False
    clients.ask("f")
    clients.ask("g")
    assert first.names == ["b", "f"]


async def test_who_waits_is_counted_and_told_when_the_ensemble_goes(toys):
    """Else an unload would have them all executed first, however long that takes."""
    loop, gate = asyncio.get_running_loop(), toys.Gate()
    step = Model("step", 1, [("step_0", toys.Scripted(toys.config("step"), gate))], ModelStats(), loop)
    steps = (EnsembleStep("step", -1, {"x": "x"}, {"y": "y"}),)
    config = toys.config("whole", ensemble=steps, max_inflight_requests=1)
    ensemble = EnsembleModel("whole", 1, config, [step], ModelStats(), loop)
    calls = [toys.Call(number) for number in range(3)]
    for call in calls:
        ensemble.submit(call.request)
    await gate.arrived()
    assert ensemble.queued == 2
    ensemble.refuse_waiting()
    assert [call.kind for call in calls[1:]] == [Kind.UNAVAILABLE] * 2
    assert ensemble.queued == 0
    gate.open()
    assert isinstance(await calls[0].answer(), InferenceResponse)
    await asyncio.to_thread(step.close)


@pytest.mark.parametrize("seed", range(20))
def test_everybody_is_answered_once(seed):
    """Whatever the order, and whoever leaves; and nobody is beyond the limit."""
    order = random.Random(seed)
    limiters = InflightLimiters(order.randint(1, 3), 2)
    first, second = stages = [Stage(limiter) for limiter in limiters.steps]
    clients = Clients(first, second)
    asked = []
    for number in range(200):
        action = order.random()
        if action < 0.4:
            asked.append(clients.ask(str(number)))
        elif action < 0.5 and asked:
            leaver = order.choice(asked)
            if not leaver.answered and leaver not in first.inside:
                leaver.cancel()
        elif (stage := order.choice(stages)).inside:
            stage.answer(order.randrange(len(stage.inside)))
        assert all(len(stage.inside) <= limiters.most for stage in stages)
    while first.inside or second.inside:
        for stage in stages:
            if stage.inside:
                stage.answer()
    assert sorted(name for name, _ in clients.told) == sorted(request.id for request in asked)


@pytest.mark.parametrize("seed", range(5))
async def test_ensembles_of_ensembles_whose_clients_ask_again_on_each_answer(toys, seed):
    """All are answered, whatever is made of what, and whoever leaves: nobody waits for who waits for it."""
    order = random.Random(seed)
    loop, left, calls = asyncio.get_running_loop(), [100], []
    leaves = [Model(name, 1, [(f"{name}_0", toys.Scripted(toys.config(name)))], ModelStats(), loop) for name in "abc"]
    wholes = []
    for name in ("inner", "middle", "outer"):
        parts = order.choices([*leaves, *wholes], k=order.randint(1, 3))
        tensors = ["x", *(f"behind_{place}" for place in range(1, len(parts))), "y"]
        steps = tuple(
            EnsembleStep(part.name, -1, {"x": tensors[place]}, {"y": tensors[place + 1]})
            for place, part in enumerate(parts)
        )
        config = toys.config(name, ensemble=steps, max_inflight_requests=order.choice([0, 1, 1, 2]))
        wholes.append(EnsembleModel(name, 1, config, parts, ModelStats(), loop))

    def ask(_answered=None):
        left[0] -= 1
        if left[0] >= 0:
            calls.append(toys.Call(1, on_answer=ask))
            order.choice(wholes).submit(calls[-1].request)
            if not (leaver := order.choice(calls)).request.answered and order.random() < 0.2:
                leaver.request.cancel()

    for _ in range(12):
        ask()
    for call in calls:  # which grow meanwhile
        await call.answer()
    assert [len(call.answers) for call in calls] == [1] * 100
    assert {model.outstanding + model.queued for model in (*wholes, *leaves)} == {0}
    for model in leaves:
        await asyncio.to_thread(model.close)
