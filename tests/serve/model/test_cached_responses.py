"""A model whose responses are cached answers what it answered before, and executes what it did not."""

import asyncio
import contextlib

import numpy as np
import pytest

from model_handlers.config.model_config import DynamicBatching
from model_handlers.errors import Kind, MmeError
from model_handlers.tensor import FP32, TensorSpec
from serve.model.model import Model
from serve.model.response_cache import ResponseCache
from serve.request import Layout
from serve.statistics import ModelStats

BATCHING = DynamicBatching((8,))


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
        assert cache.currsize > 0
    assert cache.currsize == 0
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


@pytest.mark.parametrize(("count", "copies", "missed"), [(300_000, 1, 0), (100_000, 4, 2)])
async def test_large_tensors_are_not_cached(count, copies, missed, toys):
    """A request of more than 1 MiB is not looked up; of one that is, a response of more than 1 MiB is not kept."""
    layout = Layout((("x", FP32, (1, count)),), ("y",))

    def copied(rows):
        return [np.tile(rows, (1, copies))]

    tensors = {"inputs": (TensorSpec("x", FP32, (-1,)),), "outputs": (TensorSpec("y", FP32, (-1,)),)}
    async with serving(toys, copied, budget=1 << 30, **tensors) as (model, handler, cache):
        for _ in range(2):
            call = toys.Call(1, layout=layout)
            call.request.inputs[0] = np.zeros((1, count), np.float32)
            model.submit(call.request)
            await call.answer()
            assert call.answers[0].outputs[0][2].shape == (1, copies * count)
        assert (len(handler.batches), len(cache), counts(model)[2:4]) == (2, 0, (0, missed))
