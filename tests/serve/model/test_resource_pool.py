"""Models whose instances share resources execute no more at a time than there is, and all of them in the end."""

import asyncio
import contextlib
import threading

import pytest

from model_handlers.base import CPU, Device
from model_handlers.config.model_config import DynamicBatching, InstanceGroup, Resource
from model_handlers.errors import MmeError
from serve.model.model import Model
from serve.model.rate_limiter import ResourcePool
from serve.statistics import ModelStats

BATCHING = DynamicBatching((8,))


def group(count=1, needs=1, priority=1):
    """An instance group whose instances need so much of R."""
    return InstanceGroup("g", count=count, resources=(Resource("R", needs),), priority=priority)


@contextlib.asynccontextmanager
async def serving(toys, limits, script=None, *, instances=None, inline=False, **config):
    """A started model whose instances are limited."""
    instances = instances or group()
    config.setdefault("dynamic_batching", BATCHING)
    handler = (toys.Inline if inline else toys.Scripted)(toys.config(instance_group=(instances,), **config), script)
    names = [f"g_{index}" for index in range(instances.count)]
    instances = limits.instances("m", (instances,), [(name, CPU) for name in names])
    inline_ns = 10**12 if inline else 0
    loop = asyncio.get_running_loop()
    model = Model("m", 1, [(name, handler) for name in names], ModelStats(), loop, inline_ns, limits=instances)
    try:
        yield model, handler
        assert (model.outstanding, model.queued) == (0, 0)
    finally:
        if isinstance(script, toys.Gate):
            script.open()
        await asyncio.to_thread(model.close)


def ask(model, toys, *numbers):
    """Submit a call."""
    call = toys.Call(*numbers)
    model.submit(call.request)
    return call


async def test_models_that_share_a_resource_take_turns(toys):
    """While one executes the other waits, and is told when it is its turn."""
    limits = ResourcePool(asyncio.get_running_loop(), {("r", ""): 1})
    one, two = toys.Gate(), toys.Gate()
    async with serving(toys, limits, one) as (first, _), serving(toys, limits, two) as (second, handler):
        calls = [ask(first, toys, 1)]
        await one.arrived()
        calls.append(ask(second, toys, 2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (second.queued, handler.batches) == (1, [])
        one.let()
        await two.arrived()
        calls.append(ask(first, toys, 3))
        two.let()
        one.let()
        assert [(await call.answer()) and call.kind for call in calls] == [None] * 3


async def test_without_limits_everybody_executes_at_once(toys, caplog):
    """Rate limiting is off by default; a configuration that asks for it is told."""
    limits = ResourcePool(asyncio.get_running_loop(), None)
    with caplog.at_level("INFO", "mme.model"):
        async with serving(toys, limits) as (model, _):
            await ask(model, toys, 1).answer()
    assert "its rate_limiter changes nothing" in caplog.text


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(("there_is", "instances"), [(1, 3), (2, 3), (3, 2)])
async def test_everybody_is_answered(toys, there_is, instances, inline):
    """Whatever there is for however many instances of two models, on threads or on the loop."""
    limits = ResourcePool(asyncio.get_running_loop(), {("r", ""): there_is})
    groups = {"instances": group(instances), "inline": inline, "dynamic_batching": None}
    async with serving(toys, limits, **groups) as (first, _), serving(toys, limits, **groups) as (second, _):
        calls = []
        for number in range(40):
            calls.append(ask((first, second)[number % 2], toys, number))
            if number % 7 == 0:
                await asyncio.sleep(0)
        assert [(await call.answer()) and call.kind for call in calls] == [None] * 40


async def test_a_batch_that_waits_for_more_holds_nothing(toys):
    """An instance whose queue is not ready gives its turn back, and takes one when it is."""
    limits = ResourcePool(asyncio.get_running_loop(), {("r", ""): 1})
    patient = DynamicBatching((2,), max_queue_delay_microseconds=3_600_000_000)
    async with (
        serving(toys, limits, instances=group(2), dynamic_batching=patient) as (first, handler),
        serving(toys, limits) as (second, _),
    ):
        calls = [ask(first, toys, 1)]
        await ask(second, toys, 5).answer()
        calls.append(ask(first, toys, 2))
        for call in calls:
            await call.answer()
        assert handler.batches == [[1, 2]]


async def test_a_model_that_leaves_gives_its_resources_to_others(toys):
    """Its instances are forgotten, and so is what they needed."""
    limits = ResourcePool(asyncio.get_running_loop(), {})
    async with serving(toys, limits, instances=group(1, needs=4)):
        assert repr(limits) == "<ResourcePool: <RateLimiter: 0 of 1 instances execute, 0 wait>>"
    assert repr(limits) == "<ResourcePool: <RateLimiter: 0 of 0 instances execute, 0 wait>>"


async def test_a_model_may_go_before_its_last_execution_is_known(toys, idle):
    """Closed on a thread while the loop is busy: what its instance said last is heard first, and holds nothing then."""
    limits, gate = ResourcePool(asyncio.get_running_loop(), {}), toys.Gate()
    async with serving(toys, limits, gate) as (model, _):
        call = ask(model, toys, 1)
        await gate.arrived()
        gate.open()
        closing = threading.Thread(target=model.close)
        closing.start()
        closing.join()  # and nothing that was posted to the loop meanwhile has run
        await call.answer()
        assert call.kind is None
        await idle()
    assert repr(limits) == "<ResourcePool: <RateLimiter: 0 of 0 instances execute, 0 wait>>"


async def test_a_turn_that_was_given_back_before_its_news_is_none(idle):
    """A load thread makes room for an instance that wants nothing any more when it is told: others hold what there is."""
    limits = ResourcePool(asyncio.get_running_loop(), {})
    small, large = limits.instances("small", (group(2),), [("g_0", CPU), ("g_1", CPU)]), []

    def load():
        large.append(limits.instances("large", (group(1, needs=2),), [("g_0", CPU)]))

    assert [small.acquire(0), small.acquire(1)] == [True, False]
    loading = threading.Thread(target=load)
    loading.start()
    loading.join()
    small.release_idle()
    await idle()
    small.done(0, again=False)
    assert large[0].acquire(0)
    assert not small.acquire(1)


async def test_a_model_that_can_never_execute_takes_no_part():
    """None of its instances does, and the error says why."""
    limits = ResourcePool(asyncio.get_running_loop(), {("r", "1"): 1})
    instances = [("g_0", Device("gpu", 0)), ("g_1", Device("gpu", 1))]
    with pytest.raises(MmeError, match="minimum required count is 2"):
        limits.instances("m", (group(2, needs=2),), instances)
    assert repr(limits) == "<ResourcePool: <RateLimiter: 0 of 0 instances execute, 0 wait>>"
