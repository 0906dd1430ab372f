"""Sequences through a model with instances of its own: their steps are answered in order, each once, whatever else happens."""

import asyncio
import contextlib
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_handlers.base import CPU, Handler
from model_handlers.config.model_config import (
    DirectStrategy,
    InstanceGroup,
    ModelConfig,
    OldestStrategy,
    Resource,
    SequenceBatching,
    SequenceState,
)
from model_handlers.config.validate import normalise
from model_handlers.errors import Kind, MmeError
from model_handlers.requests import FLAG_SEQUENCE_END as END
from model_handlers.requests import FLAG_SEQUENCE_KEPT as KEPT
from model_handlers.requests import FLAG_SEQUENCE_START as START
from model_handlers.tensor import FP32, TensorSpec
from serve.model.model import Model
from serve.model.rate_limiter import ResourcePool
from serve.request import InferenceRequest, Layout
from serve.statistics import ModelStats
from tests.serve.inside import guard_queue, wakes_at
from tests.waiting import until

LAYOUT = Layout((("X", FP32, (1, 1)),), ())
FOR_EVER_US = 3_600_000_000
ALWAYS_NS = 10**12


class Sums(Handler):
    """X and a state → Y, their sum, which is the next state."""

    backend = "sums"
    default_filename = "model.sums"
    inline = True

    @classmethod
    def autocomplete(cls, config, model_file):  # noqa: ARG003
        """Nothing is left out."""
        return config

    @classmethod
    def load(cls, config, model_file, device, instance):
        """Made by the test itself."""
        raise NotImplementedError

    def execute(self, inputs, outputs):
        """Add."""
        return [inputs["X"] + inputs["SUM"]] * len(outputs)

    def close(self):
        """Nothing is held."""


@contextlib.asynccontextmanager
async def serving(strategy, *, instances=1, inline_ns=0, idle_us=FOR_EVER_US, limited=False):
    """A started model, of whose instances one at a time executes if it is limited; closed when everybody is answered."""
    state = SequenceState("SUM", "SUM_OUT", FP32, (1,))
    config = normalise(
        ModelConfig(
            "m",
            max_batch_size=3,
            inputs=(TensorSpec("X", FP32, (1,)),),
            outputs=(TensorSpec("Y", FP32, (1,)),),
            sequence_batching=SequenceBatching(strategy, idle_us, state=(state,)),
        )
    )
    handler, zero = Sums(config), np.zeros((1, 1), np.float32)
    handlers = [(f"m_{index}", handler) for index in range(instances)]
    loop = asyncio.get_running_loop()
    limits = None
    if limited:
        group = InstanceGroup("m", count=instances, resources=(Resource("R", 1),))
        limits = ResourcePool(loop, {("r", ""): 1}).instances("m", (group,), [(name, CPU) for name, _ in handlers])
    model = Model("m", 1, handlers, ModelStats(), loop, inline_ns, initial_states={"SUM": zero}, limits=limits)
    try:
        yield model
        model.refuse_waiting()
        await until(lambda: not model.outstanding)
        assert model.queued == 0
    finally:
        await asyncio.to_thread(model.close)


class Step:
    """One request, and its answers."""

    def __init__(self, model, correlation_id, value, flags=0, timeout_us=0):
        self.answers = []
        self.value = value
        self.done = asyncio.get_running_loop().create_future()
        self.request = InferenceRequest(LAYOUT, [np.full((1, 1), value, np.float32)], self._complete)
        self.request.correlation_id, self.request.flags, self.request.timeout_us = correlation_id, flags, timeout_us
        model.submit(self.request)

    def _complete(self, _request, result):
        self.answers.append(result)
        if not self.done.done():
            self.done.set_result(result)

    async def total(self):
        """The sum that it was answered, or the kind of its error."""
        result = await self.done
        return result.kind if isinstance(result, MmeError) else float(result.outputs[0][2][0, 0])


