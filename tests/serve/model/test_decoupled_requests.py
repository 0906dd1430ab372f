"""Models that answer of their own accord: each request is resolved exactly once, whatever comes in whatever order."""

import asyncio
import contextlib
import itertools
import random
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.base import Handler
from model_handlers.config.model_config import DynamicBatching
from model_handlers.errors import Kind, MmeError, NotBegunError
from model_handlers.requests import ModelResponse
from serve.model.model import Model
from serve.model.replies import ResponseQueue
from serve.request import InferenceResponse
from serve.statistics import ModelStats
from tests.event_loop import run_on_loop
from tests.serve.inside import idle, left_open
from tests.waiting import PATIENCE, until


class Talks(Handler):
    """A model that sees requests: what it answers to a batch is the test's business, and so is what it says unasked.

    Attributes:
        script: requests → answers; replace it at any time.
        requests: all that were ever executed, in order.
        closed: how often it was closed.
    """

    backend = "talks"
    default_filename = "model.talks"
    sees_requests = True

    def __init__(self, config, script=None):
        super().__init__(config)
        self.script = script
        self.requests = []
        self.closed = 0

    @classmethod
    def autocomplete(cls, config, model_file):  # noqa: ARG003 - nothing to read
        """Nothing is left out."""
        return config

    @classmethod
    def load(cls, config, model_file, device, instance=""):
        """Made by the test itself."""
        raise NotImplementedError

    def execute_requests(self, requests):
        """As the script says."""
        self.requests += requests
        return self.script(requests)

    def close(self):
        """Count."""
        self.closed += 1


class Lease:
    """Counts its ends."""

    def __init__(self):
        self.released = 0

    def release(self):
        """One end."""
        self.released += 1


class Client:
    """A request and what came of it, in order: responses, then what it was resolved with."""

    def __init__(self, toys, *numbers):
        self.got = []
        self.call = toys.Call(*numbers or (1,), on_answer=lambda call: self.got.append(("end", call.answers[-1])))
        self.request = self.call.request
        self.request.on_response = lambda _, response: self.got.append(("response", response))
        self.lease = self.request.lease = Lease()

    @property
    def ends(self):
        """How often it was resolved."""
        return len(self.call.answers)

    def check(self):
        """Whatever happened, it came to one end, and nothing came behind it."""
        assert self.ends == 1
        assert self.lease.released == 1
        assert self.got[-1][0] == "end"
        assert all(kind == "response" for kind, _ in self.got[:-1])
        assert self.request.answered
        assert self.request.on_cancel is None


def response(number=1):
    """A response to a request of one row."""
    return ModelResponse({"y": np.full((1, 2), 2 * number, np.float32)})


@contextlib.asynccontextmanager
async def serving(toys, script=None, *, instances=1, decoupled=True, batching=None):
    """A started model with its handler; closed afterwards, when everybody has been answered."""
    config = toys.config(decoupled=decoupled, dynamic_batching=batching)
    handler = Talks(config, script)
    model = Model("m", 1, [(f"m_{i}", handler) for i in range(instances)], ModelStats(), asyncio.get_running_loop())
    try:
        yield model, handler
    finally:
        await asyncio.to_thread(model.close)
    assert handler.closed == 1


def audit(model, clients):
    """Nothing is under way, and everybody was counted once."""
    for client in clients:
        client.check()
    assert model.outstanding == 0
    assert left_open(model) == 0
    stats = model.stats
    assert stats.success.count + stats.fail.count == len(clients)
    assert stats.queue.count == stats.compute_infer.count == stats.success.count
    assert sum(stats.failures.values()) == stats.fail.count
    failed = [client for client in clients if isinstance(client.got[-1][1], MmeError)]
    assert stats.fail.count == len(failed)


# -- every order -------------------------------------------------------------------------------------------------------

RETURNED = {
    "None": lambda: None,
    "response": response,
    "error": lambda: MmeError(Kind.INVALID_ARGUMENT, "this one"),
    "raised": lambda: MmeError(Kind.EXECUTION_FAILED, "all of them"),
}


