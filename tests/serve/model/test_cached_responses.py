"""A model whose responses are cached answers what it answered before, and executes what it did not.

Whether the loop compares and copies tensors, or a thread because they are large.
"""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from model_handlers.config.model_config import DynamicBatching, QueuePolicy
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32
from serve.model import response_cache
from serve.model.model import Model
from serve.model.response_cache import ResponseCache
from serve.request import Layout
from serve.statistics import ModelStats

BATCHING = DynamicBatching((8,))


@pytest.fixture(autouse=True, params=["loop", "thread"])
def small(request, monkeypatch):
    """Everything is small, or nothing is: then one thread compares and copies, in order."""
    if request.param == "loop":
        yield True
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there before the test
        monkeypatch.setattr(response_cache, "_THREADS", pool)
        monkeypatch.setattr(response_cache, "_AT_ONCE", 0)
        yield False


LARGE = pytest.mark.parametrize("small", ["thread"], indirect=True)


@pytest.fixture
def looking(small):
    """Set, it lets a large request be looked up."""
    assert not small
    goes_on = threading.Event()
    response_cache._THREADS.submit(goes_on.wait, 60)
    yield goes_on
    goes_on.set()


@contextlib.asynccontextmanager
async def serving(toys, script=None, *, budget=1 << 20, cache=None, handler=None, **config):
    """A started model with a response cache; closed afterwards."""
    fields = {"dynamic_batching": BATCHING, "response_cache": True, **config}
    handler = handler or toys.Scripted(toys.config(**fields), script)
    cache = ResponseCache(budget) if cache is None else cache
    loop = asyncio.get_running_loop()
    model = Model("m", 1, [("m_0", handler)], ModelStats(), loop, responses=cache)
    try:
        yield model, handler, cache
        assert (model.outstanding, model.queued) == (0, 0)
    finally:
        await asyncio.to_thread(model.close)
        await asyncio.sleep(0)


async def ask(model, toys, *numbers, **options):
    """Submit a call and wait for its answer."""
    call = toys.Call(*numbers, **options)
    model.submit(call.request)
    assert call.answers == []  # never before `submit` returns
    await call.answer()
    await asyncio.wrap_future(response_cache._THREADS.submit(int))  # what is to be kept has been copied
    return call


def counts(model):
    """(succeeded, queued, hits, misses, executions, inferences)."""
    stats = model.stats
    durations = (stats.success, stats.queue, stats.cache_hit, stats.cache_miss)
    return (*(duration.count for duration in durations), stats.execution_count, stats.inference_count)


async def test_a_request_that_comes_again_is_not_executed(toys):
    """It gets the same tensors under its own id; a hit is a success that waited no time, and was not executed."""
    async with serving(toys) as (model, handler, _):
        calls = [await ask(model, toys, number) for number in (1, 2, 1, 1)]
        assert [call.kind for call in calls] == [None] * 4
        assert handler.batches == [[1], [2]]
        assert counts(model) == (4, 4, 2, 2, 2, 2)
        assert model.stats.cache_hit.ns > 0
        assert model.stats.cache_miss.ns > 0


async def test_shape_and_wanted_outputs_are_part_of_what_is_compared(toys):
    """The same bytes in another shape, or for other outputs, are another request."""
    one = Layout((("x", FP32, (2, 2)),), ("y",))
    all_outputs = Layout((("x", FP32, (2, 2)),), ())
    async with serving(toys) as (model, handler, _):
        await ask(model, toys, 1, 1, layout=one)
        await ask(model, toys, 1, 1, layout=all_outputs)
        await ask(model, toys, 1, 1, layout=Layout(one.inputs, ("y",)))
        assert len(handler.batches) == 2


async def test_errors_are_not_kept(toys):
    """A request that failed is executed again, and counts as no miss."""

    def fail(rows):
        raise MmeError(Kind.EXECUTION_FAILED, "not today")

    async with serving(toys, fail) as (model, handler, cache):
        calls = [await ask(model, toys, 1) for _ in range(2)]
        assert [call.kind for call in calls] == [Kind.EXECUTION_FAILED] * 2
        assert (len(handler.batches), len(cache), model.stats.cache_miss.count) == (2, 0, 0)


async def test_a_response_is_kept_apart_from_the_models_memory(toys):
    """What the model does with its buffers afterwards changes no answer, and no client can change what was kept."""
    buffer = np.empty((1, 2), np.float32)

    def reuse(rows):
        np.multiply(rows, 2, out=buffer)
        return [buffer]

    async with serving(toys, reuse) as (model, _, _):
        await ask(model, toys, 1)
        await ask(model, toys, 7)
        again = await ask(model, toys, 1)
        assert again.kind is None
        assert not again.answers[0].outputs[0][2].flags.writeable


