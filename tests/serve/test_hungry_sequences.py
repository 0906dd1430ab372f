"""Random lives of an engine over Python models of different sizes, in real processes: the books are true all the time."""

import asyncio
import contextlib
import functools
import os
import random

import psutil
import pytest

from model_handlers.errors import Kind, MmeError
from serve.cache.entry import State
from serve.loading import upkeep
from tests.processes import below, still_there
from tests.serve.hungry import MB, ask, engine_of, host_bytes, write_hungry
from tests.serve.integrity import check_integrity
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("fork_server")
BUDGET = 200  # megabytes
SIZES = {  # what each takes while it loads, and what of that it gives back then
    "light": (0, 0),
    "small": (20, 0),
    "middle": (60, 0),
    "peaks": (100, 60),
    "large": (160, 0),
    "huge": (2000, 0),
}
STEPS = ["ask"] * 5 + ["grow"] * 2 + ["send much"] * 2 + ["reload", "change", "unload", "leave", "kill"]
AT_ONCE = 4
# What may befall a request or a load when others take memory, unload what it asks for, or kill its process.
USUAL = {Kind.OUT_OF_MEMORY, Kind.UNAVAILABLE, Kind.UNKNOWN_MODEL, Kind.EXECUTION_FAILED, Kind.INVALID_MODEL}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Models are looked at all the time."""
    monkeypatch.setattr(upkeep, "_SECONDS", 0.1)


class Life:
    """One engine, and what befalls it."""

    def __init__(self, folder, engine, seed):
        self.folder = folder
        self.engine = engine
        self.random = random.Random(seed)

    async def step(self):
        """Something at random to somebody at random; every error is one that may be."""
        name, deed = self.random.choice(list(SIZES)), self.random.choice(STEPS)
        try:
            await self.do(deed, name)
        except MmeError as error:
            if error.kind not in USUAL:
                raise

    async def do(self, deed, name):
        """One step."""
        if deed == "ask":
            await ask(self.engine, name)
        elif deed == "grow":
            await ask(self.engine, name, keep=self.random.choice([5, 40]))
        elif deed == "send much":
            await ask(self.engine, name, size=self.random.choice([1, 20]) * MB)
        elif deed == "unload":
            await self.engine.unload(name)
        elif deed == "leave":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.reload(name), self.random.random() / 5)
        elif deed == "kill":
            self.kill(name)
        else:
            if deed == "change":
                self.write(name)
            await self.engine.reload(name)

    def write(self, name):
        """Its files anew, which is a change."""
        load, spare = SIZES[name]
        write_hungry(self.folder / "models", name, load, spare, pause=self.random.choice([0, 0.002]))

    def kill(self, name):
        """Its process, if it has one."""
        for child in still_there(below(os.getpid())):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == f"{name}_0":
                    child.kill()


@pytest.mark.parametrize("evicts", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_any_sequence_keeps_the_books(tmp_path, evicts, seed):
    """After each step they add up; in the end nothing is promised, and what is counted is what processes take."""
    async with engine_of(tmp_path, BUDGET, evicts=evicts) as engine:
        life = Life(tmp_path, engine, seed)
        for name in SIZES:
            life.write(name)
        running = set()
        for _ in range(60):
            running.add(asyncio.create_task(life.step()))
            done, running = await asyncio.wait(
                running,
                return_when=asyncio.FIRST_COMPLETED,
                timeout=None if len(running) == AT_ONCE else 0,
            )
            check_integrity(engine.cache)
            assert [task.exception() for task in done if task.exception()] == []
        await asyncio.gather(*running)
        while loads := [task for entry in engine.cache.entries.values() for task in tasks(entry)]:
            await asyncio.wait(loads)  # those go on whose callers left
        assert engine.cache.room.reserved.host == 0
        await until_counted(engine)
        check_integrity(engine.cache)


async def until_counted(engine):
    """Until every model's bytes are those of its processes, about."""

    def counted(name, entry):
        return entry.state is not State.READY or abs(takes(entry) - host_bytes(engine, name)) <= MB

    for entry in list(engine.cache.entries.items()):
        await until(functools.partial(counted, *entry))


def tasks(entry):
    """The loads of a model that are under way."""
    return [task for task in (entry.load and entry.load.task, entry.orphan) if task is not None]


def takes(entry):
    """Bytes of a model's processes, now."""
    return sum(model.executors.footprint().host for model in entry.resident.models())