class Stage:
    """One request, and everything that may happen to it."""

    def __init__(self, toys, model, handler, returned):
        self.client = Client(toys)
        self._model = model
        self._handler = handler
        self._returned = returned
        self._entered, self._leave = threading.Event(), threading.Event()
        handler.script = self._execute

    def _execute(self, _):
        self._entered.set()
        assert self._leave.wait(PATIENCE)
        answer = RETURNED[self._returned]()
        if self._returned == "raised":
            raise answer
        return [answer]

    async def begin(self):
        """Have it executed."""
        self._model.submit(self.client.request)
        assert await asyncio.to_thread(self._entered.wait, PATIENCE)

    async def happen(self, event):
        """One of the below."""
        [opened] = self._handler.requests
        if event == "respond":
            opened.responder.send(response(), final=False)
        elif event == "final":
            opened.responder.send(None, final=True)
        elif event == "last":
            opened.responder.send(response(), final=True)
        elif event == "fail":
            opened.responder.send(MmeError(Kind.UNSUPPORTED, "unasked"), final=False)
        elif event == "cancel":
            self.client.request.cancel()
        elif event == "unload":
            self._model.refuse_waiting()
        else:
            self._leave.set()
            while not idle(self._model):  # noqa: ASYNC110 - an instance sets no event when it comes to rest
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def is_ended(events, returned, *, decoupled):
    """Whether these leave nothing to be waited for."""
    if {"final", "last", "fail"} & set(events) or returned != "None":
        return True
    return ("respond" in events and not decoupled) or "unload" in events


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "once"])
@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("said", [(), ("respond",), ("respond", "final"), ("last",), ("respond", "fail")], ids=str)
async def test_every_order(toys, said, returned, decoupled):
    """Of what it says, the batch's answer, the client's leaving and an unload: one end, one count, one end of lease."""

    async def one(order):
        async with serving(toys, decoupled=decoupled) as (model, handler):
            stage = Stage(toys, model, handler, returned)
            await stage.begin()
            for event in order:
                await stage.happen(event)
            if not is_ended(order, returned, decoupled=decoupled):
                assert stage.client.ends == 0
                assert model.outstanding == 1
                await stage.happen("final")
            audit(model, [stage.client])
            return stage.client.got

    for order in itertools.permutations((*said, "batch", "cancel", "unload")):
        spoken = [event for event in order if event in said]
        if spoken != list(said):
            continue  # a model says its last last
        got = await one(order)
        responses = [event for event, _ in got if event == "response"]
        assert len(responses) <= (len(said) + 1 if decoupled else 0)


@pytest.mark.parametrize("takes", [True, False])
async def test_an_error_that_others_may_follow(toys, takes):
    """Is handed over as responses are, to who takes several errors; to others it is the end, which the model hears."""
    async with serving(toys) as (model, handler):
        stage = Stage(toys, model, handler, "None")
        if takes:
            stage.client.request.on_error = lambda _, error: stage.client.got.append(("error", error))
        await stage.begin()
        for event in ("batch", "respond", "fail"):
            await stage.happen(event)
        assert (stage.client.ends, handler.requests[0].responder.is_cancelled()) == (not takes, not takes)
        for event in ("respond", "final"):
            await stage.happen(event)
        kinds = [kind for kind, _ in stage.client.got]
        assert kinds == (["response", "error", "response", "end"] if takes else ["response", "end"])
        assert isinstance(stage.client.got[-1][1], MmeError) is not takes
        assert (model.outstanding, model.stats.success.count) == (0, int(takes))


async def test_the_first_end_counts(toys):
    """What a model says unasked before its batch is answered comes first, and is not undone by the batch's answer."""
    for returned in RETURNED:
        async with serving(toys) as (model, handler):
            stage = Stage(toys, model, handler, returned)
            await stage.begin()
            for event in ("respond", "last", "batch"):
                await stage.happen(event)
            audit(model, [stage.client])
            kinds = [kind for kind, _ in stage.client.got]
            assert kinds == ["response", "response", "end"]
            assert stage.client.got[-1][1] is None


async def test_what_was_said_in_the_batch_comes_before_its_error(toys):
    """However much it was: the batch's error is behind it."""

    def script(requests):
        for number in range(2000):
            requests[0].responder.send(response(number), final=False)
        raise MmeError(Kind.EXECUTION_FAILED, "enough")

    async with serving(toys, script) as (model, _):
        client = Client(toys)
        model.submit(client.request)
        await client.call.answer()
        audit(model, [client])
        numbers = [item.outputs[0][2][0, 0] / 2 for kind, item in client.got[:-1]]
        assert numbers == list(range(2000))
        assert client.got[-1][1].message == "enough"


async def test_a_model_that_is_not_decoupled_answers_once(toys):
    """Its first response is the answer; a final word without one is an error."""
    async with serving(toys, lambda requests: [None] * len(requests), decoupled=False) as (model, handler):
        first, second = Client(toys, 1), Client(toys, 2)
        model.submit(first.request)
        model.submit(second.request)
        while len(handler.requests) < 2:  # noqa: ASYNC110 - an instance's doing
            await asyncio.sleep(0)
        handler.requests[0].responder.send(response(1), final=False)
        handler.requests[0].responder.send(response(5), final=False)
        handler.requests[1].responder.send(None, final=True)
        await first.call.answer()
        await second.call.answer()
        audit(model, [first, second])
        assert first.call.kind is None
        assert second.call.kind is Kind.EXECUTION_FAILED


