"""What models' processes take while they serve is counted, and given back when nobody needs it: over real processes."""

import asyncio
import threading

import pytest

from model_handlers.errors import Kind, MmeError
from serve.cache.entry import State
from serve.cache.footprints import FORM
from serve.loading import upkeep
from serve.state_file import StateFile
from tests.serve import inside
from tests.serve.hungry import MB, ask, engine_of, host_bytes, write_hungry
from tests.serve.integrity import check_integrity
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """A test need not wait for ten seconds."""
    monkeypatch.setattr(upkeep, "_SECONDS", 0.05)


@pytest.fixture
def by_hand(short_intervals, monkeypatch):
    """Models are looked at when the test says so."""
    monkeypatch.setattr(upkeep, "_SECONDS", 3600.0)
    monkeypatch.setattr(upkeep, "_SOON_SECONDS", 3600.0)


async def look(engine):
    """Have everybody looked at now."""
    await until(inside.look(engine))


async def test_memory_of_a_large_request_is_counted_and_given_back(tmp_path):
    """While the answer is looked at its memory is the model's; a while later the model takes what it took before."""
    write_hungry(tmp_path / "models", "a")
    async with engine_of(tmp_path, 1000) as engine:
        await ask(engine, "a")
        light = host_bytes(engine, "a")
        response = await ask(engine, "a", size=50 * MB)
        await until(lambda: host_bytes(engine, "a") > light + 90 * MB)
        del response
        await until(lambda: host_bytes(engine, "a") < light + 10 * MB)
        await ask(engine, "a", size=50 * MB)  # pages that went come again


async def test_what_a_model_takes_while_it_serves_is_counted_and_others_leave_for_it(tmp_path):
    """A model that grew out of the budget puts out who was used least recently, never itself."""
    for name in "abc":
        write_hungry(tmp_path / "models", name)
    async with engine_of(tmp_path, 160) as engine:
        for name in "abc":
            await ask(engine, name)
        await ask(engine, "c", keep=150)
        await until(lambda: host_bytes(engine, "c") > 150 * MB)
        await until(lambda: engine.cache.entries["a"].state is not State.READY)  # by the next look, where c executes
        assert engine.registry.stats["a"].evictions["growth"] == 1
        assert engine.cache.entries["c"].state is State.READY
        check_integrity(engine.cache)


async def test_memory_of_a_large_request_is_given_back_before_anybody_leaves_for_it(tmp_path, by_hand):
    """It may be needed again soon, but a model that left would have to be loaded again."""
    write_hungry(tmp_path / "models", "a", load=100)
    write_hungry(tmp_path / "models", "b")
    async with engine_of(tmp_path, 180) as engine:
        await ask(engine, "a")
        await ask(engine, "b", size=50 * MB)
        await look(engine)
        assert engine.cache.entries["a"].state is State.READY
        assert host_bytes(engine, "b") < 20 * MB


async def test_others_leave_for_memory_that_is_in_use_for_long(tmp_path, by_hand):
    """What a batch holds just now is no reason yet; the next time it is."""
    write_hungry(tmp_path / "models", "a", load=100)
    write_hungry(tmp_path / "models", "b")
    async with engine_of(tmp_path, 180) as engine:
        await ask(engine, "a")
        response = await ask(engine, "b", size=50 * MB)
        await look(engine)
        assert host_bytes(engine, "b") > 100 * MB
        assert engine.cache.entries["a"].state is State.READY
        await look(engine)
        assert engine.cache.entries["a"].state is not State.READY
        del response


async def test_a_model_too_large_for_all_to_leave_puts_out_nobody(tmp_path, by_hand):
    """Nobody is evicted in vain."""
    for name in "ab":
        write_hungry(tmp_path / "models", name)
    async with engine_of(tmp_path, 100) as engine:
        await ask(engine, "a")
        await ask(engine, "b", keep=120)
        await look(engine)
        assert host_bytes(engine, "b") > 120 * MB
        assert engine.cache.entries["a"].state is State.READY


async def test_a_process_that_grows_towards_the_budget_is_looked_at_soon(tmp_path, by_hand, monkeypatch):
    """What it grows by would pass the budget before the next look in ten seconds: that comes at once instead."""
    monkeypatch.setattr(upkeep, "_SOON_SECONDS", 0.05)
    write_hungry(tmp_path / "models", "a")
    async with engine_of(tmp_path, 1000) as engine:
        await ask(engine, "a")
        await look(engine)
        await ask(engine, "a", keep=40)
        await look(engine)
        await ask(engine, "a", keep=30)
        await until(lambda: host_bytes(engine, "a") > 70 * MB)


