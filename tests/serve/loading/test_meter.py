"""What executions take of the serving process: bounded, counted, charged to models, and taken off: real bytes."""

import asyncio
import gc
from dataclasses import replace

import numpy as np
import pytest

from model_handlers.base import Footprint
from model_handlers.errors import Kind, MmeError
from model_handlers.onnx.session import trim_arena
from model_handlers.system import devices, memory
from serve.cache.entry import State
from serve.cache.footprints import FORM
from serve.loading import measuring
from serve.loading.loader import Target
from serve.state_file import StateFile
from tests.serve import engines, hungry
from tests.serve.growing import MB, ask, engine_of, private, write_growing
from tests.serve.inside import executing, measure
from tests.waiting import until


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """The process is measured when the test says so; few bytes are the server's own."""
    monkeypatch.setattr(measuring, "_SECONDS", 3600.0)
    monkeypatch.setattr(measuring, "_SOON_SECONDS", 3600.0)
    monkeypatch.setattr(measuring, "_OWN", 16 * MB)
    gc.collect()  # what tests before this one have left goes now, and nothing of it while bytes are counted
    gc.disable()
    trim_arena()
    memory.trim()
    yield
    gc.enable()


async def counted(engine, name):
    """Bytes that count for a model in use, after two looks."""
    for _ in range(2):
        await ask(engine, name, 4)
        await until(measure(engine))
    return hungry.host_bytes(engine, name)


async def test_what_executions_of_many_models_take_is_taken_once(tmp_path):
    """Ten models in one arena keep no more of their large requests than one does."""
    names = [f"m{number}" for number in range(10)]
    for name in names:
        write_growing(tmp_path / "models", name)
    async with engine_of(tmp_path, 700) as engine:
        for name in names:
            await ask(engine, name, 4)
        await ask(engine, names[0], 24 * MB)
        one = private()
        for name in names[1:]:
            await ask(engine, name, 24 * MB)
        assert private() - one < 4 * 24 * MB, "nine would keep 9 * 24"


async def test_a_request_beyond_the_budget_is_out_of_memory_and_the_next_is_answered(tmp_path):
    """The arena ends at the budget: 507 for that one request, which names the setting."""
    write_growing(tmp_path / "models", "m")
    async with engine_of(tmp_path, 60) as engine:
        await ask(engine, "m", 4)
        with pytest.raises(MmeError, match=r"needs 32\.0 MB more.*MME_MEMORY_BUDGET") as caught:
            await ask(engine, "m", 32 * MB)
        assert caught.value.kind is Kind.OUT_OF_MEMORY
        await ask(engine, "m", MB)


async def test_what_the_arena_keeps_counts_while_its_model_is_used_and_goes_when_it_is_idle(tmp_path):
    """It is charged to the model, whose own file has a few hundred bytes."""
    write_growing(tmp_path / "models", "m")
    async with engine_of(tmp_path, 700) as engine:
        await ask(engine, "m", 48 * MB)
        assert 40 * MB < await counted(engine, "m") < 150 * MB
        assert engine.cache.room.used().host >= 40 * MB
        kept = private()
        await until(measure(engine))  # nothing was executed since the last one
        assert private() < kept - 40 * MB
        assert hungry.host_bytes(engine, "m") < 8 * MB


async def test_growth_is_charged_to_the_models_that_executed(tmp_path):
    """By the bytes of their inputs; one that was only loaded pays nothing."""
    for name in "abc":
        write_growing(tmp_path / "models", name)
    async with engine_of(tmp_path, 700) as engine:
        await engine.load("c")
        kept = np.ones(120 * MB, np.uint8)
        for _ in range(2):
            await asyncio.gather(ask(engine, "a", 4000), ask(engine, "b", 1000))
            await until(measure(engine))
        a, b, c = (engine.cache.entries[name].resident.grown.host for name in "abc")
        assert a + b > 50 * MB
        told = {row["name"]: row["cache"].get("grown_bytes") for row in engine.index.rows()}
        assert told == {"a": a, "b": b, "c": None}
        assert engine.grown().host - a - b < MB
        assert round(a / b) == 4
        assert c == 0
        del kept


@pytest.mark.usefixtures("fork_server")
async def test_others_leave_for_what_is_not_given_back(tmp_path):
    """Not the model that grew; and what goes counts no more, at the next look."""
    write_growing(tmp_path / "models", "m")
    hungry.write_hungry(tmp_path / "models", "p", load=60)
    async with engine_of(tmp_path, 140) as engine:
        await hungry.ask(engine, "p")
        await ask(engine, "m", 4)
        kept = np.ones(100 * MB, np.uint8)  # as a framework keeps what it took
        assert await counted(engine, "m") > 70 * MB
        assert engine.cache.entries["p"].state is not State.READY
        assert engine.registry.stats["p"].evictions["growth"] == 1
        assert engine.cache.entries["m"].state is State.READY
        del kept
        await until(measure(engine))
        assert hungry.host_bytes(engine, "m") < 30 * MB


