"""What executions take of the serving process: bounded, counted, charged to models, and taken off: real bytes."""

import pytest

from model_handlers.errors import Kind, MmeError
from tests.serve.growing import MB, ask, engine_of, private, write_growing


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
        assert private() - one < 30 * MB


async def test_a_request_beyond_the_budget_is_out_of_memory_and_the_next_is_answered(tmp_path):
    """The arena ends at the budget: 507 for that one request, which names the setting."""
    write_growing(tmp_path / "models", "m")
    async with engine_of(tmp_path, 60) as engine:
        await ask(engine, "m", 4)
        with pytest.raises(MmeError, match=r"needs 32\.0 MB more.*MME_MEMORY_BUDGET") as caught:
            await ask(engine, "m", 32 * MB)
        assert caught.value.kind is Kind.OUT_OF_MEMORY
        await ask(engine, "m", MB)