async def test_platform_mode_counts_growth_and_puts_out_nobody(tmp_path):
    """The platform learns of it by its next load."""
    for name in "ab":
        write_hungry(tmp_path / "models", name)
    async with engine_of(tmp_path, 160, evicts=False) as engine:
        await ask(engine, "a")
        await ask(engine, "b", keep=155)
        await until(lambda: host_bytes(engine, "b") > 155 * MB)
        assert engine.cache.entries["a"].state is State.READY


async def test_what_a_model_grew_by_is_remembered_over_restarts(tmp_path, by_hand):
    """The next server reserves it for the same model, up to a quarter of the budget."""
    write_hungry(tmp_path / "models", "a")
    async with engine_of(tmp_path, 400) as engine:
        await ask(engine, "a")
        light = host_bytes(engine, "a")
        await ask(engine, "a", keep=150)
        await look(engine)
        assert host_bytes(engine, "a") > light + 140 * MB
    (row,) = StateFile(tmp_path / "cache" / "footprints.json", FORM).read()["seen"].values()
    assert abs(row["host"] - light - 100 * MB) < 5 * MB


async def outgrow(engine, name):
    """Have a model keep so much that it is ended, after two looks."""
    for keep in (150, 0):
        await ask(engine, name, keep=keep)
        await look(engine)
    await look(engine)  # which finds the budget kept


@pytest.mark.parametrize("evicts", [True, False])
async def test_a_process_that_grew_out_of_the_budget_is_ended(tmp_path, by_hand, evicts):
    """Its requests are out of memory and hear both sizes; the next one is answered, and nobody left for it in vain."""
    for name in "ab":
        write_hungry(tmp_path / "models", name)
    async with engine_of(tmp_path, 120, evicts=evicts) as engine:
        await ask(engine, "b")
        await ask(engine, "a", keep=150)
        await look(engine)
        await ask(engine, "a")
        waiting = asyncio.create_task(ask(engine, "a", tenths=250))
        await until(lambda: engine.cache.entries["a"].leases)
        await asyncio.sleep(0.05)
        await look(engine)
        with pytest.raises(
            MmeError, match=r"took 1\d\d\.\d MB, \d+\.\d MB of them to load, .* a budget of 120.0 MB"
        ) as caught:
            await waiting
        assert caught.value.kind is Kind.OUT_OF_MEMORY
        assert host_bytes(engine, "a") < 60 * MB
        await ask(engine, "a")
        await look(engine)
        await look(engine)
        await ask(engine, "a")
        assert engine.cache.entries["b"].state is State.READY


async def test_a_process_that_grows_again_and_again_comes_back_three_times(tmp_path, by_hand):
    """Then its requests are told so, for ten minutes."""
    write_hungry(tmp_path / "models", "a")
    async with engine_of(tmp_path, 120) as engine:
        for _ in range(4):
            await outgrow(engine, "a")
        with pytest.raises(MmeError, match=r"too much memory too often .* \(3 restarts within 600 s\)") as caught:
            await ask(engine, "a")
        assert caught.value.kind is Kind.UNAVAILABLE


async def test_one_batch_that_executes_ends_no_process(tmp_path, by_hand):
    """What it takes may be what it needs, and given back when it is done."""
    write_hungry(tmp_path / "models", "a")
    async with engine_of(tmp_path, 120) as engine:
        await ask(engine, "a")
        await look(engine)
        waiting = asyncio.create_task(ask(engine, "a", keep=150, tenths=15))
        await until(lambda: engine.cache.entries["a"].leases)
        for _ in range(8):
            await asyncio.sleep(0.1)
            await look(engine)
        await waiting


async def test_an_engine_that_closes_looks_at_nobody_any_more(tmp_path, by_hand, monkeypatch):
    """It waits for the look that is under way; those at hundreds of others would take the time that all have to end."""
    looks, look_at, closes = [], upkeep._Watched.look, threading.Event()

    def look_when_it_closes(watched, room):
        looks.append(watched)
        closes.wait()
        return look_at(watched, room)

    monkeypatch.setattr(upkeep._Watched, "look", look_when_it_closes)
    write_hungry(tmp_path / "models", "a")
    write_hungry(tmp_path / "models", "b")
    async with engine_of(tmp_path, 1000) as engine:
        await asyncio.gather(ask(engine, "a"), ask(engine, "b"))
        inside.look(engine)
        await until(lambda: looks)
        closing = asyncio.create_task(inside.upkeep_of(engine).close())
        await asyncio.sleep(0)
        closes.set()
        await closing
    assert len(looks) == 1