@pytest.mark.parametrize("limited", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("inline_ns", [0, ALWAYS_NS])
@pytest.mark.parametrize("strategy", [DirectStrategy(), OldestStrategy(2)], ids=["direct", "oldest"])
async def test_sequences_add_up_side_by_side(strategy, inline_ns, limited):
    """On instances of their own or on the loop; statistics count requests, not rows."""
    async with serving(strategy, instances=2, inline_ns=inline_ns, limited=limited) as model:
        steps = [
            Step(model, number, number, (START if k == 0 else 0) | (END if k == 3 else 0))
            for number in range(1, 8)
            for k in range(4)
        ]
        totals = [await step.total() for step in steps]
        assert totals == [number * (k + 1) for number in range(1, 8) for k in range(4)]
        assert model.stats.inference_count == model.stats.success.count == 28
        assert model.stats.queue.count == 28


async def test_an_idle_sequence_makes_room_by_itself():
    """Nobody has to ask: its time is watched."""
    async with serving(OldestStrategy(1), idle_us=20_000) as model:
        assert await Step(model, 1, 1, START).total() == 1
        assert await Step(model, 2, 5, START).total() == 5
        with pytest.raises(MmeError, match="must specify the START flag"):
            Step(model, 1, 1)


async def test_a_timeout_in_the_backlog_is_told_in_tritons_words():
    """All requests of the sequence are."""
    async with serving(OldestStrategy(1)) as model:
        await Step(model, 1, 1, START).total()
        waiting = [Step(model, 2, 1, START, timeout_us=10_000), Step(model, 2, 1, END)]
        errors = [await step.done for step in waiting]
        assert [error.kind for error in errors] == [Kind.QUEUE_TIMEOUT] * 2
        assert errors[0].message == "timeout of the corresponding sequence has been expired for model 'm'"
        assert await Step(model, 1, 1).total() == 2


async def test_a_client_that_leaves_ends_its_sequence():
    """The rest of it is not executed, and its place is free."""
    async with serving(OldestStrategy(1)) as model:
        one, two = Step(model, 1, 1, START), Step(model, 1, 1)
        other = Step(model, 2, 5, START)
        one.request.cancel()
        assert [await step.total() for step in (one, two)] == [Kind.CANCELLED] * 2
        assert await other.total() == 5


async def test_a_client_that_leaves_the_backlog_is_answered_at_once():
    """Nobody knows when its turn would come."""
    async with serving(OldestStrategy(1)) as model:
        assert await Step(model, 1, 1, START).total() == 1
        waiting = [Step(model, 2, 1, START), Step(model, 2, 1, END)]
        waiting[1].request.cancel()
        assert [await step.total() for step in waiting] == [Kind.CANCELLED] * 2
        assert (model.queued, model.outstanding) == (0, 0)


async def test_a_sequence_can_be_ended_from_outside():
    """Who waits for its place gets it."""
    async with serving(OldestStrategy(1)) as model:
        assert await Step(model, 1, 1, START).total() == 1
        other = Step(model, 2, 5, START)
        model.end_sequence(1)
        assert await other.total() == 5


async def test_a_model_that_is_closed_is_looked_after_no_longer():
    """Though sequences lived in it until then, of which more might have come: nothing holds it any more."""
    async with serving(OldestStrategy(1)) as model:
        assert await Step(model, 1, 1, START | KEPT).total() == 1
        assert wakes_at(model) is not None
        await asyncio.to_thread(model.close)
        assert wakes_at(model) is None


async def test_the_first_lane_that_waits_for_more_decides_when_to_look():
    """Of instances that take turns each is asked, and the nearest of their times is the one to wake at."""
    async with serving(DirectStrategy(FOR_EVER_US // 2, 1.0), instances=2, limited=True) as model:
        first, second = Step(model, 1, 1, START).request, Step(model, 2, 1, START).request
        second.arrival_ns += 1_000_000_000
        await asyncio.sleep(0)
        assert wakes_at(model) == first.arrival_ns + FOR_EVER_US // 2 * 1000


class Guarded:
    """A queue that notes what it is asked on another thread than that of the loop."""

    def __init__(self, queue):
        self.elsewhere = []
        self._queue = queue
        self._home = threading.get_ident()

    def __len__(self):
        return len(self._queue)

    def __getattr__(self, name):
        value = getattr(self._queue, name)
        if threading.get_ident() != self._home:
            self.elsewhere.append(name)
        return value


@pytest.mark.parametrize("limited", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("inline_ns", [0, ALWAYS_NS])
async def test_the_queue_is_asked_on_the_loop_alone(inline_ns, limited):
    """It has no lock: whatever an instance's thread has done, the loop tells the queue."""
    async with serving(OldestStrategy(1), instances=2, inline_ns=inline_ns, limited=limited) as model:
        queue = guard_queue(model, Guarded)
        steps = [Step(model, number, 1, flags) for number in (1, 2, 3) for flags in (START, 0, END)]
        steps[4].request.cancel()
        kept = Step(model, 4, 1, START)
        assert [await step.total() for step in (*steps[:3], *steps[6:], kept)] == [1, 2, 3, 1, 2, 3, 1]
        model.end_sequence(4)
    assert queue.elsewhere == []


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4), st.sampled_from([0, 0, START, END, START | END])),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("turn"), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([DirectStrategy(), DirectStrategy(500, 0.7), OldestStrategy(1), OldestStrategy(3)]),
    st.integers(1, 3),
    st.sampled_from([0, ALWAYS_NS]),
    st.booleans(),
    ACTIONS,
)
async def test_every_step_is_answered_once_with_the_sum_of_its_sequence(
    strategy, instances, inline_ns, limited, actions
):
    """Whatever comes, leaves, begins anew and ends, on however many instances; when the model goes, the rest is told so."""
    async with serving(strategy, instances=instances, inline_ns=inline_ns, limited=limited) as model:
        sent, lives = [], defaultdict(list)
        for name, number, *flags in actions:
            if name == "turn":
                await asyncio.sleep(0.0003 * number)
            elif name == "end":
                model.end_sequence(number)
            elif name == "cancel" and number < len(sent):
                sent[number].request.cancel()
            elif name == "step":
                with contextlib.suppress(MmeError):
                    step = Step(model, number, 2.0 ** len(sent), flags[0])
                    sent.append(step)
                    if flags[0] & START:
                        lives[number].append([])
                    lives[number][-1].append(step)
        await asyncio.sleep(0)
    assert [len(step.answers) for step in sent] == [1] * len(sent)
    for each in (life for started in lives.values() for life in started):
        expected = 0.0
        for step in each:  # powers of two: a sum tells what is in it
            total = await step.total()
            if isinstance(total, float):
                expected += step.value
                assert total == expected
            else:
                assert total in {Kind.CANCELLED, Kind.UNAVAILABLE}