@pytest.mark.usefixtures("fork_server")
async def test_the_platform_is_told_of_growth_by_its_next_load(tmp_path):
    """Nobody leaves for it: 507, as for any load that does not fit."""
    write_growing(tmp_path / "models", "m")
    hungry.write_hungry(tmp_path / "models", "p", load=60)
    async with engine_of(tmp_path, 140, evicts=False) as engine:
        await ask(engine, "m", 4)
        kept = np.ones(120 * MB, np.uint8)
        await counted(engine, "m")
        with pytest.raises(MmeError) as caught:
            await hungry.ask(engine, "p")
        assert caught.value.kind is Kind.OUT_OF_MEMORY
        assert engine.cache.entries["m"].state is State.READY
        del kept
        await until(measure(engine))
        await hungry.ask(engine, "p")


async def test_what_is_on_the_way_is_no_growth(tmp_path):
    """Requests and responses have bounds of their own."""
    write_growing(tmp_path / "models", "m")
    body = np.ones(80 * MB, np.uint8)
    async with engine_of(tmp_path, 700, on_the_way=lambda: body.nbytes) as engine:
        assert await counted(engine, "m") < 8 * MB


async def test_what_a_model_that_left_has_kept_counts_all_the_same(tmp_path):
    """It is charged to those who execute from then on."""
    for name in "ab":
        write_growing(tmp_path / "models", name)
    async with engine_of(tmp_path, 700) as engine:
        await ask(engine, "a", 4)
        kept = np.ones(120 * MB, np.uint8)
        await counted(engine, "a")
        await engine.unload("a")
        await until(measure(engine))
        assert engine.cache.room.grown.host > 50 * MB
        assert await counted(engine, "b") > 50 * MB
        del kept


async def test_what_executions_took_is_remembered_over_restarts(tmp_path):
    """The next server reserves it for the same model, up to a quarter of the budget."""
    write_growing(tmp_path / "models", "m")
    async with engine_of(tmp_path, 400) as engine:
        await ask(engine, "m", 4)
        kept = np.ones(200 * MB, np.uint8)
        await counted(engine, "m")
    (row,) = StateFile(tmp_path / "cache" / "footprints.json", FORM).read()["seen"].values()
    assert 95 * MB < row["host"] < 110 * MB
    del kept


async def test_what_a_model_left_in_the_arena_goes_with_it(tmp_path):
    """At the next look, though no other model executes; nothing counts then."""
    write_growing(tmp_path / "models", "m")
    async with engine_of(tmp_path, 700) as engine:
        await ask(engine, "m", 48 * MB)
        assert await counted(engine, "m") > 40 * MB
        await ask(engine, "m", 4)
        await engine.unload("m")
        await until(measure(engine))
        assert engine.cache.room.used().host < 16 * MB


async def test_a_look_reads_the_models_that_have_executed_lately(tmp_path):
    """However many are in memory: one that executes nothing for two looks is read again when it executes."""
    for name in "abc":
        write_growing(tmp_path / "models", name)
    async with engine_of(tmp_path, 700) as engine:
        for name in "abc":
            await ask(engine, name, 4)
        assert executing(engine) == ["a", "b", "c"]
        for _ in range(3):
            await until(measure(engine))
        assert executing(engine) == []
        await ask(engine, "b", 4)
        assert executing(engine) == ["b"]
        await engine.unload("b")
        await until(measure(engine))
        assert executing(engine) == []


async def test_a_look_works_nothing_out_for_models_that_take_what_they_took(tmp_path, monkeypatch):
    """However many there are: what a model is known to take is summed up again when it takes something else."""
    for name in "abc":
        write_growing(tmp_path / "models", name)
    async with engine_of(tmp_path, 700) as engine:
        for name in "abc":
            await ask(engine, name, 4)
        await until(measure(engine))
        worked_out, known = [], Target.known
        monkeypatch.setattr(Target, "known", lambda target: worked_out.append(target.name) or known(target))
        await until(measure(engine))
        assert worked_out == []
        target = engine.cache.entries["b"].resident
        target.footprint = replace(target.footprint, host=target.footprint.host + MB)
        await until(measure(engine))
        assert worked_out == ["b"]


async def test_growth_on_a_gpu_is_charged_to_the_models_that_are_on_it(tmp_path, monkeypatch):
    """As the driver counts it; what was taken at the start is nobody's here."""
    taken = [10 * MB, 10 * MB]
    monkeypatch.setattr(devices, "gpu_uuids", lambda: {0: "GPU-a", 1: "GPU-b"})
    monkeypatch.setattr(devices, "device_memory_used", lambda: tuple(taken))
    for name in "ab":
        write_growing(tmp_path / "models", name)
    budget = Footprint(700 * MB, (100 * MB, 100 * MB))
    async with engines.engine_of(tmp_path, budget, repository=tmp_path / "models") as engine:
        await asyncio.gather(engine.load("a"), engine.load("b"))
        engine.cache.entries["a"].resident.footprint = Footprint(0, (0, 20 * MB))
        taken[1] += 50 * MB
        await ask(engine, "b", 4)
        await counted(engine, "a")
        assert engine.cache.entries["a"].footprint.devices == (0, 50 * MB)
        assert engine.cache.entries["b"].footprint.devices == ()
        taken[1] -= 30 * MB
        await until(measure(engine))
        assert engine.cache.entries["a"].footprint.devices == (0, 20 * MB)