# -- unloading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True])
async def test_a_response_that_is_none_is_an_error_and_keeps_nobody_from_theirs(toys, decoupled):
    """Code of others may send what is no array; what was posted behind it is handed over all the same."""
    async with serving(toys, lambda requests: [None] * len(requests), decoupled=decoupled) as (model, handler):
        clients = [Client(toys), Client(toys)]
        for number, client in enumerate(clients, 1):
            model.submit(client.request)
            await until(lambda number=number: left_open(model) == number)
        for request, sent in zip(handler.requests, (ModelResponse({"y": [1.0]}), response()), strict=True):
            request.responder.send(sent, final=True)
        async with asyncio.timeout(PATIENCE):
            for client in clients:
                await client.call.answer()
        audit(model, clients)
        assert clients[0].got[-1][1].kind is Kind.INTERNAL
        assert not isinstance(clients[1].got[-1][1], MmeError)


async def test_an_unload_ends_what_a_model_leaves_open(toys):
    """When patience is over each client is told, and the model that its clients left; what it then says is nobody's."""
    told = []

    def script(requests):
        for request in requests:
            request.responder.when_cancelled(lambda: told.append(True))
        return [None] * len(requests)

    async with serving(toys, script) as (model, handler):
        clients = [Client(toys, number) for number in range(3)]
        for client in clients:
            model.submit(client.request)
        while left_open(model) < 3:  # noqa: ASYNC110 - an instance's doing
            await asyncio.sleep(0)
        handler.requests[0].responder.send(response(0), final=False)
        await asyncio.sleep(0)
        model.refuse_waiting()
        assert [client.got[-1][1].kind for client in clients] == [Kind.UNAVAILABLE] * 3
        assert "is being unloaded" in clients[0].got[-1][1].message
        for request in handler.requests:
            request.responder.send(response(1), final=True)
        await asyncio.sleep(0)
        audit(model, clients)
        assert told == [True] * 3


async def test_what_is_left_open_after_patience_was_over_is_refused_at_once(toys):
    """A batch that executes while the model goes does not keep it by requests that it leaves open."""
    async with serving(toys) as (model, handler):
        stage = Stage(toys, model, handler, "None")
        await stage.begin()
        model.refuse_waiting()
        assert stage.client.ends == 0
        await stage.happen("batch")
        audit(model, [stage.client])
        assert stage.client.got[-1][1].kind is Kind.UNAVAILABLE


def test_a_model_that_talks_after_its_loop_is_gone_is_heard_by_nobody(toys):
    """Its thread goes on."""

    async def main():
        async with serving(toys, lambda requests: [None] * len(requests)) as (model, handler):
            client = Client(toys)
            model.submit(client.request)
            while not left_open(model):  # noqa: ASYNC110 - an instance's doing
                await asyncio.sleep(0)
            model.refuse_waiting()
            audit(model, [client])
        return handler

    run_on_loop(main()).requests[0].responder.send(response(), final=True)


# -- many at once ------------------------------------------------------------------------------------------------------

DEEDS = ("return", "error", "stream", "stream error", "later", "later fail", "later nothing", "return and say", "raise")


class Chaos:
    """A script that does with each request one of the deeds, by the number that it carries."""

    def __init__(self, deeds, *, decoupled):
        self._deeds = deeds
        self._decoupled = decoupled
        self._random = random.Random(1)
        self.threads = []

    def __call__(self, requests):
        """The answers to a batch."""
        answers = [self._answer(request) for request in requests]
        if any(answer == "raise" for answer in answers):
            raise MmeError(Kind.EXECUTION_FAILED, "the whole batch")
        return answers

    def _answer(self, request):
        number = int(request.inputs["x"][0, 0])
        deed = self._deeds[number]
        if deed == "return":
            return response(number)
        if deed == "error":
            return MmeError(Kind.INVALID_ARGUMENT, "no")
        if deed == "raise":
            return "raise"
        if deed == "return and say":
            self._say(request, [(response(number), True)], aside=True)
            return response(number)
        words = {
            "stream": [(response(i), False) for i in range(3)] + [(None, True)],
            "stream error": [(response(0), False), (MmeError(Kind.UNAVAILABLE, "no more"), False), (None, True)],
            "later": [(response(i), i == 2) for i in range(3)],
            "later fail": [(MmeError(Kind.UNSUPPORTED, "no"), True)] * 2,
            "later nothing": [(None, True)] * 3,
        }[deed]
        self._say(request, words, aside=deed.startswith("later"))
        return None

    def _say(self, request, words, *, aside):
        def say():
            for answer, final in words:
                request.responder.send(answer, final=final)

        if aside:
            self.threads.append(threading.Thread(target=say))
            self.threads[-1].start()
        else:
            say()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    deeds=st.lists(st.sampled_from(DEEDS), min_size=1, max_size=30),
    cancelled=st.sets(st.integers(0, 29)),
    instances=st.integers(1, 3),
    decoupled=st.booleans(),
    batched=st.booleans(),
    unloads=st.booleans(),
)
async def test_random_models(toys, deeds, cancelled, instances, decoupled, batched, unloads):
    """Requests of every kind, on several instances and threads, with clients that leave and an unload in the middle."""
    script = Chaos(deeds, decoupled=decoupled)
    batching = DynamicBatching((8,)) if batched else None
    async with serving(toys, script, instances=instances, decoupled=decoupled, batching=batching) as (model, _):
        clients = [Client(toys, number) for number in range(len(deeds))]
        for number, client in enumerate(clients):
            model.submit(client.request)
            if number % 7 == 3:
                await asyncio.sleep(0)
            if number in cancelled:
                client.request.cancel()
        if unloads:
            await asyncio.sleep(0)
            model.refuse_waiting()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(client.call.answer() for client in clients))
        for thread in script.threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)
        audit(model, clients)


