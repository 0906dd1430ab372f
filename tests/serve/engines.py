"""Engines over real models on disk, for the tests of all that an engine is composed of."""

import asyncio
import contextlib

from model_handlers.base import Footprint
from model_handlers.errors import MmeError
from serve.engine import Engine
from serve.options import EngineOptions
from tests.serve.integrity import check_integrity

PLENTY = Footprint(1 << 30)


def resident_models(engine):
    """Every version of every model in memory, with its name."""
    for entry in engine.index.entries.values():
        if entry.resident is not None:
            for model in entry.resident.models():
                yield model.name, model


@contextlib.asynccontextmanager
async def engine_of(folder, budget=PLENTY, on_the_way=lambda: 0, **options):
    """An engine whose repository or store is under `folder`; closed and audited afterwards."""
    engine = Engine(EngineOptions(budget, folder / "cache", **options), asyncio.get_running_loop(), on_the_way)
    try:
        yield engine
    finally:
        await engine.close()
    check_integrity(engine.cache)
    assert engine.cache.room.used() == Footprint()
    assert engine.cache.room.reserved == Footprint()
    assert list(resident_models(engine)) == []


async def ask(engine, call, name="a", version=None):
    """Submit as a route does: to the model in memory, else to one that is loaded first; the report of that load."""
    if not engine.submit(name, version, call.request):
        return await engine.submit_cold(name, version, call.request)
    return None


async def answered(engine, toys, name="a", version=None):
    """The number that a model makes of 1."""
    call = toys.Call(1)
    await ask(engine, call, name, version)
    response = await call.answer()
    assert not isinstance(response, MmeError), response
    assert len(call.answers) == 1
    return response.outputs[0][2][0, 0]
