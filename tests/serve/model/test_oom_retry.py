"""Requests that run out of memory: real models, whose framework finds no room for as long as the test says."""

import asyncio
import contextlib

import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, out_of_memory
from model_handlers.onnx import OnnxHandler
from serve.cache.entry import State
from serve.cache.eviction import Rules
from tests.serve.engines import engine_of
from tests.serve.integrity import check_integrity


class Shortage:
    """When executions find no memory.

    Attributes:
        of: names of the models that find none.
        until: asked at each of their executions; true ends the shortage.
        failed: how many found none.
    """

    def __init__(self):
        self.of = set()
        self.until = lambda: False
        self.failed = 0


@pytest.fixture
def shortage(monkeypatch):
    """A shortage that has not begun."""
    shortage = Shortage()
    execute = OnnxHandler.execute

    def run_short(self, inputs, outputs):
        if self.config.name in shortage.of and not shortage.until():
            shortage.failed += 1
            raise out_of_memory(f"model '{self.config.name}' found no memory")
        return execute(self, inputs, outputs)

    monkeypatch.setattr(OnnxHandler, "execute", run_short)
    return shortage


@pytest.fixture
def serving(tmp_path, write_repository_model):
    """Begins an engine that has a, b and c in memory."""

    @contextlib.asynccontextmanager
    async def serving(config="", **options):
        for name in "abc":
            write_repository_model(tmp_path / "models" / name, config)
        async with engine_of(tmp_path, repository=tmp_path / "models", **options) as engine:
            for name in "abc":
                await engine.load(name)
                engine.cache.remeasured(
                    engine.cache.entries[name], Footprint(10**6)
                )  # what is measured differs by luck
            yield engine
            check_integrity(engine.cache)
            assert [entry.name for entry in engine.cache.entries.values() if entry.leases] == []

    return serving


@pytest.fixture
def engine(serving):
    """One without anything special."""
    return serving()


def is_ready(engine, name):
    """Whether a model is in memory."""
    return engine.cache.entries[name].state is State.READY


def evictions(engine):
    """Why each model was evicted, and how often."""
    return {name: dict(stats.evictions) for name, stats in engine.registry.stats.items() if stats.evictions}


async def asked(engine, toys, number, name="a"):
    """The kind of the error that a request got, None for the right answer; one answer, whatever happened."""
    call = toys.Call(number)
    assert engine.submit(name, None, call.request)
    with contextlib.suppress(Exception):
        await call.answer()
    return call.kind


async def test_others_leave_and_the_request_is_answered(engine, toys, shortage):
    """The client never learns of it; the model stays usable; whoever was used last longest ago left."""
    shortage.of, shortage.until = {"a"}, lambda: not is_ready(engine, "b")
    assert await asked(engine, toys, 3) is None
    assert shortage.failed == 1
    assert evictions(engine) == {"b": {"execution": 1}}
    assert is_ready(engine, "c")
    assert engine.cache.entries["b"].registered
    stats = engine.stats["a", 1]
    assert (stats.success.count, stats.fail.count) == (1, 0)
    assert await asked(engine, toys, 4) is None


async def test_a_request_that_fails_twice_is_out_of_memory_and_moves_nobody_again(engine, toys, shortage):
    """It is tried twice and told; the model goes on; the next of its requests that fails evicts no other model."""
    shortage.of = {"a"}
    assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
    assert shortage.failed == 2
    assert evictions(engine) == {"b": {"execution": 1}}
    assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
    assert shortage.failed == 3
    assert evictions(engine) == {"b": {"execution": 1}}
    assert engine.stats["a", 1].failures == {"BACKEND": 2}
    shortage.of = {"c"}
    assert await asked(engine, toys, 5) is None
    assert await asked(engine, toys, 5, "c") is Kind.OUT_OF_MEMORY
    assert evictions(engine) == {"b": {"execution": 1}, "a": {"execution": 1}}


async def test_with_nobody_to_leave_the_error_is_told_at_once(serving, toys, shortage):
    """Pinned models stay, and a second try without more room would be in vain."""
    async with serving(eviction=Rules(pins=("b", "c"))) as engine:
        shortage.of = {"a"}
        assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
        assert (shortage.failed, evictions(engine)) == (1, {})
        assert is_ready(engine, "a")


async def test_a_platform_is_told(serving, toys, shortage):
    """Where somebody else manages the models, nobody leaves: the error is what tells the platform to make room."""
    async with serving(evicts=False) as engine:
        shortage.of = {"a"}
        assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
        assert (shortage.failed, evictions(engine)) == (1, {})
        shortage.of = set()
        assert await asked(engine, toys, 3) is None


async def test_a_batch_that_fails_makes_room_once(serving, toys, shortage):
    """All of its requests run once more, and what they needed is made free one time."""
    async with serving("max_batch_size: 4") as engine:
        shortage.of, shortage.until = {"a"}, lambda: not is_ready(engine, "b")
        kinds = await asyncio.gather(*(asked(engine, toys, number) for number in range(1, 5)))
        assert kinds == [None] * 4
        assert evictions(engine) == {"b": {"execution": 1}}
        assert engine.stats["a", 1].success.count == 4


async def test_a_client_that_left_meanwhile_is_not_served(engine, toys, shortage):
    """A request whose client leaves while room is made is dropped when its turn comes again."""
    shortage.of, shortage.until = {"a"}, lambda: not is_ready(engine, "b")
    call = toys.Call(3)
    assert engine.submit("a", None, call.request)
    while not shortage.failed:  # noqa: ASYNC110 - an instance's doing
        await asyncio.sleep(0)
    while call.request.lease is engine.cache.entries["a"].residency:  # noqa: ASYNC110 - until it was taken back
        await asyncio.sleep(0)
    call.request.cancel()
    await call.answer()
    assert call.kind is Kind.CANCELLED


async def test_nobody_leaves_for_a_client_that_left(engine, toys, shortage):
    """A request that fails after its client left is not tried again."""
    call = toys.Call(3)

    def leave():
        call.request.cancelled = True
        return False

    shortage.of, shortage.until = {"a"}, leave
    assert engine.submit("a", None, call.request)
    await call.answer()
    assert (call.kind, shortage.failed, evictions(engine)) == (Kind.OUT_OF_MEMORY, 1, {})


async def test_order_is_not_given_up_for_a_second_try(serving, toys, shortage):
    """A model whose responses keep the order of their requests answers the error: what came after does not wait."""
    async with serving(
        "max_batch_size: 4 dynamic_batching { preserve_ordering: true } instance_group { count: 2 }"
    ) as engine:
        shortage.of = {"a"}
        assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
        assert (shortage.failed, evictions(engine)) == (1, {})


async def test_a_relief_that_fails_is_the_first_error(engine, toys, shortage, monkeypatch, caplog):
    """Whatever goes wrong while room is made, the request is answered: with the error that it had."""

    async def broken(name, need, reason):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(engine.cache, "relieve", broken)
    shortage.of = {"a"}
    assert await asked(engine, toys, 3) is Kind.OUT_OF_MEMORY
    assert "no such thing" in caplog.text
