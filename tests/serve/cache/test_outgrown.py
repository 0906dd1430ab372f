"""Loads that take more than was promised to them: room is made as they grow, or they are stopped. Real processes."""

import asyncio
import os
from contextlib import suppress

import psutil
import pytest

from model_handlers.errors import Kind, MmeError
from model_handlers.worker import limits
from serve.cache.entry import State
from tests.processes import below, still_there
from tests.serve.hungry import MB, ask, engine_of, host_bytes, write_hungry
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture
def no_memory_to_spare(monkeypatch):
    """The machine has none that is free but for models' budget: a load takes no more than is promised to it."""
    monkeypatch.setattr(limits.memory, "free_memory", lambda: 0)


async def refused(engine, name):
    """Why a request finds no model."""
    with pytest.raises(MmeError) as caught:
        await ask(engine, name)
    return caught.value


def largest_process():
    """Bytes of the largest of our children and theirs."""
    sizes = [0]
    for process in still_there(below(os.getpid())):
        with suppress(psutil.NoSuchProcess):
            sizes.append(process.memory_info().rss)
    return max(sizes)


async def largest_while(task):
    """The largest that any process was until a task was done."""
    largest = 0
    while not task.done():
        largest = max(largest, largest_process())
        await asyncio.sleep(0.005)
    return largest


@pytest.mark.parametrize("evicts", [True, False])
async def test_a_load_that_outgrows_the_budget_is_stopped_long_before_its_end(tmp_path, evicts):
    """It took no more than twice the budget, and the next request is refused before anything is loaded."""
    write_hungry(tmp_path / "models", "huge", load=2000, pause=0.01)
    async with engine_of(tmp_path, 100, evicts=evicts) as engine:
        asking = asyncio.create_task(refused(engine, "huge"))
        assert await largest_while(asking) < 400 * MB
        error = await asking
        assert error.kind is Kind.OUT_OF_MEMORY
        assert "model 'huge' needs" in error.message
        assert "MB when it was stopped, and was still loading" in error.message
        assert engine.cache.room.reserved.host == 0
        again = await refused(engine, "huge")
        assert again.kind is Kind.OUT_OF_MEMORY
        assert "stopped" not in again.message


async def test_no_guess_keeps_a_model_out_whose_files_fit(tmp_path):
    """Half as much again as its files would be more than there is; it is tried, and takes what it takes."""
    write_hungry(tmp_path / "models", "a", load=20)
    write_hungry(tmp_path / "models", "large", load=40)
    with (tmp_path / "models/large/1/weights").open("wb") as weights:
        weights.truncate(80 * MB)

    async with engine_of(tmp_path, 100) as engine:
        await ask(engine, "a")
        await ask(engine, "large")
        assert 40 * MB < host_bytes(engine, "large") < 80 * MB


async def test_others_leave_while_it_grows(tmp_path, no_memory_to_spare):
    """As many as it takes, least recently used first."""
    for name in "ab":
        write_hungry(tmp_path / "models", name, load=60)
    write_hungry(tmp_path / "models", "grows", load=120, pause=0.02)
    async with engine_of(tmp_path, 210) as engine:
        for name in "ab":
            await ask(engine, name)
        asking = asyncio.create_task(ask(engine, "grows"))
        await until(lambda: engine.cache.entries["a"].state is not State.READY)
        assert not asking.done()  # the first of them left in the middle of the load
        await asking
        assert host_bytes(engine, "grows") > 120 * MB
        assert engine.registry.stats["a"].evictions["growth"] == 1
        assert engine.cache.entries["b"].state is State.READY


async def test_nobody_leaves_for_what_a_load_takes_for_a_moment(tmp_path):
    """As long as the machine has it; what the model keeps is what is counted."""
    write_hungry(tmp_path / "models", "a", load=60)
    write_hungry(tmp_path / "models", "peaks", load=100, spare=60, pause=0.01)
    async with engine_of(tmp_path, 140) as engine:
        await ask(engine, "a")
        await ask(engine, "peaks")
        assert engine.cache.entries["a"].state is State.READY
        assert host_bytes(engine, "peaks") < 70 * MB


@pytest.mark.parametrize("evicts", [True, False])
async def test_memory_that_others_use_is_waited_for_or_the_platforms_to_free(tmp_path, no_memory_to_spare, evicts):
    """Where requests hold the rest it is loaded again once they have ended; a platform is told that memory is full."""
    write_hungry(tmp_path / "models", "a", load=60)
    write_hungry(tmp_path / "models", "grows", load=100, pause=0.01)
    async with engine_of(tmp_path, 130, evicts=evicts) as engine:
        await ask(engine, "a")
        lease = engine.cache.ready.lease("a")
        asking = asyncio.create_task(ask(engine, "grows"))
        if evicts:
            await asyncio.sleep(1)
            assert not asking.done()
            lease.release()
            await asking
            assert engine.cache.entries["a"].state is not State.READY
        else:
            with pytest.raises(MmeError, match="are taken: unload a model first"):
                await asking
            lease.release()


async def test_an_unload_ends_a_load_in_a_process(tmp_path):
    """Whatever its code does: nobody waits for its end, and nothing of it is left."""
    write_hungry(tmp_path / "models", "slow", load=4, pause=3600)
    async with engine_of(tmp_path, 100) as engine:
        asking = asyncio.create_task(refused(engine, "slow"))
        await until(lambda: largest_process() and engine.cache.room.reserved.host >= 4 * MB)
        await engine.unload("slow")
        assert (await asking).kind is Kind.UNAVAILABLE
        assert engine.cache.room.reserved.host == 0