# -- posts -------------------------------------------------------------------------------------------------------------


async def test_posts_of_many_threads_keep_each_ones_order():
    """And everybody else on the loop gets a turn while they come."""
    came, turns = [], 0
    posts = ResponseQueue(
        asyncio.get_running_loop(), lambda opened, answer, final: came.append((opened, answer, final))
    )

    def post(number):
        for i in range(2000):
            posts.put(number, i, i == 1999)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(PATIENCE):
        while len(came) < 8000:
            await asyncio.sleep(0)
            turns += 1
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [answer for opened, answer, _ in came if opened == number] == list(range(2000))
    assert turns >= 8000 // 256


async def test_what_the_loop_posts_is_taken_in_its_next_turn():
    """All of it, behind what threads have posted before: the loop posts no more than it can take."""
    came, first = [], asyncio.Event()
    posts = ResponseQueue(asyncio.get_running_loop(), lambda opened, *_: (came.append(opened), first.set()))
    thread = threading.Thread(target=posts.put, args=(0, None, False))
    thread.start()
    await asyncio.wait_for(first.wait(), PATIENCE)
    thread.join()
    for turn in range(3):
        for number in range(1000):
            posts.put(1 + 1000 * turn + number, None, False)
        await asyncio.sleep(0)
        assert came == list(range(1 + 1000 * (turn + 1)))


async def test_posts_may_be_taken_before_their_turn():
    """All of them, in order, and then none again."""
    came = []
    posts = ResponseQueue(asyncio.get_running_loop(), lambda opened, *_: came.append(opened))
    for number in range(1000):
        posts.put(number, None, False)
    posts.drain()
    assert came == list(range(1000))
    for _ in range(3):
        await asyncio.sleep(0)
    assert came == list(range(1000))


async def test_responses_say_who_answered(toys):
    """Each carries the model's name and version, the request's id, and where the time went."""

    def script(requests):
        requests[0].responder.send(response(), final=False)
        requests[0].responder.send(None, final=True)
        return [None]

    async with serving(toys, script) as (model, _):
        client = Client(toys)
        model.submit(client.request)
        await client.call.answer()
        (_, answer), _ = client.got
        assert isinstance(answer, InferenceResponse)
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "1")
        assert answer.timings.compute_infer >= 0
        audit(model, [client])


async def test_what_was_never_begun_goes_before_what_waits(toys):
    """In its own order: a batch whose process ends midway does not go behind all that came while it was executed."""
    executed = []
    gates = [threading.Event(), threading.Event()]

    def script(requests):
        executed.append([int(request.inputs["x"][0, 0]) for request in requests])
        if len(executed) <= len(gates):
            assert gates[len(executed) - 1].wait(PATIENCE)
        answers = [ModelResponse({"y": request.inputs["x"] * 2}) for request in requests]
        return answers if len(executed) > 1 else [answers[0], NotBegunError("m"), NotBegunError("m")]

    async with serving(toys, script, decoupled=False, batching=DynamicBatching((8,))) as (model, _):
        clients = [Client(toys, number) for number in range(3)]
        clients += [Client(toys, *[number] * 8) for number in (3, 4)]  # a batch each
        for client in clients[:3]:
            model.submit(client.request)
        await until(lambda: executed)
        for client in clients[3:]:
            model.submit(client.request)
        gates[0].set()
        await until(lambda: len(executed) == 2)  # the instance took the next batch before what came back, or after it
        await until(lambda: model.queued == (3 if executed[1] == [3] else 2))
        gates[1].set()
        for client in clients:
            await client.call.answer()
        assert executed in ([[0, 1, 2], [3], [1, 2], [4]], [[0, 1, 2], [1, 2], [3], [4]])
        audit(model, clients)