async def test_a_model_that_is_closed_is_forgotten(toys):
    """Another one of its name starts with nothing, though the cache is the same, and the bytes are free."""
    async with serving(toys) as (model, _, cache):
        await ask(model, toys, 1)
        assert cache.used > 0
    assert cache.used == 0
    async with serving(toys, cache=cache) as (model, handler, _):
        await ask(model, toys, 1)
        assert handler.batches == [[1]]


@pytest.mark.parametrize("reason", ["no budget", "not asked for"])
async def test_without_a_cache_everything_is_executed(reason, toys, caplog):
    """And nothing is counted; a model that asks for a cache where there is none is told."""
    wants, budget = (True, 0) if reason == "no budget" else (False, 1 << 20)
    async with serving(toys, response_cache=wants, budget=budget) as (model, handler, _):
        await ask(model, toys, 1)
        await ask(model, toys, 1)
        assert (len(handler.batches), counts(model)[2:4], model.stats.cached) == (2, (0, 0), False)
    assert ("its responses are not cached" in caplog.text) is wants


async def test_an_answer_from_the_cache_overtakes_nobody_where_order_is_kept(toys):
    """With preserve_ordering a request behind others is queued, though its answer is known."""
    order = []
    policy = DynamicBatching((8,), preserve_ordering=True)
    async with serving(toys, dynamic_batching=policy) as (model, handler, _):
        await ask(model, toys, 1)
        calls = [toys.Call(n, on_answer=lambda call: order.append(call.numbers[0])) for n in (2, 1)]
        for call in calls:
            model.submit(call.request)
        for call in calls:
            await call.answer()
        await ask(model, toys, 1)
        assert order == [2, 1]
        assert handler.batches == [[1], [2, 1]]


@LARGE
async def test_whoever_leaves_while_it_is_looked_up_is_not_executed(looking, toys):
    """The model hears of no request that nobody waits for."""
    async with serving(toys) as (model, handler, _):
        call = toys.Call(1)
        model.submit(call.request)
        call.request.cancel()
        assert model.outstanding == 1
        looking.set()
        await call.answer()
        assert (call.kind, handler.batches) == (Kind.CANCELLED, [])


@LARGE
async def test_a_queue_that_is_full_when_a_request_was_looked_up_refuses_it(looking, toys):
    """It is too late to refuse to accept it: that is its answer, and it is counted."""
    gate = toys.Gate()
    policy = DynamicBatching((8,), default_queue_policy=QueuePolicy(max_queue_size=1))
    async with serving(toys, gate, dynamic_batching=policy) as (model, _, _):
        calls = [toys.Call(n) for n in range(1, 4)]
        model.submit(calls[0].request)
        looking.set()
        await gate.arrived()
        for call in calls[1:]:
            model.submit(call.request)
        await calls[2].answer()
        gate.open()
        await calls[1].answer()
        assert [call.kind for call in calls] == [None, None, Kind.QUEUE_FULL]
        assert model.stats.fail.count == 1


@LARGE
async def test_a_model_that_goes_refuses_what_it_looks_up(looking, toys):
    """As it refuses what is queued."""
    async with serving(toys) as (model, handler, _):
        call = toys.Call(1)
        model.submit(call.request)
        model.refuse_waiting()
        looking.set()
        await call.answer()
        assert (call.kind, handler.batches) == (Kind.UNAVAILABLE, [])


@LARGE
async def test_nobody_overtakes_a_request_that_is_looked_up_where_order_is_kept(looking, toys, monkeypatch):
    """With preserve_ordering whoever comes meanwhile is queued behind it; else a small request need not wait."""

    async def answers(preserves):
        order = []
        policy = DynamicBatching((1,), preserve_ordering=preserves)
        config = {"dynamic_batching": policy, "max_batch_size": 1}
        async with serving(toys, **config) as (model, _, _):
            large, small = [toys.Call(n, on_answer=lambda call: order.append(call.numbers[0])) for n in (1, 2)]
            monkeypatch.setattr(response_cache, "_AT_ONCE", 0)
            model.submit(large.request)
            monkeypatch.setattr(response_cache, "_AT_ONCE", 1 << 20)
            model.submit(small.request)
            if not preserves:
                await small.answer()
            looking.set()
            await large.answer()
            await small.answer()
        return order

    assert await answers(preserves=False) == [2, 1]
    looking.clear()
    response_cache._THREADS.submit(looking.wait, 60)
    assert await answers(preserves=True) == [1, 2]


@LARGE
async def test_a_request_that_can_not_be_looked_up_is_executed(looking, toys, monkeypatch):
    """Where there is no memory to compare it, it is a request like any other."""

    def no_memory(*_):
        raise MemoryError

    async with serving(toys) as (model, handler, cache):
        monkeypatch.setattr(response_cache.CachedResponses, "_key", no_memory)
        looking.set()
        assert (await ask(model, toys, 1)).kind is None
        assert (handler.batches, len(cache)) == ([[1]], 0)
